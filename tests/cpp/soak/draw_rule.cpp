// Calls of the rule, one at a time, and a forward with its backward.
#include <algorithm>
#include <stdexcept>
#include <thread>

#include "draw.hpp"
#include "testing/judge.hpp"

namespace gatedelta::soak {

using testing::Case;
using testing::Judge;
using testing::Problem;

gd_exec draw_exec(Dice& dice, const Target& target) {
  gd_exec exec{};
  if (target.cuda) {
    exec.device = GD_CUDA;
    exec.kernels = target.kernels;
  } else {  // half of them with the instruction set that callers get
    exec.isa = dice.one_in(2) ? GD_ISA_AUTO : target.isas[static_cast<size_t>(dice.below(std::ssize(target.isas)))];
  }
  return exec;
}

testing::Compute compute_of(gd_dtype dtype, const gd_exec& exec) {
  if (exec.device == GD_CUDA) return testing::cuda_compute(dtype);
  return testing::chunk_compute(dtype, static_cast<gd_isa>(exec.isa));
}

Case draw_layer(Dice& dice, const Target& target) {
  Case c;
  c.dtype = dice.of({GD_F32, GD_BF16, GD_BF16, GD_F16});
  c.K = 16 * (1 + dice.below(6));
  c.V = 16 * (1 + dice.below(6));
  if (dice.one_in(target.cuda ? 2 : 8)) c.K = c.V = 128;
  if (target.cuda && dice.one_in(8)) c.K = 16 * (1 + dice.below(16)), c.V = 16 * (1 + dice.below(16));
  c.Hk = 1 + dice.below(target.cuda ? 4 : 2);
  c.Hv = c.Hk * dice.of<int64_t>({1, 2, 3});
  // What is hard for one input at a time, as in the cases of the numerics tests.
  testing::apply_spec(c, dice.of<const char*>({"gate=zero", "gate=weak", "gate=strong", "gate=spiky", "gate=inf",
                                               "gate=huge", "gate=raw", "gate=raw gdtype=bf16 beta=logit l2norm",
                                               "beta=zeros", "beta=logit2 gdtype=bf16", "keys=correlated gate=weak",
                                               "keys=repeated l2norm", "l2norm gate=raw dt_bias=0"}));
  c.state = dice.of({GD_F32, GD_F32, GD_BF16, GD_F16});
  // What a strong gate leaves of a state or its gradient is below the numbers that fp16 has, for which no bound is.
  using testing::GateKind;
  const bool is_weak = c.gate == GateKind::zero || c.gate == GateKind::weak || c.gate == GateKind::mixed;
  if (c.state == GD_F16 && !is_weak) c.state = GD_BF16;
  c.layout = dice.of({GD_STATE_KV, GD_STATE_VK});
  c.h0 = !dice.one_in(4);
  c.ht = !dice.one_in(8);
  c.dht = !dice.one_in(4);
  c.pool = dice.one_in(2);
  c.first_slot = c.pool && c.h0 ? dice.of<int64_t>({0, 0, 1, 3}) : 0;
  c.inplace = c.h0 && c.ht && dice.one_in(2);
  c.i64 = dice.one_in(2);
  c.strided = dice.one_in(4);
  c.seed = dice.stream + 1;
  return c;
}

namespace {

// The truth may have the machine: nothing else runs while it judges.
const testing::ReferenceOptions kAllCpus = {.threads = static_cast<int>(std::thread::hardware_concurrency())};

// Tokens of a chunked call.
Case draw_chunked(Dice& dice, const Target& target) {
  Case c = draw_layer(dice, target);
  const int64_t longest = target.cuda ? 700 : 150;
  const auto length = [&] { return dice.of<int64_t>({0, 1, 63, 64, 65, dice.below(40), dice.below(longest)}); };
  if (dice.one_in(2)) {
    const int64_t most = (target.cuda ? 1 << 21 : 1 << 18) / (c.Hv * std::max(c.K, c.V));  // tokens
    for (int64_t i = 1 + dice.below(target.cuda ? 16 : 5); i > 0 && c.total_tokens() <= most; --i)
      c.lengths.push_back(length());
    c.pad = dice.one_in(2) ? dice.below(70) : 0;
  } else {
    c.B = 1 + dice.below(3);
    c.T = length();
  }
  if (target.cuda && c.dtype != GD_F32 && dice.one_in(3)) c.segment = 1 + dice.below(3);
  return c;
}

}  // namespace

Made draw_forward(Dice& dice, const Target& target) {
  Case c = draw_chunked(dice, target);
  c.every = dice.of<int64_t>({0, 0, 64, 128});
  c.offsets = c.every == 0 && dice.one_in(4);
  const Problem problem(c);
  gd_forward_args args = problem.forward;
  args.batch_invariant = c.segment == 0 && dice.one_in(4);
  return make_call(Operation::forward, testing::describe(c), dice, target, args,
                   [c](const gd_exec& exec, const auto& results) {
                     const auto judgement = Judge(c, kAllCpus).forward(compute_of(c.dtype, exec), results);
                     return judgement.ok() ? "" : judgement.text();
                   });
}

Made draw_backward(Dice& dice, const Target& target) {
  const Case c = draw_chunked(dice, target);
  const Problem problem(c);
  gd_backward_args args = problem.backward;
  args.small_workspace = !target.cuda && dice.one_in(4);
  return make_call(Operation::backward, testing::describe(c), dice, target, args,
                   [c](const gd_exec& exec, const auto& results) {
                     const auto judgement = Judge(c, kAllCpus).backward(compute_of(c.dtype, exec), results);
                     return judgement.ok() ? "" : judgement.text();
                   });
}

Made draw_training(Dice& dice, const Target& target) {
  const Case c = draw_chunked(dice, target);
  const Problem problem(c);
  const gd_exec exec = draw_exec(dice, target);
  gd_forward_args forward = problem.forward;  // without write slots, so no sequence is a padded row
  forward.final_state = forward.final_state_indices = {};
  gd_forward_args query = forward;
  query.exec = exec;
  query.exec.tuning = forward.exec.tuning;
  size_t bytes = 0;
  if (gd_forward_saved_size(&query, &bytes) != GD_OK)
    throw std::runtime_error(testing::describe(c) + ": gd_forward_saved_size: " + gd_last_error());
  const testing::Buffer saved(bytes);
  forward.saved = saved.data();
  forward.saved_bytes = bytes;
  gd_backward_args backward = problem.backward;
  backward.saved = saved.data();
  backward.saved_bytes = bytes;
  if (gd_forward_saved_call(&query, &backward.saved_call) != GD_OK)
    throw std::runtime_error(testing::describe(c) + ": gd_forward_saved_call: " + gd_last_error());
  auto call = std::make_unique<Call>(Operation::training, testing::describe(c),
                                     Steps().add(forward, exec).add(backward, exec).take());
  call->judge = [c, exec, call = call.get()] {
    const auto judgement = Judge(c, kAllCpus).backward(compute_of(c.dtype, exec), [&](const gd_backward_args& to) {
      call->copy_results(1, to);
      return std::string();
    });
    return judgement.ok() ? std::string() : judgement.text();
  };
  return call;
}

Made draw_recurrent(Dice& dice, const Target& target) {
  using testing::StepKind;
  Case c = draw_layer(dice, target);
  c.tiled = dice.one_in(4);
  c.T = dice.of<int64_t>({1, 1, 2, 4, 8, dice.below(20)});
  c.B = 1 + dice.below(10);
  if (dice.one_in(3)) {
    c.B = 1;
    for (int64_t i = 1 + dice.below(7); i > 0; --i) c.lengths.push_back(dice.below(9));
    c.pad = dice.below(4);
  }
  c.accept = c.ht && dice.one_in(3);
  c.picked = c.pool && c.h0 ? dice.of<int64_t>({0, 0, 1, 4}) : 0;
  c.steps = dice.of({StepKind::none, StepKind::none, StepKind::dense, StepKind::pool, StepKind::rows});
  if (c.steps == StepKind::rows && c.lengths.empty()) c.steps = StepKind::pool;
  const Problem problem(c);
  return make_call(Operation::recurrent, testing::describe(c), dice, target, problem.recurrent,
                   [c](const gd_exec&, const auto& results) {
                     const auto judgement = Judge(c, kAllCpus).recurrent(results);
                     return judgement.ok() ? "" : judgement.text();
                   });
}

Made draw(Operation operation, Dice& dice, const Target& target) {
  switch (operation) {
    case Operation::forward: return draw_forward(dice, target);
    case Operation::backward: return draw_backward(dice, target);
    case Operation::training: return draw_training(dice, target);
    case Operation::recurrent: return draw_recurrent(dice, target);
    case Operation::decode_chain: return draw_decode_chain(dice, target);
    case Operation::context_parallel: return draw_context_parallel(dice, target);
    case Operation::conv1d: return draw_conv1d(dice, target);
    case Operation::conv1d_update: return draw_conv1d_update(dice, target);
    case Operation::conv1d_backward: return draw_conv1d_backward(dice, target);
    case Operation::gated_norm: return draw_gated_norm(dice, target);
    case Operation::gated_norm_backward: return draw_gated_norm_backward(dice, target);
    case Operation::layer_step: return draw_layer_step(dice, target);
  }
  throw std::logic_error("no such operation");
}

}  // namespace gatedelta::soak

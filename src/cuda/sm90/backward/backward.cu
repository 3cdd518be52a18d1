// The backward on CUDA: a validated problem becomes four to seven kernels on the caller's stream.
#include <algorithm>

#include "cuda/host/launch.cuh"
#include "cuda/kernels.hpp"
#include "cuda/sm90/backward/grad_chain.cuh"
#include "cuda/sm90/backward/gradients/kernel.cuh"
#include "cuda/sm90/backward/states_chain.cuh"
#include "cuda/sm90/chain/launch.cuh"
#include "cuda/sm90/host/params.cuh"
#include "cuda/sm90/host/tensor_map.cuh"
#include "cuda/sm90/lists/backward_lists.cuh"
#include "cuda/sm90/prepare/launch.cuh"
#include "cuda/sm90/workspace/backward.hpp"

namespace gatedelta::cuda::sm90 {

namespace {

BackwardParams params_of(const BackwardProblem& problem, char* workspace, int multiprocessors) {
  constexpr uintptr_t kAlign = ForwardWorkspace::kAlign;
  const BackwardWorkspace layout = backward_layout(problem);
  char* const base = workspace + (kAlign - reinterpret_cast<uintptr_t>(workspace) % kAlign) % kAlign;
  BackwardParams p{};
  static_cast<CallParams&>(p) = call_params(forward_of(problem), workspace, multiprocessors, kBackwardPreparedBytes);
  p.has_saved = problem.saved.present;
  const auto at = [&](size_t offset) { return base + offset; };
  p.grad_schedule = reinterpret_cast<Schedule*>(at(layout.grad_schedule));
  p.grad_work = reinterpret_cast<WorkItem*>(at(layout.grad_work));
  p.grad_boundary_ready = reinterpret_cast<int*>(at(layout.grad_boundary_ready));
  p.grad_boundaries = reinterpret_cast<uint8_t*>(at(layout.grad_boundaries));
  p.states = reinterpret_cast<uint8_t*>(at(layout.states));
  p.gradients = reinterpret_cast<uint8_t*>(at(layout.gradients));
  if (problem.dA_log || problem.d_dt_bias) p.head_sums = reinterpret_cast<float2*>(at(layout.head_sums));
  p.d_o = problem.d_o;
  p.dq = problem.dq;
  p.dk = problem.dk;
  p.dg = problem.dg;
  p.dbeta = problem.dbeta;
  p.dA_log = problem.dA_log;
  p.d_dt_bias = problem.d_dt_bias;
  const int64_t row = int64_t{p.value_heads} * kHeadDim;
  const auto rows_at = [&](size_t offset) -> TokenRows {
    return {at(offset), problem.in.q.dtype, p.sequences.tokens * row, row, kHeadDim};
  };
  p.dv = problem.dv ? problem.dv : rows_at(layout.dv);
  p.u = rows_at(layout.u);
  const Slices& slices = layout.slices;
  p.recompute_chunks = static_cast<int>(slices.recompute_chunks);
  p.split = static_cast<int>(slices.split);
  p.slice = {0, p.split};
  if (slices.count > 1) {
    p.slice1_schedule = reinterpret_cast<Schedule*>(at(layout.slice1_schedule));
    p.slice1_work = reinterpret_cast<WorkItem*>(at(layout.slice1_work));
  }
  p.d_final = problem.d_final;
  p.d_initial = problem.d_initial;
  return p;
}

// Parameters of the second slice.
BackwardParams slice1_params(const BackwardParams& p, const Slices& slices) {
  BackwardParams later = p;
  later.slice = {p.split, static_cast<int>(p.sequences.workspace_chunks())};
  later.schedule = p.slice1_schedule;
  later.work = p.slice1_work;
  later.states -= slices.split * p.value_heads * kStateTileBytes;
  later.u.data = static_cast<char*>(p.u.data) - slices.split_token * p.u.token_stride * 2;
  return later;
}

// The chain kernels take the forward's parameters with other tensors.
CallParams states_params(const BackwardParams& p) {
  CallParams states = p;
  states.o = p.u;
  states.o_map = p.u_map;
  return states;
}
CallParams chain_params(const BackwardParams& p) {
  CallParams chain = p;
  chain.v = p.d_o;
  chain.v_map = p.d_o_map;
  chain.o = p.dv;
  chain.o_map = p.dv_map;
  chain.initial = p.d_final;
  chain.final = p.d_initial;
  chain.work = p.grad_work;
  chain.schedule = p.grad_schedule;
  chain.boundary_ready = p.grad_boundary_ready;
  chain.boundaries = p.grad_boundaries;
  return chain;
}

// `later`: the second slice, if there is one.
template <class Elem>
Outcome launch(const BackwardParams& p, const BackwardParams* later, int device, cudaStream_t stream) {
  Launched ran;
  // Saved results need no prepare.
  if (!p.has_saved &&
      !ran(launch_prepare(p, std::is_same_v<Elem, __nv_bfloat16>, device, stream), "launch the prepare kernel"))
    return ran.outcome;
  const int chain_blocks = p.main_blocks();
  constexpr int kBytes = ChainSmem::kAllocated;
  if (p.sequences.count > 0) {
    const int lists = p.list == kPlannedList ? kPlannedLists : kScheduleBlocks;
    const bool all =
        ran(launch_kernel(pdl_if(!p.has_saved), backward_lists_kernel, lists, kScheduleThreads, 0, stream, p),
            "launch the lists of work") &&
        ran(launch_large<backward_chain_kernel<Elem>>(Pdl::kOn, chain_blocks, kChainThreads, kBytes, device, stream,
                                                      chain_params(p)),
            "launch the chain of gradients");
    if (!all) return ran.outcome;
  }
  const int64_t units = p.sequences.workspace_chunks() * p.key_heads,
                blocks = std::min<int64_t>(units, p.limits.blocks);
  for (const BackwardParams* of : {&p, later}) {
    if (!of) continue;
    if (p.sequences.count > 0 &&
        !ran(launch_large<states_kernel<Elem>>(Pdl::kOn, chain_blocks, kChainThreads, kBytes, device, stream,
                                               states_params(*of), of->states, later != nullptr),
             "launch the states kernel"))
      return ran.outcome;
    if (blocks > 0 && !ran(launch_large<gradients_kernel<Elem>>(Pdl::kOn, blocks, kGradientThreads,
                                                                GradientSmem::kAllocated, device, stream, *of),
                           "launch the gradients kernel"))
      return ran.outcome;
  }
  if (p.head_sums)
    ran(launch_with_pdl(head_sums_kernel, p.value_heads, 256, 0, stream, p), "launch the sums over tokens");
  return ran.outcome;
}

}  // namespace

cudaError_t launch_grad_chain(const CallParams& p, bool bf16, int device, cudaStream_t stream) {
  const auto launch = [&](auto elem) {
    return launch_large<backward_chain_kernel<decltype(elem)>>(Pdl::kOn, p.main_blocks(), kChainThreads,
                                                               ChainSmem::kAllocated, device, stream, p);
  };
  return bf16 ? launch(__nv_bfloat16{}) : launch(__half{});
}

Outcome launch(const BackwardProblem& problem, const Context& context) {
  return with_device(context.device, kDevices, [&](const DeviceFacts& facts) -> Outcome {
    BackwardParams p = params_of(problem, context.workspace, facts.multiprocessors);
    const bool bf16 = problem.in.q.dtype == GD_BF16;
    if (p.sequences.batch > 0 && p.sequences.tokens > 0) {
      for (const MappedTensor& t : {MappedTensor{"q", &p.q_map, p.q, p.key_heads},
                                    {"k", &p.k_map, p.k, p.key_heads},
                                    {"v", &p.v_map, p.v, p.value_heads},
                                    {"do", &p.d_o_map, p.d_o, p.value_heads},
                                    {"dv", &p.dv_map, p.dv, p.value_heads},
                                    {"u", &p.u_map, p.u, p.value_heads}})
        if (Outcome outcome = encode_map(t, p.sequences, bf16); outcome.status != GD_OK) return outcome;
      for (const MappedTensor& t :
           {MappedTensor{"dq", &p.dq_map, p.dq, p.key_heads}, {"dk", &p.dk_map, p.dk, p.key_heads}})
        if (t.rows)
          if (Outcome outcome = encode_map(t, p.sequences, bf16); outcome.status != GD_OK) return outcome;
    }
    const Slices slices = slices_of(problem);
    BackwardParams of_later;
    const BackwardParams* later = nullptr;
    if (slices.count > 1) {
      of_later = slice1_params(p, slices);
      if (Outcome outcome = encode_map({"u", &of_later.u_map, of_later.u, p.value_heads}, p.sequences, bf16);
          outcome.status != GD_OK)
        return outcome;
      later = &of_later;
    }
    const auto stream = static_cast<cudaStream_t>(context.stream);
    return bf16 ? launch<__nv_bfloat16>(p, later, context.device, stream)
                : launch<__half>(p, later, context.device, stream);
  });
}

}  // namespace gatedelta::cuda::sm90

// The fp32 kernels on a CPU: what src/cuda/fp32/*.cu launch, CTA after CTA.
#pragma once

#include "cuda/fp32/backward.cuh"
#include "cuda/fp32/finish.cuh"
#include "cuda/fp32/forward.cuh"
#include "forward.hpp"

namespace gatedelta::testing::emulated::fp32 {

using namespace cuda::fp32;

inline BackwardProblem problem_of(const gd_backward_args& args) {
  gd_forward_args forward{};
  forward.in = args.in;
  BackwardProblem p;
  p.in = emulated::problem_of(forward).in;
  p.d_o = rows_of(args.d_o);
  p.d_final = states_of(args.d_final_state, args.d_final_indices, args.in.first_slot);
  p.d_initial = states_of(args.d_initial_state, args.d_initial_indices, args.in.first_slot);
  p.dq = rows_of(args.dq), p.dk = rows_of(args.dk), p.dv = rows_of(args.dv);
  p.dg = rows_of(args.dg), p.dbeta = rows_of(args.dbeta);
  p.dA_log = vector_of(args.dA_log), p.d_dt_bias = vector_of(args.d_dt_bias);
  return p;
}

// Copies of tensors whose data are aligned, as the kernels want it; the generator aligns nothing. What was written is
// copied back.
class AlignedTensors {
 public:
  explicit AlignedTensors(std::initializer_list<gd_tensor*> tensors) {
    for (gd_tensor* t : tensors) {
      if (!is_there(*t)) continue;
      int64_t last = -1;
      if (element_count(*t) > 0) {
        last = 0;
        for (int d = 0; d < t->rank; ++d) last += (t->shape[d] - 1) * t->stride[d];
      }
      const auto bytes = static_cast<size_t>((last + 1) * element_bytes(t->dtype));
      copies_.push_back({static_cast<char*>(t->data), Buffer(bytes)});
      std::memcpy(copies_.back().buffer.data(), t->data, bytes);
      t->data = copies_.back().buffer.data();
    }
  }
  std::string give_back() const {
    bool intact = true;
    for (const auto& [host, buffer] : copies_) {
      std::memcpy(host, buffer.data(), buffer.size());
      intact = intact && buffer.guards_intact();
    }
    return intact ? "" : "the guards of a tensor of rows were overwritten";
  }

 private:
  struct Copy {
    char* host;
    Buffer buffer;
  };
  std::vector<Copy> copies_;
};

template <class Config, template <class> class Loop>
void run_loop(const Params& p, const Options& options) {
  const int ctas = p.sequences.count * p.value_heads * p.parts;
  for (int cta = 0; cta < ctas; ++cta)
    run_cta({kThreads, Config::kBytes, options.eager_copies, options.seed + cta},
            [&](int tid) { Loop<Config>(p, cta, tid).run(); });
}
template <class Kernel>
void run_chunks(const Params& p, int64_t ctas, const Options& options) {
  for (int cta = 0; cta < ctas; ++cta)
    run_cta({kThreads, 0, options.eager_copies, options.seed + cta}, [&](int tid) { Kernel::run(p, cta, tid); });
}

template <int kKeys>
void run_forward(const Params& p, const Options& options, bool outputs) {
  run_chunks<Prepare>(p, p.sequences.workspace_chunks() * p.key_heads, options);
  if (outputs) {
    run_loop<ForwardConfig<kKeys, true>, Forward>(p, options);
  } else {
    run_loop<ForwardConfig<kKeys, false>, Forward>(p, options);
  }
}
template <int kKeys>
void run_backward(const Params& p, const Options& options, bool has_saved) {
  if (!has_saved) run_forward<kKeys>(p, options, false);
  const int64_t chunks = p.sequences.workspace_chunks();
  run_loop<GradientConfig<kKeys>, GradientLoop>(p, options);
  run_loop<KeyConfig<kKeys>, KeyLoop>(p, options);
  run_chunks<Finish>(p, chunks * p.key_heads, options);
  run_chunks<GateGradients>(p, chunks, options);
  if (p.head_sums) run_chunks<HeadSums>(p, (p.value_heads + kWarps - 1) / kWarps, options);
}

// "" or what went wrong.
template <class Run>
std::string with_memory(size_t bytes, const Run& run) {
  const Buffer memory(bytes);
  try {
    run(memory.data());
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return memory.guards_intact() ? "" : "the workspace's guards were overwritten";
}
// f(std::integral_constant<int, kKeys>): the instance for a K.
template <class F>
void with_keys(int key_dim, const F& f) {
  switch (compiled_keys(key_dim)) {
    case 64: return f(std::integral_constant<int, 64>{});
    case 128: return f(std::integral_constant<int, 128>{});
    default: return f(std::integral_constant<int, 256>{});
  }
}

inline std::string run(const gd_forward_args& args, const Options& options) {
  const AlignedRows aligned(args);
  const ForwardProblem problem = emulated::problem_of(aligned.args);
  const std::string error = with_memory(forward_layout(problem).bytes, [&](char* workspace) {
    with_keys(problem.in.key_dim, [&](auto keys) { run_forward<keys>(params_of(problem, workspace), options, true); });
  });
  const std::string damage = aligned.give_back();
  return error.empty() ? damage : error;
}
// from_saved: after a forward that saves.
inline std::string run(const gd_backward_args& host, const Options& options, bool from_saved) {
  gd_backward_args args = host;
  const AlignedTensors aligned({&args.in.q, &args.in.k, &args.in.v, &args.d_o, &args.dq, &args.dk, &args.dv});
  BackwardProblem problem = problem_of(args);
  const Buffer saved(from_saved ? saved_layout(problem.in).bytes : 0);
  std::string error;
  with_keys(problem.in.key_dim, [&](auto keys) {
    if (from_saved) {
      ForwardProblem forward;
      forward.in = problem.in;
      problem.saved = forward.saved = {saved.data(), saved.size(), true};
      error = with_memory(forward_layout(forward).bytes,
                          [&](char* workspace) { run_forward<keys>(params_of(forward, workspace), options, true); });
    }
    if (error.empty())
      error = with_memory(backward_layout(problem).bytes, [&](char* workspace) {
        run_backward<keys>(params_of(problem, workspace), options, from_saved);
      });
  });
  if (error.empty() && !saved.guards_intact()) error = "the guards of saved were overwritten";
  const std::string damage = aligned.give_back();
  return error.empty() ? damage : error;
}

}  // namespace gatedelta::testing::emulated::fp32

// The fp32 kernels on a CPU: what src/cuda/fp32/*.cu launch, CTA after CTA.
#pragma once

#include "cuda/fp32/backward.cuh"
#include "cuda/fp32/finish.cuh"
#include "cuda/fp32/forward.cuh"
#include "forward.hpp"

namespace gatedelta::testing::emulated::fp32 {

using namespace cuda;
using namespace cuda::fp32;

template <class Config, template <class> class Loop>
void run_loop(const Params& p, const Options& options) {
  launch(int64_t{p.sequences.count} * p.value_heads * p.parts, kThreads, Config::kBytes, options,
         [&](int cta, int tid) { Loop<Config>(p, cta, tid).run(); });
}
template <class Kernel>
void run_chunks(const Params& p, int64_t ctas, const Options& options) {
  launch(ctas, kThreads, 0, options, [&](int cta, int tid) { Kernel::run(p, cta, tid); });
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
  const AlignedRows<gd_forward_args> aligned(args);
  const ForwardProblem problem = problem_of(aligned.args);
  const std::string error = with_memory(forward_layout(problem).bytes, [&](char* workspace) {
    with_keys(problem.in.key_dim, [&](auto keys) { run_forward<keys>(params_of(problem, workspace), options, true); });
  });
  const std::string damage = aligned.give_back();
  return error.empty() ? damage : error;
}
// from_saved: after a forward that saves.
inline std::string run(const gd_backward_args& args, const Options& options, bool from_saved) {
  const AlignedRows<gd_backward_args> aligned(args);
  BackwardProblem problem = problem_of(aligned.args);
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

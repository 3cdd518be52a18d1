// The portable backward on a CPU: what src/cuda/portable/portable_backward.cu launches, CTA after CTA.
#pragma once

#include "cuda/portable/backward/gates.cuh"
#include "cuda/portable/backward/grad_chain.cuh"
#include "cuda/portable/backward/gradients/head.cuh"
#include "cuda/portable/backward/gradients/loads.cuh"
#include "cuda/portable/backward/gradients/output.cuh"
#include "cuda/portable/backward/gradients/pairs.cuh"
#include "cuda/portable/backward/gradients/products.cuh"
#include "forward.hpp"

namespace gatedelta::testing::emulated {

template <class Config, class RunWhole>
void run_slice(const BackwardProblem& problem, const cuda::portable::BackwardParams& p, const cuda::portable::Cut& cut,
               const Options& options, const RunWhole& run_whole) {
  using namespace cuda;
  using namespace cuda::portable;
  using Elem = typename Config::Elem;
  using Forward = WithPass<StatesPass, Config>;
  using Backward = WithPass<GradientPass, Config>;
  using Rows = GradientsConfig<Elem, Config::kKeys == 64 ? 64 : 128>;
  if (!problem.saved) run_prepare<Elem, Config::kKeys>(p, prepare_ctas(forward_of(problem)), options);
  const Params states = states_params(p), gradients = gradient_pass_params(p);
  if (p.segment_chunks) {
    run_segments(p, cut.cost, options);
    run_transitions<States, Transitions<StatesPass, Config>>(states, cut.kind, options);
    run_transitions<GradChain, Transitions<GradientPass, Config>>(gradients, cut.kind, options);
    run_merges<Config::kKeys>(p, options);
  }
  run_chain<States, Forward>(states, options);
  run_chain<GradChain, Backward>(gradients, options);
  if (cut.cost.has_whole_grid)
    run_whole(cut.whole_kind, [&](auto config) {
      using Whole = WithPass<StatesPass, decltype(config)>;
      run_chain<States, Whole>(whole_params(states, cut.whole_kind), options);
      run_chain<GradChain, WithPass<GradientPass, Whole>>(whole_params(gradients, cut.whole_kind), options);
    });
  launch(gradient_ctas(problem), Rows::kThreads, Rows::Smem::kBytes, options,
         [&](int cta, int tid) { Gradients<Rows>(p, tid).run(cta); });
  launch(gate_ctas(problem), kGateThreads, 0, options,
         [&](int cta, int tid) { GateGradients<Elem>::run(p, cta, tid); });
  if (p.key_sums)
    launch(project_ctas(problem), kProjectThreads, 0, options,
           [&](int cta, int tid) { Project<Elem>::run(p, cta, tid); });
  if (p.head_sums)
    launch(problem.in.value_heads, kHeadSumThreads, 0, options, [&](int cta, int tid) { HeadSums::run(p, cta, tid); });
}

// Config: any pass of the chains' instance.
template <class Config, class RunWhole = NoWholeGrid>
void run_kernels(const BackwardProblem& problem, char* workspace, const Options& options,
                 const RunWhole& run_whole = {}) {
  using namespace cuda;
  using namespace cuda::portable;
  const BackwardWorkspace layout = backward_layout(problem);
  const Cut cut = cut_of(problem, layout, options);
  for (int i = 0; i < slice_count(problem); ++i)
    run_slice<Config>(slice_of(problem, i), params_of(problem, layout, workspace, cut, i), cut, options, run_whole);
}

}  // namespace gatedelta::testing::emulated

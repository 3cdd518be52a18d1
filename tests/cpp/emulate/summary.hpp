// The portable summaries on a CPU: what src/cuda/portable/portable_summary.cu launches, CTA after CTA.
#pragma once

#include "backward.hpp"
#include "cuda/portable/summary/summary.cuh"

namespace gatedelta::testing::emulated {

template <class Elem>
void run_prepare_of(const cuda::portable::Params& p, int64_t ctas, const Options& options) {
  switch (cuda::compiled_keys(p.key_dim)) {
    case 64: return run_prepare<Elem, 64>(p, ctas, options);
    case 128: return run_prepare<Elem, 128>(p, ctas, options);
    default: return run_prepare<Elem, 256>(p, ctas, options);
  }
}
template <class PassOf, class Elem, template <class> class ChainOf, class Problem>
void run_summary_chain(const Problem& problem, char* workspace, const Options& options, bool has_prepared) {
  using namespace cuda;
  using namespace cuda::portable;
  constexpr cuda::Pass kPass = PassOf::kDirection > 0 ? cuda::Pass::kForward : cuda::Pass::kBackward;
  const SummaryWorkspace layout = summary_layout(problem);
  const SummaryChain chain = chain_of(problem, layout, workspace, options.multiprocessors);
  if (!has_prepared) run_prepare_of<Elem>(chain.p, prepare_ctas(prepared_forward(problem)), options);
  launch(summary_ctas(chain.p), kSegmentThreads, 0, options,
         [&](int cta, int tid) { FindSummaries<kPass>::run(chain.p, chain.range, cta, tid); });
  with_chain<PassOf, Elem>(chain.kind, [&](auto config) {
    using Config = decltype(config);
    launch(chain_ctas(chain.transitions), Config::kThreads, Config::Smem::kBytes, options,
           [&](int cta, int tid) { ChainOf<Config>(chain.transitions, cta, tid).run(); });
  });
}

template <class Elem>
void run_instance(const SummaryProblem& problem, char* workspace, const Options& options) {
  using namespace cuda;
  using namespace cuda::portable;
  run_summary_chain<StatesPass, Elem, States>(problem, workspace, options, problem.prepared);
}
template <class Elem>
void run_instance(const BackwardSummaryProblem& problem, char* workspace, const Options& options) {
  using namespace cuda;
  using namespace cuda::portable;
  run_summary_chain<GradientPass, Elem, GradChain>(problem, workspace, options, problem.saved.present);
}

}  // namespace gatedelta::testing::emulated

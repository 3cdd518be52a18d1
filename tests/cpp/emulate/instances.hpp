// A call by the instance of the kernels that the device's size and the head sizes ask for.
#pragma once

#include "backward.hpp"

namespace gatedelta::testing::emulated {

inline cuda::portable::Cut cut_of(const ForwardProblem& problem, const Options& options) {
  return cut_of(problem, cuda::portable::forward_layout(problem), options);
}
inline cuda::portable::Cut cut_of(const BackwardProblem& problem, const Options& options) {
  return cut_of(problem, cuda::portable::backward_layout(problem), options);
}
template <class Elem, class Problem>
void run_instance(const Problem& problem, char* workspace, const Options& options) {
  using namespace cuda;
  using namespace cuda::portable;
  const auto with_instance = [](ChainKind kind, const auto& body) { with_chain<ForwardPass, Elem>(kind, body); };
  with_instance(cut_of(problem, options).kind,
                [&](auto config) { run_kernels<decltype(config)>(problem, workspace, options, with_instance); });
}
template <class Args>
std::string run(const Args& args, const Options& options) {
  return with_workspace(args, [&](const auto& problem, char* workspace) {
    problem.in.q.dtype == GD_BF16 ? run_instance<cuda::Bf16>(problem, workspace, options)
                                  : run_instance<cuda::Fp16>(problem, workspace, options);
  });
}

}  // namespace gatedelta::testing::emulated

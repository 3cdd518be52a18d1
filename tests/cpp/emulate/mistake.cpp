// A few cases through one instance of the kernels. Compiled once as they are, and with GD_PLANTED once for each planted
// mistake (plant.py), which must show. Status 0: all is as expected.
#include <cstdio>
#include <string>

#include "forward.hpp"
#include "testing/judge.hpp"

namespace gatedelta::testing {
namespace {

constexpr const char* kCases[] = {
    "T=100 Hk=1 Hv=2 K=64 V=64 dtype=bf16",
    "lengths=70+0+33 pad=5 K=48 V=32 dtype=bf16 gate=inf layout=vk pool",
    "lengths=130+64 K=64 V=48 dtype=bf16 l2norm keys=loose every=64",
};

// "" or what is wrong.
std::string judge_case(const char* spec, bool eager_copies, unsigned seed) {
  Judge judge(parse_case(spec));
  const Judgement judgement = judge.forward(Compute::tensor_cores, [&](const gd_forward_args& args) {
    const emulated::AlignedRows aligned(args);
    const ForwardProblem problem = emulated::problem_of(aligned.args);
    const std::string error = emulated::with_workspace(problem, [&](char* workspace) {
      emulated::run_kernels<cuda::portable::Forward64<cuda::portable::Bf16>>(problem, workspace,
                                                                             {1, eager_copies, seed});
    });
    const std::string damage = aligned.give_back();
    return error.empty() ? damage : error;
  });
  return judgement.ok() ? "" : judgement.text();
}

int run(bool is_planted) {
  for (unsigned seed = 1; seed <= 2; ++seed)
    for (const bool eager : {false, true})
      for (const char* spec : kCases) {
        const std::string problem = judge_case(spec, eager, seed);
        if (problem.empty()) continue;
        std::printf("%s\n%s\n", spec, problem.c_str());
        return is_planted ? 0 : 1;
      }
  if (is_planted) std::printf("the planted mistake was not found\n");
  return is_planted ? 1 : 0;
}

}  // namespace
}  // namespace gatedelta::testing

int main() {
#ifdef GD_PLANTED
  return gatedelta::testing::run(true);
#else
  return gatedelta::testing::run(false);
#endif
}

// A few cases through one instance of the kernels. Compiled once as they are, and with GD_PLANTED once for each planted
// mistake (plant.py), which must show; with GD_BACKWARD those of the backward. Status 0: all is as expected.
#include <string>
#include <string_view>

#ifdef GD_BACKWARD
#include "backward.hpp"
#else
#include "forward.hpp"
#endif
#include "planted.hpp"
#include "testing/judge.hpp"
#include "testing/raw_gates.hpp"

namespace gatedelta::testing {
namespace {

#ifdef GD_BACKWARD
using Args = gd_backward_args;
constexpr const char* kCases[] = {
    "T=100 Hk=1 Hv=2 K=64 V=64 dtype=bf16 beta=zeros",
    "raw gates",
    "lengths=70+0+33 pad=5 Hk=1 Hv=3 K=48 V=32 dtype=bf16 gate=raw l2norm layout=vk pool",
    "lengths=130+64 pad=70 K=64 V=48 dtype=bf16 gate=spiky",
    "lengths=330+0+70 Hk=1 Hv=2 K=64 V=32 dtype=bf16 gate=zero segment=1",
    "lengths=70+350 K=48 V=48 dtype=bf16 gate=strong segment=1 pool",
    "T=1090 Hk=1 Hv=2 K=16 V=16 dtype=bf16 gate=mixed segment=2",
};
#else
using Args = gd_forward_args;
constexpr const char* kCases[] = {
    "T=100 Hk=1 Hv=2 K=64 V=64 dtype=bf16",
    "lengths=20 pad=3 K=16 V=144 dtype=bf16",
    "lengths=70+0+33 pad=5 K=48 V=32 dtype=bf16 gate=inf layout=vk pool",
    "lengths=130+64 K=64 V=48 dtype=bf16 l2norm keys=loose every=64",
    "lengths=330+0+70 Hk=1 Hv=2 K=64 V=32 dtype=bf16 gate=zero segment=1 inplace",
    "lengths=70+330 K=48 V=48 dtype=bf16 gate=strong segment=1 inplace pool every=64",
    "T=300 Hk=1 Hv=2 K=64 V=64 dtype=bf16 gate=zero beta=one keys=repeated h0=0 seed=3",
};
#endif

std::string run_case(const Args& args, const emulated::Options& options) {
  using namespace cuda;
  using namespace cuda::portable;
  return emulated::with_workspace(args, [&](const auto& problem, char* workspace) {
    emulated::run_kernels<Chain64<ForwardPass, Bf16>>(problem, workspace, options);
  });
}

// "" or what is wrong.
std::string judge_case(const char* spec, bool eager_copies, unsigned seed) {
  const auto run = [&](const Args& args) { return run_case(args, {1, eager_copies, seed}); };
#ifdef GD_BACKWARD
  if (std::string_view(spec) == "raw gates") return judge_raw_gates("bf16", run);
#endif
  Judge judge(parse_case(spec));
#ifdef GD_BACKWARD
  const Judgement judgement = judge.backward(Compute::tensor_cores, run);
#else
  const Judgement judgement = judge.forward(Compute::tensor_cores, run);
#endif
  return judgement.ok() ? "" : judgement.text();
}

}  // namespace
}  // namespace gatedelta::testing

int main() {
  using namespace gatedelta::testing;
  return emulated::run_planted(kCases, judge_case);
}

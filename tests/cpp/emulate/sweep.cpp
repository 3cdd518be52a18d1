// Random hard cases on the emulated portable kernels: emulated_sweep [N [SEED [key=value ...]]]. Keys change every
// case. Exit status 1 if one is outside of its bounds. `gatedelta check --sweep` draws the same kinds of cases for the
// backends that run here and on a GPU.
#include "testing/sweep.hpp"

#include <cstdio>
#include <cstdlib>

#include "instances.hpp"

namespace gatedelta::testing {
namespace {

int sweep(uint64_t cases, uint64_t seed, const std::string& words) {
  // An emulated call takes a hundred times as long as one on the CPU, so cases are small.
  const SweepLimits limits{.fp32 = false, .cuts = true, .work = 800'000};
  constexpr int kMultiprocessors[] = {1, 3, 16, 64, 132};  // by which the instance and the cuts are chosen
  SweepTally tally;
  for (uint64_t i = 0; i < cases; ++i) {
    Case c = draw_case(seed, i, limits);
    apply_spec(c, words);
    const emulated::Options options{kMultiprocessors[i % 5], i % 2 == 0, static_cast<unsigned>(i), i % 3 == 0};
    const auto run = [&](const auto& args) { return emulated::run(args, options); };
    const std::string dtype = c.dtype == GD_BF16 ? " bf16" : " fp16";
    Judge judge(c);
    tally.add("fwd" + dtype, c, judge.forward(Compute::tensor_cores, run));
    tally.add("bwd" + dtype, c, judge.backward(Compute::tensor_cores, run));
  }
  std::printf("%s", tally.text(false).c_str());
  return tally.ok() ? 0 : 1;
}

}  // namespace
}  // namespace gatedelta::testing

int main(int argc, char** argv) {
  const auto number = [&](int i, uint64_t otherwise) {
    return i < argc ? std::strtoull(argv[i], nullptr, 10) : otherwise;
  };
  std::string words;
  for (int i = 3; i < argc; ++i) words.append(argv[i]).append(" ");
  return gatedelta::testing::sweep(number(1, 100), number(2, 1), words);
}

// CUDA devices: their list, and the parts of the commands that run on one. A build without CUDA has none.
#pragma once

#include <string>
#include <vector>

#include "cli/options.hpp"
#include "cli/timing.hpp"
#include "testing/judge.hpp"

namespace gatedelta::cli {

struct Gpu {
  std::string name;
  int major, minor;  // compute capability
};
std::vector<Gpu> gpus();  // by index

// Why no command can run on this GPU; "" if some can. The library itself refuses operations that a GPU lacks.
std::string refusal(int index, const std::vector<Gpu>& gpus);

// --device and --kernels; the CPU if no device is given. Refuses a device that is not there, and on CUDA the flags
// named.
Device chosen_device(const Options& options, const std::vector<std::string>& cpu_flags);

// Both are for a CUDA device. Where the library refuses an operation there, the result holds its message. Op::train is
// timed as one, and judged as its two parts.
testing::Judgement judge_on(const Device& device, Op op, testing::Judge& judge);
Timing time_on(const Device& device, Op op, const testing::Problem& problem, double seconds);

}  // namespace gatedelta::cli

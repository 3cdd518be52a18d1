// Chaos and load: random calls of every operation from several processes and threads, with poisoned memory, refused
// calls, forks and killed processes between them. Calls come in rounds. In a round each process draws its own ones, all
// a function of the seed, and runs each alone, one process at a time. Then all processes run theirs from all threads at
// once, and every run must leave the bits of the one alone.
//
//   soak [--seconds 600] [--seed 1] [--device cpu|cuda] [--kernels auto|portable] [--json FILE]
//   soak --plant      changes a byte of a result now and then: it must fail
//
// Exit status 1: a mismatch, another failure or a hang. 2: it could not start.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <thread>

#include "cli/options.hpp"
#include "report.hpp"

namespace gatedelta::soak {
namespace {

// In a process of its own, because one that has looked at its GPUs cannot fork others that use them.
bool has_gpu() {
  const pid_t child = fork();
  if (child == 0) {
    gd_info info = GD_INFO_INIT;
    _exit(gd_get_info(&info) == GD_OK && info.cuda_devices > 0 ? 0 : 1);
  }
  int status = 1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

std::string choice(const cli::Options& options, const std::string& name, const std::string& first,
                   const std::string& second) {
  const std::string value = options.get(name).value_or(first);
  if (value != first && value != second)
    throw cli::UsageError(name + " " + value + ": expected " + first + " or " + second);
  return value;
}

int run_main(const std::vector<std::string>& arguments) {
  const cli::Options options(arguments,
                             {{"--seconds", "N", "how long"},
                              {"--seed", "N", "of all choices"},
                              {"--device", "NAME", "cpu or cuda"},
                              {"--kernels", "NAME", "auto or portable"},
                              {"--json", "FILE", "where the report goes"},
                              {"--plant", nullptr, "change a byte now and then"}},
                             false);
  const double seconds = options.number("--seconds", 600, 0.1, 1e6);
  Setting setting;
  setting.seed = static_cast<uint64_t>(options.integer("--seed", 1, 0, 1 << 30));
  setting.plants = options.has("--plant");
  setting.target.cuda = choice(options, "--device", "cpu", "cuda") == "cuda";
  if (choice(options, "--kernels", "auto", "portable") == "portable") {
    if (!setting.target.cuda) throw cli::UsageError("--kernels is for --device cuda");
    setting.target.kernels = GD_KERNELS_PORTABLE;
  }
  if (setting.target.cuda && !has_gpu())
    throw cli::UsageError("no CUDA device of compute capability 8.0 or later, or a build without CUDA");
  const auto cpus = static_cast<int>(std::thread::hardware_concurrency());
  setting.threads = std::clamp(cpus / setting.processes, 3, kMostThreads);

  Rounds rounds(setting);
  const int64_t begin = now_ms();
  const auto passed = [&] { return static_cast<double>(now_ms() - begin) / 1000; };
  bool ok = true;
  do {
    ok = rounds.run(std::clamp(seconds / 10, 0.5, 10.0));
    print_summary(rounds, passed());
  } while (ok && passed() < seconds);
  const Board& board = rounds.board();
  for (uint64_t i = 0; i < std::min<uint64_t>(board.failures, Board::kMostFailures); ++i)
    std::printf("FAILED %s\n", board.failure[i]);
  if (const auto path = options.get("--json")) write_report(*path, setting, rounds, passed());
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace gatedelta::soak

int main(int argc, char** argv) {
  try {
    return gatedelta::soak::run_main({argv + 1, argv + argc});
  } catch (const std::exception& e) {
    std::fprintf(stderr, "soak: %s\n", e.what());
    return 2;
  }
}

#include "report.hpp"

#include <csignal>
#include <cstdio>
#include <fstream>
#include <stdexcept>

#include "cli/timing.hpp"

namespace gatedelta::soak {

using cli::Json;

namespace {

struct Totals {
  uint64_t calls = 0, runs = 0, refusals = 0, mismatches = 0;

  explicit Totals(const Board& board) {
    for (const Count& count : board.count) {
      calls += count.calls;
      runs += count.runs;
      refusals += count.refusals;
      mismatches += count.mismatches;
    }
  }
};

using Many = unsigned long long;

}  // namespace

void print_summary(const Rounds& rounds, double seconds) {
  const Board& board = rounds.board();
  const Totals all(board);
  std::printf(
      "%llu rounds, %.0f s: %llu calls, %llu runs of them, %llu refusals, %llu forks, %llu kills; %llu judged, "
      "%llu mismatches, %llu failures\n",
      Many(rounds.rounds()), seconds, Many(all.calls), Many(all.runs), Many(all.refusals), Many(board.forks),
      Many(rounds.kills(SIGKILL) + rounds.kills(SIGTERM)), Many(board.judged), Many(all.mismatches),
      Many(board.failures));
  std::fflush(stdout);
}

void write_report(const std::string& path, const Setting& setting, const Rounds& rounds, double seconds) {
  const Board& board = rounds.board();
  const Totals all(board);
  const bool cuda = setting.target.cuda;
  const cli::Device device{.cuda = cuda, .index = 0, .kernels = setting.target.kernels};
  const gd_info info = cli::get_info();
  Json operations = Json::array();
  for (int i = 0; i < kOperations; ++i) {
    const Count& count = board.count[i];
    operations.add(Json::object()
                       .set("operation", name_of(static_cast<Operation>(i)))
                       .set("calls", count.calls.load())
                       .set("runs", count.runs.load())
                       .set("refusals", count.refusals.load())
                       .set("mismatches", count.mismatches.load()));
  }
  Json report = Json::object();
  report.set("command", "soak")
      .set("machine", cli::machine_json(device))
      .set("build", Json::object()
                        .set("version", cli::version_text(info))
                        .set("compiler", __VERSION__)
                        .set("cuda", info.cuda_compiled != 0))
      .set("device", cuda ? "cuda" : "cpu");
  if (cuda) report.set("kernels", setting.target.kernels == GD_KERNELS_PORTABLE ? "portable" : "auto");
  report.set("seed", setting.seed)
      .set("seconds", seconds)
      .set("rounds", rounds.rounds())
      .set("processes", setting.processes)
      .set("threads", setting.threads)
      .set("calls", all.calls)
      .set("runs", all.runs)
      .set("refusals", all.refusals)
      .set("judged", board.judged.load())
      .set("mismatches", all.mismatches)
      .set("failures", board.failures.load())
      .set("forks", board.forks.load())
      .set("runs_in_children", board.runs_in_children.load())
      .set("sigkills", rounds.kills(SIGKILL))
      .set("sigterms", rounds.kills(SIGTERM))
      .set("kills_in_calls", rounds.kills_in_calls())
      .set("runs_after_kills", rounds.runs_after_kills())
      .set("runs_of_shared_pool", board.runs_of_shared_pool.load());
  if (cuda) report.set("replays", board.replays.load());
  report.set("operations", operations);
  std::ofstream file(path);
  file << report.text() << "\n";
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

}  // namespace gatedelta::soak

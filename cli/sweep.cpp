#include "cli/sweep.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <mutex>
#include <thread>

#include "cli/device.hpp"
#include "cli/json.hpp"
#include "cli/timing.hpp"
#include "testing/sweep.hpp"

namespace gatedelta::cli {

namespace {

testing::SweepLimits limits_of(const Device& device) {
  testing::SweepLimits limits;
  limits.cuts = device.cuda;
  if (device.cuda) limits.work = 12'000'000;  // cases that are cut
  // Where Hopper's kernels are not ruled out, most cases should be theirs: the portable ones have a sweep of their own.
  if (device.cuda && device.kernels == GD_KERNELS_AUTO) {
    limits.fp32 = false;
    limits.size = 128;
  }
  return limits;
}

const char* format_name(gd_dtype dtype) { return dtype == GD_F32 ? "fp32" : dtype == GD_BF16 ? "bf16" : "fp16"; }

Json to_json(const testing::SweepTally& tally) {
  Json rows = Json::array();
  for (const auto& [call, quantities] : tally.worst()) {
    for (const auto& [quantity, worst] : quantities) {
      Json row = Json::object();
      row.set("call", call)
          .set("quantity", quantity)
          .set("judged", worst.count)
          .set("outside", worst.over)
          .set("worst_share", worst.margin)
          .set("error", worst.error)
          .set("case", worst.spec);
      rows.add(row);
    }
  }
  return rows;
}

}  // namespace

int sweep_command(const Options& options, const Device& device, const std::vector<gd_isa>& isas, int threads,
                  const Report& report) {
  const int64_t count = options.integer("--sweep", 0, 1, int64_t{1} << 40);
  const auto seed = static_cast<uint64_t>(options.integer("--seed", 1, 0, int64_t{1} << 40));
  const std::vector<Op> ops = parse_ops(options.get("--op").value_or("fwd,bwd,rec"));
  const testing::SweepLimits limits = limits_of(device);
  testing::SweepTally tally;
  Progress progress(static_cast<size_t>(count));
  std::mutex mutex;  // of the progress bar and of `failure`
  std::exception_ptr failure;
  std::atomic<int64_t> next = 0;
  const auto work = [&] {
    try {
      for (int64_t i = next++; i < count; i = next++) {
        testing::Case c = testing::draw_case(seed, static_cast<uint64_t>(i), limits);
        testing::apply_spec(c, options.words());
        testing::Judge judge(c);
        for (const Op op : ops) {
          for (const gd_isa isa : isas) {
            for (const auto& [label, judgement] : judge_calls(device, op, judge, {.isa = resolve(isa)})) {
              std::string call = device.cuda ? device.name() : gd_isa_name(resolve(isa));
              call.append(" ").append(label).append(" ").append(format_name(c.dtype));
              tally.add(call, c, judgement);
            }
          }
        }
        const std::lock_guard lock(mutex);
        progress.step(std::to_string(i + 1));
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
      next = count;
    }
  };
  std::vector<std::thread> workers;
  for (int i = 1; i < threads; ++i) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();
  try {
    if (failure) std::rethrow_exception(failure);
  } catch (const std::invalid_argument& e) {
    throw UsageError(e.what());
  }

  report.print("%s%lld cases, %s\n", tally.text(options.has("--verbose")).c_str(), static_cast<long long>(count),
               tally.ok() ? "ok" : "FAILED");
  report.write(Json::object()
                   .set("command", "check --sweep")
                   .set("machine", machine_json(device))
                   .set("device", device.name())
                   .set("cases", count)
                   .set("seed", static_cast<int64_t>(seed))
                   .set("calls", tally.calls())
                   .set("worst_share", tally.worst_share())
                   .set("problems", static_cast<int64_t>(tally.problems().size()))
                   .set("results", to_json(tally)));
  return tally.ok() ? 0 : 1;
}

}  // namespace gatedelta::cli

// How fast the cases of a file run.
#include <algorithm>
#include <cstdio>
#include <optional>

#include "cli/device.hpp"
#include "cli/explain.hpp"
#include "cli/json.hpp"
#include "cli/options.hpp"
#include "cli/report.hpp"
#include "cli/shapes.hpp"
#include "cli/timing.hpp"

namespace gatedelta::cli {

const std::vector<Flag> kBenchFlags = {
    {"--shapes", "FILE", "csv file of cases: columns name, op and the keys below (bench/cpu/*.csv)"},
    {"--op", "LIST", "of fwd, bwd (from what the forward saved), train (both), rec"},
    {"--device", "NAME", "cpu, cuda or cuda:N (cpu)"},
    {"--kernels", "NAME", "on CUDA: auto, or portable for those that run on every GPU (auto)"},
    {"--isa", "LIST", "CPU: instruction sets: all, auto or names (auto)"},
    {"--threads", "N", "threads (all CPUs)"},
    {"--scaling", nullptr, "each case with 1, 2, 4, ... up to --threads threads"},
    {"--seconds", "S", "time to spend on each measurement (1)"},
    {"--json", "FILE", "write the results as JSON (- = standard output, without the table)"},
    {"--explain", nullptr, "run nothing: print how the CUDA forward would cut each case, and why"},
    {"--blocks", "N", "with --explain: multiprocessors of the device (132, an H200's)"},
};

namespace {

std::vector<Shape> default_shapes(const Device& device) {
  std::vector<Shape> shapes = {
      {"4096 tokens, 8 heads", testing::parse_case("T=4096 Hk=8 Hv=8 K=128 V=128 dtype=bf16"), {}},
      {"2048 tokens, 32 heads", testing::parse_case("T=2048 Hk=32 Hv=32 K=128 V=128 dtype=bf16"), {}}};
  if (!device.cuda) {
    shapes.push_back({"decode, batch 32",
                      testing::parse_case("B=32 T=1 Hk=16 Hv=32 K=128 V=128 dtype=bf16 inplace"),
                      {Op::recurrent}});
  }
  return shapes;
}

std::string label_of(const Shape& shape) { return shape.name.empty() ? testing::describe(shape.spec) : shape.name; }

std::vector<int> thread_counts(int most, bool scaling) {
  std::vector<int> counts;
  for (int n = 1; scaling && n < most; n *= 2) counts.push_back(n);
  counts.push_back(most);
  return counts;
}

int explain(const Options& options) {
  for (const char* flag : {"--op", "--device", "--kernels", "--isa", "--threads", "--scaling", "--seconds", "--json"})
    if (options.has(flag)) throw UsageError(std::string("--explain runs nothing: leave out ") + flag);
  const auto blocks = static_cast<int>(options.integer("--blocks", 132, 1, 10000));
  for (Shape shape : chosen_shapes(options, default_shapes({.cuda = true}))) {
    shape.spec.K = shape.spec.V = 128;  // Hopper's kernels have no other; the plan does not depend on it
    shape.spec.dtype = GD_BF16;
    std::printf("%s\n%s", label_of(shape).c_str(), explain_plan(shape.spec, blocks).c_str());
  }
  return 0;
}

}  // namespace

int bench_command(const std::vector<std::string>& arguments) {
  const Options options(arguments, kBenchFlags, true);
  if (options.has("--explain")) return explain(options);
  if (options.has("--blocks")) throw UsageError("--blocks is for --explain");
  const Device device = chosen_device(options, {"--isa", "--threads", "--scaling"});
  const auto shapes = chosen_shapes(options, default_shapes(device));
  const auto isas = device.cuda ? std::vector{GD_ISA_AUTO} : parse_isas(options.get("--isa").value_or("auto"));
  if (const auto list = options.get("--op")) parse_ops(*list);  // refused before anything runs
  const int cpus = device.cuda ? 1 : get_info().cpu_count;
  const int threads = static_cast<int>(options.integer("--threads", cpus, 1, 4096));
  const double seconds = options.number("--seconds", 1, 0, 3600);
  const auto counts = thread_counts(threads, options.has("--scaling"));

  const std::vector<Op> usual = {Op::forward, Op::backward};
  const auto ops_of = [&](const Shape& shape) { return chosen_ops(options, shape, usual); };
  const Report report(options);
  int width = 4;
  for (const Shape& shape : shapes) width = std::max(width, int(std::min<size_t>(label_of(shape).size(), 60)));
  size_t total = 0;
  for (const Shape& shape : shapes) total += ops_of(shape).size() * isas.size() * counts.size();

  Json results = Json::array();
  bool failed = false;
  report.print("%-*s %-5s %-12s %7s %12s %12s %13s %10s %9s\n", width, "case", "op", device.cuda ? "device" : "isa",
               "threads", "median", "best", "tokens/s", "GFLOP/s", "state GB/s");
  Progress progress(total);
  for (const Shape& shape : shapes) {
    const testing::Case& c = shape.spec;
    const std::string text = testing::describe(c), name = label_of(shape);
    std::optional<testing::Problem> problem;
    try {
      problem.emplace(c);
    } catch (const std::invalid_argument& e) {
      throw UsageError((shape.name.empty() ? "" : shape.name + ": ") + e.what());
    }
    const double tokens = double(c.lengths.empty() ? c.B * c.T : c.total_tokens() - c.pad);
    for (const Op op : ops_of(shape)) {
      for (const gd_isa choice : isas) {
        const gd_isa isa = resolve(choice);
        for (const int count : counts) {
          const Pool pool(count);
          progress.step(name + " " + name_of(op));
          Timing timing;
          try {
            const testing::Exec exec{.isa = isa, .pool = pool.get(), .threads = count};
            timing =
                device.cuda ? time_on(device, op, *problem, seconds) : Stopwatch(*problem, op, exec).measure(seconds);
          } catch (const std::runtime_error& e) {
            report.print_problem("%-*s %-5s %s\n", width, name.c_str(), name_of(op), e.what());
            failed = true;
            continue;
          }
          const std::string where = device.cuda ? device.name() : gd_isa_name(isa);
          const std::string used = device.cuda ? "-" : std::to_string(count);
          report.print("%-*s %-5s %-12s %7s %12s %12s %13.0f %10.1f", width, name.c_str(), name_of(op), where.c_str(),
                       used.c_str(), format_seconds(timing.median).c_str(), format_seconds(timing.best).c_str(),
                       tokens / timing.best, flops_of(op, c) / timing.best * 1e-9);
          if (op == Op::recurrent) report.print(" %9.1f", state_bytes_of(c) / timing.best * 1e-9);
          report.print("\n");
          results.add(to_json(timing, op, c, device, isa, count).set("name", name).set("case", text));
        }
      }
    }
  }
  report.write(Json::object().set("command", "bench").set("machine", machine_json(device)).set("results", results));
  return failed ? 1 : 0;
}

}  // namespace gatedelta::cli

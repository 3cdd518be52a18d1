// Any case against the fp64 recurrence.
#include <algorithm>
#include <cstdio>

#include "cli/device.hpp"
#include "cli/json.hpp"
#include "cli/options.hpp"
#include "cli/report.hpp"
#include "cli/shapes.hpp"
#include "cli/sweep.hpp"
#include "cli/timing.hpp"
#include "testing/judge.hpp"

namespace gatedelta::cli {

const std::vector<Flag> kCheckFlags = {
    {"--sweep", "N", "N random hard cases; keys given change each of them"},
    {"--seed", "S", "of the sweep (1)"},
    {"--shapes", "FILE", "csv file of cases: columns name, op and the keys below"},
    {"--op", "LIST", "of fwd, bwd, rec (all three)"},
    {"--device", "NAME", "cpu, cuda or cuda:N (cpu)"},
    {"--kernels", "NAME", "on CUDA: auto, or portable for those that run on every GPU (auto)"},
    {"--isa", "LIST", "CPU: instruction sets: all, auto or names (all that run here)"},
    {"--threads", "N", "threads, also of the fp64 recurrence (all CPUs)"},
    {"--verify", "N", "only the first N key heads, for large cases"},
    {"--verbose", nullptr, "show every quantity, not just the worst of each call"},
    {"--json", "FILE", "write the results as JSON (- = standard output, without the lines)"},
};

namespace {

constexpr const char* kCpuCases[] = {
    "T=512 Hk=2 Hv=4 K=128 V=128 dtype=bf16",
    "T=512 Hk=2 Hv=4 K=128 V=128 dtype=fp32",
    "lengths=1+63+64+65+0+200 pad=7 Hk=1 Hv=3 K=64 V=96 dtype=fp16 l2norm gate=raw beta=logit pool strided",
    "T=200 Hk=2 Hv=4 K=32 V=48 dtype=bf16 gate=spiky keys=correlated",
    "T=200 Hk=2 Hv=4 K=48 V=32 dtype=fp32 gate=inf beta=two",
    "B=8 T=4 Hk=2 Hv=8 K=128 V=128 dtype=bf16 state=bf16 layout=vk pool inplace accept steps=pool",
    "lengths=130+3+0+64+5+200 pad=3 Hk=2 Hv=4 K=64 V=32 pool first_slot=1 picked=4 steps=rows offsets strided",
};
constexpr const char* kCudaCases[] = {
    "T=512 Hk=2 Hv=4 K=128 V=128 dtype=bf16",
    "T=512 Hk=2 Hv=4 K=128 V=128 dtype=fp16",
    "lengths=1+63+64+65+0+200 pad=7 Hk=1 Hv=3 K=128 V=128 dtype=fp16 l2norm gate=raw beta=logit pool strided",
    "T=200 Hk=2 Hv=4 K=128 V=128 dtype=bf16 gate=spiky keys=correlated",
    "T=200 Hk=2 Hv=4 K=128 V=128 dtype=bf16 gate=inf beta=two every=64",
    "B=8 T=70 Hk=2 Hv=8 K=128 V=128 dtype=bf16 state=bf16 layout=vk pool inplace",
    "lengths=130+3+0+64+5+200 Hk=2 Hv=4 K=128 V=128 dtype=bf16 pool first_slot=1 picked=4 steps=rows offsets",
};

std::vector<Shape> default_shapes(const Device& device) {
  std::vector<Shape> shapes;
  for (const char* spec : device.cuda ? kCudaCases : kCpuCases) shapes.push_back({"", testing::parse_case(spec), {}});
  return shapes;
}

Judgements judge_on_cpu(Op op, testing::Judge& judge, const testing::Exec& exec) {
  Judgements judgements;
  if (op == Op::forward || op == Op::train) judgements.emplace_back("fwd", judge.forward(exec));
  if (op == Op::backward || op == Op::train) {
    judgements.emplace_back("bwd", judge.backward(exec, false));
    judgements.emplace_back("bwd saved", judge.backward(exec, true));
  }
  if (op == Op::recurrent) judgements.emplace_back("rec", judge.recurrent(exec));
  return judgements;
}

Judgements judge_on_cuda(const Device& device, Op op, testing::Judge& judge) {
  Judgements judgements;
  for (const Op part : op == Op::train ? std::vector{Op::forward, Op::backward} : std::vector{op})
    judgements.emplace_back(name_of(part), judge_on(device, part, judge));
  return judgements;
}

// Why the library refuses an operation on a case as the caller's mistake, or "".
std::string invalid(Op op, const testing::Problem& problem) {
  size_t bytes = 0;
  const gd_status status = op == Op::recurrent  ? gd_recurrent_workspace(&problem.recurrent, &bytes)
                           : op == Op::backward ? gd_backward_workspace(&problem.backward, &bytes)
                                                : gd_forward_workspace(&problem.forward, &bytes);
  return status == GD_INVALID_ARGUMENT ? gd_last_error() : "";
}

}  // namespace

Judgements judge_calls(const Device& device, Op op, testing::Judge& judge, const testing::Exec& exec) {
  return device.cuda ? judge_on_cuda(device, op, judge) : judge_on_cpu(op, judge, exec);
}

int check_command(const std::vector<std::string>& arguments) {
  const Options options(arguments, kCheckFlags, true);
  const Device device = chosen_device(options, {"--isa"});
  const auto isas = device.cuda ? std::vector{GD_ISA_AUTO} : parse_isas(options.get("--isa").value_or("all"));
  if (const auto list = options.get("--op")) parse_ops(*list);  // refused before anything runs
  const int threads = static_cast<int>(options.integer("--threads", get_info().cpu_count, 1, 4096));
  const int64_t verified = options.integer("--verify", 0, 1, 1 << 20);
  const std::vector<Op> usual = {Op::forward, Op::backward, Op::recurrent};
  const Pool pool(threads);
  const Report report(options);
  if (options.has("--sweep")) {
    for (const char* flag : {"--shapes", "--verify"})
      if (options.has(flag)) throw UsageError(std::string(flag) + " has no meaning beside --sweep");
    return sweep_command(options, device, isas, threads, report);
  }
  if (options.has("--seed")) throw UsageError("--seed is of --sweep: give a case its seed as seed=N");
  const auto shapes = chosen_shapes(options, default_shapes(device));

  size_t calls = 0, failures = 0;
  Json results = Json::array();
  Progress progress(shapes.size());
  for (const Shape& shape : shapes) {
    const std::string text = testing::describe(shape.spec);
    progress.step(text);
    report.print("%s%s%s\n", shape.name.c_str(), shape.name.empty() ? "" : ": ", text.c_str());
    std::optional<testing::Judge> judge;
    try {
      judge.emplace(shape.spec, testing::ReferenceOptions{.key_heads = verified, .threads = threads});
    } catch (const std::invalid_argument& e) {
      throw UsageError((shape.name.empty() ? "" : shape.name + ": ") + e.what());
    }
    const std::vector<Op> ops = chosen_ops(options, shape, usual);
    const auto is_invalid = [&](Op op) { return !invalid(op, judge->problem()).empty(); };
    if (std::all_of(ops.begin(), ops.end(), is_invalid)) throw UsageError(invalid(ops.front(), judge->problem()));
    for (const Op op : ops) {
      for (const gd_isa choice : isas) {
        const gd_isa isa = resolve(choice);
        const std::string where = device.cuda ? device.name() : gd_isa_name(isa);
        const testing::Exec exec{.isa = isa, .pool = pool.get(), .threads = threads};
        const auto judgements = judge_calls(device, op, *judge, exec);
        for (const auto& [label, judgement] : judgements) {
          ++calls;
          failures += !judgement.ok();
          const testing::Verdict* worst = judgement.worst();
          report.print("  %-6s %-10s %-12s", judgement.ok() ? "ok" : "FAILED", label.c_str(), where.c_str());
          if (worst) {
            report.print(" worst %-15s error %.2e, %3.0f %% of its bound", worst->quantity.c_str(),
                         worst->comparison.error, 100 * worst->comparison.margin);
          }
          report.print("\n");
          for (const testing::Verdict& v : judgement.verdicts) {
            if (options.has("--verbose") || !v.comparison.ok) {
              report.print("         %-16s %s\n", v.quantity.c_str(), v.comparison.text().c_str());
            }
            Json result = Json::object();
            result.set("case", text).set("op", label).set("device", device.name());
            if (!device.cuda) result.set("isa", gd_isa_name(isa));
            result.set("quantity", v.quantity)
                .set("error", v.comparison.error)
                .set("margin", v.comparison.margin)
                .set("ok", v.comparison.ok);
            results.add(result);
          }
          for (const std::string& problem : judgement.problems) report.print_problem("         %s\n", problem.c_str());
        }
      }
    }
  }
  report.print("%zu calls checked, %zu failed\n", calls, failures);
  report.write(Json::object()
                   .set("command", "check")
                   .set("machine", machine_json(device))
                   .set("calls", int64_t(calls))
                   .set("failures", int64_t(failures))
                   .set("results", results));
  return failures ? 1 : 0;
}

}  // namespace gatedelta::cli

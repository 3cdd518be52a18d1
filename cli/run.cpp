// The default job: one linear-attention layer as Qwen3.5 has it, forward and backward.
#include <cstdio>
#include <cstring>

#include "cli/device.hpp"
#include "cli/json.hpp"
#include "cli/options.hpp"
#include "cli/report.hpp"
#include "cli/timing.hpp"
#include "testing/number.hpp"

namespace gatedelta::cli {

const std::vector<Flag> kRunFlags = {
    {"--tokens", "N", "sequence length (4096)"},
    {"--device", "NAME", "cpu, cuda or cuda:N (cpu)"},
    {"--threads", "N", "threads, also of the fp64 recurrence (all CPUs)"},
    {"--kernels", "NAME", "on CUDA: auto, or portable for those that run on every GPU (auto)"},
    {"--isa", "NAME", "CPU: instruction set (the best there is)"},
    {"--verify", "N", "key heads to verify against the fp64 recurrence (2 of 16; each takes about a second)"},
    {"--seconds", "S", "time to spend on each measurement (1)"},
    {"--json", "FILE", "write the results as JSON (- = standard output, without the tables)"},
};

namespace {

// Over every bit of the tensors, in order: two runs with equal sums computed equal bits.
std::string checksum(std::initializer_list<const gd_tensor*> tensors) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const gd_tensor* t : tensors) {
    const int64_t bytes = testing::element_bytes(t->dtype);
    testing::for_each_element(*t, [&](int64_t offset, int64_t) {
      const auto* data = static_cast<const unsigned char*>(t->data) + offset * bytes;
      for (int64_t i = 0; i < bytes; ++i) hash = (hash ^ data[i]) * 0x100000001b3;
    });
  }
  char hex[32];
  std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(hash));
  return hex;
}

}  // namespace

int run_command(const std::vector<std::string>& arguments) {
  const Options options(arguments, kRunFlags, false);
  const Device device = chosen_device(options, {"--isa"});
  const int64_t tokens = options.integer("--tokens", 4096, 1, 1 << 20);
  const int64_t verified = options.integer("--verify", 2, 1, 16);
  const int threads = static_cast<int>(options.integer("--threads", get_info().cpu_count, 1, 4096));
  const double seconds = options.number("--seconds", 1, 0, 3600);
  const auto isas = device.cuda ? std::vector{GD_ISA_AUTO} : parse_isas(options.get("--isa").value_or("auto"));
  if (isas.size() != 1) throw UsageError("--isa: run takes one instruction set");
  const gd_isa isa = resolve(isas[0]);
  const Report report(options);

  // Raw gate inputs and beta logits in bf16, norm and gate inside the call, no initial state: as in training.
  testing::Case c = testing::parse_case(
      "Hk=16 Hv=32 K=128 V=128 dtype=bf16 gdtype=bf16 l2norm gate=raw beta=logit h0=0 dht=0 seed=35");
  c.T = tokens;
  const Pool pool(threads);
  const testing::Exec exec{.isa = isa, .pool = pool.get(), .threads = threads};
  testing::Judge judge(c, {.key_heads = verified, .threads = threads});

  report.print(
      "layer      1 x %lld tokens, 16 query/key heads, 32 value heads, K = V = 128, bf16, l2norm and gate inside\n",
      static_cast<long long>(tokens));
  if (device.cuda) {
    const std::string gpu = gpus().at(static_cast<size_t>(device.index)).name;
    report.print("backend    %s, %s\n\n", device.name().c_str(), gpu.c_str());
  } else {
    report.print("backend    cpu, %s, %d thread%s\n\n", gd_isa_name(isa), threads, threads == 1 ? "" : "s");
  }
  report.print("%-10s %12s %14s %12s\n", "", "time", "tokens/s", "GFLOP/s");

  Json timings = Json::array();
  const auto time = [&](Op op, gd_thread_pool* on, int count, const char* label) {
    const testing::Exec place{.isa = isa, .pool = on, .threads = count};
    const Timing timing = device.cuda ? time_on(device, op, judge.problem(), seconds)
                                      : Stopwatch(judge.problem(), op, place).measure(seconds);
    report.print("%-10s %12s %14.0f %12.1f\n", label, format_seconds(timing.best).c_str(), double(tokens) / timing.best,
                 flops_of(op, c) / timing.best * 1e-9);
    timings.add(to_json(timing, op, c, device, isa, count));
  };
  time(Op::forward, pool.get(), threads, "forward");
  time(Op::backward, pool.get(), threads, "backward");
  if (!device.cuda && threads > 1) {
    time(Op::forward, nullptr, 1, "  1 thread");
    time(Op::backward, nullptr, 1, "  1 thread");
  }

  std::vector<testing::Judgement> judgements;
  judgements.push_back(device.cuda ? judge_on(device, Op::forward, judge) : judge.forward(exec));
  const gd_forward_args& f = judge.problem().forward;
  const std::string forward_sum = checksum({&f.out, &f.final_state});
  judgements.push_back(device.cuda ? judge_on(device, Op::backward, judge) : judge.backward(exec, true));
  const gd_backward_args& b = judge.problem().backward;
  const std::string backward_sum =
      checksum({&b.dq, &b.dk, &b.dv, &b.dg, &b.dbeta, &b.dA_log, &b.d_dt_bias, &b.d_initial_state});

  report.print("\nerror against the fp64 recurrence (relative L2, worst head), value heads 0 to %lld of 32:\n",
               static_cast<long long>(verified * 2 - 1));
  Json errors = Json::array();
  bool ok = true;
  for (const testing::Judgement& judgement : judgements) {
    ok = ok && judgement.ok();
    for (const testing::Verdict& v : judgement.verdicts) {
      report.print("  %-16s %.2e   bound %.1e   %s\n", v.quantity.c_str(), v.comparison.error, v.bound.relative,
                   v.comparison.ok ? "ok" : "FAILED");
      errors.add(Json::object()
                     .set("quantity", v.quantity)
                     .set("error", v.comparison.error)
                     .set("bound", v.bound.relative)
                     .set("ok", v.comparison.ok));
    }
    for (const std::string& problem : judgement.problems) report.print_problem("  %s\n", problem.c_str());
  }
  report.print("\nchecksum   forward %s, backward %s\n", forward_sum.c_str(), backward_sum.c_str());
  report.print("%s\n", ok ? "all within bounds" : "FAILED");

  Json result = Json::object();
  result.set("command", "run").set("machine", machine_json(device)).set("case", testing::describe(c));
  result.set("tokens", tokens).set("device", device.name());
  if (!device.cuda) result.set("isa", gd_isa_name(isa)).set("threads", threads);
  result.set("timings", timings).set("verified_value_heads", verified * 2).set("errors", errors);
  result.set("checksum_forward", forward_sum).set("checksum_backward", backward_sum).set("ok", ok);
  report.write(result);
  return ok ? 0 : 1;
}

}  // namespace gatedelta::cli

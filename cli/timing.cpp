#include "cli/timing.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>

#include "cli/device.hpp"

namespace gatedelta::cli {

using testing::Case;

double flops_of(Op op, const Case& c) {
  const double C = GD_CHUNK, K = double(c.K), V = double(c.V);
  const double tokens = double(c.lengths.empty() ? c.B * c.T : c.total_tokens() - c.pad);
  const double chunks = tokens / C * double(c.Hv);  // per value head; a ragged chunk counts for its tokens
  const double forward = 3 * C * C * K + C * C * C + 3 * C * K * V + C * C * V;
  const double backward = 5 * C * C * K + 5 * C * C * V + 7 * C * K * V + (C * C * K + 2 * C * K * V);
  switch (op) {
    case Op::forward: return 2 * forward * chunks;
    case Op::backward: return 2 * backward * chunks;
    case Op::train: return 2 * (forward + backward) * chunks;
    case Op::recurrent: return 7 * K * V * tokens * double(c.Hv);
  }
  return 0;
}

double state_bytes_of(const Case& c) {
  const double states = double(c.sequences() * c.Hv * c.K * c.V);
  return states * (c.state == GD_F32 ? 4 : 2) * (int(c.h0) + int(c.ht));
}

namespace {

void must(gd_status status) {
  if (status != GD_OK) throw std::runtime_error(std::string(gd_status_name(status)) + ": " + gd_last_error());
}

template <class Args>
void set_exec(Args& args, const testing::Exec& exec) {
  args.exec.isa = exec.isa;
  if (!exec.pool) return;
  args.exec.parallel_for = gd_thread_pool_parallel_for;
  args.exec.parallel_for_context = exec.pool;
  args.exec.num_threads = gd_thread_pool_size(exec.pool);
}

template <class... Args>
void share_workspace(const testing::Buffer& buffer, Args&... args) {
  ((args.exec.workspace = buffer.data(), args.exec.workspace_bytes = buffer.size()), ...);
}

}  // namespace

Stopwatch::Stopwatch(testing::Problem& problem, Op op, const testing::Exec& exec)
    : problem_(problem),
      op_(op),
      forward_(problem.forward),
      backward_(problem.backward),
      recurrent_(problem.recurrent) {
  set_exec(forward_, exec);
  set_exec(backward_, exec);
  set_exec(recurrent_, exec);
  if (op == Op::backward || op == Op::train) {  // save for the backward, and update no states in place
    forward_.final_state = forward_.final_state_indices = {};
    size_t bytes = 0;
    must(gd_forward_saved_size(&forward_, &bytes));
    must(gd_forward_saved_call(&forward_, &backward_.saved_call));
    saved_ = testing::Buffer(bytes);
    forward_.saved = saved_.data();
    backward_.saved = saved_.data();
    forward_.saved_bytes = backward_.saved_bytes = bytes;
  }
  size_t forward_bytes = 0, backward_bytes = 0, recurrent_bytes = 0;
  if (op != Op::recurrent) must(gd_forward_workspace(&forward_, &forward_bytes));
  if (op == Op::backward || op == Op::train) must(gd_backward_workspace(&backward_, &backward_bytes));
  if (op == Op::recurrent) must(gd_recurrent_workspace(&recurrent_, &recurrent_bytes));
  workspace_ = testing::Buffer(std::max({forward_bytes, backward_bytes, recurrent_bytes}));
  share_workspace(workspace_, forward_, backward_, recurrent_);
  problem_.reset();
  if (op == Op::backward) must(gd_forward(&forward_));
}

void Stopwatch::call() {
  switch (op_) {
    case Op::forward: must(gd_forward(&forward_)); break;
    case Op::backward: must(gd_backward(&backward_)); break;
    case Op::train: must(gd_forward(&forward_)), must(gd_backward(&backward_)); break;
    case Op::recurrent: must(gd_recurrent(&recurrent_)); break;
  }
}

Timing Stopwatch::measure(double seconds) {
  using clock = std::chrono::steady_clock;
  const auto elapsed = [](clock::time_point since) {
    return std::chrono::duration<double>(clock::now() - since).count();
  };
  call();
  std::vector<double> times;
  const auto begin = clock::now();
  while (times.size() < 3 || (elapsed(begin) < seconds && times.size() < 100000)) {
    const auto start = clock::now();
    call();
    times.push_back(elapsed(start));
  }
  return summary(std::move(times));
}

Timing summary(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front(), static_cast<int>(times.size())};
}

Json to_json(const Timing& timing, Op op, const Case& c, const Device& device, gd_isa isa, int threads) {
  const double tokens = double(c.lengths.empty() ? c.B * c.T : c.total_tokens() - c.pad);
  Json json = Json::object();
  json.set("op", name_of(op)).set("device", device.name());
  if (!device.cuda) json.set("isa", gd_isa_name(isa)).set("threads", threads);
  json.set("median_ms", timing.median * 1e3).set("best_ms", timing.best * 1e3).set("repeats", timing.repeats);
  json.set("tokens_per_s", tokens / timing.best).set("gflops", flops_of(op, c) / timing.best * 1e-9);
  if (op == Op::recurrent) json.set("state_gbytes_per_s", state_bytes_of(c) / timing.best * 1e-9);
  return json;
}

std::string format_seconds(double seconds) {
  char buffer[32];
  if (seconds < 1e-3) {
    std::snprintf(buffer, sizeof buffer, "%.1f us", seconds * 1e6);
  } else if (seconds < 1) {
    std::snprintf(buffer, sizeof buffer, "%.2f ms", seconds * 1e3);
  } else {
    std::snprintf(buffer, sizeof buffer, "%.2f s", seconds);
  }
  return buffer;
}

std::string cpu_name(std::istream& cpuinfo) {
  static const std::map<std::string, std::string> kArmCores = {
      {"0xd0c", "Neoverse-N1"}, {"0xd40", "Neoverse-V1"}, {"0xd49", "Neoverse-N2"}, {"0xd4f", "Neoverse-V2"}};
  std::string part;
  for (std::string line; std::getline(cpuinfo, line);) {
    const auto colon = line.find(": ");
    if (colon == line.npos) continue;
    std::string value = line.substr(colon + 2);
    if (line.starts_with("model name")) return value;
    if (part.empty() && line.starts_with("CPU part")) part = value;
  }
  if (part.empty()) return "unknown";
  const auto known = kArmCores.find(part);
  return known == kArmCores.end() ? "part " + part : known->second;
}

Json machine_json(const Device& device) {
  const gd_info info = get_info();
  std::ifstream cpuinfo("/proc/cpuinfo");
  Json json = Json::object();
#if defined(__x86_64__)
  json.set("architecture", "x86_64");
#elif defined(__aarch64__)
  json.set("architecture", "aarch64");
#endif
  json.set("cpu", cpu_name(cpuinfo)).set("cpus", info.cpu_count).set("best_isa", gd_isa_name(info.cpu_isa_best));
  if (device.cuda) json.set("gpu", gpus().at(static_cast<size_t>(device.index)).name);
  return json;
}

Progress::Progress(size_t total) : total_(total), on_(total > 1 && isatty(STDERR_FILENO)) {}

Progress::~Progress() {
  if (on_) std::fprintf(stderr, "\r\033[K");
}

void Progress::step(const std::string& what) {
  ++done_;
  if (!on_) return;
  constexpr size_t kWidth = 30;
  const size_t filled = (done_ - 1) * kWidth / total_;
  std::fprintf(stderr, "\r\033[K[%s%s] %zu/%zu %.60s", std::string(filled, '#').c_str(),
               std::string(kWidth - filled, ' ').c_str(), done_, total_, what.c_str());
}

}  // namespace gatedelta::cli

#include "cli/device.hpp"

#include <charconv>

#if GD_CUDA_COMPILED
#include <chrono>
#include <optional>

#include "testing/device.hpp"
#endif

namespace gatedelta::cli {

namespace {

constexpr char kNoCuda[] = "this build has no CUDA backend: build it with an nvcc (docs/building.md, GD_CUDA)";

Device parse_device(const std::string& text) {
  if (text == "cpu") return {};
  Device device{.cuda = true};
  if (text == "cuda") return device;
  const auto colon = text.find(':');
  const char* const end = text.data() + text.size();
  if (colon != text.npos && text.substr(0, colon) == "cuda") {
    const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, device.index);
    if (error == std::errc() && stop == end && device.index >= 0) return device;
  }
  throw UsageError("--device " + text + ": expected cpu, cuda or cuda:N");
}

#if GD_CUDA_COMPILED

// Returns "" or what went wrong.
template <class Args>
std::string run_on(const Device& device, const Args& host) {
  try {
    GD_CUDA_OK(cudaSetDevice(device.index));
    Args args = host;
    args.exec.kernels = device.kernels;
    testing::DeviceCall<Args> call(args);
    std::string error = call.run();
    return error.empty() ? call.download(host) : error;
  } catch (const std::runtime_error& e) {
    return e.what();
  }
}

class Event {
 public:
  Event() { GD_CUDA_OK(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

Timing time_calls_on(const Device& device, Op op, const testing::Problem& problem, double seconds) {
  GD_CUDA_OK(cudaSetDevice(device.index));
  std::optional<testing::DeviceForward> forward;
  std::optional<testing::DeviceBackward> backward;
  std::optional<testing::DeviceRecurrent> recurrent;
  const auto with_kernels = [&](auto args) {
    args.exec.kernels = device.kernels;
    return args;
  };
  if (op == Op::forward || op == Op::train) forward.emplace(with_kernels(problem.forward));
  if (op == Op::backward || op == Op::train) backward.emplace(with_kernels(problem.backward));
  if (op == Op::recurrent) recurrent.emplace(with_kernels(problem.recurrent));
  const testing::CudaStream stream;
  const auto call = [&] {
    std::string error = forward ? forward->run(stream) : "";
    if (error.empty() && backward) error = backward->run(stream);
    if (error.empty() && recurrent) error = recurrent->run(stream);
    if (!error.empty()) throw std::runtime_error(error);
  };
  // Calls queue up, so that each starts when the one before has finished. The first call of a queue starts on an idle
  // device, and its launch latency would count: it is not timed.
  const Event events[17];
  std::vector<double> times;
  const auto begin = std::chrono::steady_clock::now();
  const auto until = begin + std::chrono::duration<double>(seconds);
  while (times.empty() || (std::chrono::steady_clock::now() < until && times.size() < 100000)) {
    call();
    GD_CUDA_OK(cudaEventRecord(events[0], stream));
    for (size_t i = 1; i < std::size(events); ++i) {
      call();
      GD_CUDA_OK(cudaEventRecord(events[i], stream));
    }
    GD_CUDA_OK(cudaStreamSynchronize(stream));
    for (size_t i = 1; i < std::size(events); ++i) {
      float milliseconds = 0;
      GD_CUDA_OK(cudaEventElapsedTime(&milliseconds, events[i - 1], events[i]));
      times.push_back(double(milliseconds) * 1e-3);
    }
  }
  return summary(std::move(times));
}

#else

template <class Args>
std::string run_on(const Device&, const Args&) {
  return kNoCuda;
}
Timing time_calls_on(const Device&, Op, const testing::Problem&, double) { throw std::runtime_error(kNoCuda); }

#endif

}  // namespace

std::vector<Gpu> gpus() {
  std::vector<Gpu> found;
#if GD_CUDA_COMPILED
  int count = 0;
  if (cudaGetDeviceCount(&count)) count = 0;  // no driver, or no device
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    GD_CUDA_OK(cudaGetDeviceProperties(&properties, i));
    found.push_back({properties.name, properties.major, properties.minor});
  }
#endif
  return found;
}

std::string refusal(int index, const std::vector<Gpu>& gpus) {
  if (gpus.empty()) return "there is no CUDA device here";
  const auto last = static_cast<int>(gpus.size()) - 1;
  if (index > last) return "there is no such CUDA device, the last is cuda:" + std::to_string(last);
  const auto& [name, major, minor] = gpus[static_cast<size_t>(index)];
  if (major >= 8) return "";
  return name + " has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
         ", but the library needs 8.0";
}

Device chosen_device(const Options& options, const std::vector<std::string>& cpu_flags) {
  const std::string text = options.get("--device").value_or("cpu");
  Device device = parse_device(text);
  const std::string kernels = options.get("--kernels").value_or("auto");
  if (kernels != "auto" && kernels != "portable")
    throw UsageError("--kernels " + kernels + ": expected auto or portable");
  if (!device.cuda) {
    if (options.has("--kernels")) throw UsageError("--kernels is for CUDA alone");
    return device;
  }
  if (kernels == "portable") device.kernels = GD_KERNELS_PORTABLE;
  const gd_info info = get_info();
  if (!info.cuda_compiled) throw UsageError("--device " + text + ": " + kNoCuda);
  if (const std::string reason = refusal(device.index, gpus()); !reason.empty()) {
    throw UsageError("--device " + text + ": " + reason);
  }
  for (const std::string& flag : cpu_flags) {
    if (options.has(flag)) throw UsageError(flag + " is for the CPU alone");
  }
  return device;
}

testing::Judgement judge_on(const Device& device, Op op, testing::Judge& judge) {
  const auto run = [&](const auto& host) { return run_on(device, host); };
  if (op == Op::recurrent) return judge.recurrent(run);
  const testing::Compute compute = testing::cuda_compute(judge.problem().spec.dtype);
  return op == Op::backward ? judge.backward(compute, run) : judge.forward(compute, run);
}

Timing time_on(const Device& device, Op op, const testing::Problem& problem, double seconds) {
  return time_calls_on(device, op, problem, seconds);
}

}  // namespace gatedelta::cli

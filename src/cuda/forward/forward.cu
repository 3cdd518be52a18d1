// The CUDA backend: a validated problem becomes two or three kernels on the caller's stream.
#include <atomic>
#include <cstdarg>
#include <cstdio>

#include "cuda/backend.hpp"
#include "cuda/forward/launch.cuh"
#include "cuda/forward/plan.hpp"

namespace gatedelta::cuda {

namespace {

constexpr int kSupportedMajor = 9;  // compute capability: the kernels are sm_90a code and nothing else
static_assert(PrepareSmem::allocated(kMaxGroup) <= kMaxSharedBytes);

[[gnu::format(printf, 2, 3)]] Outcome failure(gd_status status, const char* format, ...) {
  Outcome outcome{status};
  va_list values;
  va_start(values, format);
  std::vsnprintf(outcome.message, sizeof outcome.message, format, values);
  va_end(values);
  cudaGetLastError();  // the next launch would report an error that is told already
  return outcome;
}
Outcome failure(cudaError_t error, const char* what) {
  return failure(GD_INTERNAL, "CUDA failed to %s: %s", what, cudaGetErrorString(error));
}

Outcome check_device(int device) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (!error) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error == cudaErrorInvalidDevice)
    return failure(GD_INVALID_ARGUMENT, "device_index is %d, and there is no such CUDA device", device);
  if (error) return failure(GD_UNSUPPORTED, "no CUDA device can be used: %s", cudaGetErrorString(error));
  if (major != kSupportedMajor)
    return failure(GD_UNSUPPORTED, "device %d has compute capability %d.%d, the CUDA backend supports 9.0 (Hopper)",
                   device, major, minor);
  return {};
}

// Makes a device the thread's current one for as long as it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ || before_ == device) return;
    error_ = cudaSetDevice(device);
    changed_ = !error_;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  cudaError_t error() const { return error_; }

 private:
  cudaError_t error_;
  int before_ = 0;
  bool changed_ = false;
};

// A kernel's first use loads its code, which a capture in one of the stricter modes would take for a mistake.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The driver's encoder of tensor maps; this library is not linked to the driver. Looked up once, like best_isa().
cudaError_t find_encoder(EncodeTiled& encode) {
  static std::atomic<EncodeTiled> found{nullptr};
  encode = found.load(std::memory_order_relaxed);
  if (encode) return cudaSuccess;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
  if (error) return error;
  if (result != cudaDriverEntryPointSuccess || !function) return cudaErrorSymbolNotFound;
  encode = reinterpret_cast<EncodeTiled>(function);
  found.store(encode, std::memory_order_relaxed);
  return cudaSuccess;
}

Rows rows_of(const TokenRows& t) { return {t.data, t.batch_stride, t.token_stride, t.head_stride, t.dtype}; }
HeadScalars scalars_of(const HeadVector& v) { return {v.data, v.stride, v.dtype}; }
// The kernels know by the pointer whether something is there. A pool without slots may have none: `present` stands in.
States states_of(const StateRows& s, const IndexVector& indices, void* present) {
  return {!s       ? nullptr
          : s.data ? s.data
                   : present,
          s.slot_stride,
          s.head_stride,
          s.dtype,
          {indices.data, indices.is_int64}};
}

ForwardParams params_of(const ForwardProblem& problem, char* workspace, int multiprocessors) {
  constexpr uintptr_t kAlign = ForwardWorkspace::kAlign;
  const Layer& in = problem.in;
  const ForwardWorkspace layout = forward_layout(problem);
  char* const base = workspace + (kAlign - reinterpret_cast<uintptr_t>(workspace) % kAlign) % kAlign;
  ForwardParams p{};
  p.q = rows_of(in.q);
  p.k = rows_of(in.k);
  p.v = rows_of(in.v);
  p.o = rows_of(problem.o);
  p.g = rows_of(in.g);
  p.beta = rows_of(in.beta);
  p.A_log = scalars_of(in.A_log);
  p.dt_bias = scalars_of(in.dt_bias);
  p.sequences = sequences_of(in.sequences);
  p.key_heads = static_cast<int>(in.key_heads);
  p.value_heads = static_cast<int>(in.value_heads);
  p.group = static_cast<int>(in.group);
  p.gate = in.gate;
  p.beta_kind = in.beta_kind;
  p.l2norm = in.l2norm;
  p.state_value_first = in.layout == GD_STATE_VK;
  p.scale = in.scale;
  p.initial = states_of(in.initial, in.initial_indices, base);
  p.final = states_of(problem.final, problem.final_indices, base);
  p.checkpoints = states_of(problem.checkpoints, problem.checkpoint_indices, base);
  p.checkpoint_every = problem.checkpoint_every;
  p.prepared = reinterpret_cast<uint8_t*>(base + layout.prepared);
  p.order = reinterpret_cast<int*>(base + layout.order);
  p.first_checkpoint = reinterpret_cast<int64_t*>(base + layout.first_checkpoint);
  p.decays = reinterpret_cast<ChunkDecay*>(base + layout.decays);
  p.sequence_items = reinterpret_cast<WorkItem*>(base + layout.sequence_items);
  p.cuts = reinterpret_cast<PricedCut*>(base + layout.cuts);
  p.schedule = reinterpret_cast<Schedule*>(base + layout.schedule);
  p.work = reinterpret_cast<WorkItem*>(base + layout.work);
  p.initial_read = reinterpret_cast<int*>(base + layout.initial_read);
  p.boundary_ready = reinterpret_cast<int*>(base + layout.boundary_ready);
  p.boundaries = reinterpret_cast<uint8_t*>(base + layout.boundaries);
  p.list = list_mode(problem, multiprocessors);
  p.may_cut = may_cut(problem);
  if (p.may_cut) p.forced = {static_cast<int>(problem.segment_chunks), static_cast<int>(problem.segment_chunks), false};
  p.limits = {multiprocessors, static_cast<int>(max_entries(problem)), layout.boundary_count};
  return p;
}

// What the copy engine is told of q, k, v and o.
Outcome encode_maps(ForwardParams& p, bool bf16) {
  EncodeTiled encode = nullptr;
  if (const cudaError_t error = find_encoder(encode)) return failure(error, "find the driver's cuTensorMapEncodeTiled");
  const struct {
    const char* name;
    CUtensorMap* map;
    const Rows& rows;
    int heads;
  } tensors[] = {{"q", &p.q_map, p.q, p.key_heads},
                 {"k", &p.k_map, p.k, p.key_heads},
                 {"v", &p.v_map, p.v, p.value_heads},
                 {"o", &p.o_map, p.o, p.value_heads}};
  for (const auto& [name, map, rows, heads] : tensors)
    if (const CUresult result = encode_rows(encode, map, rows, heads, p.sequences.tokens, p.sequences.batch, bf16))
      return failure(GD_UNSUPPORTED,
                     "%s: the driver's tensor maps (error %d) do not take strides of %lld, %lld and %lld elements",
                     name, static_cast<int>(result), static_cast<long long>(rows.batch_stride),
                     static_cast<long long>(rows.token_stride), static_cast<long long>(rows.head_stride));
  return {};
}

template <class Elem>
Outcome launch(const ForwardParams& p, int device, cudaStream_t stream) {
  if (const cudaError_t error = launch_prepare<Elem>(p, device, stream))
    return failure(error, "launch the prepare kernel");
  if (p.sequences.count == 0) return {};  // prepare has zeroed what belongs to nobody
  if (p.list != kEvenList)
    if (const cudaError_t error = launch_schedule(p, stream)) return failure(error, "launch the schedule kernel");
  if (const cudaError_t error = launch_main<Elem>(p, device, stream))
    return failure(error, "launch the forward kernel");
  return {};
}

}  // namespace

bool is_compiled() { return true; }

int usable_devices() {
  int count = 0, usable = 0;
  if (cudaGetDeviceCount(&count)) count = 0;
  for (int device = 0; device < count; ++device) usable += check_device(device).status == GD_OK;
  cudaGetLastError();
  return usable;
}

Outcome forward(const ForwardProblem& problem, const Context& context) {
  if (Outcome outcome = check_device(context.device); outcome.status != GD_OK) return outcome;
  const RelaxedCapture relaxed;
  const CurrentDevice current(context.device);
  if (current.error()) return failure(current.error(), "select the device");
  int multiprocessors = 0;
  if (const cudaError_t error =
          cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, context.device))
    return failure(error, "count multiprocessors");

  ForwardParams p = params_of(problem, context.workspace, multiprocessors);
  const bool bf16 = problem.in.q.dtype == GD_BF16;
  if (p.sequences.batch > 0 && p.sequences.tokens > 0)  // an empty tensor has no map, and nobody looks at it
    if (Outcome outcome = encode_maps(p, bf16); outcome.status != GD_OK) return outcome;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  return bf16 ? launch<__nv_bfloat16>(p, context.device, stream) : launch<__half>(p, context.device, stream);
}

}  // namespace gatedelta::cuda

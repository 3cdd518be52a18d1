// What calls of the CUDA backend have in common on the host: devices, messages, tensors as kernels see them.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>

#include "cuda/backend.hpp"
#include "cuda/forward/params.hpp"
#include "cuda/forward/plan.hpp"

namespace gatedelta::cuda {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Boxes of 64 tokens and half of the columns of one head of [B, T, H, 128].
inline CUresult encode_rows(EncodeTiled encode, CUtensorMap* map, const Rows& rows, int heads, int64_t tokens,
                            int batch, bool bf16) {
  const cuuint64_t sizes[5] = {kTileColumns, static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(tokens),
                               static_cast<cuuint64_t>(batch), kHeadDim / kTileColumns};
  const cuuint64_t strides[4] = {static_cast<cuuint64_t>(rows.head_stride) * 2,
                                 static_cast<cuuint64_t>(rows.token_stride) * 2,
                                 static_cast<cuuint64_t>(rows.batch_stride) * 2, kTileRowBytes};
  const cuuint32_t box[5] = {kTileColumns, 1, kChunkTokens, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return encode(map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5, rows.data, sizes,
                strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// Lets a kernel have as much shared memory as any block of it may ask for. A fact of the kernel on a device: asked for
// once for each of the first 64.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, int bytes, int device, std::atomic<uint64_t>& allowed) {
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (!error) allowed.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

// Blocks of this kernel may come to the card while the last of the one before it are still there; they wait before they
// read. Not of the first one of a call: what came before is the caller's.
template <class Kernel, class... Args>
cudaError_t launch_kernel(bool early_too, Kernel kernel, int64_t blocks, int threads, int bytes, cudaStream_t stream,
                          const Args&... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = early_too ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}
template <class Kernel, class... Args>
cudaError_t launch_early(Kernel kernel, int64_t blocks, int threads, int bytes, cudaStream_t stream,
                         const Args&... args) {
  return launch_kernel(true, kernel, blocks, threads, bytes, stream, args...);
}

// The first of every call's kernels (forward.cu).
cudaError_t launch_prepare(const CallParams& p, bool bf16, int device, cudaStream_t stream);

constexpr int kSupportedMajor = 9;  // compute capability: the kernels are sm_90a code and nothing else
static_assert(PrepareSmem::allocated(kMaxGroup) <= kMaxSharedBytes);

[[gnu::format(printf, 2, 3)]] inline Outcome failure(gd_status status, const char* format, ...) {
  Outcome outcome{status};
  va_list values;
  va_start(values, format);
  std::vsnprintf(outcome.message, sizeof outcome.message, format, values);
  va_end(values);
  cudaGetLastError();  // the next launch would report an error that is told already
  return outcome;
}
inline Outcome failure(cudaError_t error, const char* what) {
  return failure(GD_INTERNAL, "CUDA failed to %s: %s", what, cudaGetErrorString(error));
}

inline Outcome check_device(int device) {
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

// Of a device the kernels run on. A fact of the device: asked for once for each of the first 64.
inline Outcome count_multiprocessors(int device, int& count) {
  static std::atomic<int> counted[64];
  if (device < 64) count = counted[device].load(std::memory_order_relaxed);
  if (count > 0) return {};
  if (Outcome outcome = check_device(device); outcome.status != GD_OK) return outcome;
  if (const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device))
    return failure(error, "count multiprocessors");
  if (device < 64) counted[device].store(count, std::memory_order_relaxed);
  return {};
}

// Calls f with the number of multiprocessors of a supported device, while that is the current one.
template <class F>
Outcome with_device(int device, const F& f) {
  int multiprocessors = 0;
  if (Outcome outcome = count_multiprocessors(device, multiprocessors); outcome.status != GD_OK) return outcome;
  const RelaxedCapture relaxed;
  const CurrentDevice current(device);
  if (current.error()) return failure(current.error(), "select the device");
  return f(multiprocessors);
}

// The driver's encoder of tensor maps; this library is not linked to the driver. Looked up once, like best_isa().
inline cudaError_t find_encoder(EncodeTiled& encode) {
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

inline Rows rows_of(const TokenRows& t) { return {t.data, t.batch_stride, t.token_stride, t.head_stride, t.dtype}; }
inline HeadScalars scalars_of(const HeadVector& v) { return {v.data, v.stride, v.dtype}; }
// The kernels know by the pointer whether something is there. A pool without slots may have none: `present` stands in.
inline States states_of(const StateRows& s, const IndexVector& indices, void* present) {
  return {!s       ? nullptr
          : s.data ? s.data
                   : present,
          s.slot_stride,
          s.head_stride,
          s.dtype,
          {indices.data, indices.is_int64}};
}

inline CallParams call_params(const ForwardProblem& problem, char* workspace, int multiprocessors,
                              int prepared_bytes = kPreparedBytes) {
  constexpr uintptr_t kAlign = ForwardWorkspace::kAlign;
  const Layer& in = problem.in;
  const ForwardWorkspace layout = forward_layout(problem, prepared_bytes);
  char* const base = workspace + (kAlign - reinterpret_cast<uintptr_t>(workspace) % kAlign) % kAlign;
  CallParams p{};
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
  p.prepared_bytes = prepared_bytes;
  p.decays = reinterpret_cast<ChunkDecay*>(base + layout.decays);
  p.order = reinterpret_cast<int*>(base + layout.order);
  p.first_checkpoint = reinterpret_cast<int64_t*>(base + layout.first_checkpoint);
  p.cuts = reinterpret_cast<CutCost*>(base + layout.cuts);
  if (problem.saved) {
    const SavedLayout saved_list = saved_layout(in);
    char* const saved = static_cast<char*>(problem.saved);
    p.prepared = reinterpret_cast<uint8_t*>(saved + saved_list.prepared);
    p.prepared_bytes = kBackwardPreparedBytes;
    p.decays = reinterpret_cast<ChunkDecay*>(saved + saved_list.decays);
    p.order = reinterpret_cast<int*>(saved + saved_list.order);
    p.first_checkpoint = reinterpret_cast<int64_t*>(saved + saved_list.first_checkpoint);
    p.cuts = reinterpret_cast<CutCost*>(saved + saved_list.cuts);
    p.saved_list = reinterpret_cast<SavedList*>(saved + saved_list.list);
    p.checkpoints = {saved + saved_list.states, in.value_heads * kStateBytes / 4, kStateBytes / 4, GD_F32, {}};
    p.checkpoint_every = kSaveIntervalTokens;
  }
  p.schedule = reinterpret_cast<Schedule*>(base + layout.schedule);
  p.work = reinterpret_cast<WorkItem*>(base + layout.work);
  p.initial_read = reinterpret_cast<int*>(base + layout.initial_read);
  p.boundary_ready = reinterpret_cast<int*>(base + layout.boundary_ready);
  p.boundaries = reinterpret_cast<uint8_t*>(base + layout.boundaries);
  p.list = list_mode(problem, multiprocessors);
  p.even_parts = even_parts(problem, multiprocessors);
  p.may_cut = may_cut(problem);
  if (p.may_cut) p.forced = {static_cast<int>(problem.segment_chunks), static_cast<int>(problem.segment_chunks), false};
  p.saves_list = p.saved_list && p.list == kPlannedList && p.may_cut && !p.forced.decaying;
  const int entries = static_cast<int>(list_entries(problem, multiprocessors));
  p.limits = {multiprocessors, entries, layout.boundary_count};
  return p;
}

// What the copy engine is told of a tensor of rows.
struct MappedTensor {
  const char* name;
  CUtensorMap* map;
  const Rows& rows;
  int heads;
};
inline Outcome encode_map(const MappedTensor& t, const Sequences& sequences, bool bf16) {
  EncodeTiled encode = nullptr;
  if (const cudaError_t error = find_encoder(encode)) return failure(error, "find the driver's cuTensorMapEncodeTiled");
  const Rows& rows = t.rows;
  if (const CUresult result = encode_rows(encode, t.map, rows, t.heads, sequences.tokens, sequences.batch, bf16))
    return failure(GD_UNSUPPORTED,
                   "%s: the driver's tensor maps (error %d) do not take strides of %lld, %lld and %lld elements",
                   t.name, static_cast<int>(result), static_cast<long long>(rows.batch_stride),
                   static_cast<long long>(rows.token_stride), static_cast<long long>(rows.head_stride));
  return {};
}

}  // namespace gatedelta::cuda

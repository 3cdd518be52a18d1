// Summaries on CUDA: the chain kernels of the forward and of the backward with lists of their own.
//   gd_summary            prepare, list of transitions, forward chain, unpack: M and S_loc leave through boundaries
//   gd_backward_summary   prepare (or what the forward saved), list of warm-up chunks, gradient chain
#include "cuda/device/warp.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/kernels.hpp"
#include "cuda/sm90/chain/launch.cuh"
#include "cuda/sm90/device.cuh"
#include "cuda/sm90/host/params.cuh"
#include "cuda/sm90/host/tensor_map.cuh"
#include "cuda/sm90/lists/uncut_list.cuh"
#include "cuda/sm90/prepare/launch.cuh"
#include "cuda/sm90/summary/fade.cuh"
#include "cuda/sm90/workspace/summary.hpp"

namespace gatedelta::cuda::sm90 {

namespace {

struct SummaryParams {
  int first, count;  // sequences
  bool skip_faded;
  int parts;  // items of a (sequence, head) pair in a gradient chain
  StateRows local, transition;
  TokenRows fade;
  Schedule* schedule;
  WorkItem* work;
  uint8_t* faded;
  int* rows;
};

constexpr int kListThreads = 256, kUnpackThreads = 256, kUnpackParts = 8;

// One warp for each (sequence, head) pair: two items, for the halves of the columns of M and S_loc.
__global__ void __launch_bounds__(kListThreads)
    list_transitions_kernel(const __grid_constant__ CallParams p, const __grid_constant__ SummaryParams s) {
  allow_next_kernel();
  const int lane = threadIdx.x & 31;
  const int pair = static_cast<int>(blockIdx.x * (kListThreads / 32) + threadIdx.x / 32);
  wait_for_previous_kernel();
  const int pairs = s.count * p.value_heads;
  if (pair == 0 && lane == 0) *s.schedule = {2 * pairs, 0, p.main_blocks()};
  if (pair >= pairs) return;
  const int row = floor_div(pair, p.value_heads), head = pair - row * p.value_heads, n = s.first + row;
  WorkItem item = item_of_head(p, whole_item(p, n), head);
  const int chunks = static_cast<int>(ChunkedSequences::chunks(item.tokens));
  const Fade fade = find_fade(p, n, head, chunks, lane, s.skip_faded);
  const bool is_faded = s.skip_faded && fade.window > 0;
  if (lane == 0) {
    s.faded[pair] = is_faded;
    if (s.fade) static_cast<float*>(s.fade.data)[s.fade.offset(row, 0, head)] = is_faded ? -INFINITY : fade.log2_left;
  }
  cut_item<Pass::kForward>(item, is_faded ? chunks - fade.window : 0, chunks, chunks, p.value_heads);
  item.kind = kTransition;
  item.warmup_tokens = item.tokens;
  item.from = kFromZero;
  item.to = pair;
  item.half = lane;
  if (lane < 2) s.work[2 * pair + lane] = item;
}

// M from its two 16-bit tiles and S_loc from the threads' floats, in the caller's layouts.
template <class Elem>
__global__ void __launch_bounds__(kUnpackThreads)
    unpack_kernel(const __grid_constant__ CallParams p, const __grid_constant__ SummaryParams s) {
  wait_for_previous_kernel();
  const int pair = static_cast<int>(blockIdx.x), row = floor_div(pair, p.value_heads),
            head = pair - row * p.value_heads;
  const uint8_t* const boundary = p.boundaries + int64_t{pair} * kBoundaryBytes;
  const bool is_empty = p.sequences[s.first + row].length == 0;
  constexpr int kNumbers = kHeadDim * kHeadDim / kUnpackParts;  // of this CTA
  const int begin = static_cast<int>(blockIdx.y) * kNumbers + static_cast<int>(threadIdx.x), end = begin + kNumbers;
  if (s.transition) {
    const bool is_faded = s.faded[pair] != 0;
    float* const to = static_cast<float*>(s.transition.data) + s.transition.offset(row, head);
    for (int i = begin; i < end; i += kUnpackThreads) {
      const int k = i / kHeadDim, j = i % kHeadDim;  // row and column of M
      const uint8_t* const tile = boundary + (j / 64 * 2 + k / 64) * kTileBytes + tile_offset(k % 64, j % 64);
      const float hi = static_cast<float>(*reinterpret_cast<const Elem*>(tile));
      const float lo = static_cast<float>(*reinterpret_cast<const Elem*>(tile + kStateTileBytes));
      to[i] = is_empty ? (k == j ? 1.0f : 0.0f) : is_faded ? 0.0f : hi + lo;
    }
  }
  const int64_t to = s.local.offset(row, head);
  for (int i = begin; i < end; i += kUnpackThreads) {
    const int k = p.state_value_first ? i % kHeadDim : i / kHeadDim;
    const int v = p.state_value_first ? i / kHeadDim : i % kHeadDim;
    // The thread and the register that held it (Chain::with_matrix, accumulator_place).
    const int thread = v % 64 / 16 * 32 + v % 8 * 4 + k % 8 / 2, part = v / 8 % 2 * 2 + k % 2;
    const auto* from = reinterpret_cast<const float*>(boundary + (2 + v / 64) * kStateTileBytes);
    const float x = from[(k / 8 * 128 + thread) * 4 + part];
    store_number(s.local.data, s.local.dtype, to + i, is_empty ? 0.0f : x);
  }
}

// One warp for each (sequence, head) pair: its first chunks, from the last of them to the first.
__global__ void __launch_bounds__(kListThreads)
    list_gradients_kernel(const __grid_constant__ CallParams p, const __grid_constant__ SummaryParams s) {
  allow_next_kernel();
  const int lane = threadIdx.x & 31;
  const int thread = static_cast<int>(blockIdx.x * kListThreads + threadIdx.x), pair = thread / 32;
  wait_for_previous_kernel();
  for (int n = thread; n < p.sequences.count; n += static_cast<int>(gridDim.x) * kListThreads)
    s.rows[n] = n >= s.first && n < s.first + s.count ? n - s.first : -1;
  const int pairs = s.count * p.value_heads;
  if (thread == 0) *s.schedule = {s.parts * pairs, 0, p.main_blocks()};
  if (pair >= pairs) return;
  const int row = floor_div(pair, p.value_heads), head = pair - row * p.value_heads, n = s.first + row;
  WorkItem item = item_of_head(p, whole_item(p, n), head);
  const int chunks = static_cast<int>(ChunkedSequences::chunks(item.tokens));
  const int window = s.skip_faded ? gradient_window(p, n, head, chunks, lane) : chunks;
  if (window < chunks) item.tokens = window * kChunkTokens;
  item.warmup_tokens = window * kChunkTokens;  // neither G nor dV is stored
  item = mirrored(item, p.value_heads);
  if (s.parts == 2) item.half = lane;
  if (lane < s.parts) s.work[s.parts * pair + lane] = item;
}

char* aligned(char* workspace) {
  constexpr uintptr_t kAlign = ForwardWorkspace::kAlign;
  return workspace + (kAlign - reinterpret_cast<uintptr_t>(workspace) % kAlign) % kAlign;
}

SummaryParams params_of(const SummaryWorkspace& layout, char* base, int64_t first, int64_t count, bool skip_faded) {
  SummaryParams s{};
  s.first = static_cast<int>(first);
  s.count = static_cast<int>(count);
  s.skip_faded = skip_faded;
  s.schedule = reinterpret_cast<Schedule*>(base + layout.schedule);
  s.work = reinterpret_cast<WorkItem*>(base + layout.work);
  s.faded = reinterpret_cast<uint8_t*>(base + layout.faded);
  s.rows = reinterpret_cast<int*>(base + layout.rows);
  return s;
}

Outcome encode(CallParams& p, std::initializer_list<MappedTensor> tensors, bool bf16) {
  if (p.sequences.batch == 0 || p.sequences.tokens == 0) return {};  // an empty tensor has no map
  for (const MappedTensor& t : tensors)
    if (Outcome outcome = encode_map(t, p.sequences, bf16); outcome.status != GD_OK) return outcome;
  return {};
}

int64_t list_blocks(int64_t pairs) { return (pairs + kListThreads / 32 - 1) / (kListThreads / 32); }

}  // namespace

Outcome launch(const SummaryProblem& problem, const Context& context) {
  return with_device(context.device, kDevices, [&](const DeviceFacts& facts) -> Outcome {
    const SummaryWorkspace layout = summary_layout(problem, true, kPreparedBytes);
    if (layout.seq_heads == 0) return {};
    char* const base = aligned(context.workspace);
    CallParams p = call_params(prepared_forward(problem), context.workspace, facts.multiprocessors);
    SummaryParams s = params_of(layout, base, problem.first, problem.count, problem.skip_faded);
    s.local = problem.local;
    s.transition = problem.transition;
    s.fade = problem.fade;
    const bool bf16 = problem.in.q.dtype == GD_BF16;
    const auto stream = static_cast<cudaStream_t>(context.stream);
    if (Outcome outcome = encode(
            p,
            {{"q", &p.q_map, p.q, p.key_heads}, {"k", &p.k_map, p.k, p.key_heads}, {"v", &p.v_map, p.v, p.value_heads}},
            bf16);
        outcome.status != GD_OK)
      return outcome;
    if (!problem.prepared)
      if (const cudaError_t error = launch_prepare(p, bf16, context.device, stream))
        return failure(error, "launch the prepare kernel");
    p.schedule = s.schedule;
    p.work = s.work;
    p.boundary_ready = reinterpret_cast<int*>(base + layout.ready);
    p.boundaries = reinterpret_cast<uint8_t*>(base + layout.boundaries);
    p.limits = {facts.multiprocessors, static_cast<int>(2 * layout.seq_heads), static_cast<int>(layout.seq_heads)};
    if (const cudaError_t error = launch_kernel(pdl_if(!problem.prepared), list_transitions_kernel,
                                                list_blocks(layout.seq_heads), kListThreads, 0, stream, p, s))
      return failure(error, "launch the list of transitions");
    if (const cudaError_t error = launch_forward_chain(p, bf16, context.device, stream))
      return failure(error, "launch the forward chain");
    const GridSize grid(layout.seq_heads, kUnpackParts);
    const cudaError_t error =
        bf16 ? launch_kernel(Pdl::kOn, unpack_kernel<__nv_bfloat16>, grid, kUnpackThreads, 0, stream, p, s)
             : launch_kernel(Pdl::kOn, unpack_kernel<__half>, grid, kUnpackThreads, 0, stream, p, s);
    if (error) return failure(error, "launch the kernel that unpacks summaries");
    return {};
  });
}

Outcome launch(const BackwardSummaryProblem& problem, const Context& context) {
  return with_device(context.device, kDevices, [&](const DeviceFacts& facts) -> Outcome {
    const SummaryWorkspace layout = summary_layout(problem, false, kBackwardPreparedBytes);
    if (layout.seq_heads == 0) return {};
    char* const base = aligned(context.workspace);
    CallParams p =
        call_params(prepared_forward(problem), context.workspace, facts.multiprocessors, kBackwardPreparedBytes);
    p.has_saved = problem.saved.present;
    SummaryParams s = params_of(layout, base, problem.first, problem.count, problem.skip_faded);
    const bool bf16 = problem.in.q.dtype == GD_BF16;
    const auto stream = static_cast<cudaStream_t>(context.stream);
    p.v = problem.d_o;
    if (Outcome outcome = encode(p,
                                 {{"q", &p.q_map, p.q, p.key_heads},
                                  {"k", &p.k_map, p.k, p.key_heads},
                                  {"do", &p.v_map, p.v, p.value_heads}},
                                 bf16);
        outcome.status != GD_OK)
      return outcome;
    if (!p.has_saved)
      if (const cudaError_t error = launch_prepare(p, bf16, context.device, stream))
        return failure(error, "launch the prepare kernel");
    s.parts = 2 * layout.seq_heads <= facts.multiprocessors ? 2 : 1;
    p.schedule = s.schedule;
    p.work = s.work;
    p.final = problem.d_local;
    p.final.indices = {s.rows, false, true, 1, 0, 1};
    p.limits = {facts.multiprocessors, static_cast<int>(s.parts * layout.seq_heads), 0};
    if (const cudaError_t error = launch_kernel(pdl_if(!p.has_saved), list_gradients_kernel,
                                                list_blocks(layout.seq_heads), kListThreads, 0, stream, p, s))
      return failure(error, "launch the list of gradients");
    if (const cudaError_t error = launch_grad_chain(p, bf16, context.device, stream))
      return failure(error, "launch the chain of gradients");
    return {};
  });
}

}  // namespace gatedelta::cuda::sm90

// Short sequences of a forward: reading and writing a state takes longer than the work of a few tokens, and a chunk
// would do the work of 64. One CTA has some value columns of one head, as in a decode step. It takes eight tokens at a
// time (decode/window_mma_tile.cuh) where that kernel supports the call, otherwise one after the other
// (decode/generic.cuh).
#include "cuda/sm90/forward/short_sequences.hpp"

#include "cuda/decode/generic.cuh"
#include "cuda/decode/window_mma_loads.cuh"
#include "cuda/decode/window_mma_solve.cuh"
#include "cuda/decode/window_mma_update.cuh"
#include "cuda/host/launch.cuh"

namespace gatedelta::cuda::sm90 {

namespace {

// The next kernel in the stream waits for this kernel alone, so this one must not end before the forward kernel.
GD_DEVICE void wait_for_forward() {
  if (blockIdx.x == 0) cudaGridDependencySynchronize();
}

// ---- one token after the other --------------------------------------------------------------------------------------

struct ShortGenericParams : DecodeParams {
  int64_t longest;
};

template <class Config>
GD_DEVICE void generic_if_short(const ShortGenericParams& p, GenericTokens<Config>& tokens) {
  const RecurrentProblem& problem = p.problem;
  const Layer& in = problem.in;
  const CtaPlace place = locate(p, blockIdx.x);
  const int n = place.sequence, head = place.head;
  const bool is_past_last = n == in.sequences.count;
  const SequenceSpan span =
      is_past_last ? SequenceSpan{0, in.sequences.used_tokens(), in.sequences.tokens - in.sequences.used_tokens()}
                   : in.sequences[n];
  if (span.length > p.longest) return;
  Tile<Config> tile(threadIdx.x, place.part);
  if (is_past_last || problem.is_padding(n)) return clear_outputs(p, span, head, tile);

  const int64_t read_slot = in.initial.slot(n), write_slot = problem.final.slot(n);
  if (read_slot < 0) {
    tile.clear();
  } else {
    tile.load(element(in.initial.data, in.initial.dtype, in.initial.offset(read_slot, head)), in.initial.dtype,
              kDecodeDim, kDecodeDim, p.states_aligned);
  }
  const int length = static_cast<int>(span.length), column = tile.column - place.part * Config::kCtaColumns;
#pragma unroll 1
  for (int begin = 0;;) {
    const int count = min(length - begin, GenericTokens<Config>::kCount);
    prepare_tokens(tokens, p, place, span, begin, count);
    if (begin == 0) tile.widen(in.initial.dtype);
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      float k[Config::kPerLane], q[Config::kPerLane], v[Config::kColumns];
      read_share(k, tokens.k[t], tile.share);
      read_share(q, tokens.q[t], tile.share);
#pragma unroll
      for (int c = 0; c < Config::kColumns; ++c) v[c] = tokens.v[t][column + c];
      advance<Config::kLayout>(tile.s, k, q, tokens.factors[t], v);
      if (problem.o) store_output(problem.o, span.batch, span.begin + begin + t, head, tile, v, p.rows_aligned);
    }
    begin += count;
    if (begin == length) break;
    __syncthreads();  // the tokens are no longer read
  }
  if (write_slot >= 0) store_state(p, problem.final, problem.final.offset(write_slot, head), tile);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    short_generic_kernel(const __grid_constant__ ShortGenericParams p) {
  __shared__ GenericTokens<Config> tokens;
  generic_if_short<Config>(p, tokens);
  wait_for_forward();
}

template <class Config>
cudaError_t launch_generic(const RecurrentProblem& problem, int64_t longest, Pdl pdl, cudaStream_t stream) {
  const ShortGenericParams p{decode_params(problem, Config::kCtaColumns), longest};
  const int64_t ctas = decode_pairs(problem.in) * p.parts.divisor;
  if (ctas == 0) return cudaSuccess;
  return launch_kernel(pdl, short_generic_kernel<Config>, ctas, Config::kThreads, 0, stream, p);
}

// ---- eight tokens at a time -----------------------------------------------------------------------------------------

struct ShortWindowMmaParams : ManyTokenParams {
  Divider heads;  // value heads
  uint32_t longest;
};

template <class Config>
GD_DEVICE void window_mma_if_short(const ShortWindowMmaParams& p, WindowShared<Config>& shared) {
  constexpr uint32_t kTokens = Config::kTokens;
  const uint32_t pair = blockIdx.x / Config::kParts, n = p.heads.quotient(pair), head = p.heads.remainder(pair, n);
  const GridPlace place{n, head, p.key_heads.of(head), blockIdx.x % Config::kParts};
  WindowMma<Config> window(p, shared, place);
  window.batch = p.offsets ? 0 : n;
  window.begin = p.offsets ? static_cast<uint32_t>(p.offsets[n]) : 0;
  window.length = (p.offsets && n < p.sequences ? static_cast<uint32_t>(p.offsets[n + 1]) : p.tokens) - window.begin;
  if (window.length > p.longest) return;
  if (n == p.sequences) return window.clear_outputs();
  const int32_t read_slot = request_slot(p.initial, n).slot(p.initial);
  if (read_slot >= 0) {
    window.request_state(read_slot);
  } else {
    if (is_padding(p, n)) return window.clear_outputs();
    window.clear_state();
  }
  const int32_t write_slot = request_slot(p.final, n).slot(p.final);
  char* const final = write_slot < 0 ? nullptr : window.row_of(p.final.at(write_slot, place.head));
  float products[WindowMma<Config>::kTiles][4];
#pragma unroll 1
  for (uint32_t first = 0;; first += kTokens) {
    const int count = static_cast<int>(min(window.length - first, kTokens));
    window.request_tokens(first, count);
    if (first == 0) window.widen_state();
    if (count == 0) {  // an empty sequence
      if (final) window.store_state(final);
      return;
    }
    if (threadIdx.x < 32) window.fill_table(count);
    window.sync_cta();
    window.multiply(products);
    window.solve(products);
    window.store_outputs(products, first, count);
    if (first + count == window.length) {
      if (final) window.template advance_to<false>(count, final);
      return;
    }
    window.template advance_to<true>(count, nullptr);
    window.sync_cta();  // the table is no longer read
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    short_window_mma_kernel(const __grid_constant__ ShortWindowMmaParams p) {
  __shared__ WindowShared<Config> shared;
  window_mma_if_short<Config>(p, shared);
  wait_for_forward();
}

template <class State, class Input>
cudaError_t launch_window_mma(const RecurrentProblem& problem, int64_t longest, Pdl pdl, cudaStream_t stream) {
  using Config = WindowMmaConfig<State, Input, WindowKind::any, 8>;
  const ShortWindowMmaParams p{many_token_params(problem), Divider(static_cast<uint32_t>(problem.in.value_heads)),
                               static_cast<uint32_t>(longest)};
  const int64_t ctas = decode_pairs(problem.in) * Config::kParts;
  if (ctas == 0) return cudaSuccess;
  return launch_kernel(pdl, short_window_mma_kernel<Config>, ctas, Config::kThreads, 0, stream, p);
}
template <class State>
cudaError_t launch_window_mma(const RecurrentProblem& problem, int64_t longest, Pdl pdl, cudaStream_t stream) {
  return problem.in.q.dtype == GD_BF16 ? launch_window_mma<State, __nv_bfloat16>(problem, longest, pdl, stream)
                                       : launch_window_mma<State, __half>(problem, longest, pdl, stream);
}

}  // namespace

cudaError_t launch_short_sequences(const ForwardProblem& problem, const ShortPlan& plan, Pdl pdl, cudaStream_t stream) {
  const RecurrentProblem recurrent = recurrent_of(problem);
  if (plan.uses_window_mma) switch (state_dtype(recurrent)) {
      case GD_F32: return launch_window_mma<float>(recurrent, plan.longest, pdl, stream);
      case GD_BF16: return launch_window_mma<__nv_bfloat16>(recurrent, plan.longest, pdl, stream);
      default: return launch_window_mma<__half>(recurrent, plan.longest, pdl, stream);
    }
  if (problem.in.layout == GD_STATE_KV) return launch_generic<GenericKv<16>>(recurrent, plan.longest, pdl, stream);
  return state_vector(recurrent) == 4 ? launch_generic<GenericVk<4, 16>>(recurrent, plan.longest, pdl, stream)
                                      : launch_generic<GenericVk<8, 16>>(recurrent, plan.longest, pdl, stream);
}

}  // namespace gatedelta::cuda::sm90

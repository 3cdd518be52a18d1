// Short sequences of a forward: reading and writing a state takes longer than the work of a few tokens, and a chunk
// would do the work of 64. One CTA has some value columns of one head, as in a decode step. Eight tokens at a time
// (decode/fold_tile.cuh) where that is possible, otherwise one after the other (decode/walk.cuh).
#include "cuda/sm90/forward/short_sequences.hpp"

#include "cuda/decode/fold_tile.cuh"
#include "cuda/decode/walk.cuh"
#include "cuda/host/launch.cuh"

namespace gatedelta::cuda::sm90 {

namespace {

// What comes next in the stream waits for this kernel alone, so this one must not end before the forward kernel.
GD_DEVICE void wait_for_forward() {
  if (blockIdx.x == 0) cudaGridDependencySynchronize();
}

// ---- one token after the other --------------------------------------------------------------------------------------

struct ShortWalkParams : DecodeParams {
  int64_t longest;
};

template <class Config>
GD_DEVICE void walk_if_short(const ShortWalkParams& p, WalkTokens<Config>& tokens) {
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
              kStepDim, kStepDim, p.states_aligned);
  }
  const int length = static_cast<int>(span.length), column = tile.column - place.part * Config::kCtaColumns;
#pragma unroll 1
  for (int begin = 0;;) {
    const int count = min(length - begin, WalkTokens<Config>::kCount);
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
    short_walk_kernel(const __grid_constant__ ShortWalkParams p) {
  __shared__ WalkTokens<Config> tokens;
  walk_if_short<Config>(p, tokens);
  wait_for_forward();
}

template <class Config>
cudaError_t launch_walk(const RecurrentProblem& problem, int64_t longest, Pdl pdl, cudaStream_t stream) {
  const ShortWalkParams p{decode_params(problem, Config::kCtaColumns), longest};
  const int64_t ctas = decode_pairs(problem.in) * p.parts.divisor;
  if (ctas == 0) return cudaSuccess;
  return launch_kernel(pdl, short_walk_kernel<Config>, ctas, Config::kThreads, 0, stream, p);
}

// ---- eight tokens at a time -----------------------------------------------------------------------------------------

struct ShortFoldParams : FoldParams {
  Divider heads;  // value heads
  uint32_t longest;
};

template <class Config>
GD_DEVICE void fold_if_short(const ShortFoldParams& p, FoldShared<Config>& shared) {
  constexpr uint32_t kTokens = Config::kTokens;
  const uint32_t pair = blockIdx.x / Config::kParts, n = p.heads.quotient(pair), head = p.heads.remainder(pair, n);
  const StepPlace place{n, head, p.key_heads.of(head), blockIdx.x % Config::kParts};
  Fold<Config> fold(p, shared, place);
  fold.batch = p.offsets ? 0 : n;
  fold.begin = p.offsets ? static_cast<uint32_t>(p.offsets[n]) : 0;
  fold.length = (p.offsets && n < p.sequences ? static_cast<uint32_t>(p.offsets[n + 1]) : p.tokens) - fold.begin;
  if (fold.length > p.longest) return;
  if (n == p.sequences) return fold.clear_outputs();
  const int32_t read_slot = request_slot(p.initial, n).slot(p.initial);
  if (read_slot >= 0) {
    fold.request_state(read_slot);
  } else {
    if (is_padding(p, n)) return fold.clear_outputs();
    fold.clear_state();
  }
  const int32_t write_slot = request_slot(p.final, n).slot(p.final);
  char* const final = write_slot < 0 ? nullptr : fold.row_of(p.final.at(write_slot, place.head));
  float products[Fold<Config>::kTiles][4];
#pragma unroll 1
  for (uint32_t first = 0;; first += kTokens) {
    const int count = static_cast<int>(min(fold.length - first, kTokens));
    fold.request_tokens(first, count);
    if (first == 0) fold.widen_state();
    if (count == 0) {  // an empty sequence
      if (final) fold.store_state(final);
      return;
    }
    if (threadIdx.x < 32) fold.fill_table(count);
    fold.meet();
    fold.multiply(products);
    fold.solve(products);
    fold.put_outputs(products, first, count);
    if (first + count == fold.length) {
      if (final) fold.template advance_to<false>(count, final);
      return;
    }
    fold.template advance_to<true>(count, nullptr);
    fold.meet();  // the table is no longer read
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads) short_fold_kernel(const __grid_constant__ ShortFoldParams p) {
  __shared__ FoldShared<Config> shared;
  fold_if_short<Config>(p, shared);
  wait_for_forward();
}

template <class State, class Input>
cudaError_t launch_fold(const RecurrentProblem& problem, int64_t longest, Pdl pdl, cudaStream_t stream) {
  using Config = FoldConfig<State, Input, FoldKind::any, 8, 2, false>;
  const ShortFoldParams p{fold_params(problem), Divider(static_cast<uint32_t>(problem.in.value_heads)),
                          static_cast<uint32_t>(longest)};
  const int64_t ctas = decode_pairs(problem.in) * Config::kParts;
  if (ctas == 0) return cudaSuccess;
  return launch_kernel(pdl, short_fold_kernel<Config>, ctas, Config::kThreads, 0, stream, p);
}
template <class State>
cudaError_t launch_fold(const RecurrentProblem& problem, int64_t longest, Pdl pdl, cudaStream_t stream) {
  return problem.in.q.dtype == GD_BF16 ? launch_fold<State, __nv_bfloat16>(problem, longest, pdl, stream)
                                       : launch_fold<State, __half>(problem, longest, pdl, stream);
}

}  // namespace

cudaError_t launch_short_walk(const ForwardProblem& problem, const WalkPlan& plan, Pdl pdl, cudaStream_t stream) {
  const RecurrentProblem walked = recurrent_of(problem);
  if (plan.folds) switch (state_dtype(walked)) {
      case GD_F32: return launch_fold<float>(walked, plan.longest, pdl, stream);
      case GD_BF16: return launch_fold<__nv_bfloat16>(walked, plan.longest, pdl, stream);
      default: return launch_fold<__half>(walked, plan.longest, pdl, stream);
    }
  if (problem.in.layout == GD_STATE_KV) return launch_walk<WalkKv<16>>(walked, plan.longest, pdl, stream);
  return state_vector(walked) == 4 ? launch_walk<WalkVk<4, 16>>(walked, plan.longest, pdl, stream)
                                   : launch_walk<WalkVk<8, 16>>(walked, plan.longest, pdl, stream);
}

}  // namespace gatedelta::cuda::sm90

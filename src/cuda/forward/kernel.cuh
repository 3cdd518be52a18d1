// The chunked forward in form C, one persistent block per SM. Per chunk and value head (docs/math.md):
//   W  = V - gamma o (K S)                S <- gamma_L S + X^T W            O = s gamma o (Q S) + R W
//   X  = delta beta o (T^T K)             R = s Gamma o (tril(Q K^T) T) o beta_j
// S^T stays in the registers of the math warpgroups (64 value rows each) as accumulators, and is repacked in place as
// the register operand of the next products. Warpgroups and their roles:
//   keys    builds tril(Q K^T), which scores go on with, and X
//   scores  builds R; its first two warps ask the copy engine for K, Q, T and the vectors, and for V, of the chunks
//           ahead (a ragged last chunk they load themselves, zero-filled)
//   math    the state chain and the output; one or two of them
// They meet only at rings of shared-memory slots with full and empty barriers.
// Blocks take pieces of work from a list (schedule.hpp): chunks of a sequence, perhaps after some "silent" ones that
// only move the state; the factors M and S_loc of a segment, for which one math warpgroup begins with the identity
// and has no values; or the states at the ends of segments, joined from those factors.
#pragma once

#include "cuda/barriers.cuh"
#include "cuda/forward/prepare.cuh"

namespace gatedelta::cuda {

constexpr int kMathWarpgroups = 2;  // warpgroups that hold 64 value columns each

struct ChainSmem {
  static constexpr int kKeysQueries = 0;                                       // [slot][Q0 K0 Q1 K1]
  static constexpr int kValues = kKeysQueries + kLoadStages * 4 * kTileBytes;  // V; once that is read, O on its way out
  static constexpr int kX = kValues + kValueStages * kMathWarpgroups * kTileBytes;  // X^T [128][64]
  static constexpr int kR = kX + kOperandStages * 2 * kTileBytes;
  static constexpr int kPrepared = kR + kOperandStages * kTileBytes;                // T and the vectors
  static constexpr int kScores = kPrepared + kLoadStages * kBackwardPreparedBytes;  // tril(Q K^T), blocks by lane
  static constexpr int kWork = kScores + kScoreStages * kTriangleBytes;             // entries of the list of work
  static constexpr int kBarriers = kWork + kWorkStages * static_cast<int>(sizeof(WorkItem));
  static constexpr int kBytes =
      kBarriers + 2 * 8 * (kLoadStages + kValueStages + kScoreStages + kOperandStages + kWorkStages + kMergeStages);
  static constexpr int kAllocated = kBytes + kTileAlign;
};
static_assert(ChainSmem::kAllocated <= kMaxSharedBytes);

// Registers a thread of each role gets; the sum over warpgroups is what the launch allocates.
struct ChainRegisters {
  static constexpr int kLaunch = 128, kKeys = 80, kScores = 80, kMathWarpgroups = 176;
  static_assert(kKeys + kScores + 2 * kMathWarpgroups <= 4 * kLaunch);
};

constexpr int kChainThreads = 128 * (2 + kMathWarpgroups);

enum NamedBarrier {
  kOutputStaged = 1,                             // of each slot and math warpgroup
  kItemDone = kOutputStaged + 2 * kValueStages,  // of each math warpgroup
};

// The chain of chunks, for what it is (schedule.hpp). The backward has its own math (cuda/backward), the rest is
// shared.
template <class Elem, Pass kPass = Pass::kForward>
struct Forward {
  static constexpr bool kReverse = kPass == Pass::kBackward;
  using Chunk = ChunkAt<kReverse>;
  using Smem = ChainSmem;
  using Mma64 = Wgmma<Elem, 64>;

  const CallParams& p;
  const uint32_t smem;
  const int tid, warp, lane;  // within the warpgroup

  using LoadPipe = Pipeline<kLoadStages, Smem::kBarriers>;
  using ValuePipe = Pipeline<kValueStages, LoadPipe::kEnd>;
  using ScorePipe = Pipeline<kScoreStages, ValuePipe::kEnd>;
  using OperandPipe = Pipeline<kOperandStages, ScorePipe::kEnd>;
  using WorkPipe = Pipeline<kWorkStages, OperandPipe::kEnd>;
  using MergePipe = Pipeline<kMergeStages, WorkPipe::kEnd>;
  static_assert(MergePipe::kEnd == Smem::kBytes);
  const LoadPipe load_pipe;
  const ValuePipe value_pipe;
  const ScorePipe score_pipe;
  const OperandPipe operand_pipe;
  const WorkPipe work_pipe;
  const MergePipe merge_pipe;  // full: the state after a step of a join is stored; empty: somebody is about to say so

  GD_DEVICE Forward(const CallParams& params, uint32_t base)
      : p(params),
        smem(base),
        tid(threadIdx.x & 127),
        warp(__shfl_sync(~0u, (threadIdx.x & 127) >> 5, 0)),
        lane(threadIdx.x & 31),
        load_pipe{base},
        value_pipe{base},
        score_pipe{base},
        operand_pipe{base},
        work_pipe{base},
        merge_pipe{base} {}

  GD_DEVICE void init_barriers() const {
    // What one warp loads, every lane of it reports; of those who read, every warp does.
    constexpr int kMathWarps = 4 * kMathWarpgroups * kArrivals, kOtherWarps = 8 * kArrivals;
    load_pipe.init(32, kOtherWarps + kMathWarps);
    value_pipe.init(32, kMathWarps);
    score_pipe.init(4 * kArrivals, 4 * kArrivals);
    operand_pipe.init(kOtherWarps, kMathWarps);
    work_pipe.init(32, kOtherWarps + kMathWarps);
    merge_pipe.init(4 * kArrivals, 1);
    barrier_init_fence();
  }

  // Blocks are there before their list is. Meanwhile they go through a chunk that has no data, so that the code of the
  // first one need not be fetched when it counts. The states' blocks have their list when they come.
  static constexpr bool kHasDryRun = kPass != Pass::kStates;
  // Before anything is read from memory, and after all is done.
  GD_DEVICE static void begin() {
    if constexpr (!kHasDryRun) wait_for_previous_kernel();
  }
  GD_DEVICE static void end() {}

  // Half of Q's columns and under it half of K's: one operand of 128 rows for Q S and K S.
  GD_DEVICE uint32_t query_tile(int stage, int half) const {
    return smem + Smem::kKeysQueries + (stage * 4 + half * 2) * kTileBytes;
  }
  GD_DEVICE uint32_t key_tile(int stage, int half) const { return query_tile(stage, half) + kTileBytes; }
  GD_DEVICE uint32_t value_tile(int stage, int math_wg) const {
    return smem + Smem::kValues + (stage * kMathWarpgroups + math_wg) * kTileBytes;
  }
  GD_DEVICE uint32_t inverse_at(int stage) const { return smem + Smem::kPrepared + stage * kBackwardPreparedBytes; }
  GD_DEVICE uint32_t x_tile(int stage) const { return smem + Smem::kX + stage * 2 * kTileBytes; }
  GD_DEVICE uint32_t r_tile(int stage) const { return smem + Smem::kR + stage * kTileBytes; }
  GD_DEVICE uint32_t score_block(int stage, int I, int J) const {
    return smem + Smem::kScores + stage * kTriangleBytes + triangle_block(I, J) + lane * 16;
  }
  GD_DEVICE uint32_t vector(int stage, ChunkVector v) const {
    return inverse_at(stage) + kInverseBytes + v * kVectorBytes;
  }

  // ---- work --------------------------------------------------------------------------------------------------------

  // What is made of it is not kept in registers through all chunks.
  GD_DEVICE int opaque_lane() const { return opaque(lane); }

  // Numbers that all threads of a warp share, said so that they live in uniform registers.
  GD_DEVICE static int uniform(int x) { return __shfl_sync(~0u, x, 0); }
  GD_DEVICE const WorkItem& work_item(int stage) const {
    return static_cast<const WorkItem*>(__cvta_shared_to_generic(smem + Smem::kWork))[stage];
  }
  GD_DEVICE static Chunk first_chunk_of(const WorkItem& item) { return Chunk::first_of(item); }
  // Which half of the value columns a math warpgroup has; negative: none of this item.
  GD_DEVICE static int half_of(const Chunk& chunk, int math_wg) {
    return chunk.half == kWhole ? math_wg : math_wg == 0 ? chunk.half : -1;
  }
  GD_DEVICE static bool is_merge(const Chunk& chunk) { return chunk.half == kNoValues; }

  // Without Q, scores and R: if it only moves the state, for the gradient of which both are needed.
  GD_DEVICE static bool is_state_only(const Chunk& chunk) {
    return kPass == Pass::kStates || (kPass == Pass::kForward && chunk.is_warmup());
  }
  // How many of an item's tokens are, or are none but images of a join; they come first.
  GD_DEVICE static int state_only_tokens(const WorkItem& item) {
    if constexpr (kPass == Pass::kForward) return item.warmup_tokens;
    return kPass == Pass::kStates || item.kind == kMerge ? item.tokens : 0;
  }

  // The warp that loads takes entries of the list and tells the others of those that have a chunk. An entry's slot is
  // given back when the next one is looked for.
  static constexpr int kEndOfWork = -1;
  GD_DEVICE int get_next_work(WorkPipelineState& ring) const {
    if (ring.count > 0) warp_arrive(work_pipe.empty((ring.count - 1) % kWorkStages));
    const PipelineState<kWorkStages> at = ring.at();
    work_pipe.wait_full(at);
    ring.advance();
    return uniform(work_item(at.stage).kind) == kNoWork ? kEndOfWork : at.stage;
  }
  // By every lane: a branch in here would keep the cursor out of the uniform registers.
  GD_DEVICE void publish_work(int word, WorkPipelineState& ring) const {
    const PipelineState<kWorkStages> at = ring.at();
    work_pipe.wait_empty(at);
    store_shared_if(lane < kWords, smem + Smem::kWork + at.stage * static_cast<int>(sizeof(WorkItem)) + lane * 4, word);
    barrier_arrive(work_pipe.full(at.stage));
    ring.advance();
  }

  // Walks through the chunks of the work this block takes; a step inside an item costs next to nothing.
  struct Cursor {
    int prepared, key_head;  // prepared: number of the chunk and head in the workspace, or of an image of M
    Chunk chunk;
    WorkPipelineState work;
  };
  // The images of a step of a join: both parts of M, then the half of S_loc. Until they are there, the join waits.
  GD_DEVICE static bool is_first_tile(const Cursor& cursor) { return cursor.prepared % kBoundaryTiles == 0; }
  GD_DEVICE static int next_tile(int snapshot, int half) {
    return snapshot == 0 ? 1 : snapshot == 1 ? 1 + half : kBoundaryTiles - snapshot;
  }

  // K and Q of chunks to come. What the block takes next is asked for while chunks are left of what it has: its number,
  // the first by the block's own if there is one for each; a chunk later the entry itself, a word per lane.
  enum Prefetch { kNothing, kTicket, kEntry };
  struct Loader {
    Cursor cursor;
    int loads_in_flight;   // chunks asked for, from the current one on
    int ready_boundaries;  // of the boundaries of the joins of this block all before this one have their factors
    int count, static_items;
    Prefetch prefetch;
    int ticket, word;     // of every lane; they may still be on their way
    int prefetch_tokens;  // the next item is asked for when no more than these are left
  };
  static constexpr int kWords = sizeof(WorkItem) / sizeof(int);
  GD_DEVICE void get_initial_work(Loader& loader) const {
    loader.count = p.schedule->count;
    loader.static_items = p.schedule->static_items;
    if (loader.static_items > 0) {
      loader.ticket = static_cast<int>(blockIdx.x) - loader.static_items;
      loader.prefetch = kTicket;
    }
    fetch_work(loader);
  }
  // Its only chunk is there.
  GD_DEVICE void publish_dry_run(Loader& loader) const {
    int word = 0;
    const auto tell = [&](size_t offset, int value) {
      word = lane == static_cast<int>(offset / sizeof(int)) ? value : word;
    };
    tell(offsetof(WorkItem, kind), kDryRun);
    tell(offsetof(WorkItem, half), kWhole);
    tell(offsetof(WorkItem, tokens), kChunkTokens);
    tell(offsetof(WorkItem, warmup_tokens), kReverse ? kChunkTokens : 0);  // gradients are kept, if it is not
    tell(offsetof(WorkItem, from), kFromZero);
    tell(offsetof(WorkItem, to), kToNowhere);
    tell(offsetof(WorkItem, origin), -1);  // no checkpoint comes after it
    publish_work(word, loader.cursor.work);
    barrier_arrive(load_pipe.full(0));
    loader.loads_in_flight = 1;
  }
  GD_DEVICE void take_ticket(Loader& loader) const {
    loader.ticket = atomic_inc_if(&p.schedule->next_ticket, lane == 0);
    loader.prefetch = kTicket;
  }
  GD_DEVICE void prefetch_entry(Loader& loader) const {
    const int i = loader.static_items + uniform(loader.ticket);
    loader.word = kNoWork;
    if (i < loader.count && lane < kWords) loader.word = reinterpret_cast<const int*>(p.work + i)[lane];
    loader.prefetch = kEntry;
  }
  // The next item that has a chunk; at.rows <= 0 if there is none.
  GD_DEVICE void fetch_work(Loader& loader) const {
    Cursor& cursor = loader.cursor;
    const auto field = [&](size_t offset) {
      return __shfl_sync(~0u, loader.word, static_cast<int>(offset / sizeof(int)));
    };
    bool ends;
    do {
      if (loader.prefetch == kNothing) take_ticket(loader);
      if (loader.prefetch == kTicket) prefetch_entry(loader);
      loader.prefetch = kNothing;
      ends = field(offsetof(WorkItem, kind)) == kNoWork;
      cursor.chunk = {field(offsetof(WorkItem, batch)),
                      field(offsetof(WorkItem, token)),
                      ends ? 0 : field(offsetof(WorkItem, tokens)),
                      field(offsetof(WorkItem, warmup_tokens)),
                      field(offsetof(WorkItem, head)),
                      field(offsetof(WorkItem, half))};
      cursor.key_head = field(offsetof(WorkItem, key_head));
      cursor.prepared = field(offsetof(WorkItem, prepared));
    } while (!ends && cursor.chunk.tokens_left <= 0);
    // An item that waits for its state asks for no other meanwhile, which would have to wait for it though a block may
    // be free: there are slots for three chunks, and there is a fourth when the first is done.
    const bool waits = field(offsetof(WorkItem, from)) >= 0 && field(offsetof(WorkItem, kind)) == kOutputs;
    loader.prefetch_tokens =
        waits ? min(3 * kChunkTokens, cursor.chunk.tokens_left - kLoadStages * kChunkTokens) : 3 * kChunkTokens;
    publish_work(loader.word, cursor.work);
  }
  GD_DEVICE void advance_loader(Loader& loader) const {
    Cursor& cursor = loader.cursor;
    if (loader.prefetch == kNothing) {
      if (cursor.chunk.tokens_left <= loader.prefetch_tokens) take_ticket(loader);
    } else if (loader.prefetch == kTicket) {
      prefetch_entry(loader);
    }
    cursor.chunk = cursor.chunk.next();
    cursor.prepared += is_merge(cursor.chunk) ? next_tile(cursor.prepared % kBoundaryTiles, cursor.key_head)
                       : kReverse             ? -p.value_heads
                                              : p.value_heads;
    if (cursor.chunk.tokens_left <= 0) fetch_work(loader);
  }

  // ---- loads, by two warps -----------------------------------------------------------------------------------------

  // So that the current chunk is asked for and the one after it, too; in joins, which do little else, the two after it.
  GD_DEVICE void load_ahead(Loader& loader, const PipelineState<kLoadStages>& current, int loads_in_flight) const {
#pragma unroll 1
    while (loader.loads_in_flight < loads_in_flight && loader.cursor.chunk.tokens_left > 0) {
      if (is_merge(loader.cursor.chunk) && is_first_tile(loader.cursor)) {
        // Others must not be kept from what comes before, on which this may depend.
        bool ready = are_transitions_ready(loader);
        if (!ready && loader.loads_in_flight > 0) break;
        while (!ready) ready = are_transitions_ready(loader);
      }
      PipelineState<kLoadStages> ring = current;
      for (int i = 0; i < loader.loads_in_flight; ++i) ring.advance();
      load_keys_queries(loader, ring);
      ++loader.loads_in_flight;
    }
    --loader.loads_in_flight;
  }
  // Every lane asks for one boundary: most are ready at once, and to ask and to fence takes longer than a step of a
  // join.
  GD_DEVICE bool are_transitions_ready(Loader& loader) const {
    const int boundary = loader.cursor.prepared / kBoundaryTiles;
    if (boundary < loader.ready_boundaries) return true;
    const int asked = boundary + lane, last = p.limits.boundaries - 1;
    const uint32_t ready = __ballot_sync(
        ~0u, load_acquire(p.boundary_ready + (asked < last ? asked : last)) >= kTransitionReady && asked <= last);
    fence_async_global();
    loader.ready_boundaries = boundary + __popc(ready & ~(ready + 1));  // up to the first that is not
    return boundary < loader.ready_boundaries;
  }
  GD_DEVICE void load_keys_queries(Loader& loader, const PipelineState<kLoadStages>& ring) const {
    const Cursor& cursor = loader.cursor;
    constexpr int kBytes = kPass == Pass::kForward ? kPreparedBytes : kBackwardPreparedBytes;
    const Chunk& chunk = cursor.chunk;
    const int stage = ring.stage;
    const uint32_t full = load_pipe.full(stage);
    load_pipe.wait_empty(ring);
    if (!chunk.is_whole()) {
      load_ragged_rows(query_tile(stage, 0), true, 2 * kTileBytes, p.q, chunk, cursor.key_head, 0);
      load_ragged_rows(key_tile(stage, 0), true, 2 * kTileBytes, p.k, chunk, cursor.key_head, 0);
      arrive_after_copies(full);
    }
    if (elect_one()) {
      if (is_merge(chunk)) {
        barrier_arrive_expect(full, kStateTileBytes);
        barrier_arrive(full, 31);
        bulk_load(query_tile(stage, 0), p.boundaries + int64_t{cursor.prepared} * kStateTileBytes, kStateTileBytes,
                  full);
      } else {
        if (chunk.is_whole()) {
          barrier_arrive_expect(full, (is_state_only(chunk) ? 2 : 4) * kTileBytes + kBytes);
          barrier_arrive(full, 31);
#pragma unroll 1
          for (int half = 0; half < 2; ++half) {
            if (!is_state_only(chunk))
              tma_load(query_tile(stage, half), &p.q_map, full, cursor.key_head, chunk.token, chunk.batch, half);
            tma_load(key_tile(stage, half), &p.k_map, full, cursor.key_head, chunk.token, chunk.batch, half);
          }
        } else {
          barrier_arrive_expect(full, kBytes);
        }
        bulk_load(inverse_at(stage), p.prepared + int64_t{cursor.prepared} * p.prepared_bytes, kBytes, full);
      }
    }
    advance_loader(loader);
  }
  GD_DEVICE void load_values(const Chunk& chunk, const PipelineState<kLoadStages>& ring) const {
    const int stage = ring.stage;
    const uint32_t full = value_pipe.full(stage);
    barrier_wait(value_pipe.empty(stage), ring.phase ^ 1);
    if (!chunk.is_whole()) {
      const bool whole = chunk.half == kWhole;
      load_ragged_rows(value_tile(stage, 0), whole, kTileBytes, p.v, chunk, chunk.head, whole ? 0 : chunk.half * 64);
      arrive_after_copies(full);
    }
    if (elect_one()) {
      if (chunk.is_whole()) {
        barrier_arrive_expect(full, chunk.half == kWhole ? 2 * kTileBytes : is_merge(chunk) ? 0 : kTileBytes);
        barrier_arrive(full, 31);
#pragma unroll
        for (int math_wg = 0; math_wg < kMathWarpgroups; ++math_wg)
          if (const int half = half_of(chunk, math_wg); half >= 0)
            tma_load(value_tile(stage, math_wg), &p.v_map, full, chunk.head, chunk.token, chunk.batch, half);
      } else {
        barrier_arrive(full);
      }
    }
  }
  // The sequence's last rows. The copy engine would fetch what lies behind them, and 0 times a stranger's NaN is NaN.
  GD_DEVICE void load_ragged_rows(uint32_t tiles, bool two, int tile_stride, const Rows& src, const Chunk& chunk,
                                  int head, int column) const {
    const auto* from = static_cast<const uint16_t*>(src.data) + src.offset(chunk.batch, chunk.token, head) + column;
#pragma unroll 1
    for (int i = lane; i < (two ? 2 : 1) * kChunkTokens * 8; i += 32) {
      const int piece = i % 8, tile = two ? i / 8 % 2 : 0, row = two ? i / 16 : i / 8;
      const bool valid = row < chunk.tokens();
      copy_async16(tiles + tile * tile_stride + tile_offset(row, piece * 8),
                   from + (valid ? row * src.token_stride : 0) + tile * 64 + piece * 8, valid);
    }
  }
  // All lanes but the one that will say that the rest is on its way.
  GD_DEVICE void arrive_after_copies(uint32_t full) const {
    copy_async_wait();
    fence_async_shared();
    if (!elect_one()) barrier_arrive(full);
    __syncwarp();
  }

  // ---- keys: X^T = K^T T with scaled columns -----------------------------------------------------------------------

  GD_DEVICE void run_keys() const {
    PipelineState<kLoadStages> load;
    PipelineState<kScoreStages> score;
    PipelineState<kOperandStages> operand;
    WorkPipelineState work;
    for (int i = get_next_work(work); i != kEndOfWork; i = get_next_work(work)) {
      const bool joins = work_item(i).kind == kMerge;
#pragma unroll 1
      for (int plain = state_only_tokens(work_item(i)); plain > 0; plain -= kChunkTokens) {
        load_pipe.wait_full(load);
        if (joins) {
          warp_arrive(load_pipe.empty(load.stage));
        } else {
          build_x(load.stage, operand);
          operand.advance();
        }
        load.advance();
      }
      if constexpr (kPass != Pass::kStates) {
#pragma unroll 1
        for (int rows = work_item(i).tokens - state_only_tokens(work_item(i)); rows > 0; rows -= kChunkTokens) {
          load_pipe.wait_full(load);
          build_scores(load.stage, score);
          build_x(load.stage, operand);
          load.advance();
          score.advance();
          operand.advance();
        }
      }
    }
  }

  // tril(Q K^T) as R's register operand, by lane.
  GD_DEVICE void build_scores(int load, const PipelineState<kScoreStages>& score) const {
    float qk[32];
    mma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step)
      Mma64::template ss<false, false>(qk, tile_descriptor(query_tile(load, step / 4), step % 4 * kStepContiguous),
                                       tile_descriptor(key_tile(load, step / 4), step % 4 * kStepContiguous), step > 0);
    mma_commit();
    score_pipe.wait_empty(score);
    mma_wait<0>();
    with_warp(warp, [&](auto w) { store_scores<decltype(w)::value>(qk, score.stage); });
    warp_arrive(score_pipe.full(score.stage));
  }
  template <int I>
  GD_DEVICE void store_scores(const float (&qk)[32], int stage) const {
    const int g = lane >> 2, column = (lane & 3) * 2;
#pragma unroll
    for (int J = 0; J < I; ++J) {
      const float* c = qk + 8 * J;
      stmatrix(score_block(stage, I, J), pack<Elem>(c[0], c[1]), pack<Elem>(c[2], c[3]), pack<Elem>(c[4], c[5]),
               pack<Elem>(c[6], c[7]));
    }
    const float* c = qk + 8 * I;
    stmatrix(score_block(stage, I, I), pack<Elem>(column <= g ? c[0] : 0.0f, column < g ? c[1] : 0.0f),
             pack<Elem>(c[2], c[3]), 0, pack<Elem>(column <= g ? c[6] : 0.0f, column < g ? c[7] : 0.0f));
  }

  GD_DEVICE void build_x(int load, const PipelineState<kOperandStages>& operand) const {
    const uint32_t T = inverse_at(load);
    float2 scale[8];
    float x[32];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mma_fence();
      multiply_keys(x, load, half, T);
      if (half == 0) {
#pragma unroll
        for (int J = 0; J < 4; ++J) find_scale(scale[2 * J], scale[2 * J + 1], load, J);
        operand_pipe.wait_empty(operand);
      }
      mma_wait<0>();
#pragma unroll
      for (int J = 0; J < 4; ++J) store_x(x + 8 * J, scale[2 * J], scale[2 * J + 1], J, half, operand.stage);
    }
    publish_operand(load, operand.stage);
  }
  // Without beta in a backward, which multiplies by it where it can.
  GD_DEVICE void find_scale(float2& a, float2& b, int load, int J) const {
    if constexpr (kReverse) {
      const uint32_t log_gamma = vector(load, kLogGamma), here = log_gamma + 8 * (lane & 3) + J * 64;
      const float last = load_shared(log_gamma + 63 * 4);
      const float2 first = load_shared2(here), second = load_shared2(here + 32);
      a = make_float2(exp2_approx(last - first.x), exp2_approx(last - first.y));
      b = make_float2(exp2_approx(last - second.x), exp2_approx(last - second.y));
      return;
    }
    const uint32_t tail = vector(load, kBetaTail) + 8 * (lane & 3) + J * 64;
    const float after = decay_after_block(load, J);
    const float2 first = load_shared2(tail), second = load_shared2(tail + 32);
    a = make_float2(first.x * after, first.y * after);
    b = make_float2(second.x * after, second.y * after);
  }
  // This warp's part of an operand is in place, and it needs K, Q and T no more.
  GD_DEVICE void publish_operand(int load, int operand) const {
    fence_async_shared();
    __syncwarp();
    if (is_arriving()) {
      barrier_arrive(operand_pipe.full(operand));
      barrier_arrive(load_pipe.empty(load));
    }
  }

  // Rows [64 half, ...) of K^T T. T is lower triangular: of its block row I only the first I + 1 blocks are there. The
  // full one comes first because it sets the accumulators.
  GD_DEVICE void multiply_keys(float (&x)[32], int load, int half, uint32_t T) const {
    const uint32_t K = key_tile(load, half);
    Mma64::template ss<true, true>(x, tile_descriptor(K, 3 * kStepRows), triangle_descriptor(T, 3), false);
    Wgmma<Elem, 48>::template ss<true, true>(x, tile_descriptor(K, 2 * kStepRows), triangle_descriptor(T, 2), true);
    Wgmma<Elem, 32>::template ss<true, true>(x, tile_descriptor(K, kStepRows), triangle_descriptor(T, 1), true);
    Wgmma<Elem, 16>::template ss<true, true>(x, tile_descriptor(K, 0), triangle_descriptor(T, 0), true);
    mma_commit();
  }

  // From the last token of a block of 16 to the chunk's last.
  GD_DEVICE float decay_after_block(int load, int J) const {
    const uint32_t log_gamma = vector(load, kLogGamma);
    return J == 3 ? 1.0f : exp2_approx(load_shared(log_gamma + 63 * 4) - load_shared(log_gamma + (16 * J + 15) * 4));
  }

  GD_DEVICE void store_x(const float* c, float2 a, float2 b, int J, int half, int operand) const {
    const uint32_t at =
        x_tile(operand) + half * kTileBytes + tile_offset(16 * warp + block_row(lane), block_column(lane));
    stmatrix(at ^ (J * 32), pack<Elem>(a.x * c[0], a.y * c[1]), pack<Elem>(a.x * c[2], a.y * c[3]),
             pack<Elem>(b.x * c[4], b.y * c[5]), pack<Elem>(b.x * c[6], b.y * c[7]));
  }

  // ---- scores: R = gates o (tril(Q K^T) T) -------------------------------------------------------------------------

  // Its first warps have the least to do with R: they also keep the loads going, K and Q one chunk ahead of V.
  GD_DEVICE void run_scores() const {
    PipelineState<kLoadStages> load;
    PipelineState<kOperandStages> operand;
    PipelineState<kScoreStages> score;
    Loader loader{};
    if (warp == 0) {
      if constexpr (kHasDryRun) {
        publish_dry_run(loader);
      } else {
        get_initial_work(loader);
      }
    }
    WorkPipelineState work;
    for (int i = get_next_work(work); i != kEndOfWork; i = get_next_work(work)) {
      const bool joins = work_item(i).kind == kMerge, is_dry_run = kHasDryRun && work_item(i).kind == kDryRun;
      int plain = state_only_tokens(work_item(i)), warmup_tokens = work_item(i).warmup_tokens;
#pragma unroll 1
      for (int rows = work_item(i).tokens; rows > 0;
           rows -= kChunkTokens, plain -= kChunkTokens, warmup_tokens -= kChunkTokens) {
        if (warp == 0) load_ahead(loader, load, joins ? 3 : 2);
        if (warp == 1) {
          if (is_dry_run) {
            barrier_arrive(value_pipe.full(load.stage));
          } else {
            load_values(Chunk::of(work_item(i), rows), load);
          }
        }
        if (kPass == Pass::kStates && warmup_tokens <= 0) {
          build_writes(load, operand);
        } else if (kPass == Pass::kStates || plain > 0) {
          load_pipe.wait_full(load);
          if (joins) {
            warp_arrive(load_pipe.empty(load.stage));
          } else {
            operand_pipe.wait_empty(operand);
            publish_operand(load.stage, operand.stage);
          }
        } else {
          build_r(load, score, operand);
          score.advance();
        }
        load.advance();
        if (!joins) operand.advance();
      }
      if (is_dry_run) {
        wait_for_previous_kernel();
        if (warp == 0) get_initial_work(loader);
      }
    }
  }

  // Of the states, what a chunk that is not silent writes is kept. Then beta^-1 T_g beta has R's place: its diagonal is
  // 1, which no rounding touches. (Where beta is next to nothing, so is what the chunk writes.)
  GD_DEVICE void build_writes(const PipelineState<kLoadStages>& load,
                              const PipelineState<kOperandStages>& operand) const {
    load_pipe.wait_full(load);
    RowFactors factors;
    float t[32];
    with_warp(warp, [&](auto w) {
      find_factors<decltype(w)::value>(factors, load.stage);
      load_inverse<decltype(w)::value>(t, load.stage);
    });
    operand_pipe.wait_empty(operand);
    with_warp(warp, [&](auto w) { store_r<decltype(w)::value>(t, factors, operand.stage, load.stage); });
    publish_operand(load.stage, operand.stage);
  }
  template <int I>
  GD_DEVICE void load_inverse(float (&t)[32], int stage) const {
    const int lane = opaque_lane();
    const uint32_t from = inverse_at(stage) + triangle_block(I, 0) + block_offset(block_row(lane), block_column(lane));
#pragma unroll
    for (int J = 0; J <= I; ++J) {
      uint32_t block[4];
      ldmatrix(block, from + J * kBlockBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = unpack<Elem>(block[i]);
        t[8 * J + 2 * i] = two.x;
        t[8 * J + 2 * i + 1] = two.y;
      }
    }
  }

  GD_DEVICE void build_r(const PipelineState<kLoadStages>& load, const PipelineState<kScoreStages>& score,
                         const PipelineState<kOperandStages>& operand) const {
    load_pipe.wait_full(load);
    RowFactors factors;  // ready before the scores are, so that little is left to do once the product is there
    with_warp(warp, [&](auto w) { find_factors<decltype(w)::value>(factors, load.stage); });
    score_pipe.wait_full(score);
    uint32_t a[16];
    with_warp(warp, [&](auto w) { load_scores<decltype(w)::value>(a, score.stage); });
    const uint32_t T = inverse_at(load.stage);
    float r[32];
    mma_fence();
    Mma64::template rs<true>(r, a + 12, triangle_descriptor(T, 3), false);
    Wgmma<Elem, 48>::template rs<true>(r, a + 8, triangle_descriptor(T, 2), true);
    Wgmma<Elem, 32>::template rs<true>(r, a + 4, triangle_descriptor(T, 1), true);
    Wgmma<Elem, 16>::template rs<true>(r, a, triangle_descriptor(T, 0), true);
    mma_commit();
    warp_arrive(score_pipe.empty(score.stage));
    operand_pipe.wait_empty(operand);
    mma_wait<0>();
    with_warp(warp, [&](auto w) { store_r<decltype(w)::value>(r, factors, operand.stage, load.stage); });
    publish_operand(load.stage, operand.stage);
  }
  template <int I>
  GD_DEVICE void load_scores(uint32_t (&a)[16], int stage) const {
#pragma unroll
    for (int J = 0; J < 4; ++J) {
      uint32_t block[4] = {0, 0, 0, 0};
      if (J <= I) ldmatrix(block, score_block(stage, I, J));
#pragma unroll
      for (int i = 0; i < 4; ++i) a[4 * J + i] = block[i];
    }
  }

  // What a thread's numbers of block row I of R are scaled by, left of the diagonal block. There e^{b_i - b_j} is split
  // at the last token of j's block and the first of i's: no factor is above 1, and there are fewer of them.
  GD_DEVICE float row_scale(int load, int row) const {
    if constexpr (kPass == Pass::kStates) {
      constexpr float kNothing = 1e-20f;
      const float beta = load_shared(vector(load, kBeta) + row * 4);
      return fabsf(beta) < kNothing ? 0.0f : __fdividef(1.0f, beta * load_shared(vector(load, kKeyNorm) + row * 4));
    }
    return load_shared(vector(load, kScoreScale) + row * 4);
  }
  struct RowFactors {
    float2 rows;           // for both of its rows
    float2 columns[3][2];  // [J], for two columns in both halves of the block
  };
  template <int I>
  GD_DEVICE void find_factors(RowFactors& f, int load) const {
    if constexpr (I > 0) {
      const int lane = opaque_lane(), row = 16 * I + (lane >> 2), column = (lane & 3) * 2;
      const uint32_t log_gamma = vector(load, kLogGamma);
      const float reference = load_shared(log_gamma + 16 * I * 4);
      f.rows = make_float2(row_scale(load, row) * exp2_approx(load_shared(log_gamma + row * 4) - reference),
                           row_scale(load, row + 8) * exp2_approx(load_shared(log_gamma + (row + 8) * 4) - reference));
#pragma unroll
      for (int J = 0; J < I; ++J) {
        const float between = exp2_approx(reference - load_shared(log_gamma + (16 * J + 15) * 4));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t at = (16 * J + 8 * half + column) * 4;
          if constexpr (kReverse) {
            const float2 b = load_shared2(log_gamma + at);
            f.columns[J][half] = make_float2(exp2_approx(reference - b.x), exp2_approx(reference - b.y));
          } else {
            const float2 tail = load_shared2(vector(load, kBetaTail) + at);
            f.columns[J][half] = make_float2(between * tail.x, between * tail.y);
          }
        }
      }
    }
  }
  // On the diagonal what lies above is left out by selection, never by a product.
  template <int I>
  GD_DEVICE void store_r(const float (&r)[32], const RowFactors& f, int operand, int load) const {
    const int lane = opaque_lane(), g = lane >> 2, column = (lane & 3) * 2, row = 16 * I + g, here = 16 * I + column;
    const uint32_t at = r_tile(operand) + tile_offset(16 * I + block_row(lane), block_column(lane));
    const uint32_t log_gamma = vector(load, kLogGamma), beta = vector(load, kBeta);
    const float b0 = load_shared(log_gamma + row * 4), b1 = load_shared(log_gamma + (row + 8) * 4);
    const float s0 = row_scale(load, row), s1 = row_scale(load, row + 8);
    const float2 b = load_shared2(log_gamma + here * 4), d = load_shared2(log_gamma + (here + 8) * 4);
    float2 w = make_float2(1, 1), x = w;
    if constexpr (!kReverse) {
      w = load_shared2(beta + here * 4);
      x = load_shared2(beta + (here + 8) * 4);
    }
#pragma unroll
    for (int J = 0; J < I; ++J) {
      const float* c = r + 8 * J;
      const float2 i = f.rows, p = f.columns[J][0], q = f.columns[J][1];
      stmatrix(at ^ (J * 32), pack<Elem>(c[0] * (i.x * p.x), c[1] * (i.x * p.y)),
               pack<Elem>(c[2] * (i.y * p.x), c[3] * (i.y * p.y)), pack<Elem>(c[4] * (i.x * q.x), c[5] * (i.x * q.y)),
               pack<Elem>(c[6] * (i.y * q.x), c[7] * (i.y * q.y)));
    }
    const float* c = r + 8 * I;
    float e0 = column <= g ? c[0] * s0 * w.x * exp2_approx(b0 - b.x) : 0.0f;
    float e1 = column < g ? c[1] * s0 * w.y * exp2_approx(b0 - b.y) : 0.0f;
    float e6 = column <= g ? c[6] * s1 * x.x * exp2_approx(b1 - d.x) : 0.0f;
    float e7 = column < g ? c[7] * s1 * x.y * exp2_approx(b1 - d.y) : 0.0f;
    if constexpr (kPass == Pass::kStates) {
      if (column == g) e0 = e6 = 1;
      if (column + 1 == g) e1 = e7 = 1;
    }
    stmatrix(at ^ (I * 32), pack<Elem>(e0, e1),
             pack<Elem>(c[2] * s1 * w.x * exp2_approx(b1 - b.x), c[3] * s1 * w.y * exp2_approx(b1 - b.y)), 0,
             pack<Elem>(e6, e7));
  }

  // ---- math --------------------------------------------------------------------------------------------------------

  // S^T: rows are value columns, columns are key dimensions.
  struct State {
    float s[64];
    uint32_t packed[32];
    uint32_t value_offset, vector_offset;  // where this thread finds V and leaves O in a tile; its columns in a vector
    int merge_steps = 0;                   // steps of joins so far
  };

  template <class Body>
  GD_DEVICE void for_each_item(int math_wg, const Body& body) const {
    PipelineState<kLoadStages> load;  // values too
    static_assert(int{kValueStages} == int{kLoadStages});
    PipelineState<kOperandStages> operand;
    State state;
    state.value_offset = opaque(tile_offset(transposed_row(lane), 16 * warp + transposed_column(lane)));
    state.vector_offset = opaque(8 * (lane & 3));
    int storing_stage = -1;  // the slot that O is being sent from
    WorkPipelineState work;
    for (int i = get_next_work(work); i != kEndOfWork; i = get_next_work(work)) {
      const WorkItem& item = work_item(i);
      if (item.kind == kMerge) {
        merge(state, math_wg, item, load, storing_stage);
        continue;
      }
      Chunk chunk = first_chunk_of(item);
      const bool is_identity = item.kind == kTransition && math_wg == 1;
      const int half = is_identity ? chunk.half : half_of(chunk, math_wg);
      if (half < 0) {
#pragma unroll 1
        for (; chunk.tokens_left > 0; chunk = chunk.next()) {
          skip_chunk(load, operand, storing_stage);
          load.advance();
          operand.advance();
        }
        continue;
      }
      if (is_identity) {
        begin_identity(state.s, half);
      } else {
        begin_state(state.s, item, half);
      }
      pack_state(state);
      body(i, item, chunk, half, is_identity, state, load, operand, storing_stage);
    }
    if (warp == 0 && elect_one()) store_wait_read<0>();
  }
  GD_DEVICE void run_math(int math_wg) const {
    for_each_item(math_wg,
                  [&](int i, const WorkItem& item, Chunk chunk, int half, bool is_identity, State& state,
                      PipelineState<kLoadStages>& load, PipelineState<kOperandStages>& operand, int& storing_stage) {
#pragma unroll 1
                    for (; chunk.is_warmup(); chunk = chunk.next()) {
                      advance_warmup(state, math_wg, load, operand, !is_identity, storing_stage);
                      load.advance();
                      operand.advance();
                    }
                    // From checkpoint to checkpoint, so that chunks need not jump over the code of one.
                    const int first = chunk.token;
#pragma unroll 1
                    while (chunk.tokens_left > 0) {
                      const int until = rows_at_checkpoint(i, chunk);
#pragma unroll 1
                      do {
                        advance(state, math_wg, load, operand, chunk, chunk.token > first, storing_stage);
                        load.advance();
                        operand.advance();
                        chunk = chunk.next();
                      } while (chunk.tokens_left > until);
                      if (p.checkpoint_every) store_checkpoint(state.s, i, math_wg, chunk);
                    }
                    if (item.kind == kOutputs) {
                      release_value_stage(storing_stage);
                      store_last_output(math_wg, chunk.before(), load.previous_stage());
                      storing_stage = load.previous_stage();
                    }
                    if (item.kind == kDryRun) {
                      storing_stage = load.previous_stage();
                      wait_for_previous_kernel();
                      copy_empty_sequences(state, math_wg);
                    } else if (is_identity) {
                      store_transition(state, math_wg, half, load.previous_stage(), item.to);
                    } else {
                      end_state(state.s, math_wg, item, half);
                    }
                  });
  }

  // A chunk of which this warpgroup has no columns.
  GD_DEVICE void skip_chunk(const PipelineState<kLoadStages>& load, const PipelineState<kOperandStages>& operand,
                            int& storing_stage) const {
    load_pipe.wait_full(load);
    warp_arrive(load_pipe.empty(load.stage));
    skip_values(load, storing_stage);
    operand_pipe.wait_full(operand);
    warp_arrive(operand_pipe.empty(operand.stage));
  }
  GD_DEVICE void skip_values(const PipelineState<kLoadStages>& load, int& storing_stage) const {
    release_value_stage(storing_stage);
    storing_stage = -1;
    barrier_wait(value_pipe.full(load.stage), load.phase);
    warp_arrive(value_pipe.empty(load.stage));
  }

  // Sequences without a token: their states are handed on.
  GD_DEVICE void copy_empty_sequences(State& state, int math_wg) const {
    for (int n = blockIdx.x; n < p.sequences.count; n += gridDim.x) {
      if (p.sequences[n].length > 0 || p.is_padding(n)) continue;
#pragma unroll 1
      for (int i = math_wg; i < 2 * p.value_heads; i += kMathWarpgroups) {
        load_state(state.s, p.initial, p.initial.slot(n), i / 2, i % 2);
        store_state(p.final, p.final.slot(n), i / 2, i % 2, state.s);
      }
    }
  }

  GD_DEVICE static void pack_state(State& state) {
#pragma unroll
    for (int i = 0; i < 32; ++i) state.packed[i] = pack<Elem>(state.s[2 * i], state.s[2 * i + 1]);
  }

  // (tile S)^T of a tile of both halves of the columns, kRows of them; a group of its own.
  template <int kRows>
  GD_DEVICE static void multiply_state(float* to, const State& state, uint32_t tile) {
#pragma unroll
    for (int step = 0; step < 8; ++step)
      Wgmma<Elem, kRows>::template rs<false>(
          to, state.packed + 4 * step, tile_descriptor(tile + step / 4 * 2 * kTileBytes, step % 4 * kStepContiguous),
          step > 0);
    mma_commit();
  }

  GD_DEVICE void decay_state(State& state, int load) const {
    const float gamma_L = exp2_approx(load_shared(vector(load, kLogGamma) + 63 * 4));
#pragma unroll
    for (int i = 0; i < 64; ++i) state.s[i] *= gamma_L;
  }
  GD_DEVICE void load_values_transposed(uint32_t (&v)[16], uint32_t from) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) ldmatrix_trans(v + 4 * n, from + n * 2048);
  }
  GD_DEVICE void load_scales(float2 (&scale)[8], uint32_t from) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) scale[n] = load_shared2(from + n * 32);
  }
  // W = V - gamma o (K S), transposed.
  GD_DEVICE static void subtract(uint32_t (&w)[16], const uint32_t (&v)[16], const float2 (&scale)[8],
                                 const float* ks) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float* c = ks + 4 * n;
      const float2 v0 = unpack<Elem>(v[2 * n]), v1 = unpack<Elem>(v[2 * n + 1]), a = scale[n];
      w[2 * n] = pack<Elem>(v0.x - a.x * c[0], v0.y - a.y * c[1]);
      w[2 * n + 1] = pack<Elem>(v1.x - a.x * c[2], v1.y - a.y * c[3]);
    }
  }
  GD_DEVICE void add_written(State& state, const uint32_t (&w)[16], int operand) const {
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Wgmma<Elem, 128>::template rs<false>(state.s, w + 4 * step,
                                           tile_descriptor(x_tile(operand), step * kStepContiguous), true);
    mma_commit();
  }

  // A chunk without outputs; of M, which is a state without values.
  GD_DEVICE void advance_warmup(State& state, int math_wg, const PipelineState<kLoadStages>& load,
                                const PipelineState<kOperandStages>& operand, bool has_values,
                                int& storing_stage) const {
    float ks[32];
    uint32_t w[16], v[16];
    float2 scale[8];
    load_pipe.wait_full(load);
    mma_fence();
    multiply_state<64>(ks, state, key_tile(load.stage, 0));
    release_value_stage(storing_stage);
    storing_stage = -1;
    barrier_wait(value_pipe.full(load.stage), load.phase);
    if (has_values) {
      load_values_transposed(v, value_tile(load.stage, math_wg) + state.value_offset);
    } else {
#pragma unroll
      for (int n = 0; n < 16; ++n) v[n] = 0;
    }
    load_scales(scale, vector(load.stage, kReadKey) + state.vector_offset);
    mma_wait<0>();
    subtract(w, v, scale, ks);
    if (has_values) {
      warp_arrive(value_pipe.empty(load.stage));
    } else {
      storing_stage = load.stage;  // M may have to leave through it
    }
    decay_state(state, load.stage);
    operand_pipe.wait_full(operand);
    mma_fence();
    add_written(state, w, operand.stage);
    warp_arrive(load_pipe.empty(load.stage));
    mma_wait<0>();
    pack_state(state);
    warp_arrive(operand_pipe.empty(operand.stage));
  }

  GD_DEVICE void advance(State& state, int math_wg, const PipelineState<kLoadStages>& load,
                         const PipelineState<kOperandStages>& operand, const Chunk& chunk, bool has_before,
                         int& storing_stage) const {
    float qk[64];  // (Q S)^T, the beginning of O, then (K S)^T
    uint32_t w[16], v[16];
    float2 scale[8];
    load_pipe.wait_full(load);
    mma_fence();
    multiply_state<64>(qk + 32, state, key_tile(load.stage, 0));
    release_value_stage(storing_stage);
    storing_stage = -1;
    // What W needs is fetched while K S still runs.
    barrier_wait(value_pipe.full(load.stage), load.phase);
    load_values_transposed(v, value_tile(load.stage, math_wg) + state.value_offset);
    load_scales(scale, vector(load.stage, kReadKey) + state.vector_offset);
    mma_wait<0>();
    subtract(w, v, scale, qk + 32);
    materialize(w);
    mma_fence();
    multiply_state<64>(qk, state, query_tile(load.stage, 0));
    mma_wait<1>();
    decay_state(state, load.stage);  // earlier it would only be moved down to here
    // S += X^T W, on top of gamma_L S.
    operand_pipe.wait_full(operand);
    mma_fence();
    add_written(state, w, operand.stage);
    // O = s gamma o (Q S)^T + R W. Without norms the factors are those of W, times s.
    if (p.l2norm) {
      load_scales(scale, vector(load.stage, kReadQuery) + state.vector_offset);
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) scale[n] = make_float2(p.scale * scale[n].x, p.scale * scale[n].y);
    }
    mma_wait<1>();
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      qk[4 * n] *= scale[n].x;
      qk[4 * n + 1] *= scale[n].y;
      qk[4 * n + 2] *= scale[n].x;
      qk[4 * n + 3] *= scale[n].y;
    }
    warp_arrive(load_pipe.empty(load.stage));
    mma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Mma64::template rs<false>(qk, w + 4 * step, tile_descriptor(r_tile(operand.stage), step * kStepContiguous), true);
    mma_commit();
    if (has_before) {  // no earlier: it takes its time, and these products theirs
      store_output(math_wg, chunk.before(), load.previous_stage());
      storing_stage = load.previous_stage();
    }
    mma_wait<1>();
    pack_state(state);
    materialize(state.packed);
    mma_wait<0>();
    warp_arrive(operand_pipe.empty(operand.stage));
    stage_output(qk, value_tile(load.stage, math_wg) + state.value_offset);
  }

  // Has the numbers computed here: ptxas would rather pack them behind the next products, where they are needed, and
  // nothing is left to hide it. A use that has an effect, if never one that matters, keeps them before.
  template <int kCount>
  GD_DEVICE static void materialize(const uint32_t (&x)[kCount]) {
    uint32_t all = x[0] ^ x[kCount - 1];
#pragma unroll
    for (int i = 1; i < kCount - 1; i += 2) all ^= x[i] ^ x[i + 1];
    asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0x7fc17fc1;\n@p nanosleep.u32 0;}" ::"r"(all) : "memory");
  }

  // O^T to the slot V came in: a warp writes where only it has read.
  GD_DEVICE static void stage_output(const float* o, uint32_t at) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* c = o + 8 * n;
      stmatrix_trans(at + n * 2048, pack<Elem>(c[0], c[1]), pack<Elem>(c[2], c[3]), pack<Elem>(c[4], c[5]),
                     pack<Elem>(c[6], c[7]));
    }
  }
  // From there to memory, while the next chunk is worked on: only one warp has to wait for the others. No warp is two
  // chunks ahead of another (operands.empty waits for all), so none comes to a slot's barrier twice before all came
  // once.
  GD_DEVICE void store_output(int math_wg, const Chunk& chunk, int stage) const {
    const int barrier = kOutputStaged + math_wg * kValueStages + stage;
    fence_async_shared();
    if (warp != 0) return named_barrier_arrive(barrier, 128);
    named_barrier_sync(barrier, 128);
    store_output_tile(math_wg, chunk, stage);
  }
  // The item's last chunk, all of it or its first rows. All wait for all, at a barrier of its own.
  GD_DEVICE void store_last_output(int math_wg, const Chunk& chunk, int stage) const {
    fence_async_shared();
    named_barrier_sync(kItemDone + math_wg, 128);
    if (chunk.is_whole()) {
      if (warp == 0) store_output_tile(math_wg, chunk, stage);
      return;
    }
    if (!p.o.data) return;
    const uint32_t tile = value_tile(stage, math_wg);
    auto* to = static_cast<uint16_t*>(p.o.data) + p.o.offset(chunk.batch, chunk.token, chunk.head) +
               half_of(chunk, math_wg) * 64;
#pragma unroll 1
    for (int i = tid; i < chunk.tokens() * 8; i += 128)
      *reinterpret_cast<uint4*>(to + i / 8 * p.o.token_stride + i % 8 * 8) =
          load_shared_words(tile + tile_offset(i / 8, i % 8 * 8));
    named_barrier_sync(kItemDone + math_wg, 128);  // before the slot is given back
  }
  GD_DEVICE void store_output_tile(int math_wg, const Chunk& chunk, int stage) const {
    if (!p.o.data || !elect_one()) return;
    tma_store(&p.o_map, value_tile(stage, math_wg), chunk.head, chunk.token, chunk.batch, half_of(chunk, math_wg));
    store_commit();
  }
  // Once the copy engine has read the slot, which the first warp has asked it to.
  GD_DEVICE void release_value_stage(int stage) const {
    if (stage < 0 || !is_arriving()) return;
    if (warp == 0) store_wait_read<0>();
    barrier_arrive(value_pipe.empty(stage));
  }

  // ---- pieces of sequences -----------------------------------------------------------------------------------------

  // This warpgroup's part of what lies in the workspace at a boundary: floats as the threads hold them.
  GD_DEVICE float4* boundary_state(int boundary, int half) const {
    return reinterpret_cast<float4*>(p.boundaries + int64_t{boundary} * kBoundaryBytes + (2 + half) * kStateTileBytes) +
           tid;
  }
  GD_DEVICE void load_boundary(float (&s)[64], int boundary, int half) const {
    const float4* from = boundary_state(boundary, half);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float4 x = __ldcg(from + i * 128);
      s[4 * i] = x.x;
      s[4 * i + 1] = x.y;
      s[4 * i + 2] = x.z;
      s[4 * i + 3] = x.w;
    }
  }
  GD_DEVICE void store_boundary(const float (&s)[64], int boundary, int half) const {
    float4* to = boundary_state(boundary, half);
#pragma unroll
    for (int i = 0; i < 16; ++i) to[i * 128] = make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
  }
  GD_DEVICE void wait_until(const int* counter, int value) const {
    while (load_acquire(counter) < value) pause();
    __syncwarp();
  }

  GD_DEVICE void begin_state(float (&s)[64], const WorkItem& item, int half) const {
    if (item.from >= 0) {
      wait_until(p.boundary_ready + item.from, kStateReady);
      return load_boundary(s, item.from, half);
    }
    if constexpr (kPass == Pass::kStates)
      if (item.from == kFromSaved) return load_state(s, p.checkpoints, item.seq_head, item.head, half);
    load_state(s, p.initial, item.from == kFromInitial ? p.initial.slot(item.sequence) : -1, item.head, half);
  }
  GD_DEVICE void begin_identity(float (&s)[64], int half) const {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const Place at = accumulator_place(lane, i);
      s[i] = at.column == half * 64 + warp * 16 + at.row ? 1.0f : 0.0f;
    }
  }
  GD_DEVICE void end_state(const float (&s)[64], int math_wg, const WorkItem& item, int half) const {
    if (item.to >= 0) {
      store_boundary(s, item.to, half);
      named_barrier_sync(kItemDone + math_wg, 128);
      if (tid == 0) add_release(p.boundary_ready + item.to, item.kind == kTransition ? 1 : kStateReady / 2);
      return;
    }
    if (item.to == kToFinal) {
      if (item.readers > 0) wait_until(p.initial_read + item.seq_head, item.readers);
      return store_state(p.final, p.final.slot(item.sequence), item.head, half, s);
    }
    if (item.from != kFromInitial || !p.final.data) return;
    named_barrier_sync(kItemDone + math_wg, 128);
    if (tid == 0) add_release(p.initial_read + item.seq_head, 1);
  }

  // M^T as the threads hold it becomes the operand of a join, in two parts of 16 bits, through the slot that V would
  // have come in.
  GD_DEVICE void store_transition(const State& state, int math_wg, int half, int stage, int boundary) const {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int rows = 0; rows < 2; ++rows) {
        float x[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const float y = state.s[32 * rows + i];
          x[i] = part == 0 ? y : y - high_part(y);
        }
        stage_output(x, value_tile(stage, math_wg) + state.value_offset);
        fence_async_shared();
        named_barrier_sync(kItemDone + math_wg, 128);
        if (warp == 0 && elect_one()) {
          bulk_store(p.boundaries + (int64_t{boundary} * kBoundaryTiles + part) * kStateTileBytes +
                         (half * 2 + rows) * kTileBytes,
                     value_tile(stage, math_wg), kTileBytes);
          store_commit();
          store_wait<0>();
          if (part == 1 && rows == 1) {
            fence_async_global();
            add_release(p.boundary_ready + boundary, 1);
          }
        }
        named_barrier_sync(kItemDone + math_wg, 128);
      }
    }
  }
  GD_DEVICE static float high_part(float x) { return static_cast<float>(static_cast<Elem>(x)); }

  // S <- M S + S_loc for one segment after the other, half of the columns; with M and S in two parts each, which is
  // nearly fp32's accuracy. The second warpgroup has nothing to do with it.
  GD_DEVICE void merge(State& state, int math_wg, const WorkItem& item, PipelineState<kLoadStages>& load,
                       int& storing_stage) const {
    if (math_wg != 0) return publish_merged(state, item, load, storing_stage);
    const int half = item.key_head;
    wait_until(p.boundary_ready + item.from, kStateReady);
    load_boundary(state.s, item.from, half);
    int boundary = item.to;
#pragma unroll 1
    for (int rows = item.tokens; rows > 0; rows -= kMergeTiles * kChunkTokens, ++boundary) {
      uint32_t lower[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float a = state.s[2 * i], b = state.s[2 * i + 1];
        state.packed[i] = pack<Elem>(a, b);
        const float2 upper = unpack<Elem>(state.packed[i]);
        lower[i] = pack<Elem>(a - upper.x, b - upper.y);
      }
      load_pipe.wait_full(load);
      mma_fence();
      multiply_state<128>(state.s, state, query_tile(load.stage, 0));
      add_products(state.s, lower, query_tile(load.stage, 0));
      mma_wait<0>();
      release_merge_tile(load, storing_stage);
      load_pipe.wait_full(load);
      mma_fence();
      add_products(state.s, state.packed, query_tile(load.stage, 0));
      mma_wait<0>();
      release_merge_tile(load, storing_stage);
      load_pipe.wait_full(load);
      add_boundary(state.s, query_tile(load.stage, 0));
      release_merge_tile(load, storing_stage);
      store_boundary(state.s, boundary, half);
      warp_arrive(merge_pipe.full(state.merge_steps % kMergeStages));
      ++state.merge_steps;
    }
  }
  // The other warpgroup tells of it, which takes as long as a step: until the state is in memory. Two warps do that in
  // turn, a third hands back the images for all of them, and does not run away from those two.
  GD_DEVICE void publish_merged(State& state, const WorkItem& item, PipelineState<kLoadStages>& load,
                                int& storing_stage) const {
    release_value_stage(storing_stage);
    storing_stage = -1;
    int boundary = item.to;
#pragma unroll 1
    for (int rows = item.tokens; rows > 0; rows -= kMergeTiles * kChunkTokens, ++boundary, ++state.merge_steps) {
      const int stage = state.merge_steps % kMergeStages;
      if (warp == kMergeStages && state.merge_steps > 0)
        barrier_wait(merge_pipe.empty(stage ^ 1), (state.merge_steps - 1) / kMergeStages & 1);
#pragma unroll 1
      for (int snapshot = 0; snapshot < kMergeTiles; ++snapshot, load.advance())
        if (warp == kMergeStages) release_merge_tile_for_all(load);
      if (warp != stage) continue;
      barrier_wait(merge_pipe.full(stage), state.merge_steps / kMergeStages & 1);
      if (!elect_one()) continue;
      barrier_arrive(merge_pipe.empty(stage));
      add_release(p.boundary_ready + boundary, 2);
    }
    named_barrier_sync(kItemDone + 1, 128);  // nobody looks for what comes next before all images have come
  }
  GD_DEVICE void release_merge_tile_for_all(const PipelineState<kLoadStages>& load) const {
    load_pipe.wait_full(load);
    barrier_wait(value_pipe.full(load.stage), load.phase);
    if (!elect_one()) return;
    barrier_arrive(value_pipe.empty(load.stage), 4 * kArrivals);
    barrier_arrive(load_pipe.empty(load.stage), 4 * kArrivals);
  }
  GD_DEVICE void release_merge_tile(PipelineState<kLoadStages>& load, int& storing_stage) const {
    skip_values(load, storing_stage);
    warp_arrive(load_pipe.empty(load.stage));
    load.advance();
  }
  GD_DEVICE void add_boundary(float (&s)[64], uint32_t from) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float4 x = load_shared4(from + (i * 128 + tid) * 16);
      s[4 * i] += x.x;
      s[4 * i + 1] += x.y;
      s[4 * i + 2] += x.z;
      s[4 * i + 3] += x.w;
    }
  }
  GD_DEVICE static void add_products(float (&to)[64], const uint32_t (&a)[32], uint32_t tile) {
#pragma unroll
    for (int step = 0; step < 8; ++step)
      Wgmma<Elem, 128>::template rs<false>(
          to, a + 4 * step, tile_descriptor(tile + step / 4 * 2 * kTileBytes, step % 4 * kStepContiguous), true);
    mma_commit();
  }

  // A packed state to memory, as an operand without swizzle (tiles.hpp): what a warp has in one register is a line.
  // Some of it under a chunk's first product, the rest under its last: all at once, and whatever else the warps have to
  // do with memory waits until it is gone.
  static constexpr int kEarly = 16;
  template <int kBegin, int kEnd>
  GD_DEVICE void store_packed(const uint32_t (&packed)[32], uint8_t* snapshots, int prepared, int half) const {
    auto* to =
        reinterpret_cast<uint32_t*>(snapshots + int64_t{prepared} * kStateTileBytes) + (half * 4 + warp) * 1024 + lane;
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) to[i * 32] = packed[i];
  }

  // ---- states in memory --------------------------------------------------------------------------------------------

  // Calls f with a pointer to this thread's first number of the head's matrix in the slot and with the strides of value
  // columns and of key dimensions: constants, so that each of the 64 numbers is an offset in its instruction.
  template <class F>
  GD_DEVICE void with_matrix(const States& states, int64_t slot, int head, int half, const F& f) const {
    const int64_t matrix = slot * states.slot_stride + head * states.head_stride;
    const auto with_layout = [&](auto* data) {
      uint32_t thread;  // asked for again, so that nothing of it is kept in registers through all chunks
      asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
      const uint32_t v = half * 64 + thread / 32 % 4 * 16 + thread % 32 / 4, k = thread % 4 * 2;
      using One = std::integral_constant<int, 1>;
      using Row = std::integral_constant<int, kHeadDim>;
      if (p.state_value_first) {
        f(data + matrix + v * kHeadDim + k, Row{}, One{});
      } else {
        f(data + matrix + k * kHeadDim + v, One{}, Row{});
      }
    };
    if (states.dtype == GD_F32) {
      with_layout(static_cast<float*>(states.data));
    } else if (states.dtype == GD_BF16) {
      with_layout(static_cast<__nv_bfloat16*>(states.data));
    } else {
      with_layout(static_cast<__half*>(states.data));
    }
  }
  GD_DEVICE void load_state(float (&s)[64], const States& states, int64_t slot, int head, int half) const {
    if (slot < 0) {
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = 0;
      return;
    }
    with_matrix(states, slot, head, half, [&](const auto* from, auto v_stride, auto k_stride) {
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        const Place at = accumulator_place(0, i);
        s[i] = static_cast<float>(from[at.row * decltype(v_stride)::value + at.column * decltype(k_stride)::value]);
      }
    });
  }
  GD_DEVICE void store_state(const States& states, int64_t slot, int head, int half, const float (&s)[64]) const {
    if (slot < 0) return;
    with_matrix(states, slot, head, half, [&](auto* to, auto v_stride, auto k_stride) {
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        const Place at = accumulator_place(0, i);
        to[at.row * decltype(v_stride)::value + at.column * decltype(k_stride)::value] = s[i];
      }
    });
  }
  // How many rows are left at the next one, or none. The item is looked up again: in registers it would have to stay
  // through every chunk.
  GD_DEVICE int rows_at_checkpoint(int i, const Chunk& chunk) const {
    if (!p.checkpoint_every) return 0;
    const int64_t left = p.checkpoint_every - (chunk.token - work_item(i).origin) % p.checkpoint_every;
    return left < chunk.tokens_left ? chunk.tokens_left - static_cast<int>(left) : 0;
  }
  // Before the chunk at `at`, if there is one.
  GD_DEVICE void store_checkpoint(const float (&s)[64], int i, int math_wg, const Chunk& chunk) const {
    const WorkItem& item = work_item(i);
    const int64_t done = chunk.token - item.origin;
    if (chunk.tokens_left < 0 || done % p.checkpoint_every != 0) return;
    const int64_t entry = p.first_checkpoint[item.sequence] + done / p.checkpoint_every - 1;
    store_state(p.checkpoints, p.checkpoints.indices.data ? p.checkpoints.indices[entry] : entry, chunk.head,
                half_of(chunk, math_wg), s);
  }
};

// What the warpgroups of a block do: keys and scores are those of the forward, `math` is called by the others.
template <class Chain, class Math, class... More>
GD_DEVICE void run_roles(const CallParams& p, const Math& math, More... more) {
  extern __shared__ uint8_t dynamic_smem[];
  using Registers = ChainRegisters;
  uint32_t smem = tile_aligned(shared_address(dynamic_smem));
  asm volatile("" : "+r"(smem));  // or the compiler would rather find the address again, wherever it is used
  const Chain chain(p, __shfl_sync(~0u, smem, 0), more...);
  // Blocks of R above the diagonal are never written.
  for (int i = threadIdx.x; i < kOperandStages * kTileBytes / 16; i += kChainThreads)
    store_shared_words(chain.r_tile(0) + i * 16, make_uint4(0, 0, 0, 0));
  if (threadIdx.x == 0) chain.init_barriers();
  fence_async_shared();
  __syncthreads();
  chain.begin();
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (role == 0) {
    shrink_registers<Registers::kKeys>();
    chain.run_keys();
  } else if (role == 1) {
    shrink_registers<Registers::kScores>();
    chain.run_scores();
  } else {
    grow_registers<Registers::kMathWarpgroups>();
    math(chain, role - 2);
  }
  chain.end();
}

template <class Elem>
__global__ void __launch_bounds__(kChainThreads, 1) forward_kernel(const __grid_constant__ CallParams p) {
  run_roles<Forward<Elem>>(p, [](const Forward<Elem>& forward, int math_wg) { forward.run_math(math_wg); });
}

}  // namespace gatedelta::cuda

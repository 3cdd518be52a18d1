// The chain: a persistent kernel body that walks a head's chunks and carries its state. Pass selects what it is for:
// outputs (forward/), the states before every chunk, or the gradients of states (backward/). Per chunk, in the forward:
//   W = V - gamma o (K S)                 S <- gamma_L S + X^T W            O = s gamma o (Q S) + R W
//   X = delta beta o (T^T K)              R = s Gamma o (tril(Q K^T) T) o beta_j
// S^T stays in the registers of the math warpgroups (64 value columns each) as accumulators and is repacked in place as
// the register operand of the next products. The roles (config.hpp) meet only at pipelines of shared-memory stages with
// full and empty barriers, and at a few named barriers.
// CTAs take work items from a list (schedule/work_item.hpp): chunks of a sequence, perhaps after warm-up chunks that
// only advance the state; the transition M and local state S_loc of a segment, for which math warpgroup 1 starts from
// the identity and has no values; or the merge of those into the states at segment boundaries.
// Members are defined by role: work, loads, keys, scores, math, boundary, state_io (.cuh); roles.cuh runs them.
#pragma once

#include "cuda/sm90/chain/config.hpp"
#include "cuda/sm90/device.cuh"
#include "cuda/sm90/params.hpp"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace gatedelta::cuda::sm90 {

template <class Elem, Pass kPass>
struct Chain {
  static constexpr bool kReverse = kPass == Pass::kBackward;
  using Chunk = ChunkAt<kReverse>;
  using Smem = ChainSmem;
  using Mma64 = Wgmma<Elem, 64>;
  using LoadStage = PipelineState<kLoadStages>;  // position in the load and in the value pipeline
  using ScoreStage = PipelineState<kScoreStages>;
  using OperandStage = PipelineState<kOperandStages>;
  static_assert(int{kValueStages} == int{kLoadStages});

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
  const MergePipe merge_pipe;  // full: a merged state is stored; empty: a warp has begun to publish it

  GD_DEVICE Chain(const CallParams& params, uint32_t base)
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

  // Producers of loads arrive once per lane of the loading warp, all other roles once per warp.
  GD_DEVICE void init_barriers() const {
    constexpr int kMathWarps = 4 * kMathWarpgroups * kArrivals, kOtherWarps = 8 * kArrivals;
    load_pipe.init(32, kOtherWarps + kMathWarps);
    value_pipe.init(32, kMathWarps);
    score_pipe.init(4 * kArrivals, 4 * kArrivals);
    operand_pipe.init(kOtherWarps, kMathWarps);
    work_pipe.init(32, kOtherWarps + kMathWarps);
    merge_pipe.init(4 * kArrivals, 1);
    barrier_init_fence();
  }

  // With PDL, CTAs start before the work list exists. They use the wait for a dry-run chunk (all barriers, no loads or
  // stores) that warms the instruction cache. The states chain has no such wait: its list exists when it starts.
  static constexpr bool kHasDryRun = kPass != Pass::kStates;
  // begin: before the first read of global memory. end: after the last role has finished.
  GD_DEVICE static void begin() {
    if constexpr (!kHasDryRun) wait_for_previous_kernel();
  }
  GD_DEVICE static void end() {}

  // ---- shared memory -----------------------------------------------------------------------------------------------

  // Half of Q's columns with the same half of K's below it: one operand of 128 rows for Q S and K S.
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

  // ---- work items (work.cuh) ---------------------------------------------------------------------------------------

  // NOTE(ptxas): values derived from it are recomputed instead of staying in registers through all chunks.
  GD_DEVICE int opaque_lane() const { return opaque(lane); }
  // NOTE(ptxas): a value that all lanes share, in a form that ptxas keeps in a uniform register.
  GD_DEVICE static int uniform(int x) { return __shfl_sync(~0u, x, 0); }

  GD_DEVICE const WorkItem& work_item(int stage) const;
  GD_DEVICE static Chunk first_chunk_of(const WorkItem& item) { return Chunk::first_of(item); }
  GD_DEVICE static int half_of(const Chunk& chunk, int math_wg);
  GD_DEVICE static bool is_merge(const Chunk& chunk) { return chunk.half == kNoValues; }
  GD_DEVICE static bool is_state_only(const Chunk& chunk);
  GD_DEVICE static int state_only_tokens(const WorkItem& item);

  // The stage of the next item, or kEndOfWork. Releases the stage of the previous one.
  static constexpr int kEndOfWork = -1;
  GD_DEVICE int get_next_work(WorkPipelineState& work) const;
  GD_DEVICE void publish_work(int word, WorkPipelineState& work) const;

  // Walks the chunks of this CTA's items.
  struct Cursor {
    int prepared, key_head;  // prepared: index of chunk and head in the workspace; in a merge, of a boundary tile
    Chunk chunk;
    WorkPipelineState work;
  };
  // A merge step loads three tiles of a boundary: M hi, M lo, and one half of S_loc.
  GD_DEVICE static bool is_first_tile(const Cursor& cursor) { return cursor.prepared % kBoundaryTiles == 0; }
  GD_DEVICE static int next_tile(int tile, int half);

  // The next item is prefetched in two steps: three chunks before the current one ends the loader takes a ticket, one
  // chunk later it loads the 64-byte entry, one word per lane. First items may be assigned by blockIdx instead.
  enum Prefetch { kNothing, kTicket, kEntry };
  struct Loader {
    Cursor cursor;
    int loads_in_flight;   // chunks loaded or being loaded, from the current one on
    int ready_boundaries;  // all boundaries below this one are known to have their transitions
    int count, static_items;
    Prefetch prefetch;
    int ticket, word;     // may still be in flight
    int prefetch_tokens;  // prefetch starts when no more tokens than these are left
  };
  static constexpr int kWords = sizeof(WorkItem) / sizeof(int);
  GD_DEVICE void get_initial_work(Loader& loader) const;
  GD_DEVICE void publish_dry_run(Loader& loader) const;
  GD_DEVICE void take_ticket(Loader& loader) const;
  GD_DEVICE void prefetch_entry(Loader& loader) const;
  GD_DEVICE void fetch_work(Loader& loader) const;
  GD_DEVICE void advance_loader(Loader& loader) const;

  // ---- loads, by two warps of scores (loads.cuh) -------------------------------------------------------------------

  GD_DEVICE void load_ahead(Loader& loader, const LoadStage& current, int wanted) const;
  GD_DEVICE bool are_transitions_ready(Loader& loader) const;
  GD_DEVICE void load_keys_queries(Loader& loader, const LoadStage& load) const;
  GD_DEVICE void load_values(const Chunk& chunk, const LoadStage& load) const;
  GD_DEVICE void load_ragged_chunk(uint32_t tiles, bool two, int tile_stride, const TokenRows& src, const Chunk& chunk,
                                   int head, int column) const;

  // ---- keys (keys.cuh) ---------------------------------------------------------------------------------------------

  GD_DEVICE void run_keys() const;
  GD_DEVICE void build_scores(int load, const ScoreStage& score) const;
  template <int I>
  GD_DEVICE void store_scores(const float (&qk)[32], int stage) const;
  GD_DEVICE void build_x(int load, const OperandStage& operand) const;
  GD_DEVICE void find_scale(float2& a, float2& b, int load, int J) const;
  GD_DEVICE void publish_operand(int load, int operand) const;
  GD_DEVICE void multiply_keys(float (&x)[32], int load, int half, uint32_t T) const;
  GD_DEVICE float decay_after_block(int load, int J) const;
  GD_DEVICE void store_x(const float* c, float2 a, float2 b, int J, int half, int operand) const;

  // ---- scores (scores.cuh) -----------------------------------------------------------------------------------------

  struct RowFactors {
    float2 rows;           // of the thread's two rows
    float2 columns[3][2];  // [J]: of two columns in both halves of block J
  };
  GD_DEVICE void run_scores() const;
  GD_DEVICE void build_writes(const LoadStage& load, const OperandStage& operand) const;
  template <int I>
  GD_DEVICE void load_inverse(float (&t)[32], int stage) const;
  GD_DEVICE void build_r(const LoadStage& load, const ScoreStage& score, const OperandStage& operand) const;
  template <int I>
  GD_DEVICE void load_scores(uint32_t (&a)[16], int stage) const;
  GD_DEVICE float row_scale(int load, int row) const;
  template <int I>
  GD_DEVICE void find_factors(RowFactors& f, int load) const;
  template <int I>
  GD_DEVICE void store_r(const float (&r)[32], const RowFactors& f, int operand, int load) const;

  // ---- math (math.cuh) ---------------------------------------------------------------------------------------------

  // S^T: rows are value columns, columns are key dimensions.
  struct State {
    float s[64];
    uint32_t packed[32];
    uint32_t value_offset, vector_offset;  // of this thread's elements in a V or O tile, and in a chunk vector
    int merge_steps = 0;                   // merge steps so far
  };
  template <class Body>
  GD_DEVICE void for_each_item(int math_wg, const Body& body) const;
  GD_DEVICE void skip_chunk(const LoadStage& load, const OperandStage& operand, int& storing_stage) const;
  GD_DEVICE void skip_values(const LoadStage& load, int& storing_stage) const;
  GD_DEVICE void copy_empty_sequences(State& state, int math_wg) const;

  GD_DEVICE static void pack_state(State& state);
  template <int kRows>
  GD_DEVICE static void multiply_state(float* to, const State& state, uint32_t tile);
  GD_DEVICE void decay_state(State& state, int load) const;
  GD_DEVICE void load_values_transposed(uint32_t (&v)[16], uint32_t from) const;
  GD_DEVICE void load_scales(float2 (&scale)[8], uint32_t from) const;
  GD_DEVICE static void subtract(uint32_t (&w)[16], const uint32_t (&v)[16], const float2 (&scale)[8], const float* ks);
  GD_DEVICE void add_written(State& state, const uint32_t (&w)[16], int operand) const;
  GD_DEVICE void advance_warmup(State& state, int math_wg, const LoadStage& load, const OperandStage& operand,
                                bool has_values, int& storing_stage) const;
  template <int kCount>
  GD_DEVICE void materialize(const uint32_t (&x)[kCount]) const;

  GD_DEVICE static void stage_output(const float* o, uint32_t at);
  GD_DEVICE void store_output(int math_wg, const Chunk& chunk, int stage) const;
  GD_DEVICE void store_last_output(int math_wg, const Chunk& chunk, int stage) const;
  GD_DEVICE void store_output_tile(int math_wg, const Chunk& chunk, int stage) const;
  GD_DEVICE void release_value_stage(int stage) const;

  // ---- segment boundaries (boundary.cuh) ---------------------------------------------------------------------------

  GD_DEVICE float4* boundary_state(int boundary, int half) const;
  GD_DEVICE void load_boundary(float (&s)[64], int boundary, int half) const;
  GD_DEVICE void store_boundary(const float (&s)[64], int boundary, int half) const;
  GD_DEVICE void wait_until(const int* counter, int value) const;
  GD_DEVICE void begin_state(float (&s)[64], const WorkItem& item, int half) const;
  GD_DEVICE void begin_identity(float (&s)[64], int half) const;
  template <class Slot>
  GD_DEVICE void end_state(const float (&s)[64], int math_wg, const WorkItem& item, int half,
                           const Slot& final_slot) const;
  GD_DEVICE void end_state(const float (&s)[64], int math_wg, const WorkItem& item, int half) const {
    end_state(s, math_wg, item, half, [&] { return p.final.slot(item.sequence); });
  }
  GD_DEVICE void store_transition(const State& state, int math_wg, int half, int stage, int boundary) const;
  GD_DEVICE static float high_part(float x) { return static_cast<float>(static_cast<Elem>(x)); }
  GD_DEVICE void merge(State& state, int math_wg, const WorkItem& item, LoadStage& load, int& storing_stage) const;
  GD_DEVICE void publish_merged(State& state, const WorkItem& item, LoadStage& load, int& storing_stage) const;
  GD_DEVICE void release_merge_tile_for_all(const LoadStage& load) const;
  GD_DEVICE void release_merge_tile(LoadStage& load, int& storing_stage) const;
  GD_DEVICE void add_boundary(float (&s)[64], uint32_t from) const;
  GD_DEVICE static void add_products(float (&to)[64], const uint32_t (&a)[32], uint32_t tile);

  // Stores registers [kBegin, kEnd) of a packed state as an operand without swizzle (tiles.hpp); one register of a warp
  // is one 128-byte line. The first kEarly go under a chunk's first product, the rest under its last: in one burst they
  // would delay every other access of the warps.
  static constexpr int kEarly = 16;
  template <int kBegin, int kEnd>
  GD_DEVICE void store_packed(const uint32_t (&packed)[32], uint8_t* snapshots, int prepared, int half) const;

  // ---- states in global memory (state_io.cuh) ----------------------------------------------------------------------

  template <class F>
  GD_DEVICE void with_matrix(const StateRows& states, int64_t slot, int head, int half, const F& f) const;
  template <class T>
  GD_DEVICE static bool has_pairs(const T* at, int k_stride);
  GD_DEVICE void load_state(float (&s)[64], const StateRows& states, int64_t slot, int head, int half) const;
  GD_DEVICE void store_state(const StateRows& states, int64_t slot, int head, int half, const float (&s)[64]) const;
  GD_DEVICE void prefetch_state(int slot, int head, int half) const;
};

}  // namespace gatedelta::cuda::sm90

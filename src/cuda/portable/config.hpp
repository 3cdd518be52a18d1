// Tiles, instances, parameters and memory of the portable kernels: plain arithmetic that needs no CUDA, shared by the
// limits, the launches, the kernels and the tests that run the kernels on a CPU.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/device/host_device.hpp"
#include "cuda/device/instances.hpp"
#include "cuda/portable/cut/cost.hpp"
#include "cuda/device/decay.hpp"
#include "cuda/device/sequences.hpp"

namespace gatedelta::cuda::portable {

constexpr int kStep = 32;  // tokens of a step of the forward kernel; a chunk is two of them
constexpr int kStepsPerChunk = kChunkTokens / kStep;

// ---- tiles in shared memory ----------------------------------------------------------------------------------------

// A tile is rows of tokens, 64 columns (128 bytes) of each. The index of a 16-byte packet is XORed with the row's
// lowest three bits: ldmatrix meets no bank twice, transposed or not.
constexpr int kTileColumns = 64;
constexpr int kTileRowBytes = 128;
GD_HOST_DEVICE constexpr uint32_t tile_offset(int row, int packet) {
  return static_cast<uint32_t>(row * kTileRowBytes + ((packet ^ (row & 7)) * kPacketBytes));
}
// A warp's own values: rows of 16 or 32 columns, two or four packets.
template <int kColumns>
GD_HOST_DEVICE constexpr uint32_t values_offset(int row, int packet) {
  constexpr int kPackets = kColumns / kPacketColumns;
  return static_cast<uint32_t>(row * kColumns * 2 + ((packet ^ (row / (8 / kPackets) % kPackets)) * kPacketBytes));
}
// A lower triangular matrix without its zero blocks: 16 x 16 blocks (0,0), (1,0), (1,1). A block is four 8 x 8 matrices
// of 128 bytes, by rows: each is what one register of a fragment stores.
constexpr int kMatrixBytes = 128, kBlockBytes = 4 * kMatrixBytes;
GD_HOST_DEVICE constexpr uint32_t triangle_block(int I, int J) {
  return static_cast<uint32_t>(I * (I + 1) / 2 + J) * kBlockBytes;
}

// ---- what prepare leaves for a step and value head -----------------------------------------------------------------

enum StepVector {
  kBeta,       // beta_i
  kReadKey,    // beta_i gamma_i r^k_i: what K S is scaled by
  kReadQuery,  // s gamma_i r^q_i: what Q S is scaled by
  kTail,       // delta_i r^k_i: what U is scaled by where it is written
  kVectors
};
// What it leaves for the gradients of a chunk and value head: the logarithms (base 2) of gamma, and beta.
enum ChunkVector { kLogGamma, kChunkBeta, kChunkVectors };
// gamma and delta begin anew in every step. Without l2norm r is 1.
struct Prepared {
  static constexpr int kTriangleBytes = 3 * kBlockBytes;
  static constexpr int kVectorBytes = kStep * 4;
  static constexpr int kN = 0;                                    // stril(Gamma o T)
  static constexpr int kP = kN + kTriangleBytes;                  // s Gamma o tril(Q K^T), Q and K normalised
  static constexpr int kVector = kP + kTriangleBytes;             // [kVectors][kStep]
  static constexpr int kEnd = kVector + kVectors * kVectorBytes;  // gamma of the step's last token
  static constexpr int kCarry = kEnd + 4;                         // 1: errors are carried on; otherwise 0
  static constexpr int kBytes = kEnd + kPacketBytes;
  static_assert(kBytes % kPacketBytes == 0);
};

// ---- instances -----------------------------------------------------------------------------------------------------

template <class ElemOf, int kKeysOf>
struct PrepareConfig {
  using Elem = ElemOf;
  static constexpr int kKeys = kKeysOf;
  static constexpr int kThreads = 128;
  static constexpr int kCtasPerSm = kKeys == 256 ? 2 : 5;
  static constexpr int kTiles = kKeys / kTileColumns;
  static constexpr int kTileBytes = kChunkTokens * kTileRowBytes;
  static constexpr int kHeadsAtOnce = 16;  // whose gates are in shared memory

  struct Smem {
    static constexpr int kK = 0;
    static constexpr int kQ = kK + kTiles * kTileBytes;
    // In their place once the products are done:
    static constexpr int kScores = 0;  // [step][6][lane] of 16 bytes: Q K^T on and below the diagonal, fp32
    static constexpr int kScoreBytes = 6 * 32 * kPacketBytes;
    static constexpr int kOperands = kScores + kStepsPerChunk * kScoreBytes;  // [step][lane] of 2 packets: K K^T, fp16
    static constexpr int kOperandBytes = 2 * 32 * kPacketBytes;
    // [step][4]: of K K^T's 8 x 8 blocks on the diagonal the 28 numbers below it, fp32
    static constexpr int kTriangles = kOperands + kStepsPerChunk * kOperandBytes;
    static constexpr int kBelowBytes = 128;
    static constexpr int kInverses = kTriangles + kStepsPerChunk * 4 * kBelowBytes;  // [warp]: D, then D beta; columns
    static constexpr int kInverseBytes = 32 * kPacketBytes;
    static constexpr int kLogs = kInverses + kThreads / 32 * 2 * kInverseBytes;  // [warp][kStep]
    static constexpr int kTilesEnd = kQ + kTiles * kTileBytes;
    static_assert(kLogs + kThreads / 32 * Prepared::kVectorBytes <= kTilesEnd);
    static constexpr int kNorms = kTilesEnd;                      // r^k, then r^q
    static constexpr int kCarry = kNorms + 2 * kChunkTokens * 4;  // [step] as Prepared::kCarry
    static constexpr int kLengths = kCarry + kPacketBytes;        // [64]: |k|^2, of normalised keys with l2norm
    static constexpr int kGates = kLengths + kChunkTokens * 4;    // [heads][64]: gates in units of log 2; then betas
    GD_HOST_DEVICE static constexpr int heads(int group) { return group < kHeadsAtOnce ? group : kHeadsAtOnce; }
    GD_HOST_DEVICE static constexpr int allocated(int group) { return kGates + 2 * heads(group) * kChunkTokens * 4; }
  };
};

// What a kernel does with the steps of a sequence, in which direction, and whether it reads Q.
struct ForwardPass {
  static constexpr int kDirection = 1;
  static constexpr bool kReadsQueries = true;
};
struct StatesPass {
  static constexpr int kDirection = 1;
  static constexpr bool kReadsQueries = false;
};
struct GradientPass {
  static constexpr int kDirection = -1;
  static constexpr bool kReadsQueries = true;
};

// kRows: value columns of a warp, 16 or 32. A CTA has kWarps of them, of one head.
template <class PassOf, class ElemOf, int kKeysOf, int kRowsOf, int kWarpsOf, int kCtasPerSmOf>
struct ChainConfig {
  using Pass = PassOf;
  using Elem = ElemOf;
  static constexpr int kKeys = kKeysOf, kRows = kRowsOf, kWarps = kWarpsOf, kCtasPerSm = kCtasPerSmOf;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumns = kRows * kWarps;
  static constexpr int kTiles = kKeys / kTileColumns;
  static constexpr int kTileBytes = kStep * kTileRowBytes;
  static constexpr int kStages = 2;
  // Whether it runs transitions, too: transition_kind. With 32 rows the states kernel would spill.
  static constexpr bool kHasTransitions = kRows == 16;

  struct Smem {
    static constexpr int kK = 0;
    static constexpr int kQ = kK + kStages * kTiles * kTileBytes;
    static constexpr int kQueryBytes = Pass::kReadsQueries ? kStages * kTiles * kTileBytes : 0;
    static constexpr int kValues = kQ + kQueryBytes;  // [warp][token][kRows], one stage
    static constexpr int kValueBytes = kStep * kRows * 2;
    static constexpr int kPrepared = kValues + kWarps * kValueBytes;
    static constexpr int kBytes = kPrepared + kStages * Prepared::kBytes;
    static_assert(kBytes <= 99 << 10);  // what a CTA can have on every device from 8.0 on
  };
};
template <class Pass, class Elem>
using Chain64 = ChainConfig<Pass, Elem, 64, 16, 4, 4>;
template <class Pass, class Elem>
using Chain128 = ChainConfig<Pass, Elem, 128, 32, 4, 2>;
template <class Pass, class Elem>
using Chain128Half = ChainConfig<Pass, Elem, 128, 16, 4, 3>;
template <class Pass, class Elem>
using Chain128Quarter = ChainConfig<Pass, Elem, 128, 16, 2, 6>;
template <class Pass, class Elem>
using Chain256 = ChainConfig<Pass, Elem, 256, 16, 8, 1>;

// How many value columns a CTA has changes no bit: a warp never meets a number of another warp's columns. Few columns
// where there are few heads, so that more multiprocessors work.
enum class ChainKind { k64, k128, k128Half, k128Quarter, k256 };
inline ChainKind chain_kind(const Layer& in, int multiprocessors) {
  const int keys = compiled_keys(in.key_dim);
  if (keys != 128) return keys == 64 ? ChainKind::k64 : ChainKind::k256;
  const int64_t ctas = in.sequences.count * in.value_heads * ((in.value_dim + 127) / 128);  // of whole heads
  if (2 * ctas > multiprocessors && in.value_dim > 64) return ChainKind::k128;
  return 4 * ctas > multiprocessors ? ChainKind::k128Half : ChainKind::k128Quarter;
}
// What transitions of a call run with. Most heads have none, so few columns of more CTAs are better anyway.
inline ChainKind transition_kind(ChainKind kind) { return kind == ChainKind::k128 ? ChainKind::k128Half : kind; }
// Calls run with the config of a kind.
template <class Pass, class Elem, class Run>
auto with_chain(ChainKind kind, const Run& run) {
  switch (kind) {
    case ChainKind::k64: return run(Chain64<Pass, Elem>{});
    case ChainKind::k128: return run(Chain128<Pass, Elem>{});
    case ChainKind::k128Half: return run(Chain128Half<Pass, Elem>{});
    case ChainKind::k128Quarter: return run(Chain128Quarter<Pass, Elem>{});
    case ChainKind::k256: break;
  }
  return run(Chain256<Pass, Elem>{});
}

constexpr int kSegmentThreads = 128;
constexpr int kFoldColumns = 8;  // value columns of a CTA of the fold
template <int kKeysOf>
struct FoldConfig {
  static constexpr int kKeys = kKeysOf, kColumns = kFoldColumns;
  static constexpr int kDepth = kKeys == 128 ? 32 : 16, kStages = kKeys == 256 ? 3 : 4;  // rows of M^T in a stage
  static_assert(kStages - 1 <= kKeys / kDepth);  // what is loaded ahead is the next M's at most
  static constexpr int kSlices = 4;              // of a stage's rows, each multiplied by its warps
  static constexpr int kThreads = kSlices * (kKeys / 4) * (kColumns / 4);  // a thread sums 4 x 4 numbers

  struct Smem {
    static constexpr int kState = 0;
    static constexpr int kMaps = kState + kKeys * kColumns * 4;
    static constexpr int kStageBytes = kDepth * kKeys * 4;
    static constexpr int kSums = kMaps + kStages * kStageBytes;  // [slice][column][kKeys]
    static constexpr int kColumnBytes = kKeys * 4 + 16;          // no two columns of a row in the same banks
    static constexpr int kSumBytes = kColumns * kColumnBytes;
    static constexpr int kBytes = kSums + kSlices * kSumBytes;
    static_assert(kBytes <= 99 << 10);
  };
};

// Value columns of a CTA, and its shared memory.
inline int chain_columns(ChainKind kind) {
  return with_chain<ForwardPass, Bf16>(kind, [](auto config) { return decltype(config)::kColumns; });
}
inline int chain_bytes(ChainKind kind) {
  return with_chain<ForwardPass, Bf16>(kind, [](auto config) { return decltype(config)::Smem::kBytes; });
}

// Of a device: what a choice of CTAs asks of it.
struct Multiprocessors {
  int count;
  int shared_bytes;                       // of each
  static constexpr int kReserved = 1024;  // of each CTA, the system's
  int resident(int bytes) const { return shared_bytes / (bytes + kReserved); }
};
// CTAs on each multiprocessor where as many are spread evenly.
inline int spread(float ctas, int multiprocessors) {
  const float each = ceil_of(ctas / static_cast<float>(multiprocessors));
  return each > 1 ? static_cast<int>(each) : 1;
}
// Shared memory of a CTA with which so many of them fit on a multiprocessor, and no more.
inline int spread_bytes(int resident, int shared_bytes) {
  return (shared_bytes / (resident + 1) - Multiprocessors::kReserved) / 128 * 128 + 128;
}

// ---- segments ------------------------------------------------------------------------------------------------------

// Sequences that are cut have segments of equal length, the last one excepted. Their slots follow each other, sequence
// by sequence; one without tokens has a slot, too. The host knows how many there may be: so many where one sequence has
// all tokens. Those that stay empty are the last ones.
struct SegmentSlots {
  int64_t tokens;  // of a segment

  GD_HOST_DEVICE int64_t count(const ChunkedSequences& s) const {
    return s.offsets ? s.count + (s.tokens - 1) / tokens : s.count * ((s.tokens + tokens - 1) / tokens);
  }
};
// Of a sequence.
struct alignas(8) SlotRange {
  int first, count;
};

// What a CTA of a chain does for a value head. Where gradients are followed, from the last token to the first, "before"
// means behind.
struct alignas(16) Segment {
  static constexpr int kFromEntry = -1;
  int sequence;       // negative: nothing
  int chunk, chunks;  // the first one with outputs, and how many they are
  int warmup;         // chunks before them, from no state; kFromEntry: it begins with the state at its boundary;
                      // 0: it is the first one and begins with what the caller gives
  GD_HOST_DEVICE bool is_entered() const { return warmup == kFromEntry; }
  GD_HOST_DEVICE int warmup_chunks() const { return warmup > 0 ? warmup : 0; }
};

// ---- what kernels are told -----------------------------------------------------------------------------------------

// Passed by value: a graph that captures a call holds all of it.
struct Params {
  TokenRows q, k, v, o, g, beta;
  HeadVector A_log, dt_bias;
  ChunkedSequences sequences;
  int key_heads, value_heads, group, key_dim, value_dim;
  int prepare_helpers;                              // CTAs
  bool is_prepared;                                 // a summary has prepared the chunks
  int log_parts;                                    // of the CTAs of the forward kernel for a head, a power of two
  uint32_t q_stride, k_stride, v_stride, o_stride;  // from token to token
  gd_gate gate;
  gd_beta beta_kind;
  bool l2norm;
  float scale;
  StateRows initial, final, checkpoints;
  int key_state_stride, value_state_stride;  // inside a matrix
  int64_t checkpoint_every;                  // tokens; 0 = none
  IndexRows checkpoint_offsets;
  // What prepare leaves is that of all heads of the call, also where the kernels are told of some of them.
  int prepared_heads, prepared_key_heads;
  uint8_t* prepared;          // [chunks][prepared_heads][kStepsPerChunk][Prepared::kBytes]
  float* vectors;             // for a backward: [chunks][prepared_heads][kChunkVectors][64]
  float* norms;               // for a backward: [chunks][prepared_key_heads][2][64], r^k, then r^q
  uint8_t* snapshots;         // of a pass of the backward: [chunks][value_heads][V][K], see Chain::keep_state
  int* order;                 // [N] sequences, longest first; null = as they come
  int64_t* first_checkpoint;  // [N] number of its first checkpoint, of packed sequences
  // Of a call that cuts sequences:
  int segment_chunks;  // 0 = none is cut
  int map_column;      // of transitions: the column that stands for the first one of M; otherwise 0
  ChunkDecay* decays;  // [value_heads][chunks][kStepsPerChunk], of the steps
  void* initial_copy;  // [N][value_heads][K V] as p.initial; null = the initial states stay as they are
  SlotRange* ranges;   // [N]; without segments: sequences with a range are another grid's
  Segment* segments;   // [slots][value_heads]; null = none is cut
  float* entries;      // [slots][value_heads][K V], states that segments begin with, matrices as the caller's
  float* maps;         // [slots][value_heads][K][K], M^T of a segment
  // The same of the chain of gradients, in a backward; its maps are M.
  Segment* gradient_segments;
  float *gradient_entries, *gradient_maps;
  // Of a summary:
  int summaries;         // sequences that have a segment each; otherwise 0
  StateRows transition;  // M; S_loc, or G_loc, is `final`
  GD_HOST_DEVICE SegmentSlots slots() const { return {int64_t{segment_chunks} * kChunkTokens}; }
  GD_HOST_DEVICE int64_t state_numbers() const { return int64_t{key_dim} * value_dim; }
  GD_HOST_DEVICE ChunkDecay* step_decays(int64_t chunk_index, int head) const {
    return decays + (head * sequences.workspace_chunks() + chunk_index) * kStepsPerChunk;
  }
  GD_HOST_DEVICE bool is_padding(int n) const {
    if (n == sequences.count) return true;
    return initial.indices && final.indices && initial.slot(n) < 0 && final.slot(n) < 0;
  }
  GD_HOST_DEVICE int64_t snapshot_bytes() const { return int64_t{2} * key_dim * value_dim; }
  GD_HOST_DEVICE float* chunk_vectors(int64_t chunk_index, int head) const {
    return vectors + (chunk_index * prepared_heads + head) * kChunkVectors * kChunkTokens;
  }
  GD_HOST_DEVICE float* chunk_norms(int64_t chunk_index, int key_head) const {
    return norms + (chunk_index * prepared_key_heads + key_head) * 2 * kChunkTokens;
  }
  GD_HOST_DEVICE uint8_t* prepared_step(int64_t chunk_index, int head, int step) const {
    return prepared + ((chunk_index * prepared_heads + head) * kStepsPerChunk + step) * int64_t{Prepared::kBytes};
  }
};

// ---- memory --------------------------------------------------------------------------------------------------------

// Limits of the kernels' 32-bit arithmetic; validation enforces them.
constexpr int64_t kMaxCtas = INT_MAX;           // of one launch
constexpr int64_t kMaxSeqHeads = INT_MAX / 16;  // N * Hv: the narrowest CTAs are 8 a head
// Chunks times Hv: a chain counts what prepare left in packets, by 32 bits. They are 64 GiB.
constexpr int64_t kMaxChunkHeads = UINT32_MAX / (kStepsPerChunk * Prepared::kBytes / kPacketBytes);
constexpr int64_t kMaxTokenStride = (int64_t{1} << 31) / kChunkTokens;  // elements: a chunk's rows are 32 bits apart
constexpr int64_t kMaxSorted = 1024;  // sequences that are sorted by length; more of them balance themselves

inline bool is_sorted(const Layer& in) { return in.sequences.offsets && in.sequences.count <= kMaxSorted; }
inline bool counts_checkpoints(const ForwardProblem& p) { return p.checkpoint_every && p.in.sequences.offsets; }
// The first CTAs of prepare look at the lengths of packed sequences; the others have a chunk and key head each.
constexpr int kRanksPerCta = 128;
inline int64_t prepare_helpers(const ForwardProblem& p) {
  const int64_t rankers = is_sorted(p.in) ? (p.in.sequences.count + kRanksPerCta - 1) / kRanksPerCta : 0;
  return rankers > 0 ? rankers : counts_checkpoints(p) ? 1 : 0;
}
inline int64_t prepare_ctas(const ForwardProblem& p) {
  if (p.prepared && !p.in.sequences.offsets) return 0;
  return sequences_of(p.in.sequences).workspace_chunks() * p.in.key_heads + prepare_helpers(p);
}

// Whether the sequences of a call may be cut on some device. The cut itself is chosen where the device is known
// (cut.hpp), and takes no more memory than this leaves to it.
constexpr int64_t kMostCutHeads = 512;  // N * Hv: as many fill every GPU
constexpr int kLeastSegment = 8;        // chunks
inline bool may_cut(const ForwardProblem& p) {
  if (!p.context_parallel || p.batch_invariant) return false;
  const Sequences& s = p.in.sequences;
  if (p.segment_chunks) return s.count > 0 && s.tokens > 0;
  return s.count > 0 && s.tokens > 2 * kLeastSegment * kChunkTokens && s.count <= kMostCutHeads / p.in.value_heads;
}
// Slots of the shortest segments that are chosen.
inline int64_t most_slots(const ForwardProblem& p) {
  const int64_t chunks = p.segment_chunks ? p.segment_chunks : kLeastSegment;
  return SegmentSlots{chunks * kChunkTokens}.count(sequences_of(p.in.sequences));
}

// Documented bound of a forward's workspace: bytes per token and value head, plus a constant. States and transitions of
// segments get what is left below it, or what a forced segment length needs. A backward has both for each of its
// chains, and no other bound.
constexpr int64_t kBytesPerToken = 192, kFixedBytes = int64_t{32} << 20;
constexpr int64_t kMostEntryBytes = int64_t{48} << 20;  // of a chain

struct ForwardWorkspace {
  static constexpr size_t kAlign = 64;  // of every part, and of the memory itself
  size_t prepared = 0, first_checkpoint = 0;
  size_t decays = 0, ranges = 0, segments = 0, initial_copy = 0, entries = 0, maps = 0;
  int64_t entry_slots = 0;  // of segments; 0: no sequence may be cut
  size_t bytes = 0;
};
// Appends a part to memory of so many bytes; returns where it begins.
inline size_t take_bytes(size_t& bytes, int64_t more) {
  constexpr size_t kAlign = ForwardWorkspace::kAlign;
  const size_t at = bytes;
  bytes += (static_cast<size_t>(more) + kAlign - 1) / kAlign * kAlign;
  return at;
}
// What prepare leaves; with `saved` it lies there, and the backward of the same inputs needs no prepare.
struct PreparedLayout {
  size_t prepared = 0, order = 0, vectors = 0, norms = 0, decays = 0, bytes = 0;
};
inline int64_t decay_bytes(const Layer& in) {
  return sequences_of(in.sequences).workspace_chunks() * in.value_heads * kStepsPerChunk * int64_t{sizeof(ChunkDecay)};
}
inline PreparedLayout prepared_layout(const Layer& in, bool for_backward) {
  PreparedLayout w;
  const auto take = [&](int64_t bytes) { return take_bytes(w.bytes, bytes); };
  const int64_t chunks = sequences_of(in.sequences).workspace_chunks();
  w.prepared = take(chunks * in.value_heads * kStepsPerChunk * int64_t{Prepared::kBytes});
  w.order = take(is_sorted(in) ? in.sequences.count * int64_t{sizeof(int)} : 0);
  if (!for_backward) return w;
  w.vectors = take(chunks * in.value_heads * kChunkVectors * kChunkTokens * int64_t{sizeof(float)});
  w.norms = take(chunks * in.key_heads * 2 * kChunkTokens * int64_t{sizeof(float)});
  w.decays = take(decay_bytes(in));
  return w;
}
inline size_t saved_bytes(const Layer& in) { return prepared_layout(in, true).bytes; }
// Of a chain that is cut: what its segments begin with, in so many slots.
inline int64_t segment_bytes(const Layer& in, int64_t slots) {
  return slots * in.value_heads * int64_t{sizeof(Segment)};
}
inline int64_t entry_bytes(const Layer& in, int64_t slots) {
  return slots * in.value_heads * in.key_dim * in.value_dim * int64_t{sizeof(float)};
}
inline int64_t map_bytes(const Layer& in, int64_t slots) {
  return slots * in.value_heads * in.key_dim * in.key_dim * int64_t{sizeof(float)};
}
// for_backward: prepare leaves what a backward needs, too, as it does with `saved`.
inline ForwardWorkspace forward_layout(const ForwardProblem& p, bool for_backward = false) {
  ForwardWorkspace w;
  const bool keeps_all = for_backward || p.saved;
  w.prepared = take_bytes(w.bytes, p.saved ? 0 : static_cast<int64_t>(prepared_layout(p.in, for_backward).bytes));
  w.first_checkpoint = take_bytes(w.bytes, counts_checkpoints(p) ? p.in.sequences.count * int64_t{sizeof(int64_t)} : 0);
  if (!may_cut(p)) return w;
  const Layer& in = p.in;
  ForwardWorkspace cut = w;
  const auto take = [&](int64_t bytes) { return take_bytes(cut.bytes, bytes); };
  const int64_t heads = in.value_heads, matrix = int64_t{in.key_dim} * in.value_dim;
  const int64_t slots = most_slots(p);
  cut.decays = take(keeps_all ? 0 : decay_bytes(in));
  cut.ranges = take(in.sequences.count * int64_t{sizeof(SlotRange)});
  const bool may_overwrite = in.initial && !for_backward;
  cut.initial_copy = take(may_overwrite ? in.sequences.count * heads * matrix * dtype_bytes(in.initial.dtype) : 0);
  const int64_t promised = kBytesPerToken * in.sequences.batch * in.sequences.tokens * heads + kFixedBytes;
  const int64_t left = promised - static_cast<int64_t>(cut.bytes) - 3 * int64_t{ForwardWorkspace::kAlign};
  const int64_t room = for_backward || left > kMostEntryBytes ? kMostEntryBytes : left;
  const int64_t fitting = room / (segment_bytes(in, 1) + entry_bytes(in, 1) + map_bytes(in, 1));
  // Each sequence has a slot, and one more that is cut in two.
  if (!p.segment_chunks && fitting <= in.sequences.count) return w;
  cut.entry_slots = p.segment_chunks || fitting > slots ? slots : fitting;
  cut.segments = take(segment_bytes(in, cut.entry_slots));
  cut.entries = take(entry_bytes(in, cut.entry_slots));
  cut.maps = take(map_bytes(in, cut.entry_slots));
  return cut;
}

// Whether states that are read may be overwritten in the same call.
inline bool overlap(const StateRows& a, const StateRows& b, const Layer& in) {
  if (!a || !b) return false;
  const auto last = [&](const StateRows& x) {
    const int64_t numbers =
        (x.slots - 1) * x.slot_stride + (in.value_heads - 1) * x.head_stride + int64_t{in.key_dim} * in.value_dim;
    return reinterpret_cast<uintptr_t>(x.data) + static_cast<uintptr_t>(numbers * dtype_bytes(x.dtype));
  };
  return reinterpret_cast<uintptr_t>(a.data) < last(b) && reinterpret_cast<uintptr_t>(b.data) < last(a);
}

// CTAs of a chain kernel for columns of a head, as a power of two.
inline int log_parts(int columns, int cta_columns) {
  int log = 0;
  while ((cta_columns << log) < columns) ++log;
  return log;
}

// A cut of sequences (cut.hpp).
struct Cut {
  int chunks = 0;                         // of a segment; 0 = no sequence is cut
  ChainKind kind = ChainKind::k64;        // of segments; of whole sequences, if they have no other grid
  ChainKind whole_kind = ChainKind::k64;  // of the grid for whole sequences (CutPrices::has_whole_grid)
  CutPrices prices = {};                  // of a pack, whose segments may turn out longer; otherwise of no chain
  SegmentSums expected = {};              // of a pack a guess
};

// layout: that of the problem.
inline Params params_of(const ForwardProblem& problem, const ForwardWorkspace& layout, char* workspace, const Cut& cut,
                        bool for_backward = false) {
  const Layer& in = problem.in;
  const bool keeps_all = for_backward || problem.saved;
  const PreparedLayout parts = prepared_layout(in, keeps_all);
  char* const kept = problem.saved ? static_cast<char*>(problem.saved.data) : workspace + layout.prepared;
  Params p{};
  p.q = in.q, p.k = in.k, p.v = in.v, p.o = problem.o;
  p.g = in.g, p.beta = in.beta;
  p.A_log = in.A_log, p.dt_bias = in.dt_bias;
  p.sequences = sequences_of(in.sequences);
  p.key_heads = static_cast<int>(in.key_heads);
  p.value_heads = static_cast<int>(in.value_heads);
  p.group = static_cast<int>(in.group);
  p.key_dim = in.key_dim, p.value_dim = in.value_dim;
  p.prepare_helpers = static_cast<int>(prepare_helpers(problem));
  p.is_prepared = problem.prepared;
  p.log_parts = log_parts(in.value_dim, chain_columns(cut.kind));
  p.q_stride = static_cast<uint32_t>(in.q.token_stride), p.k_stride = static_cast<uint32_t>(in.k.token_stride);
  p.v_stride = static_cast<uint32_t>(in.v.token_stride), p.o_stride = static_cast<uint32_t>(problem.o.token_stride);
  p.gate = in.gate, p.beta_kind = in.beta_kind;
  p.l2norm = in.l2norm, p.scale = in.scale;
  p.initial = in.initial, p.final = problem.final, p.checkpoints = problem.checkpoints;
  p.key_state_stride = in.layout == GD_STATE_KV ? in.value_dim : 1;
  p.value_state_stride = in.layout == GD_STATE_KV ? 1 : in.key_dim;
  p.checkpoint_every = problem.checkpoint_every;
  p.checkpoint_offsets = problem.checkpoint_offsets;
  p.prepared_heads = p.value_heads, p.prepared_key_heads = p.key_heads;
  p.prepared = reinterpret_cast<uint8_t*>(kept + parts.prepared);
  if (is_sorted(in)) p.order = reinterpret_cast<int*>(kept + parts.order);
  if (keeps_all) p.vectors = reinterpret_cast<float*>(kept + parts.vectors);
  if (keeps_all) p.norms = reinterpret_cast<float*>(kept + parts.norms);
  if (keeps_all) p.decays = reinterpret_cast<ChunkDecay*>(kept + parts.decays);
  if (counts_checkpoints(problem)) p.first_checkpoint = reinterpret_cast<int64_t*>(workspace + layout.first_checkpoint);
  if (cut.chunks == 0) return p;
  p.segment_chunks = cut.chunks;
  p.ranges = reinterpret_cast<SlotRange*>(workspace + layout.ranges);
  p.segments = reinterpret_cast<Segment*>(workspace + layout.segments);
  if (!keeps_all) p.decays = reinterpret_cast<ChunkDecay*>(workspace + layout.decays);
  if (overlap(p.initial, p.final, in) || overlap(p.initial, p.checkpoints, in))
    p.initial_copy = workspace + layout.initial_copy;
  p.entries = reinterpret_cast<float*>(workspace + layout.entries);
  p.maps = reinterpret_cast<float*>(workspace + layout.maps);
  return p;
}

}  // namespace gatedelta::cuda::portable

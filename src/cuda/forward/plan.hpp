// How the forward is cut into blocks, and where its scratch memory lies. Pure host arithmetic.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/forward/layout.hpp"

namespace gatedelta::cuda {

// What the kernels' 32-bit arithmetic and their shared memory bear; validation holds every call to it.
constexpr int64_t kMaxTokens = INT_MAX - (kChunkTokens - 1);  // a position rounded up to whole chunks
constexpr int64_t kMaxPairs = INT_MAX / 4;                    // N * Hv: twice as many items, and room for a stride
constexpr int64_t kMaxPrepareBlocks = INT_MAX;                // of one launch
constexpr int64_t kMaxGroup = 256;                            // Hv / Hk: prepare holds the betas of a group

// What the copy engine asks of q, k, v and o.
constexpr int64_t kRowAlign = 16;  // bytes, of their data and of their strides
constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;

// From shapes alone: a query's offsets have no data yet, what counts is that there will be some.
inline Sequences sequences_of(const gatedelta::Sequences& s) {
  const void* offsets = !s.offsets ? nullptr : s.offsets.data ? s.offsets.data : &s;
  return {static_cast<int>(s.count), static_cast<int>(s.batch), s.tokens, {offsets, s.offsets.is_int64}};
}

// One per slot and key head, and one that sorts.
inline int64_t prepare_blocks(const Layer& layer) {
  return sequences_of(layer.sequences).slots() * layer.key_heads + 1;
}

// Offsets of the workspace's parts from its first 128-byte boundary, and its whole size.
struct ForwardWorkspace {
  static constexpr size_t kAlign = 128;        // of every part
  static constexpr size_t kCallersAlign = 64;  // of the memory itself

  size_t prepared = 0;          // [slots][Hv][kPreparedBytes]
  size_t order = 0;             // int [N]
  size_t first_checkpoint = 0;  // int64_t [N], if there are checkpoints
  size_t bytes = 0;
};

inline ForwardWorkspace forward_layout(const ForwardProblem& p) {
  ForwardWorkspace w;
  const auto take = [&](int64_t bytes) {
    const size_t at = w.bytes;
    w.bytes += (static_cast<size_t>(bytes) + ForwardWorkspace::kAlign - 1) / ForwardWorkspace::kAlign *
               ForwardWorkspace::kAlign;
    return at;
  };
  const int64_t count = p.in.sequences.count;
  w.prepared = take(sequences_of(p.in.sequences).slots() * p.in.value_heads * kPreparedBytes);
  w.order = take(count * int64_t{sizeof(int)});
  w.first_checkpoint = take(p.checkpoint_every ? count * int64_t{sizeof(int64_t)} : 0);
  w.bytes += ForwardWorkspace::kAlign - ForwardWorkspace::kCallersAlign;
  return w;
}

// Math warpgroups per block, of 64 value columns each. Where heads are so few that their halves all run at once, two
// blocks share a head: half a head takes more than half as long, so a second round of halves would lose. The bits are
// the same: value columns never mix.
inline int math_warpgroups(int64_t sequences, int64_t value_heads, int multiprocessors) {
  return 2 * sequences * value_heads <= multiprocessors ? 1 : 2;
}

}  // namespace gatedelta::cuda

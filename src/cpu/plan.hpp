// How the CPU backend divides a call into work items and lays out its scratch memory. Host arithmetic only: nothing
// here touches memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"

namespace gatedelta::cpu {

constexpr int kPanelColumns = 32;    // value columns advance in panels of this many; K and V are padded to it
constexpr int kMaxPanels = 8;        // K, V <= 256
constexpr int kSaveInterval = 8;     // chunks between two states saved for the backward, which replays them
constexpr int kMaxHeadsPerItem = 8;  // their states should stay in the L2 cache

struct Dims {
  int K, V;    // as given
  int Kp, Vp;  // padded to whole panels
  GD_ALWAYS_INLINE int key_panels() const { return Kp / kPanelColumns; }
  GD_ALWAYS_INLINE int value_panels() const { return Vp / kPanelColumns; }
  GD_ALWAYS_INLINE int64_t state_size() const { return int64_t{Kp} * Vp; }
};

GD_ALWAYS_INLINE Dims padded_dims(const Layer& layer) {
  const auto pad = [](int n) { return (n + kPanelColumns - 1) / kPanelColumns * kPanelColumns; };
  return {layer.key_dim, layer.value_dim, pad(layer.key_dim), pad(layer.value_dim)};
}

// Allocates aligned arrays from one buffer. With a null base it only measures.
class Carver {
 public:
  static constexpr size_t kAlign = 64;

  GD_ALWAYS_INLINE explicit Carver(char* base = nullptr) : base_(base) {}

  template <class T>
  GD_ALWAYS_INLINE T* take(int64_t count) {
    const size_t offset = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return base_ ? reinterpret_cast<T*>(base_ + offset) : nullptr;
  }
  GD_ALWAYS_INLINE size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// How the forward shares a head's work between lanes. The plan does not change the arithmetic of a (sequence, head,
// panel).
struct ForwardPlan {
  // Fused: an item is a whole sequence for `heads_per_item` neighbouring value heads, chunk by chunk.
  // Split (fewer sequence-head pairs than lanes can use): blocks of chunks. Lanes first prepare the state-free operands
  // of every chunk of a block, then every (sequence, head, value panel) computes its chain over the block.
  bool split;
  int heads_per_item;
  int64_t items;  // fused items
};

ForwardPlan plan_forward(const Layer& layer, int lanes);

// Whether the backward gives the value heads of a group to different lanes because there are too few groups.
bool backward_splits_groups(const Layer& layer, int lanes);

// `saved` holds one state per kSaveInterval chunks. Index of a sequence's first saved state, and an upper bound of
// their number. Both follow from offsets alone, so no table is needed: floor(begin / tokens per state) + n leaves every
// sequence room for its ceil(length / tokens per state).
int64_t first_saved_state(const Layer& layer, int64_t sequence, const SequenceSpan& span);
int64_t max_saved_states(const Layer& layer);

GD_ALWAYS_INLINE int64_t chunks_of(int64_t length) { return (length + kChunk - 1) / kChunk; }

}  // namespace gatedelta::cpu

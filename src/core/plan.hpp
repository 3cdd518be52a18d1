// How a call is cut into work, and where its scratch memory lies. Pure host arithmetic, no memory is touched.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"

namespace gatedelta {

constexpr int kPanelColumns = 32;    // value columns advance in panels of this many; K and V are padded to it
constexpr int kMaxPanels = 8;        // K, V <= 256
constexpr int kWindow = 8;           // chunks between two states kept for the backward
constexpr int kMaxHeadsPerItem = 8;  // their states should stay in the second-level cache

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

// Hands out aligned pieces of one buffer. With a null base it only measures.
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

// How the forward shares a head's work between lanes. The arithmetic per (sequence, head, panel) is the same either
// way.
struct ForwardPlan {
  // Fused: an item is a whole sequence for `heads_per_item` neighbouring value heads, chunk by chunk.
  // Split (fewer sequence-head pairs than lanes want): windows of chunks; first every chunk's state-free operands in
  // parallel, then every (sequence, head, value panel) walks the window.
  bool split;
  int heads_per_item;
  int64_t items;  // fused items
};

ForwardPlan plan_forward(const Layer& layer, int lanes);

// Whether the backward gives the value heads of a group to different lanes, because there are too few groups.
bool backward_splits_groups(const Layer& layer, int lanes);

// Index of the first kept window state of a sequence, and a bound for how many there are; from offsets alone, so that
// no table is needed: floor(begin / window) + n leaves every sequence room for its ceil(length / window).
int64_t first_window(const Layer& layer, int64_t sequence, const SequenceSpan& span);
int64_t max_windows(const Layer& layer);

GD_ALWAYS_INLINE int64_t chunks_of(int64_t length) { return (length + kChunk - 1) / kChunk; }

}  // namespace gatedelta

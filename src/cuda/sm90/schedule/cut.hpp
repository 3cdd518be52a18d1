// A cut: the lengths of segments, and where they begin.
#pragma once

#include "cuda/device/fast_math.hpp"
#include "cuda/sm90/schedule/costs.hpp"
#include "cuda/sm90/schedule/work_item.hpp"

namespace gatedelta::cuda::sm90 {

// Lengths of segments in chunks; 0 = not cut.
struct Cut {
  int decaying;    // of decaying heads: each segment starts with a warm-up from no state
  int persistent;  // of persistent heads: two segments, of which the second warms up over the whole first, or more,
                   // which are merged
  bool halves;     // two CTAs share a head, half of its value columns each
};

GD_HOST_DEVICE inline int segments_of(int chunks, int length) {
  return length <= 0 || chunks <= length ? 1 : ceil_div(chunks, length);
}

// Persistent heads: the first of the merged segments is shorter. It computes outputs, and ends about when the others,
// which do not yet, have their transitions. Of two segments, the second warms up over the first. In the gradient chain
// a warm-up chunk costs as much as any other: segments are equal there, and a cut in two would gain nothing.
constexpr int kWorthMerging = 48;  // chunks of a sequence: fewer cost less than transitions and merges
template <Pass kPass = Pass::kForward>
GD_HOST_DEVICE int persistent_segments(int chunks, int length) {
  const int segments = segments_of(chunks, length);
  return kPass == Pass::kForward || segments != 2 ? segments : chunks < kWorthMerging ? 1 : 3;
}
// Where the segments of one head begin. The first may differ in length; of the rest, some are one chunk longer.
struct Borders {
  int first, each, longer;  // chunks of the first; of each other; how many of those have one more
  GD_HOST_DEVICE Borders(int chunks, int segments, int first_chunks) : first(first_chunks) {
    const int rest = first > 0 ? segments - 1 : segments;
    each = floor_div(chunks - first, rest);
    longer = chunks - first - each * rest;
  }
  GD_HOST_DEVICE int operator[](int i) const {
    const int before = first > 0 && i > 0 ? i - 1 : i;
    return (i > 0 ? first : 0) + each * before + (before < longer ? before : longer);
  }
};
// Decaying heads: equal segments.
GD_HOST_DEVICE inline int decaying_begin(int chunks, int segments, int i) { return Borders(chunks, segments, 0)[i]; }
template <Pass kPass>
GD_HOST_DEVICE Borders persistent_borders(int chunks, int segments) {
  if (kPass != Pass::kForward || segments == 1) return {chunks, segments, 0};
  const float first = segments == 2
                          ? static_cast<float>(chunks) * (Costs::kChunk / (2 * Costs::kChunk - Costs::kWarmup))
                          : static_cast<float>(chunks) * fast_div(0.56f, static_cast<float>(segments) - 0.44f);
  return {chunks, segments, first < 1 ? 1 : static_cast<int>(first)};
}
template <Pass kPass = Pass::kForward>
GD_HOST_DEVICE int persistent_begin(int chunks, int segments, int i) {
  return persistent_borders<kPass>(chunks, segments)[i];
}

}  // namespace gatedelta::cuda::sm90

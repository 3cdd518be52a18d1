// A cut: the lengths of segments, and where they begin.
#pragma once

#include "cuda/schedule/costs.hpp"
#include "cuda/schedule/fast_math.hpp"
#include "cuda/schedule/work_item.hpp"

namespace gatedelta::cuda {

// Lengths of segments in chunks; 0 = not cut.
struct Cut {
  int decaying;    // of heads whose older states fade: each segment begins some chunks early, with no state
  int persistent;  // of heads whose states last: two segments, the second of which runs through the first silently, or
                   // more, which are joined
  bool halves;     // two blocks share a head, half of its value columns each
};

GD_HOST_DEVICE inline int segments_of(int chunks, int length) {
  return length <= 0 || chunks <= length ? 1 : ceil_div(chunks, length);
}

// Where segment i of a sequence begins. Heads that fade: equal ones.
GD_HOST_DEVICE inline int decaying_begin(int chunks, int segments, int i) {
  const int each = floor_div(chunks, segments), more = chunks - each * segments;
  return each * i + (i < more ? i : more);
}
// Heads that last: the first of the joined segments is shorter. It hands its state on when it has ended, with outputs,
// about when the others have their factors, without. Of two, the second runs through the first. In a backward silent
// chunks take as long as others do: segments are equal, and of two the second would gain nothing.
constexpr int kWorthMerging = 48;  // chunks of a sequence: fewer take less time than factors and joins
template <Pass kPass = Pass::kForward>
GD_HOST_DEVICE int persistent_segments(int chunks, int length) {
  const int segments = segments_of(chunks, length);
  return kPass == Pass::kForward || segments != 2 ? segments : chunks < kWorthMerging ? 1 : 3;
}
// Where the segments of one head begin: the first may be another length than the rest, of which some are a chunk
// longer.
struct Borders {
  int first, each, longer;  // chunks of the first; of the rest, of which so many have one more
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

}  // namespace gatedelta::cuda

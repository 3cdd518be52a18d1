// A balanced list: whole heads of similar lengths that fill the last round of the GPU badly, such as 192 of them on 132
// CTAs. All heads lie on one line, one behind the other, which is cut into equal stretches, one per CTA. A head that a
// border crosses is computed in two parts, and the first hands its state to the second through a boundary: the
// operations on the state are those of the uncut head, and so are the bits.
#pragma once

#include "cuda/sm90/schedule/work_item.hpp"

namespace gatedelta::cuda::sm90 {

constexpr int kMostBorders = 255;  // more CTAs get no balanced list

// A stretch is at least as long as every head, so no head has more than two parts. On a CTA, the part behind the first
// border of its stretch comes first and the part before the last border comes last: the head's first chunks are the
// next CTA's first work, and are done when its last chunks are this CTA's last work.
struct BalancedLine {
  static constexpr int kShortestPart = 2;  // chunks: fewer cost more as an item than they balance
  int stretches, each, longer;             // chunks of each stretch; `longer` of them have one more

  GD_HOST_DEVICE BalancedLine(int chunks, int longest_head, int blocks) {
    const int most = floor_div(chunks, longest_head);
    stretches = most < blocks ? most : blocks;
    each = floor_div(chunks, stretches);
    longer = chunks - each * stretches;
  }
  GD_HOST_DEVICE int borders() const { return stretches - 1; }
  // Border i, after stretch i.
  GD_HOST_DEVICE int border(int i) const { return (i + 1) * each + floor_div((i + 1) * longer, stretches); }
  // The first border behind a position, or one past the last.
  GD_HOST_DEVICE int border_after(int position) const {
    int i = floor_div(position, each + 1) - 1;
    while (i < 0 || (i < borders() && border(i) <= position)) ++i;
    return i;
  }
  // Chunks of the second part of a head that border i crosses; 0: not cut.
  GD_HOST_DEVICE int tail(int i, int begin, int chunks) const {
    const int before = border(i) - begin;
    return before >= kShortestPart && chunks - before >= kShortestPart ? before : 0;
  }
};

// By border: chunks of the second part of the head it crosses, and how many borders before it cross one.
struct BalancedCuts {
  const int* tails;
  const int* before;
  int count;  // cut heads
};

// Writes the entries of one head by put(place in the list, item): first parts, whole heads, second parts by falling
// length. `whole` is the item of all its chunks, seq_head its number and `begin` its position on the
// line.
template <class Put>
GD_HOST_DEVICE void list_balanced_head(const BalancedLine& line, const BalancedCuts& cuts, const WorkItem& whole,
                                       int seq_head, int seq_heads, int begin, int chunks, int value_heads,
                                       const Put& put) {
  const int border = line.border_after(begin);
  const bool is_crossed = border < line.borders() && line.border(border) < begin + chunks;
  const int tail = is_crossed ? cuts.tails[border] : 0;
  const int cut_before = border < line.borders() ? cuts.before[border] : cuts.count;
  WorkItem item = whole;
  if (tail == 0) {
    cut_item<Pass::kForward>(item, 0, chunks, chunks, value_heads);
    return put(cuts.count + seq_head - cut_before, item);
  }
  cut_item<Pass::kForward>(item, 0, chunks - tail, chunks, value_heads);
  item.to = border;
  put(cut_before, item);
  int longer = 0;
  for (int i = 0; i < line.borders(); ++i) longer += cuts.tails[i] > tail || (cuts.tails[i] == tail && i < border);
  item = whole;
  cut_item<Pass::kForward>(item, chunks - tail, chunks, chunks, value_heads);
  item.from = border;
  put(seq_heads + longer, item);
}

}  // namespace gatedelta::cuda::sm90

#include "cli/explain.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <vector>

#include "cuda/sm90/workspace/forward.hpp"
#include "cuda/sm90/workspace/short_sequences.hpp"

namespace gatedelta::cli {

namespace {

[[gnu::format(printf, 2, 3)]] void add(std::string& text, const char* format, ...) {
  char line[256];
  va_list values;
  va_start(values, format);
  std::vsnprintf(line, sizeof line, format, values);
  va_end(values);
  text += line;
}

ForwardProblem problem_of(const testing::Case& c) {
  ForwardProblem p;
  p.in.key_heads = c.Hk;
  p.in.value_heads = c.Hv;
  p.in.group = c.Hv / c.Hk;
  const bool packed = !c.lengths.empty();
  p.in.sequences.count = packed ? static_cast<int64_t>(c.lengths.size()) : c.B;
  p.in.sequences.batch = packed ? 1 : c.B;
  p.in.sequences.tokens = packed ? c.total_tokens() : c.T;
  p.in.sequences.offsets.present = packed;
  p.checkpoint_every = c.every;
  p.checkpoint_offsets.present = c.offsets;
  p.segment_chunks = c.segment;
  // What decides which sequences are short, as on CUDA.
  p.in.key_dim = p.in.value_dim = cuda::sm90::kHeadDim;
  p.in.q.dtype = GD_BF16;
  p.in.layout = c.layout;
  if (c.h0) p.in.initial.dtype = c.state;
  if (c.ht) p.final.dtype = c.state;
  if (c.every || c.offsets) p.checkpoints.dtype = c.state;
  return p;
}

std::string length_text(int chunks) { return chunks > 0 ? std::to_string(chunks) : "uncut"; }

double microseconds(float cost) { return double{cost} / cuda::sm90::Costs::kPerMicrosecond; }

}  // namespace

std::string explain_plan(const testing::Case& c, int blocks) {
  const ForwardProblem p = problem_of(c);
  const cuda::sm90::ForwardWorkspace workspace = cuda::sm90::forward_layout(p);
  const cuda::sm90::Limits limits = {blocks, static_cast<int>(cuda::sm90::max_entries(p)), workspace.boundary_count,
                                     cuda::sm90::kMostMergedHalves};
  const auto count = static_cast<int>(p.in.sequences.count), heads = static_cast<int>(c.Hv);
  const cuda::sm90::ShortPlan plan = cuda::sm90::short_plan(p);
  std::vector<int> chunks(p.in.sequences.count);
  int short_sequences = 0;
  for (int n = 0; n < count; ++n) {
    const int64_t length = c.lengths.empty() ? c.T : c.lengths[n];
    if (length > plan.longest) chunks[n] = static_cast<int>(cuda::ChunkedSequences::chunks(length));
    short_sequences += length <= plan.longest;
  }

  std::string text;
  add(text, "  %d sequences of %d value heads on %d blocks, workspace %.1f MiB, room for %d boundaries\n", count, heads,
      blocks, static_cast<double>(workspace.bytes) / (1 << 20), limits.boundaries);
  if (plan.which == cuda::sm90::ShortSequences::kAll)
    return text + "  not cut: one kernel, without chunks, for so few tokens\n";
  if (plan.which == cuda::sm90::ShortSequences::kSome)
    add(text, "  %d sequences of at most %d tokens run in the kernel for short sequences\n", short_sequences,
        static_cast<int>(plan.longest));
  cuda::sm90::LengthClass classes[cuda::sm90::kMaxClasses + 1] = {};
  const auto classes_of = [&](int share) {
    return cuda::sm90::length_classes(chunks.data(), count, heads, share, classes);
  };
  if (p.segment_chunks > 0 &&
      (!cuda::sm90::is_planned(count, heads) || limits.entries > cuda::sm90::kMaxPlannedEntries))
    return text + "  refused: CUDA does not cut so many sequences, heads or segments: leave out segment\n";
  switch (cuda::sm90::list_mode(p, blocks)) {
    case cuda::sm90::kSortedList:
      return text + "  not cut: so many sequences and heads keep the GPU busy, longest first\n";
    case cuda::sm90::kEvenList:
      return text + "  not cut: " +
             (cuda::sm90::are_short(p) ? "sequences are too short for it, "
                                       : "heads of one length keep the GPU busy, ") +
             (cuda::sm90::even_parts(p, blocks) == 2 ? "in halves\n" : "whole\n");
    case cuda::sm90::kPlannedList: break;
  }
  if (p.segment_chunks > 0) {
    add(text, "  segments of %d chunks, as segment= says\n", static_cast<int>(p.segment_chunks));
    return text;
  }
  if (const int parts = cuda::sm90::busy_parts(classes, classes_of(0), blocks))
    return text + "  not cut: heads of one length keep the GPU busy, " + (parts == 2 ? "in halves" : "whole") +
           ", which the device finds from the lengths\n";
  if (cuda::sm90::may_balance(p, limits) &&
      cuda::sm90::is_balanced(cuda::sm90::lengths_of(chunks.data(), count), heads, blocks))
    return text +
           "  balanced: heads of similar lengths in one equal stretch per block; some are in two parts, the second "
           "of which goes on with the first one's state\n";

  add(text, "  %-16s %14s %15s %7s %8s %11s %10s\n", "persistent heads", "decaying every", "these every", "heads",
      "items", "about", "uncut");
  const int longest = *std::max_element(chunks.begin(), chunks.end());
  for (int share = 0; share < cuda::sm90::kShares; ++share) {
    const int class_count = classes_of(share);
    const cuda::sm90::CutCost best =
        cuda::sm90::fastest_cut(classes, class_count, longest, limits, cuda::sm90::supports_cut(p));
    const cuda::sm90::Cut cut = cuda::sm90::cut_number(best.number, cuda::sm90::length_scale(longest));
    const auto cycles_of = [&](const cuda::sm90::Cut& c) {
      return cuda::sm90::cycles_of(c, cuda::sm90::PiecesOf(c, classes, class_count).classes, class_count, longest,
                                   limits);
    };
    int pieces = 0;
    for (int i = 0; i < class_count; ++i) {
      const cuda::sm90::ClassPieces of = cuda::sm90::pieces_of(cut, classes[i]);
      pieces += of.first.number + of.decaying.number + of.persistent.number + of.merges.number + of.waiting.number;
    }
    add(text, "  %d of %-11d %14s %15s %7s %8d %8.0f us %7.0f us\n", share, cuda::sm90::kShares - 1,
        length_text(cut.decaying).c_str(), length_text(cut.persistent).c_str(), cut.halves ? "halves" : "whole", pieces,
        microseconds(cycles_of(cut)), microseconds(cycles_of(cuda::sm90::cut_number(0, 1))));
  }
  return text;
}

}  // namespace gatedelta::cli

// What Hopper's kernels do not take.
#include "cuda/limits.hpp"

#include <cinttypes>
#include <utility>

#include "cuda/kernels.hpp"
#include "cuda/sm90/workspace/backward.hpp"

namespace gatedelta::cuda::sm90 {

namespace {

Outcome check_layer(const Layer& in) {
  for (const auto& [name, size] : {std::pair("K", in.key_dim), std::pair("V", in.value_dim)})
    if (size != kHeadDim)
      return refusal(GD_UNSUPPORTED, "%s is %d, must be %d for Hopper's kernels", name, size, kHeadDim);
  GD_CHECK(check_16_bit(in));
  if (in.group > kMaxGroup)
    return refusal(GD_UNSUPPORTED, "Hv / Hk is %" PRId64 ", must be at most %" PRId64 " on CUDA", in.group, kMaxGroup);
  GD_CHECK(check_seq_heads(in, kMaxSeqHeads));
  return check_chunks(prepare_blocks(in), kMaxPrepareBlocks, kPrepareHelpers);
}

Outcome check_segments(const ForwardProblem& p) {
  if (p.segment_chunks && !is_planned(p.in.sequences.count, p.in.value_heads))
    return refusal(GD_UNSUPPORTED,
                   "segment_chunks is %" PRId64
                   ": sequences are cut on CUDA where there are at most %d, with at most %d "
                   "heads all together",
                   p.segment_chunks, kMaxPlannedSequences, kMaxPlannedSeqHeads);
  if (p.segment_chunks && max_entries(p) > kMaxPlannedEntries)
    return refusal(GD_UNSUPPORTED,
                   "segment_chunks is %" PRId64 ", which may make %" PRId64 " work items, more than %d on CUDA",
                   p.segment_chunks, max_entries(p), kMaxPlannedEntries);
  return {};
}

}  // namespace

bool supports_layer(const Layer& in) {
  return check_layer(in).status == GD_OK &&
         check_rows({{"q", &in.q}, {"k", &in.k}, {"v", &in.v}}, in, {.tma = true}).status == GD_OK;
}

Outcome check(const ForwardProblem& p) {
  const Layer& in = p.in;
  if (p.saved && p.checkpoints)
    return refusal(GD_UNSUPPORTED,
                   "saved and checkpoints are both given: on CUDA a forward keeps states for one of them");
  GD_CHECK(check_saved_without_padding(p));
  GD_CHECK(check_layer(in));
  if (in.initial.slots > kMaxSlots)
    return refusal(GD_UNSUPPORTED, "initial_state has %" PRId64 " slots, must have at most %" PRId64 " on CUDA",
                   in.initial.slots, kMaxSlots);
  GD_CHECK(check_segments(p));
  return check_rows({{"q", &in.q}, {"k", &in.k}, {"v", &in.v}, {"out", &p.o}}, in, {.tma = true});
}

Outcome check(const BackwardProblem& p) {
  GD_CHECK(check_small_workspace(p));
  GD_CHECK(check_layer(p.in));
  GD_CHECK(check_segments(forward_of(p)));
  return check_rows(
      {{"q", &p.in.q}, {"k", &p.in.k}, {"v", &p.in.v}, {"do", &p.d_o}, {"dq", &p.dq}, {"dk", &p.dk}, {"dv", &p.dv}},
      p.in, {.tma = true});
}

Outcome check(const SummaryProblem& p) {
  GD_CHECK(check_layer(p.in));
  return check_rows({{"q", &p.in.q}, {"k", &p.in.k}, {"v", &p.in.v}}, p.in, {.tma = true});
}

Outcome check(const BackwardSummaryProblem& p) {
  GD_CHECK(check_layer(p.in));
  return check_rows({{"q", &p.in.q}, {"k", &p.in.k}, {"do", &p.d_o}}, p.in, {.tma = true});
}

}  // namespace gatedelta::cuda::sm90

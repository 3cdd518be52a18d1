// Checks that the portable kernels support a problem.
#include "cuda/limits.hpp"

#include <cinttypes>

#include "cuda/kernels.hpp"
#include "cuda/portable/backward/config.hpp"
#include "cuda/portable/summary/config.hpp"

namespace gatedelta::cuda::portable {

namespace {

// The narrowest CTAs of the transitions are 16 for a segment and head.
Outcome check_segments(const ForwardProblem& p) {
  if (!p.segment_chunks) return {};
  if (p.persistent_segment_chunks || p.segment_halves)
    return refusal(GD_UNSUPPORTED, "%s is set, but the portable CUDA kernels cut all heads alike",
                   p.persistent_segment_chunks ? "persistent_segment_chunks" : "segment_halves");
  const int64_t segments = most_segments(p), most = kMaxSeqHeads / 2;
  if (segments <= most / p.in.value_heads) return {};
  return refusal(GD_UNSUPPORTED,
                 "segment_chunks is %" PRId64 ", which may make %" PRId64 " segments, with %" PRId64
                 " heads more than %" PRId64 " on CUDA",
                 p.segment_chunks, segments, p.in.value_heads, most);
}
const RowRules kRowRules = {.token_strides = kMaxTokenStride};
Outcome check_chunk_heads(const Layer& in) {
  const int64_t chunks = sequences_of(in.sequences).workspace_chunks();
  if (chunks <= kMaxChunkHeads / in.value_heads) return {};
  return refusal(GD_UNSUPPORTED,
                 "the call has %" PRId64 " chunks times value heads, must have at most %" PRId64
                 " for the portable CUDA kernels",
                 chunks * in.value_heads, kMaxChunkHeads);
}

template <class Problem>
Outcome check_summary(const Problem& p, const char* values_name, const TokenRows& values) {
  const Layer& in = p.in;
  const ForwardProblem forward = prepared_forward(p);
  GD_CHECK(check_16_bit(in));
  GD_CHECK(check_seq_heads(in, kMaxSeqHeads));
  GD_CHECK(check_chunks(prepare_ctas(forward), kMaxCtas, prepare_helpers(forward)));
  GD_CHECK(check_chunk_heads(in));
  return check_rows({{"q", &in.q}, {"k", &in.k}, {values_name, &values}}, in, kRowRules);
}

}  // namespace

Outcome check(const ForwardProblem& p) {
  const Layer& in = p.in;
  GD_CHECK(check_saved_without_padding(p));
  GD_CHECK(check_segments(p));
  GD_CHECK(check_16_bit(in));
  GD_CHECK(check_seq_heads(in, kMaxSeqHeads));
  GD_CHECK(check_chunks(prepare_ctas(p), kMaxCtas, prepare_helpers(p)));
  GD_CHECK(check_chunk_heads(in));
  return check_rows({{"q", &in.q}, {"k", &in.k}, {"v", &in.v}, {"out", &p.o}}, in, kRowRules);
}

Outcome check(const BackwardProblem& p) {
  const Layer& in = p.in;
  GD_CHECK(check_small_workspace(p));
  if (p.small_workspace && in.key_heads == 1)
    return refusal(GD_UNSUPPORTED,
                   "small_workspace is set, but Hk is 1: the portable CUDA kernels take halves of the key heads");
  const ForwardProblem forward = forward_of(p);
  GD_CHECK(check_segments(forward));
  GD_CHECK(check_16_bit(in));
  GD_CHECK(check_seq_heads(in, kMaxSeqHeads));
  GD_CHECK(check_chunks(prepare_ctas(forward), kMaxCtas, prepare_helpers(forward)));
  GD_CHECK(check_chunk_heads(in));
  return check_rows(
      {{"q", &in.q}, {"k", &in.k}, {"v", &in.v}, {"do", &p.d_o}, {"dq", &p.dq}, {"dk", &p.dk}, {"dv", &p.dv}}, in,
      kRowRules);
}

Outcome check(const SummaryProblem& p) { return check_summary(p, "v", p.in.v); }
Outcome check(const BackwardSummaryProblem& p) { return check_summary(p, "do", p.d_o); }

}  // namespace gatedelta::cuda::portable

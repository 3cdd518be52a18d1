// Checks that the kernels for fp32 inputs support a problem.
#include "cuda/limits.hpp"

#include <cinttypes>

#include "cuda/fp32/config.hpp"
#include "cuda/kernels.hpp"

namespace gatedelta::cuda::fp32 {

namespace {
Outcome check_layer(const Layer& in, int64_t segment_chunks) {
  if (segment_chunks)
    return refusal(GD_UNSUPPORTED, "segment_chunks is %" PRId64 ": the CUDA kernels for float32 cut no sequence",
                   segment_chunks);
  GD_CHECK(check_sequences(in));
  GD_CHECK(check_seq_heads(in, kMaxSeqHeads));
  return check_chunks(chunk_ctas(in), kMaxCtas, 0);
}
}  // namespace

Outcome check(const ForwardProblem& p) {
  const Layer& in = p.in;
  if (p.prepared)
    return refusal(GD_UNSUPPORTED, "prepared is set, but there is no summary of float32 q, k and v on CUDA");
  GD_CHECK(check_saved_without_padding(p));
  GD_CHECK(check_layer(in, p.segment_chunks));
  return check_rows({{"q", &in.q}, {"k", &in.k}, {"v", &in.v}, {"out", &p.o}}, in, {});
}

Outcome check(const BackwardProblem& p) {
  if (p.small_workspace)
    return refusal(GD_UNSUPPORTED, "small_workspace is set, but the CUDA kernels for float32 have one size of it");
  GD_CHECK(check_layer(p.in, p.segment_chunks));
  return check_rows(
      {{"q", &p.in.q}, {"k", &p.in.k}, {"v", &p.in.v}, {"do", &p.d_o}, {"dq", &p.dq}, {"dk", &p.dk}, {"dv", &p.dv}},
      p.in, {});
}

}  // namespace gatedelta::cuda::fp32

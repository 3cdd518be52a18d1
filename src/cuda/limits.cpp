#include "cuda/limits.hpp"

#include <cinttypes>
#include <initializer_list>
#include <utility>

#include "core/names.hpp"
#include "cuda/decode/config.hpp"
#include "cuda/fp32/config.hpp"
#include "cuda/gated_norm/config.hpp"
#include "cuda/portable/backward_config.hpp"
#include "cuda/portable/summary_config.hpp"
#include "cuda/workspace/backward.hpp"

namespace gatedelta::cuda {

namespace {

// Leaves the function with the outcome of a rule that does not hold.
#define GD_CHECK(rule) \
  if (const Outcome outcome_ = (rule); outcome_.status != GD_OK) return outcome_

// What no kernel for whole sequences takes.
Outcome check_sequences(const Layer& in) {
  if (in.tiled)
    return refusal(GD_UNSUPPORTED,
                   "key_head_order is tiled with Hk = %" PRId64 " and Hv = %" PRId64
                   ", must be grouped on CUDA but in recurrent steps: reorder the value heads",
                   in.key_heads, in.value_heads);
  if (const int64_t tokens = in.sequences.tokens; tokens > kMaxTokens)
    return refusal(GD_UNSUPPORTED, "T is %" PRId64 ", must be at most %" PRId64 " on CUDA", tokens, kMaxTokens);
  return {};
}
// What no kernel for chunks takes.
Outcome check_inputs(const Layer& in) {
  if (in.q.dtype != GD_BF16 && in.q.dtype != GD_F16)
    return refusal(GD_UNSUPPORTED, "q, k and v are %s, must be bfloat16 or float16 in a summary on CUDA",
                   dtype_name(in.q.dtype));
  return check_sequences(in);
}
Outcome check_seq_heads(const Layer& in, int64_t most) {
  if (in.sequences.count <= most / in.value_heads) return {};
  return refusal(GD_UNSUPPORTED, "N * Hv is %" PRId64 " * %" PRId64 ", must be at most %" PRId64 " on CUDA",
                 in.sequences.count, in.value_heads, most);
}
Outcome check_chunks(int64_t blocks, int64_t most, int64_t helpers) {
  if (blocks <= most) return {};
  return refusal(GD_UNSUPPORTED,
                 "the call has %" PRId64 " chunks times key heads, must have at most %" PRId64 " on CUDA",
                 blocks - helpers, most - helpers);
}

Outcome check_layer(const Layer& in) {
  for (const auto& [name, size] : {std::pair("K", in.key_dim), std::pair("V", in.value_dim)})
    if (size != kHeadDim)
      return refusal(GD_UNSUPPORTED, "%s is %d, must be %d for Hopper's kernels", name, size, kHeadDim);
  GD_CHECK(check_inputs(in));
  if (in.group > kMaxGroup)
    return refusal(GD_UNSUPPORTED, "Hv / Hk is %" PRId64 ", must be at most %" PRId64 " on CUDA", in.group, kMaxGroup);
  GD_CHECK(check_seq_heads(in, kMaxSeqHeads));
  return check_chunks(prepare_blocks(in), kMaxPrepareBlocks, kPrepareHelpers);
}

Outcome check_small_workspace(const BackwardProblem& p) {
  if (!p.small_workspace || p.saved) return {};
  return refusal(
      GD_UNSUPPORTED,
      "small_workspace is set, but saved is null: on CUDA give it what the forward saved (in a query saved_bytes), or "
      "leave it 0");
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

// What loads of 16 bytes and TMA require of a tensor of rows, and that it has the type of q.
Outcome check_rows(const char* name, const TokenRows* rows, const Layer& in, bool by_tma = true) {
  if (!*rows) return {};
  if (rows->dtype != in.q.dtype)
    return refusal(GD_UNSUPPORTED, "%s: dtype is %s, must be %s as that of q on CUDA", name, dtype_name(rows->dtype),
                   dtype_name(in.q.dtype));
  if (reinterpret_cast<uintptr_t>(rows->data) % kRowAlign)
    return refusal(GD_UNSUPPORTED, "%s: data (%p) is not %d-byte aligned, as it must be on CUDA", name, rows->data,
                   static_cast<int>(kRowAlign));
  const int64_t strides[] = {rows->batch_stride, rows->token_stride, rows->head_stride};
  for (int d = 0; d < 3; ++d) {
    const int64_t element_bytes = dtype_bytes(rows->dtype), bytes = strides[d] * element_bytes;
    if (bytes % kRowAlign)
      return refusal(GD_UNSUPPORTED, "%s: stride[%d] is %" PRId64 ", must be a multiple of %d (%d bytes) on CUDA", name,
                     d, strides[d], static_cast<int>(kRowAlign / element_bytes), static_cast<int>(kRowAlign));
    if (by_tma && bytes >= kMaxStrideBytes)
      return refusal(GD_UNSUPPORTED, "%s: stride[%d] is %" PRId64 ", must be less than 2^39 on CUDA", name, d,
                     strides[d]);
  }
  return {};
}

}  // namespace

Outcome check_limits(const ForwardProblem& p) {
  const Layer& in = p.in;
  if (p.saved && p.checkpoints)
    return refusal(GD_UNSUPPORTED,
                   "saved and checkpoints are both given: on CUDA a forward keeps states for one of them");
  // A padded row would leave gaps in `saved`, and the host does not know which rows are padded.
  if (p.saved && in.initial.indices && p.final.indices)
    return refusal(GD_UNSUPPORTED, "saved is given, but on CUDA not together with initial_indices and final_indices");
  GD_CHECK(check_layer(in));
  if (in.initial.slots > kMaxSlots)
    return refusal(GD_UNSUPPORTED, "initial_state has %" PRId64 " slots, must have at most %" PRId64 " on CUDA",
                   in.initial.slots, kMaxSlots);
  GD_CHECK(check_segments(p));
  for (const auto& [name, rows] :
       {std::pair("q", &in.q), std::pair("k", &in.k), std::pair("v", &in.v), std::pair("o", &p.o)})
    GD_CHECK(check_rows(name, rows, in));
  return {};
}

bool is_hoppers(const Layer& in) {
  if (check_layer(in).status != GD_OK) return false;
  for (const TokenRows* rows : {&in.q, &in.k, &in.v})
    if (check_rows("", rows, in).status != GD_OK) return false;
  return true;
}

namespace {

// The narrowest CTAs of the transitions are 16 a segment and head.
Outcome check_portable_segments(const ForwardProblem& p) {
  if (!p.segment_chunks) return {};
  if (p.persistent_segment_chunks || p.segment_halves)
    return refusal(GD_UNSUPPORTED, "%s is set, but the portable CUDA kernels cut all heads alike",
                   p.persistent_segment_chunks ? "persistent_segment_chunks" : "segment_halves");
  const int64_t slots = portable::most_slots(p), most = portable::kMaxSeqHeads / 2;
  if (slots <= most / p.in.value_heads) return {};
  return refusal(GD_UNSUPPORTED,
                 "segment_chunks is %" PRId64 ", which may make %" PRId64 " segments, with %" PRId64
                 " heads more than %" PRId64 " on CUDA",
                 p.segment_chunks, slots, p.in.value_heads, most);
}
Outcome check_portable_rows(const char* name, const TokenRows* rows, const Layer& in) {
  GD_CHECK(check_rows(name, rows, in, false));
  if (rows->token_stride < portable::kMaxTokenStride) return {};
  return refusal(GD_UNSUPPORTED, "%s: stride[1] is %" PRId64 ", must be less than %" PRId64 " on CUDA", name,
                 rows->token_stride, portable::kMaxTokenStride);
}
Outcome check_chunk_heads(const Layer& in) {
  const int64_t chunks = portable::sequences_of(in).workspace_chunks();
  if (chunks <= portable::kMaxChunkHeads / in.value_heads) return {};
  return refusal(GD_UNSUPPORTED,
                 "the call has %" PRId64 " chunks times value heads, must have at most %" PRId64
                 " for the portable CUDA kernels",
                 chunks * in.value_heads, portable::kMaxChunkHeads);
}

}  // namespace

Outcome check_portable_limits(const ForwardProblem& p) {
  const Layer& in = p.in;
  // A padded row would leave gaps in `saved`, and the host does not know which rows are padded.
  if (p.saved && in.initial.indices && p.final.indices)
    return refusal(GD_UNSUPPORTED, "saved is given, but on CUDA not together with initial_indices and final_indices");
  GD_CHECK(check_portable_segments(p));
  GD_CHECK(check_inputs(in));
  GD_CHECK(check_seq_heads(in, portable::kMaxSeqHeads));
  GD_CHECK(check_chunks(portable::prepare_ctas(p), portable::kMaxCtas, portable::prepare_helpers(p)));
  GD_CHECK(check_chunk_heads(in));
  for (const auto& [name, rows] :
       {std::pair("q", &in.q), std::pair("k", &in.k), std::pair("v", &in.v), std::pair("o", &p.o)})
    GD_CHECK(check_portable_rows(name, rows, in));
  return {};
}

Outcome check_portable_limits(const BackwardProblem& p) {
  const Layer& in = p.in;
  GD_CHECK(check_small_workspace(p));
  if (p.small_workspace && in.key_heads == 1)
    return refusal(GD_UNSUPPORTED,
                   "small_workspace is set, but Hk is 1: the portable CUDA kernels take halves of the key heads");
  const ForwardProblem forward = portable::forward_of(p);
  GD_CHECK(check_portable_segments(forward));
  GD_CHECK(check_inputs(in));
  GD_CHECK(check_seq_heads(in, portable::kMaxSeqHeads));
  GD_CHECK(check_chunks(portable::prepare_ctas(forward), portable::kMaxCtas, portable::prepare_helpers(forward)));
  GD_CHECK(check_chunk_heads(in));
  for (const auto& [name, rows] :
       {std::pair("q", &in.q), std::pair("k", &in.k), std::pair("v", &in.v), std::pair("d_o", &p.d_o),
        std::pair("dq", &p.dq), std::pair("dk", &p.dk), std::pair("dv", &p.dv)})
    GD_CHECK(check_portable_rows(name, rows, in));
  return {};
}

namespace {
template <class Problem>
Outcome check_portable_summary(const Problem& p, const char* values_name, const TokenRows& values) {
  const Layer& in = p.in;
  const ForwardProblem forward = portable::prepared_forward(p);
  GD_CHECK(check_inputs(in));
  GD_CHECK(check_seq_heads(in, portable::kMaxSeqHeads));
  GD_CHECK(check_chunks(portable::prepare_ctas(forward), portable::kMaxCtas, portable::prepare_helpers(forward)));
  GD_CHECK(check_chunk_heads(in));
  for (const auto& [name, rows] : {std::pair("q", &in.q), std::pair("k", &in.k), std::pair(values_name, &values)})
    GD_CHECK(check_portable_rows(name, rows, in));
  return {};
}
}  // namespace

Outcome check_portable_limits(const SummaryProblem& p) { return check_portable_summary(p, "v", p.in.v); }
Outcome check_portable_limits(const BackwardSummaryProblem& p) { return check_portable_summary(p, "d_o", p.d_o); }

Outcome check_limits(const BackwardProblem& p) {
  GD_CHECK(check_small_workspace(p));
  GD_CHECK(check_layer(p.in));
  GD_CHECK(check_segments(forward_of(p)));
  for (const auto& [name, rows] :
       {std::pair("q", &p.in.q), std::pair("k", &p.in.k), std::pair("v", &p.in.v), std::pair("d_o", &p.d_o),
        std::pair("dq", &p.dq), std::pair("dk", &p.dk), std::pair("dv", &p.dv)})
    GD_CHECK(check_rows(name, rows, p.in));
  return {};
}

namespace {
Outcome check_fp32_layer(const Layer& in, int64_t segment_chunks) {
  if (segment_chunks)
    return refusal(GD_UNSUPPORTED, "segment_chunks is %" PRId64 ": the CUDA kernels for float32 cut no sequence",
                   segment_chunks);
  GD_CHECK(check_sequences(in));
  GD_CHECK(check_seq_heads(in, portable::kMaxSeqHeads));
  return check_chunks(fp32::chunk_ctas(in), portable::kMaxCtas, 0);
}
}  // namespace

Outcome check_fp32_limits(const ForwardProblem& p) {
  const Layer& in = p.in;
  if (p.prepared)
    return refusal(GD_UNSUPPORTED, "prepared is set, but there is no summary of float32 q, k and v on CUDA");
  // A padded row would leave gaps in `saved`, and the host does not know which rows are padded.
  if (p.saved && in.initial.indices && p.final.indices)
    return refusal(GD_UNSUPPORTED, "saved is given, but on CUDA not together with initial_indices and final_indices");
  GD_CHECK(check_fp32_layer(in, p.segment_chunks));
  for (const auto& [name, rows] :
       {std::pair("q", &in.q), std::pair("k", &in.k), std::pair("v", &in.v), std::pair("o", &p.o)})
    GD_CHECK(check_rows(name, rows, in, false));
  return {};
}

Outcome check_fp32_limits(const BackwardProblem& p) {
  if (p.small_workspace)
    return refusal(GD_UNSUPPORTED, "small_workspace is set, but the CUDA kernels for float32 have one size of it");
  GD_CHECK(check_fp32_layer(p.in, p.segment_chunks));
  for (const auto& [name, rows] :
       {std::pair("q", &p.in.q), std::pair("k", &p.in.k), std::pair("v", &p.in.v), std::pair("d_o", &p.d_o),
        std::pair("dq", &p.dq), std::pair("dk", &p.dk), std::pair("dv", &p.dv)})
    GD_CHECK(check_rows(name, rows, p.in, false));
  return {};
}

Outcome check_limits(const SummaryProblem& p) {
  GD_CHECK(check_layer(p.in));
  for (const auto& [name, rows] : {std::pair("q", &p.in.q), std::pair("k", &p.in.k), std::pair("v", &p.in.v)})
    GD_CHECK(check_rows(name, rows, p.in));
  return {};
}

Outcome check_limits(const BackwardSummaryProblem& p) {
  GD_CHECK(check_layer(p.in));
  for (const auto& [name, rows] : {std::pair("q", &p.in.q), std::pair("k", &p.in.k), std::pair("d_o", &p.d_o)})
    GD_CHECK(check_rows(name, rows, p.in));
  return {};
}

Outcome check_limits(const RecurrentProblem& p) {
  if (decode_pairs(p.in) <= kMaxDecodePairs) return {};
  return refusal(GD_UNSUPPORTED, "N * Hv is %" PRId64 " * %" PRId64 ", must be at most %" PRId64 "%s on CUDA",
                 p.in.sequences.count, p.in.value_heads, kMaxDecodePairs,
                 p.in.sequences.offsets ? " (and with cu_seqlens N counts one more)" : "");
}

Outcome check_limits(const GatedNorm& in) {
  if (in.rows() <= kMaxNormRows) return {};
  return refusal(GD_UNSUPPORTED, "B * T * H is %" PRId64 ", must be at most %" PRId64 " on CUDA", in.rows(),
                 kMaxNormRows);
}

}  // namespace gatedelta::cuda

#include "cuda/limits.hpp"

#include <cinttypes>

#include "core/names.hpp"

namespace gatedelta::cuda {

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

Outcome check_16_bit(const Layer& in) {
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

Outcome check_chunks(int64_t ctas, int64_t most, int64_t helpers) {
  if (ctas <= most) return {};
  return refusal(GD_UNSUPPORTED,
                 "the call has %" PRId64 " chunks times key heads, must have at most %" PRId64 " on CUDA",
                 ctas - helpers, most - helpers);
}

Outcome check_small_workspace(const BackwardProblem& p) {
  if (!p.small_workspace || p.saved) return {};
  return refusal(
      GD_UNSUPPORTED,
      "small_workspace is set, but saved is null: on CUDA give it what the forward saved (in a query saved_bytes), or "
      "leave it 0");
}

Outcome check_saved_without_padding(const ForwardProblem& p) {
  if (!p.saved || !p.in.initial.indices || !p.final.indices) return {};
  return refusal(GD_UNSUPPORTED,
                 "saved is given, but on CUDA not together with initial_state_indices and final_state_indices");
}

namespace {

Outcome check_named_rows(const char* name, const TokenRows* rows, const Layer& in, const RowRules& rules) {
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
    if (rules.tma && bytes >= kMaxStrideBytes)
      return refusal(GD_UNSUPPORTED, "%s: stride[%d] is %" PRId64 ", must be less than 2^39 on CUDA", name, d,
                     strides[d]);
  }
  if (rules.token_strides > 0 && rows->token_stride >= rules.token_strides)
    return refusal(GD_UNSUPPORTED, "%s: stride[1] is %" PRId64 ", must be less than %" PRId64 " on CUDA", name,
                   rows->token_stride, rules.token_strides);
  return {};
}

}  // namespace

Outcome check_rows(std::initializer_list<NamedRows> list, const Layer& in, const RowRules& rules) {
  for (const NamedRows& named : list) GD_CHECK(check_named_rows(named.name, named.rows, in, rules));
  return {};
}

}  // namespace gatedelta::cuda

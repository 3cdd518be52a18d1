// The layer's inputs, common to all operations.
#include "api/validate/inputs.hpp"

#include <cinttypes>
#include <cmath>
#include <utility>

#include "core/names.hpp"

namespace gatedelta::api {

namespace {

constexpr int64_t kMaxHeads = 1 << 16;

}  // namespace

gd_status check_head_dim(const char* name, int64_t size) {
  if (size >= 16 && size <= 256 && size % 16 == 0) return GD_OK;
  return invalid("%s is %" PRId64 ", must be a multiple of 16 from 16 to 256", name, size);
}

gd_status validate_layer(Checker& check, const gd_inputs& in, Layer& layer, bool picked) {
  GD_TRY(check_reserved("in", in.reserved, in.reserved_flags));
  GD_TRY(check_enum("gate", in.gate, GD_GATE_RAW));
  GD_TRY(check_enum("beta_kind", in.beta_kind, GD_BETA_LOGIT_DOUBLED));
  GD_TRY(check_enum("state_layout", in.state_layout, GD_STATE_VK));
  layer.gate = static_cast<gd_gate>(in.gate);
  layer.beta_kind = static_cast<gd_beta>(in.beta_kind);
  layer.layout = static_cast<gd_state_layout>(in.state_layout);
  GD_TRY(check_enum("key_head_order", in.key_head_order, GD_KEY_HEADS_TILED));
  layer.l2norm = in.l2norm != 0;
  if (in.first_slot < 0) return invalid("first_slot is %" PRId64 ", must not be negative", in.first_slot);
  layer.first_slot = in.first_slot;

  GD_TRY(check.rows("q", in.q, {"[B, T, Hk, K]", 4, {kAny, kAny, kAny, kAny}}, Need::required, Role::input, layer.q));
  GD_TRY(check_head_dim("K", in.q.shape[3]));
  if (in.q.shape[2] < 1) return invalid("Hk is 0, q must have at least one head");
  Sequences& sequences = layer.sequences;
  sequences.batch = in.q.shape[0];
  sequences.tokens = in.q.shape[1];
  layer.key_heads = in.q.shape[2];
  layer.key_dim = static_cast<int>(in.q.shape[3]);
  GD_TRY(check.rows("k", in.k, key_rows(layer), Need::required, Role::input, layer.k));
  const Shape v = {"[B, T, Hv, V]", 4, {sequences.batch, sequences.tokens, kAny, kAny}};
  GD_TRY(check.rows("v", in.v, v, Need::required, Role::input, layer.v));
  GD_TRY(check_head_dim("V", in.v.shape[3]));
  layer.value_heads = in.v.shape[2];
  layer.value_dim = static_cast<int>(in.v.shape[3]);
  if (layer.value_heads < 1 || layer.value_heads % layer.key_heads != 0)
    return invalid("v has Hv = %" PRId64 " heads, must be a multiple of Hk = %" PRId64, layer.value_heads,
                   layer.key_heads);
  if (layer.value_heads > kMaxHeads)
    return invalid("v has Hv = %" PRId64 " heads, must be at most %" PRId64, layer.value_heads, kMaxHeads);
  layer.group = layer.value_heads / layer.key_heads;
  layer.tiled = in.key_head_order == GD_KEY_HEADS_TILED && layer.key_heads > 1 && layer.group > 1;
  for (const auto& [name, dtype] : {std::pair("k", in.k.dtype), std::pair("v", in.v.dtype)})
    if (dtype != in.q.dtype)
      return invalid("%s: dtype is %s, must be %s as that of q", name, dtype_name(dtype), dtype_name(in.q.dtype));

  GD_TRY(check.rows("g", in.g, value_scalars(layer), Need::required, Role::input, layer.g));
  GD_TRY(check.rows("beta", in.beta, value_scalars(layer), Need::required, Role::input, layer.beta));
  GD_TRY(check.gate_vector("A_log", in.A_log, layer, Need::required, Role::input, layer.A_log));
  GD_TRY(check.gate_vector("dt_bias", in.dt_bias, layer, Need::optional, Role::input, layer.dt_bias));

  GD_TRY(check.offsets("cu_seqlens", in.cu_seqlens, sequences.offsets));
  sequences.count = sequences.batch;
  if (sequences.offsets) {
    if (in.cu_seqlens.shape[0] < 1) return invalid("cu_seqlens is empty, must hold N + 1 offsets");
    if (sequences.batch != 1)
      return invalid("B is %" PRId64 ", must be 1 with cu_seqlens: packed sequences share one row of tokens",
                     sequences.batch);
    sequences.count = in.cu_seqlens.shape[0] - 1;
  }
  // Tokens, plus a chunk per sequence, times heads; every workspace is a small multiple of this.
  int64_t tokens, work;
  if (__builtin_mul_overflow(sequences.batch, sequences.tokens, &tokens) ||
      __builtin_add_overflow(tokens, (sequences.count + 1) * kChunk, &work) ||
      __builtin_mul_overflow(work, layer.value_heads, &work) || work > kMaxSize)
    return invalid("%" PRId64 " sequences of B * T = %" PRId64 " * %" PRId64 " tokens with %" PRId64
                   " heads are too many to compute",
                   sequences.count, sequences.batch, sequences.tokens, layer.value_heads);

  const Shape rows_of_slots = {"[N, S]", 2, {sequences.count, kAny}};
  GD_TRY(check.indexed_states("initial_state", in.initial_state, "initial_state_indices", in.initial_state_indices,
                              picked ? rows_of_slots : per_sequence(layer), layer, Role::input, layer.initial));
  if (picked && in.initial_state_indices.shape[1] == 0)
    return invalid("initial_state_indices is [N, S] with S = 0, must have a slot for each sequence");

  if (!in.has_scale && in.scale != 0) return invalid("scale is %g, but has_scale is 0", static_cast<double>(in.scale));
  if (!std::isfinite(in.scale)) return invalid("scale is %g, must be finite", static_cast<double>(in.scale));
  layer.scale = in.has_scale ? in.scale : 1.0f / std::sqrt(static_cast<float>(layer.key_dim));
  return GD_OK;
}

gd_status check_first_slot(const Layer& layer, std::initializer_list<const StateRows*> others) {
  if (layer.first_slot == 0 || layer.initial.indices) return GD_OK;
  for (const StateRows* states : others)
    if (states->indices) return GD_OK;
  return invalid("first_slot is %" PRId64 ", but the call has no indices", layer.first_slot);
}

}  // namespace gatedelta::api

// The stages of context parallelism: summaries of sequences, forwards and backwards, and the merge.
#include <cinttypes>

#include "api/validate/inputs.hpp"
#include "api/validate/saved.hpp"
#include "core/names.hpp"

namespace gatedelta::api {

namespace {

// The range of sequences a call summarises. On return `count` is their number.
gd_status check_range(int64_t first, int64_t& count, const Sequences& all) {
  if (first < 0 || first > all.count)
    return invalid("first_sequence is %" PRId64 ", but there are %" PRId64 " sequences", first, all.count);
  if (count < 0) return invalid("sequence_count is %" PRId64 ", must not be negative", count);
  if (count > all.count - first)
    return invalid("sequence_count is %" PRId64 ", but %" PRId64 " sequences follow first_sequence = %" PRId64, count,
                   all.count - first, first);
  if (count == 0) count = all.count - first;
  return GD_OK;
}

gd_status refuse_initial_state(const gd_inputs& in) {
  if (is_absent(in.initial_state) && is_absent(in.initial_state_indices)) return GD_OK;
  return invalid("initial_state is given, but a summary is of what happens without one: leave it out");
}

// [n, Hv, ., .] for the n sequences of a summary.
gd_status summary_states(Checker& check, const char* name, const gd_tensor& t, const Layer& layer, int64_t count,
                         StateRows& out) {
  if (is_absent(t)) return invalid("%s is missing", name);
  const bool kv = layer.layout == GD_STATE_KV;
  const Shape shape = {kv ? "[n, Hv, K, V]" : "[n, Hv, V, K]",
                       4,
                       {count, layer.value_heads, Checker::rows_of(layer), Checker::columns_of(layer)}};
  GD_TRY(check.tensor(name, t, shape, kFloats, 2, Role::output));
  out = {check.address(t), static_cast<gd_dtype>(t.dtype), count, stride_of(t, 0), stride_of(t, 1), {}};
  return GD_OK;
}

gd_status check_float32(const char* name, const gd_tensor& t) {
  if (is_absent(t) || t.dtype == GD_F32) return GD_OK;
  return invalid("%s: dtype is %s, must be float32", name, dtype_name(t.dtype));
}

}  // namespace

gd_status validate_shapes(const gd_summary_args& args, Stage stage, SummaryProblem& p) {
  Checker check(stage);
  GD_TRY(check_reserved("gd_summary_args", args.reserved));
  GD_TRY(refuse_initial_state(args.in));
  gd_inputs in = args.in;
  GD_TRY(check.saved(args.saved, args.saved_bytes, Role::output, p.saved));
  p.prepared = args.prepared != 0;
  if (p.prepared && !p.saved) return invalid("prepared is set, but saved is null: give it that of the earlier call");
  if (!p.saved) {  // these are not read
    in.q = in.k;
    in.has_scale = 0;
    in.scale = 0;
  }
  TokenRows k;
  GD_TRY(check.rows("k", in.k, {"[B, T, Hk, K]", 4, {kAny, kAny, kAny, kAny}}, Need::required, Role::input, k));
  GD_TRY(validate_layer(check, in, p.in));
  GD_TRY(
      check_saved_call(stage, p.prepared, SavedPart::prepared, args.saved_call, saved_call_of(p.in, args.exec, false)));
  GD_TRY(check_first_slot(p.in, {}));
  p.first = args.first_sequence;
  p.count = args.sequence_count;
  GD_TRY(check_range(p.first, p.count, p.in.sequences));
  const int64_t count = p.count, heads = p.in.value_heads;
  GD_TRY(summary_states(check, "local_state", args.local_state, p.in, count, p.local));
  if (!is_absent(args.transition)) {
    GD_TRY(check_float32("transition", args.transition));
    const Shape shape = {"[n, Hv, K, K]", 4, {count, heads, p.in.key_dim, p.in.key_dim}};
    GD_TRY(check.tensor("transition", args.transition, shape, kFloats, 2, Role::output));
    p.transition = {check.address(args.transition), GD_F32, count, stride_of(args.transition, 0),
                    stride_of(args.transition, 1),  {}};
  }
  if (!is_absent(args.fade)) {
    GD_TRY(check_float32("fade", args.fade));
    GD_TRY(check.tensor("fade", args.fade, {"[n, Hv]", 2, {count, heads}}, kFloats, 0, Role::output));
    p.fade = {check.address(args.fade), GD_F32, stride_of(args.fade, 0), 0, stride_of(args.fade, 1)};
  }
  p.skip_faded = args.skip_faded != 0;
  if (p.skip_faded && !p.transition && !p.fade)
    return invalid("skip_faded is set, but transition and fade are absent: nothing would say which heads have faded");
  return check.finish(args.exec);
}

gd_status validate_shapes(const gd_backward_summary_args& args, Stage stage, BackwardSummaryProblem& p) {
  Checker check(stage);
  GD_TRY(check_reserved("gd_backward_summary_args", args.reserved, args.reserved_flags));
  GD_TRY(refuse_initial_state(args.in));
  gd_inputs in = args.in;
  const Shape any = {"[B, T, Hv, V]", 4, {kAny, kAny, kAny, kAny}};
  GD_TRY(check.rows("q", in.q, {"[B, T, Hk, K]", 4, {kAny, kAny, kAny, kAny}}, Need::required, Role::input, p.in.q));
  GD_TRY(check.rows("do", args.do_, any, Need::required, Role::input, p.d_o));
  if (args.do_.shape[0] != in.q.shape[0] || args.do_.shape[1] != in.q.shape[1])
    return invalid("do has B, T = %" PRId64 ", %" PRId64 ", must have those of q, %" PRId64 ", %" PRId64,
                   args.do_.shape[0], args.do_.shape[1], in.q.shape[0], in.q.shape[1]);
  in.v = args.do_;  // v has its shape, and is not read
  in.v.dtype = in.q.dtype;
  GD_TRY(validate_layer(check, in, p.in));
  GD_TRY(check_first_slot(p.in, {}));
  p.in.v = {};
  p.first = args.first_sequence;
  p.count = args.sequence_count;
  GD_TRY(check_range(p.first, p.count, p.in.sequences));
  GD_TRY(summary_states(check, "d_local", args.d_local, p.in, p.count, p.d_local));
  GD_TRY(check.saved(args.saved, args.saved_bytes, Role::input, p.saved));
  GD_TRY(check_saved_call(stage, static_cast<bool>(p.saved), SavedPart::prepared, args.saved_call,
                          saved_call_of(p.in, args.exec, false)));
  p.skip_faded = args.skip_faded != 0;
  return check.finish(args.exec);
}

gd_status validate_shapes(const gd_merge_args& args, Stage stage, MergeProblem& p) {
  Checker check(stage);
  GD_TRY(check_reserved("gd_merge_args", args.reserved));
  GD_TRY(check_enum("state_layout", args.state_layout, GD_STATE_VK));
  p.layout = static_cast<gd_state_layout>(args.state_layout);
  p.transposed = args.transposed != 0;
  const bool kv = p.layout == GD_STATE_KV;
  const char* const matrix = kv ? "[P, Hv, K, V]" : "[P, Hv, V, K]";
  if (is_absent(args.values)) return invalid("values is missing");
  GD_TRY(check.tensor("values", args.values, {matrix, 4, {kAny, kAny, kAny, kAny}}, kFloats, 2, Role::input));
  p.segments = args.values.shape[0];
  p.heads = args.values.shape[1];
  const int64_t K = args.values.shape[kv ? 2 : 3], V = args.values.shape[kv ? 3 : 2];
  if (p.heads < 1) return invalid("Hv is 0, values must have at least one head");
  GD_TRY(check_head_dim("K", K));
  GD_TRY(check_head_dim("V", V));
  p.key_dim = static_cast<int>(K);
  p.value_dim = static_cast<int>(V);
  if (is_absent(args.transitions)) return invalid("transitions is missing");
  GD_TRY(check_float32("transitions", args.transitions));
  const Shape transitions = {"[P, Hv, K, K]", 4, {p.segments, p.heads, K, K}};
  GD_TRY(check.tensor("transitions", args.transitions, transitions, kFloats, 2, Role::input));
  if (is_absent(args.first) || is_absent(args.count))
    return invalid("%s is missing", is_absent(args.first) ? "first" : "count");
  GD_TRY(check.indices("first", args.first, {"[R]", 1, {kAny}}, Role::input, p.first));
  p.results = args.first.shape[0];
  GD_TRY(check.indices("count", args.count, {"[R]", 1, {p.results}}, Role::input, p.count));
  if (is_absent(args.state)) return invalid("state is missing");
  const Shape state = {kv ? "[R, Hv, K, V]" : "[R, Hv, V, K]", 4, {p.results, p.heads, kv ? K : V, kv ? V : K}};
  GD_TRY(check.tensor("state", args.state, state, kFloats, 2, Role::output));
  const auto rows = [&](const gd_tensor& t) -> StateRows {
    return {check.address(t), static_cast<gd_dtype>(t.dtype), t.shape[0], stride_of(t, 0), stride_of(t, 1), {}};
  };
  p.values = rows(args.values);
  p.transitions = rows(args.transitions);
  p.state = rows(args.state);
  return check.finish(args.exec);
}

}  // namespace gatedelta::api

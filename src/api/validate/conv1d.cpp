// Arguments of the convolution and of its backward.
#include <cinttypes>

#include "api/validate/checker.hpp"
#include "api/validate/contents.hpp"

namespace gatedelta::api {

namespace {

constexpr int64_t kMaxChannels = 1 << 24;

Shape token_rows(const Conv1dInputs& in) {
  return {"[B, T, D]", 3, {in.sequences.batch, in.sequences.tokens, in.channels}};
}

gd_status check_taps(Checker& check, const char* name, const gd_tensor& t, const Shape& shape, Role role,
                     TapWeights& out) {
  if (is_absent(t)) return role == Role::input ? invalid("%s is missing", name) : GD_OK;
  GD_TRY(check.tensor(name, t, shape, kFloats, 0, role));
  out = {check.address(t), static_cast<gd_dtype>(t.dtype), stride_of(t, 0), stride_of(t, 1)};
  return GD_OK;
}

gd_status check_bias(Checker& check, const char* name, const gd_tensor& t, const Conv1dInputs& in, Role role,
                     HeadVector& out) {
  if (is_absent(t)) return GD_OK;
  GD_TRY(check.tensor(name, t, {"[D]", 1, {in.channels}}, kFloats, 0, role));
  out = {check.address(t), static_cast<gd_dtype>(t.dtype), stride_of(t, 0)};
  return GD_OK;
}

// One state per sequence, or a pool when there are indices.
gd_status check_states(Checker& check, const char* name, const gd_tensor& t, const Conv1dInputs& in, Role role,
                       ConvStates& out, bool may_share = false) {
  if (is_absent(t)) return GD_OK;
  const bool pool = static_cast<bool>(out.indices);
  const Shape shape = {pool ? "[slots, D, S]" : "[N, D, S]", 3, {pool ? kAny : in.sequences.count, in.channels, kAny}};
  GD_TRY(check.tensor(name, t, shape, kFloats, 0, role, may_share));
  if (t.shape[2] < in.taps - 1)
    return invalid("%s has S = %" PRId64 " columns, must have at least W - 1 = %d", name, t.shape[2], in.taps - 1);
  const IndexRows indices = out.indices;
  const int64_t first_slot = out.first_slot;
  out = {check.address(t), static_cast<gd_dtype>(t.dtype),
         t.shape[0],       t.shape[2],
         stride_of(t, 0),  stride_of(t, 1),
         stride_of(t, 2),  indices,
         first_slot};
  return GD_OK;
}

gd_status check_indexed_states(Checker& check, const char* name, const gd_tensor& t, const char* index_name,
                               const gd_tensor& index, const Conv1dInputs& in, int64_t first_slot, Role role,
                               ConvStates& out) {
  if (is_absent(t) && !is_absent(index)) return invalid("%s is given without %s", index_name, name);
  GD_TRY(check.indices(index_name, index, {"[N]", 1, {in.sequences.count}}, role, out.indices));
  if (out.indices) out.first_slot = first_slot;
  return check_states(check, name, t, in, role, out, true);
}

gd_status validate_inputs(Checker& check, const gd_conv1d_inputs& args, Conv1dInputs& in) {
  GD_TRY(check_reserved("in", args.reserved, args.reserved_flags));
  GD_TRY(check_enum("activation", args.activation, GD_CONV1D_SILU));
  in.silu = args.activation == GD_CONV1D_SILU;
  GD_TRY(check.rows("x", args.x, {"[B, T, D]", 3, {kAny, kAny, kAny}}, Need::required, Role::input, in.x));
  Sequences& sequences = in.sequences;
  sequences.batch = args.x.shape[0];
  sequences.tokens = args.x.shape[1];
  in.channels = args.x.shape[2];
  if (in.channels < 1 || in.channels > kMaxChannels)
    return invalid("x has D = %" PRId64 " channels, must have from 1 to %" PRId64, in.channels, kMaxChannels);
  GD_TRY(check_taps(check, "weight", args.weight, {"[D, W]", 2, {in.channels, kAny}}, Role::input, in.weight));
  if (args.weight.shape[1] < 2 || args.weight.shape[1] > kMaxTaps)
    return invalid("weight has W = %" PRId64 " taps, must have from 2 to %d", args.weight.shape[1], kMaxTaps);
  in.taps = static_cast<int>(args.weight.shape[1]);
  GD_TRY(check_bias(check, "bias", args.bias, in, Role::input, in.bias));

  GD_TRY(check.offsets("cu_seqlens", args.cu_seqlens, sequences.offsets));
  sequences.count = sequences.batch;
  if (sequences.offsets) {
    if (args.cu_seqlens.shape[0] < 1) return invalid("cu_seqlens is empty, must hold N + 1 offsets");
    if (sequences.batch != 1)
      return invalid("B is %" PRId64 ", must be 1 with cu_seqlens: packed sequences share one row of tokens",
                     sequences.batch);
    sequences.count = args.cu_seqlens.shape[0] - 1;
  }
  int64_t work;
  if (__builtin_mul_overflow(sequences.batch, sequences.tokens, &work) ||
      __builtin_add_overflow(work, sequences.count + 1, &work) || __builtin_mul_overflow(work, in.channels, &work) ||
      work > kMaxSize)
    return invalid("%" PRId64 " sequences of B * T = %" PRId64 " * %" PRId64 " tokens with %" PRId64
                   " channels are too many to compute",
                   sequences.count, sequences.batch, sequences.tokens, in.channels);
  if (args.first_slot < 0) return invalid("first_slot is %" PRId64 ", must not be negative", args.first_slot);
  return check_indexed_states(check, "initial_state", args.initial_state, "initial_state_indices",
                              args.initial_state_indices, in, args.first_slot, Role::input, in.initial);
}

gd_status check_first_slot(int64_t first_slot, bool indexed) {
  if (first_slot == 0 || indexed) return GD_OK;
  return invalid("first_slot is %" PRId64 ", but the call has no indices", first_slot);
}

bool same_pool(const ConvStates& a, const ConvStates& b) {
  return a && b && a.data == b.data && a.dtype == b.dtype && a.slots == b.slots && a.slot_stride == b.slot_stride;
}

// No slot is written twice, and none that one sequence reads is written by another. Several sequences may read one
// slot.
gd_status check_slots(const Conv1dProblem& p, uint64_t* bitmap) {
  const ConvStates &read = p.in.initial, &written = p.final;
  const bool in_place = same_pool(read, written);
  const auto word = [&](int64_t slot) -> uint64_t& { return bitmap[slot / 64]; };
  const auto bit = [](int64_t slot) { return uint64_t{1} << (static_cast<uint64_t>(slot) % 64); };
  const int64_t count = p.in.sequences.count;
  // Clears only the words it will look at: a call uses a few slots of a pool that may have millions.
  for (int64_t n = 0; n < count; ++n) {
    if (written.slot(n) >= 0) word(written.slot(n)) = 0;
    if (in_place && read.slot(n) >= 0) word(read.slot(n)) = 0;
  }
  for (int64_t n = 0; n < count; ++n) {
    const int64_t slot = written.slot(n);
    if (slot < 0) continue;
    if (word(slot) & bit(slot))
      return invalid("final_state_indices[%" PRId64 "]: slot %" PRId64 " is written more than once", n, slot);
    word(slot) |= bit(slot);
  }
  for (int64_t n = 0; in_place && n < count; ++n) {
    const int64_t slot = read.slot(n);
    if (slot >= 0 && slot != written.slot(n) && word(slot) & bit(slot))
      return invalid("sequence %" PRId64 " starts from slot %" PRId64 ", which another sequence writes in place", n,
                     slot);
  }
  return GD_OK;
}

// The tokens of a draft window fit into the columns of its state.
gd_status check_window(const Conv1dProblem& p, int64_t tokens) {
  const int64_t columns = p.in.taps - 2 + tokens;
  if (!p.previous_accept_lengths || !p.final || tokens == 0 || columns <= p.final.columns) return GD_OK;
  return invalid("final_state has S = %" PRId64 " columns, must have at least W - 2 + %" PRId64 " = %" PRId64
                 " for a draft window of %" PRId64 " tokens",
                 p.final.columns, tokens, columns, tokens);
}

}  // namespace

gd_status validate_shapes(const gd_conv1d_args& args, Stage stage, Conv1dProblem& p) {
  Checker check(stage);
  const Conv1dInputs& in = p.in;
  GD_TRY(check_reserved("gd_conv1d_args", args.reserved));
  GD_TRY(validate_inputs(check, args.in, p.in));
  GD_TRY(check.rows("out", args.out, token_rows(in), Need::optional, Role::output, p.y));
  GD_TRY(check_indexed_states(check, "final_state", args.final_state, "final_state_indices", args.final_state_indices,
                              in, args.in.first_slot, Role::output, p.final));
  GD_TRY(check_first_slot(args.in.first_slot, in.initial.indices || p.final.indices));
  if (!in.initial && !is_absent(args.previous_accept_lengths))
    return invalid("previous_accept_lengths is given without initial_state");
  GD_TRY(check.indices("previous_accept_lengths", args.previous_accept_lengths, {"[N]", 1, {in.sequences.count}},
                       Role::input, p.previous_accept_lengths));
  if (!in.sequences.offsets) GD_TRY(check_window(p, in.sequences.tokens));
  if (const gd_tensor& steps = args.step_states; !is_absent(steps)) {
    const Shape shape = {"[B, T, D, W - 1]", 4, {in.sequences.batch, in.sequences.tokens, in.channels, in.taps - 1}};
    GD_TRY(check.tensor("step_states", steps, shape, kFloats, 0, Role::output));
    p.steps = {check.address(steps), static_cast<gd_dtype>(steps.dtype),
               stride_of(steps, 0),  stride_of(steps, 1),
               stride_of(steps, 2),  stride_of(steps, 3)};
  }
  if (!p.y && !p.final && !p.steps) return invalid("nothing to compute: out, final_state and step_states are absent");
  return check.finish(args.exec);
}

gd_status validate_shapes(const gd_conv1d_backward_args& args, Stage stage, Conv1dBackwardProblem& p) {
  Checker check(stage);
  const Conv1dInputs& in = p.in;
  GD_TRY(check_reserved("gd_conv1d_backward_args", args.reserved));
  GD_TRY(validate_inputs(check, args.in, p.in));
  GD_TRY(check_first_slot(args.in.first_slot, static_cast<bool>(in.initial.indices)));
  GD_TRY(check.rows("dy", args.dy, token_rows(in), Need::required, Role::input, p.d_y));
  GD_TRY(check_states(check, "dht", args.dht, in, Role::input, p.d_final));
  GD_TRY(check.rows("dx", args.dx, token_rows(in), Need::optional, Role::output, p.dx));
  GD_TRY(check_taps(check, "dweight", args.dweight, {"[D, W]", 2, {in.channels, in.taps}}, Role::output, p.dweight));
  GD_TRY(check_bias(check, "dbias", args.dbias, in, Role::output, p.dbias));
  GD_TRY(check_states(check, "d_initial_state", args.d_initial_state, in, Role::output, p.d_initial));
  if (p.d_initial && in.initial && p.d_initial.columns != in.initial.columns)
    return invalid("d_initial_state has S = %" PRId64 " columns, must have %" PRId64 " as initial_state",
                   p.d_initial.columns, in.initial.columns);
  if (!p.dx && !p.dweight && !p.dbias && !p.d_initial)
    return invalid("no gradient is asked for: dx, dweight, dbias and d_initial_state are absent");
  return check.finish(args.exec);
}

size_t slot_bitmap_bytes(const Conv1dProblem& p) {
  if (!p.final || (!p.in.initial.indices && !p.final.indices)) return 0;
  return static_cast<size_t>((p.final.slots + 511) / 512) * 64;
}
size_t slot_bitmap_bytes(const Conv1dBackwardProblem&) { return 0; }  // writes no pool

gd_status validate_contents(const Conv1dProblem& p, uint64_t* bitmap) {
  const Conv1dInputs& in = p.in;
  const int64_t count = in.sequences.count;
  GD_TRY(check_offsets(in.sequences));
  GD_TRY(check_range("initial_state_indices", in.initial.indices, count, "initial_state", in.initial.slots));
  GD_TRY(check_range("final_state_indices", p.final.indices, count, "final_state", p.final.slots));
  for (int64_t n = 0; p.previous_accept_lengths && n < count; ++n) {
    const int64_t accepted = p.previous_accept_lengths[n], most = in.initial.columns - in.taps + 2;
    if (p.is_padding(n)) continue;
    if (accepted < 1 || accepted > most)
      return invalid("previous_accept_lengths[%" PRId64 "] is %" PRId64 ", must be from 1 to S - W + 2 = %" PRId64, n,
                     accepted, most);
    if (p.final.slot(n) >= 0) GD_TRY(check_window(p, in.sequences[n].length));
  }
  return bitmap ? check_slots(p, bitmap) : GD_OK;
}

gd_status validate_contents(const Conv1dBackwardProblem& p, uint64_t*) {
  GD_TRY(check_offsets(p.in.sequences));
  return check_range("initial_state_indices", p.in.initial.indices, p.in.sequences.count, "initial_state",
                     p.in.initial.slots);
}

}  // namespace gatedelta::api

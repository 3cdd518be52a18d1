// What each operation writes, and its own options.
#include <cinttypes>

#include "api/validate/contents.hpp"
#include "api/validate/inputs.hpp"
#include "api/validate/saved.hpp"

namespace gatedelta::api {

namespace {

template <class Args>
gd_status check_segments(const Args& args, gd_tuning& tuning) {
  GD_TRY(check_enum("context_parallel", args.context_parallel, GD_CP_OFF));
  GD_TRY(validate_tuning(args.exec, tuning));
  const int32_t chunks = tuning.segment_chunks;
  if (chunks == 0) return GD_OK;
  if (args.context_parallel == GD_CP_OFF)
    return invalid("segment_chunks is %" PRId32 ", but context_parallel is off", chunks);
  if (args.batch_invariant)
    return refuse(GD_UNSUPPORTED, "segment_chunks is %" PRId32 ": a batch_invariant call cuts no sequence", chunks);
  return GD_OK;
}

// Rows of slots and what picks from them go together.
gd_status check_picked(const gd_tensor& initial_state_indices, bool picked) {
  if (!picked && !is_absent(initial_state_indices) && initial_state_indices.rank == 2)
    return invalid(
        "initial_state_indices: rank is 2, must be 1: [N]; rows of slots [N, S] need previous_accept_lengths");
  if (picked && is_absent(initial_state_indices))
    return invalid("previous_accept_lengths is given without initial_state_indices");
  if (picked && initial_state_indices.rank != 2)
    return invalid("previous_accept_lengths is given, but initial_state_indices has rank %" PRId32
                   ", must have 2: rows of slots [N, S]",
                   initial_state_indices.rank);
  return GD_OK;
}

// Slots of a batch are [B, T]. Those of packed sequences are [1, T], by the tokens of the pack, or [N, S], a row for
// each sequence; with one sequence both are the same.
gd_status check_step_indices(Checker& check, const gd_tensor& indices, RecurrentProblem& p) {
  const Sequences& s = p.in.sequences;
  const bool rows = s.offsets && indices.rank == 2 && indices.shape[0] == s.count;
  const Shape by_sequence = {"[N, S]", 2, {s.count, kAny}};
  const Shape by_token = {s.offsets ? "[N, S] or [B, T]" : "[B, T]", 2, {s.batch, s.tokens}};
  GD_TRY(check.indices("step_indices", indices, rows ? by_sequence : by_token, Role::output, p.step_states.indices));
  p.steps_by_token = s.offsets && !rows;
  if (p.steps_by_token) p.step_states.indices.stride = 0;  // there is one row
  return GD_OK;
}

}  // namespace

gd_status validate_shapes(const gd_forward_args& args, Stage stage, ForwardProblem& p) {
  Checker check(stage);
  const Layer& in = p.in;
  GD_TRY(check_reserved("gd_forward_args", args.reserved, args.reserved_flags));
  gd_tuning tuning;
  GD_TRY(check_segments(args, tuning));
  GD_TRY(validate_layer(check, args.in, p.in));
  GD_TRY(check.rows("out", args.out, value_rows(in), Need::required, Role::output, p.o));
  GD_TRY(check.indexed_states("final_state", args.final_state, "final_state_indices", args.final_state_indices,
                              per_sequence(in), in, Role::output, p.final));

  if (is_absent(args.checkpoints)) {
    if (!is_absent(args.checkpoint_indices)) return invalid("checkpoint_indices is given without checkpoints");
    if (!is_absent(args.checkpoint_offsets)) return invalid("checkpoint_offsets is given without checkpoints");
    if (args.checkpoint_every != 0)
      return invalid("checkpoint_every is %" PRId64 ", but there are no checkpoints", args.checkpoint_every);
  } else if (!is_absent(args.checkpoint_offsets)) {
    if (args.checkpoint_every != 0)
      return invalid("checkpoint_every is %" PRId64 ", but checkpoint_offsets says where checkpoints are",
                     args.checkpoint_every);
    GD_TRY(check.indices("checkpoint_offsets", args.checkpoint_offsets, per_sequence(in), Role::input,
                         p.checkpoint_offsets));
    GD_TRY(check.indexed_states("checkpoints", args.checkpoints, "checkpoint_indices", args.checkpoint_indices,
                                per_sequence(in), in, Role::output, p.checkpoints));
  } else {
    if (args.checkpoint_every <= 0 || args.checkpoint_every % kChunk != 0)
      return invalid("checkpoint_every is %" PRId64 ", must be a positive multiple of %d", args.checkpoint_every,
                     kChunk);
    p.checkpoint_every = args.checkpoint_every;
    GD_TRY(check.indices("checkpoint_indices", args.checkpoint_indices, {"[C]", 1, {kAny}}, Role::output,
                         p.checkpoints.indices));
    GD_TRY(check.states("checkpoints", args.checkpoints, in, kAny, Role::output, p.checkpoints,
                        static_cast<bool>(p.checkpoints.indices)));
    p.checkpoint_room = p.checkpoints.indices ? args.checkpoint_indices.shape[0] : p.checkpoints.slots;
    if (!in.sequences.offsets) GD_TRY(check_checkpoint_count(p));
  }
  GD_TRY(check_first_slot(in, {&p.final, &p.checkpoints}));

  p.context_parallel = args.context_parallel == GD_CP_AUTO;
  p.batch_invariant = args.batch_invariant != 0;
  p.segment_chunks = tuning.segment_chunks;
  p.persistent_segment_chunks = tuning.persistent_segment_chunks;
  p.segment_halves = tuning.segment_halves != 0;
  GD_TRY(check.saved(args.saved, args.saved_bytes, Role::output, p.saved));
  p.prepared = args.prepared != 0;
  if (p.prepared && !p.saved) return invalid("prepared is set, but saved is null: give it gd_summary's");
  GD_TRY(check_saved_call(stage, p.prepared, SavedPart::prepared, args.saved_call,
                          saved_call_of(in, args.exec, p.batch_invariant)));
  return check.finish(args.exec);
}

gd_status validate_shapes(const gd_backward_args& args, Stage stage, BackwardProblem& p) {
  Checker check(stage);
  const Layer& in = p.in;
  GD_TRY(check_reserved("gd_backward_args", args.reserved, args.reserved_flags));
  gd_tuning tuning;
  GD_TRY(check_segments(args, tuning));
  if (tuning.persistent_segment_chunks || tuning.segment_halves)
    return refuse(GD_UNSUPPORTED, "%s is set, but a backward cuts all heads alike",
                  tuning.persistent_segment_chunks ? "persistent_segment_chunks" : "segment_halves");
  GD_TRY(validate_layer(check, args.in, p.in));
  GD_TRY(check.rows("do", args.do_, value_rows(in), Need::required, Role::input, p.d_o));
  GD_TRY(check.indexed_states("dht", args.dht, "dht_indices", args.dht_indices, per_sequence(in), in, Role::input,
                              p.d_final, false));

  GD_TRY(check.rows("dq", args.dq, key_rows(in), Need::optional, Role::output, p.dq));
  GD_TRY(check.rows("dk", args.dk, key_rows(in), Need::optional, Role::output, p.dk));
  GD_TRY(check.rows("dv", args.dv, value_rows(in), Need::optional, Role::output, p.dv));
  GD_TRY(check.rows("dg", args.dg, value_scalars(in), Need::optional, Role::output, p.dg));
  GD_TRY(check.rows("dbeta", args.dbeta, value_scalars(in), Need::optional, Role::output, p.dbeta));
  GD_TRY(check.gate_vector("dA_log", args.dA_log, in, Need::optional, Role::output, p.dA_log));
  GD_TRY(check.gate_vector("d_dt_bias", args.d_dt_bias, in, Need::optional, Role::output, p.d_dt_bias));
  GD_TRY(check.indexed_states("d_initial_state", args.d_initial_state, "d_initial_state_indices",
                              args.d_initial_state_indices, per_sequence(in), in, Role::output, p.d_initial, false));
  GD_TRY(check_first_slot(in, {&p.d_final, &p.d_initial}));
  if (!p.dq && !p.dk && !p.dv && !p.dg && !p.dbeta && !p.dA_log && !p.d_dt_bias && !p.d_initial)
    return invalid("no gradient is asked for: dq, dk, dv, dg, dbeta, dA_log, d_dt_bias and d_initial_state are absent");

  p.context_parallel = args.context_parallel == GD_CP_AUTO;
  p.batch_invariant = args.batch_invariant != 0;
  p.segment_chunks = tuning.segment_chunks;
  p.small_workspace = args.small_workspace != 0;
  GD_TRY(check.saved(args.saved, args.saved_bytes, Role::input, p.saved));
  GD_TRY(check_saved_call(stage, static_cast<bool>(p.saved), SavedPart::all, args.saved_call,
                          saved_call_of(in, args.exec, p.batch_invariant)));
  return check.finish(args.exec);
}

gd_status validate_shapes(const gd_recurrent_args& args, Stage stage, RecurrentProblem& p) {
  Checker check(stage);
  const Layer& in = p.in;
  GD_TRY(check_reserved("gd_recurrent_args", args.reserved, args.reserved_flags));
  const bool picked = !is_absent(args.previous_accept_lengths);
  GD_TRY(check_picked(args.in.initial_state_indices, picked));
  GD_TRY(validate_layer(check, args.in, p.in, picked));
  GD_TRY(check.indices("previous_accept_lengths", args.previous_accept_lengths, per_sequence(in), Role::input,
                       p.previous_accept_lengths));
  const int64_t B = in.sequences.batch, T = in.sequences.tokens;
  GD_TRY(check.rows("out", args.out, value_rows(in), Need::optional, Role::output, p.o));
  GD_TRY(check.indexed_states("final_state", args.final_state, "final_state_indices", args.final_state_indices,
                              per_sequence(in), in, Role::output, p.final));
  if (!p.final && !is_absent(args.accept_lengths)) return invalid("accept_lengths is given without final_state");
  GD_TRY(check.indices("accept_lengths", args.accept_lengths, per_sequence(in), Role::input, p.accept_lengths));

  const gd_tensor& steps = args.step_states;
  GD_TRY(check_step_indices(check, args.step_indices, p));
  if (p.step_states.indices) {
    if (is_absent(steps)) return invalid("step_indices is given without step_states");
    GD_TRY(check.states("step_states", steps, in, kAny, Role::output, p.step_states, true));
  } else if (!is_absent(steps)) {
    const Shape shape = {
        in.layout == GD_STATE_KV ? "[B, T, Hv, K, V] without step_indices" : "[B, T, Hv, V, K] without step_indices",
        5,
        {B, T, in.value_heads, Checker::rows_of(in), Checker::columns_of(in)}};
    GD_TRY(check.tensor("step_states", steps, shape, kFloats, 2, Role::output));
    p.step_states = {check.address(steps), static_cast<gd_dtype>(steps.dtype), B * T, 0, stride_of(steps, 2), {}};
    p.step_batch_stride = stride_of(steps, 0);
    p.step_token_stride = stride_of(steps, 1);
  }
  if (!p.o && !p.final && !p.step_states)
    return invalid("nothing to compute: out, final_state and step_states are absent");
  // A call that stores no state has no write slots: a null read slot alone marks a padded row.
  p.pads_by_read_index = !p.final && !p.step_states;
  GD_TRY(check_first_slot(in, {&p.final, &p.step_states}));
  p.batch_invariant = args.batch_invariant != 0;
  return check.finish(args.exec);
}

}  // namespace gatedelta::api

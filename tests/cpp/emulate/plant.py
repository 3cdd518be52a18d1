#!/usr/bin/env python3
"""Plants a mistake in a copy of a file of src/cuda, for a test that must find it.

usage: plant.py NAME SOURCE_FOLDER TARGET_FOLDER    writes the changed file
       plant.py --forward | --backward | --fp32     prints the names
"""

import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple


class Mistake(NamedTuple):
    file: str  # below portable/ or fp32/
    right: str  # occurs once in the file
    wrong: str


FORWARD = {
    # barriers
    "no_barrier_between_steps": Mistake(
        "chain/advance.cuh", "sync_cta();      // of every thread", "// of every thread"
    ),
    "no_barrier_before_tiles_are_reused": Mistake(
        "prepare/prepare.cuh", "sync_cta();  // K and Q are not read any more", "// K and Q"
    ),
    "no_barrier_before_operands": Mistake(
        "prepare/prepare.cuh", "sync_cta();\n    Operands operands;", "Operands operands;"
    ),
    # asynchronous copies
    "rows_are_not_waited_for": Mistake(
        "chain/advance.cuh", "copy_wait<1>();  // the rows of this step", "copy_wait<2>();  // the rows"
    ),
    "values_are_not_waited_for": Mistake(
        "forward/forward_chain.cuh", "copy_wait<1>();  // V of this step", "copy_wait<2>();  // V"
    ),
    "chunk_is_not_waited_for": Mistake("prepare/prepare.cuh", "copy_wait<0>();", "copy_wait<1>();"),
    "next_rows_overwrite_this_stage": Mistake(
        "chain/loads.cuh", "load_shared_part(stage ^ 1, rows, part)", "load_shared_part(stage, rows, part)"
    ),
    # addresses
    "no_swizzle": Mistake(
        "chain/loads.cuh", "tile_offset(first, tid & 7) +", "first * kTileRowBytes + (tid & 7) * kPacketBytes +"
    ),
    "misaligned_values": Mistake(
        "instances.hpp", "kPrepared = kValues + kWarps * kValueBytes", "kPrepared = kValues + 8"
    ),
    "states_by_the_wrong_stride": Mistake(
        "workspace.hpp", "p.key_state_stride = in.layout == GD_STATE_KV ? in.value_dim : 1;",
        "p.key_state_stride = in.layout == GD_STATE_KV ? in.key_dim : 1;",
    ),
    "one_place_for_all_checkpoints": Mistake(
        "forward/forward_chain.cuh", "first + done / p.checkpoint_every - 1", "first"
    ),
    # ends of sequences
    "rows_past_the_end_are_read": Mistake(
        "chain/loads.cuh", "first + i * kRowStep < rows && tile", "(first + i * kRowStep < rows || rows > 0) && tile"
    ),
    "rows_past_the_end_are_written": Mistake(
        "chain/state.cuh", "if (8 * n + g < rows && 16", "if (8 * n + g <= rows && 16"
    ),
    "padding_is_zeroed_to_column_128": Mistake(
        "prepare/outputs.cuh", "packets = p.value_dim / kPacketColumns,",
        "packets = min(p.value_dim, 128) / kPacketColumns,",
    ),
    # numbers
    "infinite_gates_are_not_clamped": Mistake(
        "../device/gates.cuh", "return g < kLowestGate ? kLowestGate : g;", "return g;"
    ),
    "scores_without_their_diagonal": Mistake("prepare/outputs.cuh", "on = 2 * t <= g", "on = 2 * t < g"),
    "state_decays_before_it_is_read": Mistake(
        "forward/forward_chain.cuh", "this->pack_state(s, kk);\n      this->scale_state(kk, end);",
        "this->scale_state(kk, end);\n      this->pack_state(s, kk);",
    ),
    "writes_do_not_decay": Mistake("forward/forward_chain.cuh", "this->scale(W, prep, kTail);", ""),
    "error_feedback_between_unequal_keys": Mistake(
        "prepare/products.cuh", "most <= 4 * least && alike > 0.75f * least", "most > 0"
    ),
    "errors_of_triangles_are_left": Mistake(
        "prepare/outputs.cuh", "if (is_last) reinterpret_cast<uint32_t*>(out + at)[lane] = both;", ""
    ),
    "errors_of_other_lanes_are_left": Mistake(
        "chain/rounding.cuh", "first + (is_last ? error + others : 0), second);", "first, second);"
    ),
    "norms_left_out_of_writes": Mistake(
        "prepare/outputs.cuh", "exp2_approx(end - log) * rk;", "exp2_approx(end - log);"
    ),
    # segments
    "warmup_is_a_chunk_short": Mistake(
        "cut/segments.cuh", "warmup > 0 && warmup < boundary ? warmup :",
        "warmup > 0 && warmup < boundary ? warmup - 1 :",
    ),
    "warmup_without_a_decay": Mistake(
        "cut/segments.cuh", "return joined(decays[first], decays[first + 1]);",
        "return first < 0 ? decays[first] : ChunkDecay{-99, 1};",
    ),
    "values_of_warmups_are_not_waited_for": Mistake(
        "chain/advance.cuh", "copy_wait<1>();  // V of this step", "copy_wait<2>();  // V"
    ),
    "outputs_begin_with_the_warmup": Mistake(
        "chain/loads.cuh", "p.o.offset(batch, at.span.begin + output_step * kStep, at.head)",
        "p.o.offset(batch, at.span.begin + (step + 0 * output_step) * kStep, at.head)",
    ),
    "boundary_state_of_another_head": Mistake(
        "chain/state.cuh", "load_matrix(p.boundary_states, GD_F32, work_item() * p.state_numbers()",
        "load_matrix(p.boundary_states, GD_F32, (work_item() ^ 1) * p.state_numbers()",
    ),
    "initial_states_are_overwritten": Mistake("workspace.hpp", "if (!a || !b) return false;", "return false;"),
    "segments_share_the_final_state": Mistake(
        "forward/forward_chain.cuh", "if (rows <= 0 && end < at.span.length) return;", ""
    ),
    "transitions_begin_with_zero": Mistake("backward/states_chain.cuh", "== 0 ? 1.0f : 0.0f", "== 0 ? 0.0f : 0.0f"),
    "transitions_are_transposed": Mistake(
        "backward/states_chain.cuh",
        "key_stride = i == 0 ? 1 : p.key_dim;\n        value_stride = i == 0 ? p.key_dim : 1;",
        "key_stride = i == 1 ? 1 : p.key_dim;\n        value_stride = i == 1 ? p.key_dim : 1;",
    ),
    "segments_are_counted_from_the_first": Mistake(
        "cut/segments.cuh", "left - shuffle(counts.up_to - counts.mine, found)", "left"
    ),
    "ranges_begin_a_segment_late": Mistake(
        "cut/segments.cuh", "first + counts.up_to - counts.mine", "first + counts.up_to"
    ),
    "no_merges": Mistake("cut/merge.cuh", "if (merges) {", "if (merges && i < 0) {"),
    "merge_by_the_next_transition": Mistake(
        "cut/merge.cuh", "load_block(segment, ahead, block + ahead);", "load_block(segment + 1, ahead, block + ahead);"
    ),
    "merge_goes_on_with_the_same_transition": Mistake(
        "cut/merge.cuh", "load_block(segment + 1, ahead - kBlocks", "load_block(segment, ahead - kBlocks"
    ),
    "merge_does_not_wait": Mistake("cut/merge.cuh", "copy_wait<Config::kStages - 2>();", ""),
    "no_barrier_between_blocks_of_a_merge": Mistake(
        "cut/merge.cuh", "sync_cta();  // the block is there", "// the block is there"
    ),
    "no_barrier_after_a_merge": Mistake(
        "cut/merge.cuh", "sync_cta();  // all sums are there, and S is not", "// S is not"
    ),
}  # fmt: skip

BACKWARD = {
    # barriers
    "no_barrier_between_steps_of_states": Mistake(
        "chain/advance.cuh", "sync_cta();      // of every thread", "// of every thread"
    ),
    "no_barrier_between_steps_of_gradients": Mistake(
        "backward/grad_chain.cuh", "this->begin_step();", "copy_wait<1>();"
    ),
    "no_barrier_between_stages": Mistake(
        "backward/gradients/gradients.cuh", "sync_cta();  // the stage is there", "// the stage"
    ),
    "no_barrier_before_pairs": Mistake(
        "backward/gradients/gradients.cuh", "sync_cta();  // the last stage is not", "// the last"
    ),
    "no_barrier_after_pairs": Mistake("backward/gradients/gradients.cuh", "store_pairs(matrices);\n      sync_cta();",
                                      "store_pairs(matrices);"),
    "no_barrier_before_sums": Mistake(
        "backward/gradients/gradients.cuh", "sync_cta();  // the sums are there", "// the sums"
    ),
    "no_barrier_after_sums": Mistake(
        "backward/gradients/output.cuh", "sync_cta();  // the last head's sums", "// the last"
    ),
    # asynchronous copies
    "stage_is_not_waited_for": Mistake("backward/gradients/gradients.cuh", "copy_wait<0>();", "copy_wait<1>();"),
    "outputs_are_not_waited_for": Mistake(
        "backward/grad_chain.cuh", "copy_wait<1>();  // dO of this step", "copy_wait<2>();  // dO"
    ),
    # addresses
    "prepared_steps_in_the_wrong_order": Mistake(
        "chain/loads.cuh", "Pass::kDirection > 0 ? kStepsPerChunk - 1 : 0", "0"
    ),
    "states_after_half_a_chunk": Mistake(
        "backward/states_chain.cuh", "if (stage == 0) this->store_snapshot", "if (stage == 1) this->store_snapshot"
    ),
    "gradients_after_half_a_chunk": Mistake(
        "backward/grad_chain.cuh", "ends_chunk = step % kStepsPerChunk == 0", "ends_chunk = step % kStepsPerChunk == 1"
    ),
    "snapshots_are_transposed": Mistake(
        "chain/state.cuh", "(2 * i + h % 2) * (p.key_dim / 8) + 2 * kk + h / 2",
        "(2 * i + h / 2) * (p.key_dim / 8) + 2 * kk + h % 2",
    ),
    # ends of sequences
    "values_past_the_end_are_read": Mistake(
        "backward/gradients/loads.cuh", "valid = r < rows && first + packet * kPacketColumns < p.value_dim",
        "valid = (r < rows || rows) && first + packet * kPacketColumns < p.value_dim",
    ),
    "vectors_of_a_step_without_tokens": Mistake(
        "backward/gradients/loads.cuh", "is_there = step == 0 || both", "is_there = true"
    ),
    "tokens_of_no_sequence_are_left": Mistake("backward/gradients/gradients.cuh", "return zero_rows();", "return;"),
    "sums_of_no_chunk_are_left": Mistake("backward/gates.cuh", "if (!p.head_sums) return;",
                                         "if (!p.head_sums || at.rows <= 0) return;"),
    # numbers
    "values_lose_a_small_beta": Mistake(
        "backward/grad_chain.cuh", "if (stores_unscaled(beta.x)) beta.x = 1;", ""
    ),
    "pairs_of_small_betas_are_not_scaled": Mistake(
        "backward/gradients/pairs.cuh", "pack<Elem>(pending * first, pending * second)", "pack<Elem>(first, second)"
    ),
    "pairs_with_their_diagonal": Mistake("backward/gradients/pairs.cuh", "first = c < r ?", "first = c <= r ?"),
    "steps_of_a_chunk_do_not_decay": Mistake(
        "backward/gradients/pairs.cuh", "pair_tile >= 2 && J < 2 ? first_end : 0.0f", "0.0f"
    ),
    "reads_of_the_second_step_do_not_decay": Mistake(
        "backward/gradients/loads.cuh", "exp2_approx(step == 0 ? log : log + first_end)", "exp2_approx(log)"
    ),
    "gates_pass_their_own_write": Mistake("backward/gates.cuh", "float sum = shuffle_up(x, 1);", "float sum = x;"),
    "slope_of_softplus_ends_early": Mistake("../device/gates.cuh", "x > 20.0f ? 1.0f", "x > 5.0f ? 1.0f"),
    "infinite_gates_are_not_clamped_in_their_gradient": Mistake(
        "backward/gates.cuh", "clamp_gate(decay * softplus_of(x))", "(decay * softplus_of(x))"
    ),
    "no_projection": Mistake("backward/gradients/output.cuh", "-r * r * sum_of(which, row(i, h))", "0"),
    "queries_do_not_move_the_gradient": Mistake(
        "backward/grad_chain.cuh", "this->add_to_state(outputs, Q, [](int) {});", ""
    ),
    # segments
    "warmup_of_gradients_is_a_chunk_short": Mistake(
        "cut/segments.cuh", "warmup > 0 && warmup < boundary ? warmup :",
        "warmup > 0 && warmup < boundary ? warmup - kGradients :",
    ),
    "gradients_of_warmups_are_stored": Mistake(
        "backward/grad_chain.cuh", "advance<false>(rows, step);", "advance<true>(rows, step);"
    ),
    "states_of_warmups_are_stored": Mistake(
        "backward/states_chain.cuh", "[](const Tokens&) {}", "[&](const Tokens& U) { this->store_outputs(U, rows); }"
    ),
    "snapshots_begin_with_the_warmup": Mistake("backward/states_chain.cuh", "this->snapshot_at(at, segment.chunk)",
                                               "this->snapshot_at(at, first)"),
    "values_begin_with_the_warmup": Mistake(
        "backward/grad_chain.cuh", "first + step, first + steps_of(end) - 1", "first + step, first + step"
    ),
    "segments_share_the_initial_gradient": Mistake(
        "backward/grad_chain.cuh", "if (!is_boundary && segment.chunk > 0) return;", ""
    ),
    "local_gradients_begin_with_their_boundary": Mistake(
        "backward/grad_chain.cuh", "if (this->is_transition() && segment.begins_at_boundary()) {",
        "if (segment.chunk < 0) {",
    ),
    "gradients_go_to_the_wrong_segment": Mistake("chain/chain.cuh", "work_item() + Pass::kDirection * p.value_heads",
                                                 "work_item() + p.value_heads"),
    "merges_of_gradients_are_not_mirrored": Mistake("cut/merge.cuh", "is_mirrored ? segments - 1 - segment : segment",
                                                   "segment"),
    "gradients_by_the_transition_of_states": Mistake(
        "cut/merge.cuh", "transitions = is_mirrored ? p.gradient_transitions : p.transitions;",
        "transitions = p.transitions;",
    ),
    "no_transitions_for_gradients": Mistake(
        "backward/states_chain.cuh",
        "return gradients->begins_at_boundary() && gradients[-p.value_heads].begins_at_boundary();",
        "return false;",
    ),
}  # fmt: skip

FP32 = {
    # barriers and asynchronous copies
    "fp32_no_barrier_between_stages": Mistake(
        "forward.cuh", "sync_cta();      // of every thread", "// of every thread"
    ),
    "fp32_stage_is_not_waited_for": Mistake("forward.cuh", "copy_wait<0>();  // this stage", "copy_wait<1>();"),
    "fp32_sums_are_read_too_early": Mistake(
        "backward.cuh", "sync_cta();  // the sums of all warps are there\n      this->template store_sums<false>(sums",
        "this->template store_sums<false>(sums",
    ),
    "fp32_sums_are_overwritten": Mistake("backward.cuh", "if (first > 0) sync_cta();", ""),
    # addresses and ends of sequences
    "fp32_keys_are_not_padded": Mistake("loop.cuh", "valid = row < count && column < p.key_dim", "valid = row < count"),
    "fp32_sums_without_the_last_warp": Mistake("loop.cuh", "w < warps; ++w", "w < warps - 1; ++w"),
    "fp32_one_part_for_all_ctas": Mistake("loop.cuh", "* p.parts + part) * p.key_dim", "* p.parts) * p.key_dim"),
    "fp32_one_place_for_all_checkpoints": Mistake("forward.cuh", "first + done / p.checkpoint_every - 1", "first"),
    "fp32_halves_are_not_traded": Mistake(
        "loop.cuh", "shuffle_xor(second ? y[i] : y[kHalf + i]", "shuffle_xor(second ? y[kHalf + i] : y[i]"
    ),
    # numbers
    "fp32_state_is_read_before_it_decays": Mistake("forward.cuh", "read = f.gamma * f.r_k", "read = f.r_k"),
    "fp32_own_output_left_out_of_du": Mistake("backward.cuh", "f.beta * fmaf(f.qk, z[c], y[c])", "f.beta * y[c]"),
    "fp32_length_is_not_removed": Mistake("finish.cuh", "r * (d[i] - along * unit[i])", "r * d[i]"),
    "fp32_chunks_begin_with_nothing": Mistake(
        "finish.cuh", "Known after = after_span(span);", "Known after = {0, 0};"
    ),
    "fp32_errors_are_not_taken_back": Mistake("finish.cuh", "x.D - share * x.squares", "x.D"),
    "fp32_gates_forget_the_initial_state": Mistake(
        "backward.cuh", "add_term(product, x, Stored::widen(from[i]))", "add_term(product, x, 0 * from[i])"
    ),
    "fp32_one_head_of_a_group": Mistake("finish.cuh", "add(dk, x);", "if (v == 0) add(dk, x);"),
}  # fmt: skip

MISTAKES = {"--forward": FORWARD, "--backward": BACKWARD, "--fp32": FP32}


def main() -> int:
    if len(sys.argv) == 2 and sys.argv[1] in MISTAKES:
        print(";".join(MISTAKES[sys.argv[1]]), end="")
        return 0
    name, source, target = sys.argv[1:]
    mistake = (FORWARD | BACKWARD | FP32)[name]
    file = os.path.normpath(Path("fp32" if name in FP32 else "portable", mistake.file))
    text = (Path(source) / file).read_text()
    if text.count(mistake.right) != 1:
        print(f"plant: {file} has {text.count(mistake.right)} times: {mistake.right!r}")
        return 1
    shutil.rmtree(target, ignore_errors=True)  # the mistake may have been in another file
    planted = Path(target) / file
    planted.parent.mkdir(parents=True)
    planted.write_text(text.replace(mistake.right, mistake.wrong))
    return 0


if __name__ == "__main__":
    sys.exit(main())

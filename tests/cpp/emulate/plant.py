#!/usr/bin/env python3
"""Plants a mistake in a copy of a kernel folder's file, for a test that must find it.

usage: plant.py NAME SOURCE_FOLDER TARGET_FOLDER    writes the changed file
       plant.py --names
"""

import sys
from pathlib import Path
from typing import NamedTuple


class Mistake(NamedTuple):
    file: str
    right: str  # occurs once in the file
    wrong: str


MISTAKES = {
    # barriers
    "no_barrier_between_steps": Mistake(
        "forward.cuh", "sync_cta();      // of every thread", "// of every thread"
    ),
    "no_barrier_before_tiles_are_reused": Mistake(
        "prepare.cuh", "sync_cta();  // K and Q are not read any more", "// K and Q"
    ),
    "no_barrier_before_operands": Mistake("prepare.cuh", "sync_cta();\n    Operands operands;", "Operands operands;"),
    # asynchronous copies
    "rows_are_not_waited_for": Mistake(
        "forward.cuh", "copy_wait<1>();  // the rows of this step", "copy_wait<2>();  // the rows"
    ),
    "values_are_not_waited_for": Mistake("forward.cuh", "copy_wait<1>();  // V of this step", "copy_wait<2>();  // V"),
    "chunk_is_not_waited_for": Mistake("prepare.cuh", "copy_wait<0>();", "copy_wait<1>();"),
    "next_rows_overwrite_this_stage": Mistake(
        "forward.cuh", "load_shared_rows(stage ^ 1, rows - kStep)", "load_shared_rows(stage, rows - kStep)"
    ),
    # addresses
    "no_swizzle": Mistake(
        "chain.cuh", "tile_offset(first, tid & 7);", "first * kTileRowBytes + (tid & 7) * kPacketBytes;"
    ),
    "misaligned_values": Mistake("config.hpp", "kPrepared = kValues + kWarps * kValueBytes", "kPrepared = kValues + 8"),
    "states_by_the_wrong_stride": Mistake(
        "config.hpp", "p.key_state_stride = in.layout == GD_STATE_KV ? in.value_dim : 1;",
        "p.key_state_stride = in.layout == GD_STATE_KV ? in.key_dim : 1;",
    ),
    "one_place_for_all_checkpoints": Mistake("forward.cuh", "first + done / p.checkpoint_every - 1", "first"),
    # ends of sequences
    "rows_past_the_end_are_read": Mistake("chain.cuh", "valid = is_row && ", "valid = (is_row || rows) && "),
    "rows_past_the_end_are_written": Mistake("chain.cuh", "if (8 * n + g < rows && 16", "if (8 * n + g <= rows && 16"),
    # numbers
    "infinite_gates_are_not_clamped": Mistake(
        "gates.cuh", "return g < kLowestGate ? kLowestGate : g;", "return g;"
    ),
    "scores_without_their_diagonal": Mistake("prepare.cuh", "on = 2 * t <= g", "on = 2 * t < g"),
    "state_decays_before_it_is_read": Mistake(
        "forward.cuh", "this->pack_state(s, kk);\n      this->scale_state(kk, end);",
        "this->scale_state(kk, end);\n      this->pack_state(s, kk);",
    ),
    "writes_do_not_decay": Mistake("forward.cuh", "this->scale(W, prep, kTail);", ""),
    "errors_carried_between_unequal_keys": Mistake(
        "prepare.cuh", "most <= 4 * least && alike > 0.75f * least", "most > 0"
    ),
    "norms_left_out_of_writes": Mistake("prepare.cuh", "exp2_approx(end - log) * rk;", "exp2_approx(end - log);"),
    # ---- of src/cuda/fp32 ----
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
    "fp32_length_is_kept": Mistake("finish.cuh", "r * (d[i] - along * unit[i])", "r * d[i]"),
    "fp32_chunks_begin_with_nothing": Mistake("finish.cuh", "D += p.products[", "D += 0 * p.products["),
    "fp32_one_head_of_a_group": Mistake("finish.cuh", "add(dk, x);", "if (v == 0) add(dk, x);"),
}  # fmt: skip


def main() -> int:
    if sys.argv[1:] == ["--names"]:
        print(";".join(MISTAKES), end="")
        return 0
    name, source, target = sys.argv[1:]
    mistake = MISTAKES[name]
    text = (Path(source) / mistake.file).read_text()
    if text.count(mistake.right) != 1:
        print(f"plant: {mistake.file} has {text.count(mistake.right)} times: {mistake.right!r}")
        return 1
    Path(target).mkdir(parents=True, exist_ok=True)
    (Path(target) / mistake.file).write_text(text.replace(mistake.right, mistake.wrong))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The rows of FlashQLA's public H200 table, forward and backward: head counts and sequence lengths. Also the other
shapes that bench.gpu.segments measures.
"""

from __future__ import annotations

import random

FORWARD_HEADS = [(2, 8), (4, 16), (8, 32), (16, 64), (16, 32), (8, 24), (16, 48), (16, 16), (32, 32)]
PAIRS = [
    (28672, 4096), (24576, 8192), (16384, 16384), (8192, 24576), (4096, 28672),
    (12288, 4096), (6144, 2048), (4096, 4096), (2048, 6144), (1024, 7168),
]  # fmt: skip
EQUAL = [(8192, 4), (4096, 8), (2048, 4), (1024, 8)]  # length, how many
BACKWARD_HEADS = [(16, 32), (8, 16), (4, 8), (2, 4)]
BACKWARD_LENGTHS = {  # FlashQLA cuts at random positions: the first of torch.randperm(tokens - 1) with seed 42
    "8k_1seq": [8192],
    "8k_2seq": [7053, 1139],
    "8k_4seq": [5809, 1244, 406, 733],
    "8k_8seq": [161, 1928, 3157, 563, 1244, 229, 177, 733],
    "32k_1seq": [32768],
    "32k_2seq": [7212, 25556],
    "32k_4seq": [7212, 7072, 13725, 4759],
    "32k_8seq": [3274, 1029, 2909, 5061, 2011, 3793, 9932, 4759],
}
# What tables of a few rows show, and results/h200/history.csv follows.
LANDMARKS = ("16/64 8192x4", "16/64 1x32768", "8/32 4096x8", "16/48 4096x8", "32/32 8192x4", "16/64 1x2048")
BACKWARD_LANDMARKS = (
    "16/32 32k_1seq", "16/32 32k_8seq", "16/32 8k_1seq", "8/16 32k_4seq", "4/8 32k_1seq", "2/4 8k_1seq",
)  # fmt: skip
ERRORS = {"fwd": ("err_o", "err_state"), "bwd": ("err_dq", "err_dk", "err_dv", "err_dg", "err_dbeta", "err_dh0")}
VERIFIED_TOKENS = 1024  # of a backward row, scaled down
OTHER_VALUE_HEADS = (4, 6, 12, 20, 40)
OTHER_LENGTHS = (777, 5000, 50000, 131072)
RAGGED_HEADS, RAGGED_DRAWS, RAGGED_COUNT, RAGGED_LONGEST = [(6, 18), (9, 36), (11, 55)], 3, (40, 60), 1500
MIXES, MIX_TOKENS, MIX_HEADS = 30, 40000, [(2, 8), (8, 32)]


def forward_lengths() -> dict[str, list[int]]:
    lengths = {f"1x{n}": [n] for n in (32768, 16384, 8192, 4096, 2048)}
    lengths |= {"+".join(map(str, pair)): list(pair) for pair in PAIRS}
    lengths |= {f"{n}x{count}": [n] * count for n, count in EQUAL}
    return lengths


def forward_rows() -> list[dict]:
    return [
        {"kind": "fwd", "hk": hk, "hv": hv, "seq": name, "lengths": lengths}
        for hk, hv in FORWARD_HEADS
        for name, lengths in forward_lengths().items()
    ]


def backward_rows() -> list[dict]:
    return [
        {"kind": "bwd", "hk": hk, "hv": hv, "seq": name, "lengths": lengths}
        for hk, hv in BACKWARD_HEADS
        for name, lengths in BACKWARD_LENGTHS.items()
    ]


KINDS = {"fwd": forward_rows, "bwd": backward_rows}


def name_of(row: dict) -> str:
    return f"{row['hk']}/{row['hv']} {row['seq']}"


def lengths_of(row: dict) -> list[int]:
    """By name: a recorded row has no lengths."""
    return BACKWARD_LENGTHS[row["seq"]] if row["kind"] == "bwd" else forward_lengths()[row["seq"]]


def of_kind(rows: list[dict], kind: str) -> list[dict]:
    return [row for row in rows if row["kind"] == kind]


def scaled_down(lengths: list[int]) -> list[int]:
    """As many sequences in about the same proportions, VERIFIED_TOKENS tokens in all: autograd through the fp64
    recurrence keeps a state for every token."""
    return [max(1, n * VERIFIED_TOKENS // sum(lengths)) for n in lengths]


def mixes() -> dict[str, list[int]]:
    """Ragged packs of 3 to 15 sequences, the same ones every time."""
    generator = random.Random(0)
    found = {}
    for i in range(MIXES):
        inner = generator.sample(range(1, MIX_TOKENS), generator.randint(3, 15) - 1)
        ends = [*sorted(inner), MIX_TOKENS]
        found[f"mix{i}"] = [end - begin for begin, end in zip([0, *ends], ends)]
    return found


def other_rows() -> list[dict]:
    single = [(hv // 2, hv, f"1x{n}", [n]) for hv in OTHER_VALUE_HEADS for n in OTHER_LENGTHS]
    ragged = [(hk, hv, name, lengths) for hk, hv in MIX_HEADS for name, lengths in mixes().items()]
    return [
        {"kind": "fwd", "hk": hk, "hv": hv, "seq": name, "lengths": lengths}
        for hk, hv, name, lengths in single + ragged
    ]


def ragged_rows() -> list[dict]:
    """Packs of many ragged sequences, head counts of no table; the same ones every time."""
    generator = random.Random(1)
    return [
        {"kind": "ragged", "hk": hk, "hv": hv, "seq": f"ragged{draw}",
         "lengths": [generator.randint(1, RAGGED_LONGEST) for _ in range(generator.randint(*RAGGED_COUNT))]}
        for hk, hv in RAGGED_HEADS
        for draw in range(RAGGED_DRAWS)
    ]  # fmt: skip


def selected(rows: list[dict], heads: str | None, seq: str | None) -> list[dict]:
    """The rows with these head counts (16/64) and this name (8192x4)."""
    return [row for row in rows if heads in (None, f"{row['hk']}/{row['hv']}") and seq in (None, row["seq"])]

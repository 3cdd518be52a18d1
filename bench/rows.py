"""The rows of the forward table: head counts and sequence lengths of FlashQLA's public H200 table."""

from __future__ import annotations

FORWARD_HEADS = [(2, 8), (4, 16), (8, 32), (16, 64), (16, 32), (8, 24), (16, 48), (16, 16), (32, 32)]
PAIRS = [
    (28672, 4096), (24576, 8192), (16384, 16384), (8192, 24576), (4096, 28672),
    (12288, 4096), (6144, 2048), (4096, 4096), (2048, 6144), (1024, 7168),
]  # fmt: skip
EQUAL = [(8192, 4), (4096, 8), (2048, 4), (1024, 8)]  # length, how many


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

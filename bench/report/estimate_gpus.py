#!/usr/bin/env python3
"""Estimates the portable forward on GPUs it has not been run on, from its time on an H200 and from published rates.

A chunk of 64 tokens of a value head with K = V = 128 is 1728 mma.m16n8k16 (two steps; each has 32 for K S, 32 for Q S,
32 for the state's update and 12 for the triangles, for each 16 of 128 value columns), 432 on each of an SM's four
schedulers. What the H200 takes beyond the products is called the rest: loads, vectors, packing, barriers. Where
products take longer, more of the rest runs beside them. So a GPU's time lies between the products alone and products
plus rest, or is the time of its bytes where that is longer; prepare, which its bytes bound, comes on top.

usage: estimate_gpus.py results/h200/portable.json --output results/h200/estimates.json
"""

import argparse
import json
from pathlib import Path

ROW = {"kind": "fwd", "hk": 16, "hv": 64, "seq": "8192x4", "head_size": 128}
CHUNK_HEADS = 4 * 8192 // 64 * 64
MMAS = 1728 / 4  # of a chunk and head, on one scheduler
# Bytes of a chunk and head. The forward reads V, writes O, reads what prepare left, and with four value heads to a key
# head K and Q once for each, of which L2 serves most. Prepare reads K and Q once for four heads and writes 7200 bytes.
TILE = 64 * 128 * 2
FORWARD_BYTES = 2 * TILE + 7200 + 2 * TILE / 4
PREPARE_BYTES = 2 * TILE / 4 + 7200
SHARE = 0.85  # of a data sheet's bandwidth that a copy reaches
# An H200's SMs, TB/s, and cycles of a scheduler for an mma.m16n8k16: measured in a loop of nothing else, because
# mma.sync does not reach the published rate, which is wgmma's (4 cycles).
H200_SMS, H200_BANDWIDTH, H200_MMA = 132, 4.8, 6.02
# Published: SMs, boost clock in GHz, cycles for an mma.m16n8k16 with fp32 sums (from the dense rate), TB/s.
GPUS = [
    ("A100 80 GB", 108, 1.41, 8, 2.04, ""),
    ("RTX 4090", 128, 2.52, 32, 1.01, ""),
    ("L40S", 142, 2.52, 16, 0.864, ""),
    ("RTX 5090", 170, 2.41, 32, 1.79, ""),
    ("B200", 148, 1.85, 6.02, 8.0, "if mma.sync is as fast as on an H200"),
    ("B200", 148, 1.85, 8, 8.0, "if it is as fast as on an A100"),
]


def milliseconds(sms: int, ghz: float, cycles: float) -> float:
    return CHUNK_HEADS / sms * cycles / (ghz * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result = json.loads(arguments.measured.read_text())
    row = next(row for row in result["rows"] if all(row[key] == value for key, value in ROW.items()))
    ms = row["ms"]["portable"]
    prepare = CHUNK_HEADS * PREPARE_BYTES / (H200_BANDWIDTH * SHARE * 1e9)
    cycles = (ms - prepare) / milliseconds(H200_SMS, result["header"]["sm_clock_mhz"] / 1e3, 1)
    rest = cycles - MMAS * H200_MMA
    estimates = []
    for name, sms, ghz, cycles_of_mma, bandwidth, condition in GPUS:
        products = milliseconds(sms, ghz, MMAS * cycles_of_mma)
        with_rest = milliseconds(sms, ghz, MMAS * cycles_of_mma + rest)
        moved = CHUNK_HEADS * FORWARD_BYTES / (bandwidth * SHARE * 1e9)
        prepare = CHUNK_HEADS * PREPARE_BYTES / (bandwidth * SHARE * 1e9)
        estimates.append({
            "gpu": name, "condition": condition, "products_ms": products, "bytes_ms": moved,
            "low_ms": max(products, moved) + prepare, "high_ms": max(with_rest, moved) + prepare,
            "limit": "memory" if moved > with_rest else "products" if moved < products else "both",
        })  # fmt: skip
    kept = {"row": ROW, "measured_ms": ms, "measured": result["header"], "cycles_of_a_chunk": cycles,
            "rest_cycles": rest, "estimates": estimates}  # fmt: skip
    for e in estimates:
        print(f"{e['gpu']:12} {e['low_ms']:5.2f} to {e['high_ms']:5.2f} ms, {e['limit']} {e['condition']}")
    if arguments.output:
        arguments.output.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()

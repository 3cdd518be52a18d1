"""Serving on a GPU: the rows of decode, draft verification and packs of short sequences, the peers' times for them, and
the project's bars. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from bench.lib.ratios import geomean
from bench.lib.targets import TARGETS, judged

RECORDED = Path(__file__).resolve().parents[1] / "peers" / "decode_h200.json"
RECORDED_MARK = " (recorded)"  # ends the names of peers whose time is from the recording, not from the row's own run
KEY = ("kind", "hk", "hv", "batch", "T", "state_dtype", "layout", "store")
KINDS = ("decode", "verify", "pack")
D = 128  # K and V
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
CHAIN_BYTES, LONGEST_CHAIN = 192 << 20, 256  # more state than the L2 holds, in at most so many calls

HEADS = [(16, 32), (16, 64), (16, 48), (8, 32), (4, 16), (2, 8), (4, 8)]
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MAIN = (16, 32)  # the heads with every row
VERIFY_BATCHES = (1, 8, 32, 128)
VERIFY_LENGTHS = {MAIN: (2, 4, 8), (16, 64): (4,), (2, 8): (4,)}
STORES = ("steps", "none", "final", "accept")
ERRORS = ("err_o", "err_state")


def decode_rows() -> list[dict]:
    """One token: the state is read, and written in place."""
    formats = [("float32", "VK"), ("bfloat16", "VK"), ("float32", "KV"), ("bfloat16", "KV")]
    return [
        {"kind": "decode", "hk": hk, "hv": hv, "batch": batch, "T": 1, "state_dtype": dtype, "layout": layout,
         "store": "final"}
        for hk, hv in HEADS
        for dtype, layout in formats[: 4 if (hk, hv) == MAIN else 3]
        for batch in BATCHES
    ]  # fmt: skip


def verify_rows() -> list[dict]:
    """T drafts: the state after all of them is stored, or after each, or after an accepted number, or none."""
    rows = []
    for (hk, hv), lengths in VERIFY_LENGTHS.items():
        stores = STORES if (hk, hv) == MAIN else STORES[:3]
        formats = [(dtype, "VK", store) for dtype in ITEM_BYTES for store in stores] + [("float32", "KV", "final")]
        rows += [
            {"kind": "verify", "hk": hk, "hv": hv, "batch": batch, "T": tokens, "state_dtype": dtype, "layout": layout,
             "store": store}
            for tokens in lengths
            for dtype, layout, store in formats
            for batch in VERIFY_BATCHES
        ]  # fmt: skip
    return rows


def pack_rows() -> list[dict]:
    """What engines send to a prefill: short sequences, many of them, next to long ones or not."""
    generator = random.Random(0)
    ragged = [generator.randint(1, 300) for _ in range(300)]
    packs = [
        (8, 32, "300 ragged 1-300", ragged),
        (16, 32, "64 x 1", [1] * 64),
        (16, 32, "1 x 1", [1]),
        (16, 32, "200 x 1, 2 x 8192", [8192, *[1] * 200, 8192]),
        (16, 32, "32 x 16, 8 x 512", [16] * 32 + [512] * 8),
        (16, 64, "128 x 64", [64] * 128),
    ]
    return [{"kind": "pack", "hk": hk, "hv": hv, "seq": name, "lengths": lengths} for hk, hv, name, lengths in packs]


def key(row: dict) -> tuple:
    return tuple(row[name] for name in KEY)


def name_of(row: dict) -> str:
    if row["kind"] == "pack":
        return f"{row['hk']}/{row['hv']} {row['seq']}"
    tokens = "" if row["T"] == 1 else f" x {row['T']} {row['store']}"
    return f"{row['hk']}/{row['hv']} {row['batch']}{tokens} {row['state_dtype']} {row['layout']}"


def state_bytes(row: dict) -> int:
    """Of all sequences, once."""
    return row["batch"] * row["hv"] * D * D * ITEM_BYTES[row["state_dtype"]]


def moved_bytes(row: dict) -> int:
    """State bytes that must be read and written."""
    return state_bytes(row) * (1 + {"none": 0, "steps": row["T"]}.get(row["store"], 1))


def chain_length(row: dict) -> int:
    """Calls in a graph, each on its own slots, so that no state is in the L2 when its turn comes."""
    return min(LONGEST_CHAIN, -(-CHAIN_BYTES // state_bytes(row)))


def load_recorded(path: Path = RECORDED) -> tuple[str, dict[tuple, dict[str, float]]]:
    """The GPU, and every peer's time in ms by row."""
    table = json.loads(path.read_text())
    return table["gpu"], {key(row): row["peers"] for row in table["rows"]}


def compared(row: dict, recorded: dict[tuple, dict[str, float]]) -> dict:
    """The row with all peers' times and its ratio to the fastest. A peer timed in the row's run counts with that time,
    any other with the recorded one."""
    timed = row.get("peers", {})
    known = {} if row["kind"] == "pack" else recorded.get(key(row), {})
    peers = timed | {name + RECORDED_MARK: ms for name, ms in known.items() if name not in timed}
    if not peers:
        return row
    best = min(peers.values())
    return row | {"peers": peers, "best_peer_ms": best, "speedup": best / row["ms"]}


def with_peers(result: dict, path: Path = RECORDED) -> list[dict]:
    """The rows of serving in a result, with the peers' times: recorded ones if those are from the same model of GPU."""
    gpu, recorded = load_recorded(path)
    if result["header"]["gpu"] != gpu:
        recorded = {}
    return [compared(row, recorded) for row in result["rows"] if row["kind"] in KINDS]


def best_peer(row: dict) -> str:
    return min(row["peers"], key=row["peers"].get)


def summary(rows: list[dict]) -> dict | None:
    """Number of rows with a ratio, geometric mean and worst of the ratios, and how many are to a recorded time."""
    rows = [row for row in rows if "speedup" in row]
    if not rows:
        return None
    return {
        "rows": len(rows), "geomean": geomean([row["speedup"] for row in rows]),
        "worst": min(rows, key=lambda row: row["speedup"]),
        "recorded": sum(map(rests_on_recorded, rows)),
    }  # fmt: skip


def rests_on_recorded(row: dict) -> bool:
    """Whether the row's ratio is to a time of another run."""
    return best_peer(row).endswith(RECORDED_MARK)


def copy_share(row: dict, copy_bytes_per_s: float) -> float:
    """State bytes moved per second, as a share of what a copy moves."""
    return moved_bytes(row) / (row["ms"] * 1e-3) / copy_bytes_per_s


def groups_of(rows: list[dict]) -> dict[str, list[dict]]:
    """What is summed up, by name."""
    verify = [row for row in rows if row["kind"] == "verify"]
    return {
        "decode": [row for row in rows if row["kind"] == "decode"],
        "verify, every state": [row for row in verify if row["store"] == "steps"],
        "verify, one state or none": [row for row in verify if row["store"] != "steps"],
        "packs": [row for row in rows if row["kind"] == "pack"],
    }


def bars(header: dict, rows: list[dict]) -> list[dict]:
    """The bars that these rows (with peers' times) can be judged by."""
    targets, found = TARGETS["serving"], []
    for name, members in groups_of(rows).items():
        if total := summary(members):
            if target := targets["geomean"].get(name):
                found.append(judged(f"{name}: geometric mean over the fastest peer", total["geomean"], target))
            worst = total["worst"]
            found.append(judged(f"{name}: worst row ({name_of(worst)})", worst["speedup"], targets["worst"][name]))
    main = {key(row): row for row in rows if row["kind"] != "pack" and (row["hk"], row["hv"]) == MAIN}

    def at(batch: int, dtype: str, tokens: int = 1) -> dict | None:
        kind = "decode" if tokens == 1 else "verify"
        return main.get((kind, *MAIN, batch, tokens, dtype, "VK", "final"))

    copy = header.get("copy_bytes_per_s")
    for dtype, target in targets["copy_share"].items():
        first = target["from_batch"]
        some = [row for batch in BATCHES if batch >= first and (row := at(batch, dtype))]
        if some and copy:
            share = min(copy_share(row, copy) for row in some)
            found.append(judged(f"decode: share of copy bandwidth, {dtype}, batch {first} and more", share, target))
    if row := at(1, "float32"):
        found.append(judged("decode: batch 1, us", row["ms"] * 1e3, targets["decode_us"]))
        if "hot_ms" in row:
            found.append(judged("decode: batch 1, indices in L2, us", row["hot_ms"] * 1e3, targets["decode_hot_us"]))
    target = targets["4_tokens_over_1"]
    first = target["from_batch"]
    for dtype in ITEM_BYTES:
        pairs = [(at(batch, dtype, 4), at(batch, dtype)) for batch in BATCHES if batch >= first]
        times = [four["ms"] / one["ms"] for four, one in pairs if four and one]
        if times:
            found.append(judged(f"T = 4 over T = 1, {dtype}, batch {first} and more", max(times), target))
    if us := header.get("decode_call_us", {}).get("gatedelta"):
        found.append(judged("decode: host time of an eager call, us", us, targets["call_us"]))
    return found


def problem_of(rows: list[dict]) -> str | None:
    """Why these cannot be the rows of a record; None if they can."""
    expected = {name_of(row) for row in decode_rows() + verify_rows() + pack_rows()}
    if {name_of(row) for row in rows} != expected:
        return "it does not hold every row of bench.gpu.decode and bench.gpu.packs"
    if not all("err_o" in row and ("err_state" in row or row.get("store") == "none") for row in rows):
        return "there are rows of serving without errors"
    return None


def report(header: dict, rows: list[dict]) -> str:
    """The sums and bars, for people."""
    lines = []
    for name, members in groups_of(rows).items():
        if total := summary(members):
            worst = total["worst"]
            lines.append(f"{total['rows']} {name} rows: geometric mean {total['geomean']:.3f}, worst "
                         f"{worst['speedup']:.3f} ({name_of(worst)}, {best_peer(worst)}); {total['recorded']} to a "
                         "recorded time")  # fmt: skip
    lines += [
        f"{'met   ' if bar['passed'] else 'MISSED'} {bar['what']}: {bar['value']:.3f} (bar {bar['bar']})"
        for bar in bars(header, rows)
    ]
    return "\n".join(lines)

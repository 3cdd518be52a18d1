"""The rows of bench.gpu.models, and ratios between its paths. Needs neither torch nor a GPU."""

from __future__ import annotations

# What sizes differ in; the rest is the default of transformers' Qwen3_5TextConfig. Three of four layers are Gated Delta
# Networks with heads of 128.
SIZES = {
    "0.8B": {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 3584, "num_attention_heads": 8,
             "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 16},
    "4B": {"hidden_size": 2560, "num_hidden_layers": 32, "intermediate_size": 9216, "num_attention_heads": 16,
           "num_key_value_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
}  # fmt: skip
SMOKE_SIZES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}  # fmt: skip
VOCABULARY, SMOKE_VOCABULARY = 32768, 64
KINDS = ("prefill", "decode", "train")
PREFILLS, BATCHES, PROMPT = (4096, 32768, 131072), (1, 8, 32), 512
PACK = (3072, 2048, 1536, 1024, 512)  # 8192 tokens
# For processes that compile kernels side by side: little memory, and counts that 16 divides, as it does those above.
COMPILED = [{"kind": "prefill", "tokens": 1024, "batch": 1}, {"kind": "decode", "tokens": 512, "batch": 1},
            {"kind": "train", "lengths": [512, 512]}]  # fmt: skip
SMOKE_PREFILLS, SMOKE_BATCHES, SMOKE_PROMPT, SMOKE_PACK = (40, 80), (2,), 20, (30, 7, 13)

PATHS = {
    "gatedelta": "GateDelta", "gatedelta-fused": "GateDelta, projections fused", "fla": "FLA", "torch": "torch code",
    "fla-all": "FLA with its convolution and norm",
}  # fmt: skip
# What is measured of a path that differs from another one in some kinds of rows alone.
KINDS_OF = {"gatedelta-fused": ("decode",)}
KEY = ("kind", "model", "tokens", "batch", "mode")


def rows_of(smoke: bool, sizes: list[str], kinds: tuple[str, ...]) -> list[dict]:
    """In the order in which a path measures them: within a kind, what takes longer comes later."""
    prefills, batches, prompt, pack = (
        (SMOKE_PREFILLS, SMOKE_BATCHES, SMOKE_PROMPT, SMOKE_PACK) if smoke else (PREFILLS, BATCHES, PROMPT, PACK)
    )
    rows = []
    for model in sizes:
        every = {
            "prefill": [{"tokens": tokens, "batch": 1, "mode": "eager"} for tokens in prefills],
            "decode": [{"tokens": prompt, "batch": batch, "mode": mode} for batch in batches
                       for mode in ("eager", "graph")],
            "train": [{"tokens": sum(pack), "batch": len(pack), "mode": "eager", "lengths": list(pack)}],
        }  # fmt: skip
        rows += [{"kind": kind, "model": model} | row for kind in KINDS if kind in kinds for row in every[kind]]
    return rows


def key(row: dict) -> tuple:
    return tuple(row[name] for name in KEY)


def name_of(row: dict) -> str:
    if row["kind"] == "prefill":
        return f"prefill, {row['tokens'] // 1024}k tokens" if row["tokens"] >= 1024 else f"prefill, {row['tokens']}"
    if row["kind"] == "decode":
        return f"decode, batch {row['batch']}" + (", CUDA graph" if row["mode"] == "graph" else "")
    return f"training step, {row['tokens']} tokens in {row['batch']} sequences"


def by_path(rows: list[dict]) -> dict[tuple, dict[str, dict]]:
    """The rows of every path with the same key, in the order of the first path."""
    groups: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        groups.setdefault(key(row), {})[row["path"]] = row
    return groups


def speedup(ours: dict, theirs: dict | None, time: str) -> float | None:
    """None where either was not measured."""
    if theirs is None or time not in ours or time not in theirs:
        return None
    return theirs[time] / ours[time]

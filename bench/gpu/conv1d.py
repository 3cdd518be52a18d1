"""Times the causal convolution on a GPU against a copy of as many bytes, and against FLA's and causal-conv1d's kernels
where they can be imported.

Times and bandwidths are taken as in gated_norm.py. The update of a decode step moves x, y and each state twice; its
"of copy" compares it with a copy of as many bytes, which for small batches is a launch.

Usage: python -m bench.gpu.conv1d [--tokens 4096] [--channels 8192] [--batches 1 8 64 512] [--dtype bfloat16]
                              [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gatedelta._operators import conv1d as _conv1d

from bench.gpu import chunked as gpu
from bench.gpu.gated_norm import MAX_SETS, POOL_BYTES, call_us, copy_us
from tools import records

TAPS = 4


def rows(tokens: int, channels: int, dtype: torch.dtype, channel_major: bool) -> torch.Tensor:
    if channel_major:
        return torch.randn(1, channels, tokens, device="cuda").to(dtype).transpose(1, 2)
    return torch.randn(1, tokens, channels, device="cuda").to(dtype)


def prefill(tokens: int, channels: int, dtype: torch.dtype, channel_major: bool) -> dict[str, tuple[float, int]]:
    """Time in us and bytes of each."""
    size = tokens * channels * dtype.itemsize
    sets = max(1, min(MAX_SETS, POOL_BYTES // (3 * size)))
    tensors = [[rows(tokens, channels, dtype, channel_major) for _ in range(3)] for _ in range(sets)]
    weight = torch.randn(channels, TAPS, device="cuda", dtype=dtype)
    cu = torch.tensor([0, tokens // 3, tokens // 2, tokens], device="cuda", dtype=torch.int32)
    state = torch.zeros(1, channels, TAPS - 1, device="cuda", dtype=dtype)
    found = {}

    def forward(i: int, options: int = _conv1d.SILU, offsets=None, states=None) -> None:
        x, y, _ = tensors[i]
        _conv1d.forward_out(x, weight, None, options, offsets, None, None, 0, y, states, None, False, None, None)

    def backward(i: int, wanted: int) -> object:
        x, _, dy = tensors[i]
        return _conv1d.backward(x, weight, None, _conv1d.SILU, None, None, dy, None, wanted)

    found["forward"] = call_us(forward, sets), 2 * size
    found["forward, no SiLU"] = call_us(lambda i: forward(i, 0), sets), 2 * size
    found["forward, with a final state"] = call_us(lambda i: forward(i, states=state), sets), 2 * size
    if not channel_major:
        found["forward, packed"] = call_us(lambda i: forward(i, offsets=cu), sets), 2 * size
    found["backward"] = call_us(lambda i: backward(i, 0b0011), sets), 3 * size
    found["backward, dx alone"] = call_us(lambda i: backward(i, 0b0001), sets), 3 * size
    found["copy, as forward"] = copy_us(2 * size), 2 * size
    found["copy, as backward"] = copy_us(3 * size), 3 * size
    for name, peer in peers(channel_major).items():
        found[name] = call_us(lambda i, peer=peer: peer(tensors[i][0], weight), sets), 2 * size
    return found


def peers(channel_major: bool) -> dict[str, Callable]:
    """Forwards with SiLU of other packages, x [B, T, D]; FLA's wants channels contiguous."""
    found = {}
    try:
        from causal_conv1d import causal_conv1d_fn

        found["causal-conv1d"] = lambda x, w: causal_conv1d_fn(x.transpose(1, 2), w, activation="silu")
    except ImportError:
        pass
    try:
        from fla.modules.conv.causal_conv1d import causal_conv1d

        if not channel_major:
            found["FLA"] = lambda x, w: causal_conv1d(x, w, activation="silu")
    except ImportError:
        pass
    return found


def update(batch: int, channels: int, dtype: torch.dtype, tokens: int, tokens_first: bool) -> tuple[float, int]:
    """A decode step, or a window of drafts, in place in a pool."""
    columns = TAPS - 1 if tokens == 1 else TAPS - 2 + tokens
    x, y = (torch.randn(batch, tokens, channels, device="cuda").to(dtype) for _ in range(2))
    weight = torch.randn(channels, TAPS, device="cuda", dtype=dtype)
    state_bytes = batch * channels * columns * dtype.itemsize
    sets = max(1, min(MAX_SETS, POOL_BYTES // state_bytes))
    slots = torch.randperm(batch * sets, device="cuda").view(sets, batch).to(torch.int32)
    pool = torch.zeros(batch * sets, columns, channels, device="cuda", dtype=dtype).transpose(1, 2)
    if not tokens_first:
        pool = pool.contiguous()
    accepted = None if tokens == 1 else torch.randint(1, tokens + 1, (batch,), device="cuda", dtype=torch.int32)

    def call(i: int) -> None:
        _conv1d.forward_out(
            x, weight, None, _conv1d.SILU, None, None, slots[i], 0, y, pool, slots[i], True, accepted, None
        )

    moved = 2 * state_bytes + 2 * batch * tokens * channels * dtype.itemsize
    return call_us(call, sets), moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--channels", type=int, default=8192)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    print(f"{torch.cuda.get_device_name()}: {options.channels} channels, {options.dtype}")
    peers(False)  # imports them
    versions = {name: sys.modules[name].__version__ for name in ("fla", "causal_conv1d") if name in sys.modules}
    result = {"header": gpu.machine() | {"peers": versions}, "rows": []}
    common = {"channels": options.channels, "dtype": options.dtype}
    for tokens in options.tokens:
        for channel_major in (False, True):
            found = prefill(tokens, options.channels, dtype, channel_major)
            order = "channel-major" if channel_major else "token-major"
            times = {name: us for name, (us, _) in found.items()}
            result["rows"].append({"kind": "prefill", "tokens": tokens, "order": order} | common | {"us": times})
            for name, (us, moved) in found.items():
                copy = found["copy, as backward" if "backward" in name else "copy, as forward"][0]
                print(
                    f"{tokens:6} tokens {order:13} {name:28} {us:8.2f} us  {moved / us / 1e6:5.2f} TB/s  "
                    f"{copy / us:5.2f} of copy"
                )
    for batch in options.batches:
        for tokens in (1, 4):
            for tokens_first in (True, False):
                us, moved = update(batch, options.channels, dtype, tokens, tokens_first)
                states = "[S, D]" if tokens_first else "[D, S]"
                times = {"update": us, "copy": copy_us(moved)}
                row = {"kind": "update", "batch": batch, "tokens": tokens, "states": states}
                result["rows"].append(row | common | {"us": times})
                print(
                    f"update of {tokens} tokens, batch {batch:4}, states {states} {us:8.2f} us  "
                    f"{moved / us / 1e6:5.2f} TB/s  {times['copy'] / us:5.2f} of copy"
                )
    if options.output:
        records.write(options.output, result)


if __name__ == "__main__":
    main()

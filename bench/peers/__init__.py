"""Adapters for other implementations, one module each. The library knows nothing of them.

The adapter of transformers' torch code, which bench.cpu.vs_transformers uses, has

    NAME                      what tables call it
    version() -> str
    chunk(q, k, v, g, beta, initial_state) -> (o, final_state)
    recurrent(q, k, v, g, beta, initial_state) -> (o, final_state)

on torch tensors [B, T, H, D] with g the log decay and beta after its sigmoid, no l2norm, scale K^-1/2, gradients by
autograd through `chunk`.

The adapters of packages that serve on a GPU, which bench.gpu.decode and bench.gpu.packs use where they can be imported,
have NAME, version() and

    decode_calls(problem) -> {name: call}     the functions that can do this Problem of bench.gpu.decode. call(i) works
                                              on the i-th set of slots and returns o and the tensor with the states,
                                              or None if these were written in place
    pack_calls(pack) -> {name: call}          likewise for a Pack of bench.gpu.packs
    forward_calls(inputs) -> {name: call}     (FLA's alone) of bench.gpu.in_turns, on the inputs of bench.gpu.chunked
    backward_calls(inputs, gradients, leaves) -> {name: call}
    compile_in_parallel()                     called in each of several processes that compile kernels for later ones
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType

SERVING = ("fla_triton", "flashinfer_cute", "sglang_triton")  # the package, then what its kernels are written in


def importable(wanted: Iterable[str] | None = None) -> list[ModuleType]:
    """The adapters of packages that serve and are installed here, or of those wanted. Prints which are not."""
    found = []
    for name in SERVING:
        if wanted is not None and name.partition("_")[0] not in wanted:
            continue
        try:
            found.append(importlib.import_module(f"{__name__}.{name}"))
        except Exception as error:  # a package may fail to import in any way it likes
            print(f"peers: no {name} here: {type(error).__name__}: {str(error)[:200]}")
    return found

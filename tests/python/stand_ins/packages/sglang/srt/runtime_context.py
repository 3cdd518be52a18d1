"""The arguments of the process, by group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_exec = SimpleNamespace(
    mamba=SimpleNamespace(
        linear_attn_backend="triton", linear_attn_decode_backend=None, linear_attn_prefill_backend=None,
        linear_attn_verify_backend=None,
    ),
    deterministic=SimpleNamespace(enable_deterministic_inference=False),
)  # fmt: skip


def get_exec() -> Any:
    return _exec

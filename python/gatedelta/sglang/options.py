"""The name that GateDelta has among SGLang's arguments, and the modes for which they select it."""

from __future__ import annotations

from typing import NamedTuple

BACKEND_NAME = "gatedelta"  # of --linear-attn-backend and the like


class Modes(NamedTuple):
    """Which of a runner's modes are GateDelta's."""

    decode: bool
    prefill: bool
    verify: bool


def selected_modes() -> Modes:
    """The modes that this process's arguments select."""
    from sglang.srt.runtime_context import get_exec

    mamba = get_exec().mamba
    base, verify = mamba.linear_attn_backend, mamba.linear_attn_verify_backend
    decode = (mamba.linear_attn_decode_backend or base) == BACKEND_NAME
    prefill = (mamba.linear_attn_prefill_backend or base) == BACKEND_NAME
    return Modes(decode, prefill, decode if verify is None else verify == BACKEND_NAME)

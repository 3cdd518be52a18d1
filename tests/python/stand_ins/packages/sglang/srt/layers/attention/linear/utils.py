from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

from sglang.srt.runtime_context import get_exec


def pp_spec_stable_rows_enabled() -> bool:
    return False


class LinearAttnKernelBackend(Enum):
    TRITON = "triton"
    FLASHINFER = "flashinfer"
    CUSTOM = "custom"

    @classmethod
    def _missing_(cls, value):
        return cls.CUSTOM

    def is_custom(self) -> bool:
        return self is LinearAttnKernelBackend.CUSTOM


def resolve_linear_attn_backends():
    mamba = get_exec().mamba
    base = mamba.linear_attn_backend
    return SimpleNamespace(
        decode=LinearAttnKernelBackend(mamba.linear_attn_decode_backend or base),
        prefill=LinearAttnKernelBackend(mamba.linear_attn_prefill_backend or base),
        verify=LinearAttnKernelBackend(mamba.linear_attn_verify_backend or "triton"),
    )

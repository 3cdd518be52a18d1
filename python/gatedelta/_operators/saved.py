"""Which call of chunk_gated_delta_rule_fwd saved what its backward is given. Plain numbers, which torch.compile can
trace: the library's own check of the same (src/api/validate/saved.cpp) is out of its sight."""

from __future__ import annotations

from torch import Tensor

from .. import _lib
from . import ops, queries

_NAMES = dict(zip(_lib.SavedCall._fields, ("B", "T", "N", "Hk", "Hv", "K", "V")))
_VALUES = {
    "device": ("cpu", "cuda"),
    "kernels": tuple(_lib.KERNELS),
    "dtype": ("none", "float32", "bfloat16", "float16"),
    "gate": ("log", "raw"),
    "beta_kind": ("value", "logit", "logit_doubled"),
    "state_layout": ("KV", "VK"),
    "key_head_order": tuple(_lib.KEY_HEAD_ORDERS),
}
_ROUNDING = 1e-6  # of a scale


def call_of(
    q: Tensor,
    v: Tensor,
    options: int,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    scale: float | None,
) -> _lib.SavedCall:
    return _lib.SavedCall(
        batch=q.shape[0],
        tokens=q.shape[1],
        sequences=queries.sequence_count(q.shape[0], cu_seqlens),
        key_heads=q.shape[2],
        value_heads=v.shape[2],
        key_dim=q.shape[3],
        value_dim=v.shape[3],
        device=_lib.CUDA if q.is_cuda else _lib.CPU,
        kernels=ops.KERNELS if q.is_cuda else 0,
        dtype=queries.DTYPES.get(q.dtype, 0),
        gate=_lib.GATE_LOG,
        beta_kind=_lib.BETA_VALUE,
        state_layout=_lib.STATE_VK if options & ops.STATE_V_FIRST else _lib.STATE_KV,
        l2norm=0,
        key_head_order=0,
        cu_seqlens=int(cu_seqlens is not None),
        dt_bias=0,
        initial_state=int(initial_state is not None),
        batch_invariant=0,
        scale=(q.shape[3] or 1) ** -0.5 if scale is None else scale,
    )


def check(saved: object, q: Tensor, v: Tensor, options: int, cu_seqlens: Tensor | None, initial_state: Tensor | None,
          scale: float | None) -> None:  # fmt: skip
    """Refuses what a forward of another call saved, in the library's words."""
    if not isinstance(saved, _lib.Saved) or not isinstance(saved.call, _lib.SavedCall):
        raise TypeError(
            f"saved must be what chunk_gated_delta_rule_fwd returned, a Saved, or None, not {type(saved).__qualname__}"
        )
    if not saved.written:
        raise ValueError(_lib.NOT_WRITTEN)
    if q.dim() != 4 or v.dim() != 4:
        return  # which the operator refuses
    call = call_of(q, v, options, cu_seqlens, initial_state, scale)
    for name, there, here in zip(call._fields, saved.call, call):
        if name != "scale" and there != here:
            raise ValueError(_refusal(name, there, here))
    if not abs(saved.call.scale - call.scale) <= _ROUNDING * abs(call.scale):
        raise ValueError(_refusal("scale", saved.call.scale, call.scale))


def _refusal(name: str, there: float, here: float) -> str:
    return (
        f"gatedelta: saved is of a call {_trait(name, there)}, but this one is {_trait(name, here)}: give it what a "
        "forward of its own inputs saved"
    )


def _trait(name: str, value: float) -> str:
    if name in _NAMES:
        return f"with {_NAMES[name]} = {value}"
    if name in _VALUES:
        values = _VALUES[name]
        return f"with {name} {values[value] if 0 <= value < len(values) else 'unknown'}"
    if name == "scale":
        return f"with scale = {value:.6g}"
    return f"{'with' if value else 'without'} {name}"

"""FLA's calls of the gated delta rule as calls of ours: what is taken, and how tensors are brought into shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._plugins import limits
from ..torch import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

_CHUNK_SIZES = (16, 32, 64)  # FLA's choices. They change the result by rounding alone, so each is taken as a hint.


class _Chunk(NamedTuple):
    """The arguments of FLA's ``chunk_gated_delta_rule``, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float | None = None
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None  # this and the next: other kernels need them, derived from cu_seqlens
    chunk_indices: Tensor | None = None
    cp_context: object | None = None
    use_gate_in_kernel: bool = False
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    chunk_size: int = 64
    transpose_state_layout: bool | None = None


class _Recurrent(NamedTuple):
    """The arguments of FLA's ``fused_recurrent_gated_delta_rule``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    gk: Tensor | None = None
    gv: Tensor | None = None
    beta: Tensor | None = None
    scale: float | None = None
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    cu_seqlens: Tensor | None = None
    transpose_state_layout: bool | None = None


# Arguments that our functions take as FLA's do. The rest of a call is a hint, or is refused.
_PASSED_ON = (
    "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first",
    "transpose_state_layout", "cu_seqlens",
)  # fmt: skip


def chunk_refusal(*args: Any, **kwargs: Any) -> str | None:
    """Why a call of FLA's is not taken, or None."""
    plan = _plan_chunk(*args, **kwargs)
    return plan if isinstance(plan, str) else None


def chunk(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Precondition: ``chunk_refusal`` returned None."""
    return _run(chunk_gated_delta_rule, _plan_chunk(*args, **kwargs))


def recurrent(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None] | str:
    """The results, or why the call is not taken."""
    plan = _plan_recurrent(*args, **kwargs)
    return plan if isinstance(plan, str) else _run(fused_recurrent_gated_delta_rule, plan)


def _plan_chunk(*args: Any, **kwargs: Any) -> dict[str, Any] | str:
    """The arguments of our function for a call of FLA's, or why it is not taken."""
    if unknown := _unknown(_Chunk, kwargs):
        return unknown
    call = _Chunk(*args, **kwargs)
    if call.cp_context is not None:
        if not hasattr(call.cp_context, "pre_num_ranks"):
            return "cp_context has not the fields of fla.ops.cp's contexts"
        if call.initial_state is not None or call.output_final_state:
            return "cp_context with initial_state or output_final_state, which FLA's own kernels do not take either"
        if call.q.is_cuda and call.q.dtype == torch.float32:
            return "cp_context on cuda: q, k and v are float32; bfloat16 and float16 are taken"
    if call.chunk_size not in _CHUNK_SIZES:
        return f"chunk_size is {call.chunk_size}, FLA has {_CHUNK_SIZES}"
    if not call.q.dtype == call.k.dtype == call.v.dtype:
        return f"q, k and v differ in dtype: {call.q.dtype}, {call.k.dtype}, {call.v.dtype}"
    plan = _plan(call)
    if isinstance(plan, dict) and call.cp_context is not None:
        plan["cp_context"] = call.cp_context
    return plan


def _plan_recurrent(*args: Any, **kwargs: Any) -> dict[str, Any] | str:
    if unknown := _unknown(_Recurrent, kwargs):
        return unknown
    call = _Recurrent(*args, **kwargs)
    if call.gk is not None or call.gv is not None:
        return "gk and gv: a gated delta network has one decay a head"
    if call.beta is not None and call.beta.dim() != 3:
        return f"beta is of shape {list(call.beta.shape)}, one for each value channel; one a head is taken, [B, T, Hv]"
    return _plan(call)


def _unknown(kind: type[_Chunk | _Recurrent], kwargs: dict[str, Any]) -> str | None:
    unknown = kwargs.keys() - set(kind._fields)
    return f"unknown arguments: {', '.join(sorted(unknown))}" if unknown else None


def _plan(call: _Chunk | _Recurrent) -> dict[str, Any] | str:
    if call.use_gate_in_kernel and (call.A_log is None or call.g is None):
        return "use_gate_in_kernel needs g and A_log"
    if not call.use_gate_in_kernel:
        call = call._replace(A_log=None, dt_bias=None)  # FLA does not look at them either
    q, k, v = call.q, call.k, call.v
    tensors = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
    reason = limits.tensors_refusal(q.device, {name: getattr(call, name) for name in tensors})
    if reason:
        return reason
    if q.shape[2] != k.shape[2] or v.shape[2] % q.shape[2]:
        return f"heads of q, k and v are {q.shape[2]}, {k.shape[2]} and {v.shape[2]}"
    for name, size in (("K", q.shape[-1]), ("V", v.shape[-1])):
        if not 0 < size <= limits.MAX_HEAD_DIM:
            return f"{name} is {size}, at most {limits.MAX_HEAD_DIM} is taken"
    plan = {name: getattr(call, name) for name in _PASSED_ON}
    if call.scale is None:
        plan["scale"] = q.shape[-1] ** -0.5  # of q as it is, before zeros fill it up
    if call.cu_seqlens is not None:
        if q.shape[0] != 1:
            return f"B is {q.shape[0]}, must be 1 with cu_seqlens"
        plan["cu_seqlens"] = call.cu_seqlens.contiguous()
    return plan


def _run(function: Callable, call: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Calls our function with tensors as it needs them: of one dtype, with rows and states as the kernels read them,
    and with K and V filled up with zeros. Columns of zeros change nothing: those of q and k add nothing to a product or
    a norm, those of v nothing to another column, and what they touch of a state stays 0."""
    q, k, v, state = (call.pop(name) for name in ("q", "k", "v", "initial_state"))
    key_dim, value_dim, dtype = q.shape[-1], v.shape[-1], v.dtype
    if not q.dtype == k.dtype == dtype:  # recurrent alone. No number loses digits.
        wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), dtype)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    sizes = _kernel_sizes(key_dim, value_dim)
    q, k, v = _rows(q, sizes[0]), _rows(k, sizes[0]), _rows(v, sizes[1])
    if function is chunk_gated_delta_rule and q.is_cuda:
        q, k, v = _aligned(q), _aligned(k), _aligned(v)
    padded = sizes != (key_dim, value_dim)
    state_v_first = call["state_v_first"] or call["transpose_state_layout"]
    if state is not None:
        rows, columns = reversed(sizes) if state_v_first else sizes
        if padded:
            state = torch.nn.functional.pad(state, (0, columns - state.shape[-1], 0, rows - state.shape[-2]))
        if state.stride(-1) != 1 or state.stride(-2) != columns:
            state = state.contiguous()
    o, final = function(q=q, k=k, v=v, initial_state=state, **call)
    if padded:
        o = o[..., :value_dim].contiguous()
        if final is not None:
            rows, columns = (value_dim, key_dim) if state_v_first else (key_dim, value_dim)
            final = final[..., :rows, :columns].contiguous()
    return o.to(dtype), final


def _kernel_sizes(key_dim: int, value_dim: int) -> tuple[int, int]:
    """K and V of the kernels that serve these sizes."""
    step = limits.HEAD_STEP
    return -(-key_dim // step) * step, -(-value_dim // step) * step


def _rows(x: Tensor, size: int) -> Tensor:
    """x with its last dimension contiguous, and with zeros up to this size."""
    if x.shape[-1] != size:
        return torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy where the kernels could not read it: its address and strides must be multiples of 16 bytes."""
    if any(stride * x.element_size() % 16 for stride in x.stride()[:-1]):
        x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x

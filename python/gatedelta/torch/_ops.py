"""The operators ``torch.ops.gatedelta.*``: loads the binding and tells torch the shapes of what they return.

They have no gradients of their own (the functions in ``gatedelta.torch`` have). An output that was not asked for is an
empty tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _lib

if torch.__version__ < (2, 10):
    raise ImportError(f"gatedelta.torch needs torch 2.10 or newer; this is torch {torch.__version__}")

_FORCED_ISA = _lib.forced_isa()  # a wrong GATEDELTA_ISA fails here, not in the first call
torch.ops.load_library(str(_lib.library_path("gatedelta_torch")))

chunk_fwd = torch.ops.gatedelta.chunk_fwd.default
chunk_fwd_out = torch.ops.gatedelta.chunk_fwd_out.default
chunk_bwd = torch.ops.gatedelta.chunk_bwd.default
recurrent = torch.ops.gatedelta.recurrent.default
recurrent_out = torch.ops.gatedelta.recurrent_out.default

# Order of chunk_bwd's results, and of the bits of its `wanted`.
GRADIENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")

_DTYPES = {
    torch.float32: _lib.DTYPE_F32,
    torch.bfloat16: _lib.DTYPE_BF16,
    torch.float16: _lib.DTYPE_F16,
    torch.int32: _lib.DTYPE_I32,
    torch.int64: _lib.DTYPE_I64,
}


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty((0,), dtype=torch.uint8)


def empty_states(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, state_v_first: bool) -> Tensor:
    """[N, Hv, K, V] or [N, Hv, V, K] in float32, not filled."""
    if q.dim() != 4 or v.dim() != 4:
        raise RuntimeError(f"gatedelta: q and v must have rank 4, not {q.dim()} and {v.dim()}")
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    matrix = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    return q.new_empty((count, v.shape[2], *matrix), dtype=torch.float32)


def _describe(tensor: Tensor | None, name: str) -> _lib.Tensor:
    """Shape and dtype for a size query, strides as of a contiguous tensor."""
    result = _lib.Tensor()
    if tensor is None:
        return result
    if tensor.dtype not in _DTYPES or tensor.dim() > _lib.MAX_RANK:
        raise RuntimeError(
            f"gatedelta: {name} is a {tensor.dtype} tensor of rank {tensor.dim()}, which nothing here is"
        )
    result.dtype = _DTYPES[tensor.dtype]
    result.rank = tensor.dim()
    stride = 1
    for i in reversed(range(tensor.dim())):
        result.shape[i] = tensor.shape[i]
        result.stride[i] = stride
        stride *= tensor.shape[i]
    return result


def _cuda_saved_bytes(o: Tensor, cu_seqlens: Tensor | None) -> int:
    """saved_layout of src/cuda/forward/plan.hpp, also for symbolic shapes and without a CUDA build."""
    batch, tokens, heads = o.shape[:3]
    if cu_seqlens is None:
        chunks, windows = batch * ((tokens + 63) // 64), batch * (tokens // 1024)
    else:
        chunks, windows = tokens // 64 + cu_seqlens.shape[0], tokens // 1024
    return (chunks * heads * (6912 + 8) + 63) // 64 * 64 + windows * heads * 65536


def _saved_bytes(
    tensors: dict[str, Tensor | None], o: Tensor, gate: int, beta_kind: int, state_layout: int, l2norm: bool
) -> int:
    """How much chunk_fwd saves. On the CPU with symbolic shapes only the call itself can tell, and torch is told so."""
    if o.is_cuda:
        return _cuda_saved_bytes(o, tensors["cu_seqlens"])
    if any(not isinstance(size, int) for tensor in tensors.values() if tensor is not None for size in tensor.shape):
        return torch.library.get_ctx().new_dynamic_size()
    args = _lib.ForwardArgs()
    args.exec.isa = _FORCED_ISA
    for name, tensor in tensors.items():
        setattr(args.inputs, name, _describe(tensor, name))
    args.inputs.gate, args.inputs.beta_kind = gate, beta_kind
    args.inputs.state_layout, args.inputs.l2norm = state_layout, l2norm
    args.o = _describe(o, "o")
    return _lib.size_query("gd_forward_saved_size", args)


@torch.library.register_fake("gatedelta::chunk_fwd")
def _(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, initial_indices, scale, gate, beta_kind, state_layout,
    l2norm, output_final_state, save, context_parallel, batch_invariant,
):  # fmt: skip
    o = q.new_empty(v.shape)
    states = empty_states(q, v, cu_seqlens, state_layout == _lib.STATE_VK) if output_final_state else _nothing(q)
    saved = _nothing(q)
    if save:
        tensors = {
            "q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens,
            "initial_state": initial_state, "initial_indices": initial_indices,
        }  # fmt: skip
        saved = q.new_empty((_saved_bytes(tensors, o, gate, beta_kind, state_layout, l2norm),), dtype=torch.uint8)
    return o, states, saved


@torch.library.register_fake("gatedelta::chunk_fwd_out")
def _(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, initial_indices, scale, gate, beta_kind, state_layout,
    l2norm, o, final_state, final_indices, in_place, checkpoints, checkpoint_indices, checkpoint_every,
    context_parallel, batch_invariant,
):  # fmt: skip
    return None


@torch.library.register_fake("gatedelta::chunk_bwd")
def _(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, initial_indices, scale, gate, beta_kind, state_layout,
    l2norm, d_o, d_final_state, saved, wanted, context_parallel, batch_invariant,
):  # fmt: skip
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    return tuple(x.new_empty(x.shape) if wanted >> i & 1 else _nothing(q) for i, x in enumerate(inputs))


@torch.library.register_fake("gatedelta::recurrent")
def _(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, initial_indices, scale, gate, beta_kind, state_layout,
    l2norm, output_final_state,
):  # fmt: skip
    states = empty_states(q, v, cu_seqlens, state_layout == _lib.STATE_VK) if output_final_state else _nothing(q)
    return q.new_empty(v.shape), states


@torch.library.register_fake("gatedelta::recurrent_out")
def _(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, initial_indices, scale, gate, beta_kind, state_layout,
    l2norm, o, final_state, final_indices, in_place, accept_lengths, step_states, step_indices,
):  # fmt: skip
    return None

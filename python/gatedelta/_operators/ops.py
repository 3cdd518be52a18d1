"""The operators ``torch.ops.gatedelta.*``: loads the binding and gives torch the shapes of their results.

They have no gradients of their own (autograd.py gives them some). An output the caller did not request is an empty
tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _lib

if torch.__version__ < (2, 10):
    raise ImportError(f"gatedelta.torch needs torch 2.10 or newer; this is torch {torch.__version__}")

_FORCED_ISA = _lib.forced_isa()  # a wrong GATEDELTA_ISA fails here, not in the first call
_lib.forced_kernels()  # likewise GATEDELTA_KERNELS
torch.ops.load_library(str(_lib.library_path("gatedelta_torch")))

chunk_fwd = torch.ops.gatedelta.chunk_fwd.default
chunk_fwd_save = torch.ops.gatedelta.chunk_fwd_save.default
chunk_fwd_out = torch.ops.gatedelta.chunk_fwd_out.default
chunk_bwd = torch.ops.gatedelta.chunk_bwd.default
recurrent = torch.ops.gatedelta.recurrent.default
recurrent_out = torch.ops.gatedelta.recurrent_out.default

# The bits of the operators' `options`, as in bindings/torch/inputs.hpp (a test compares them).
GATE_RAW = 1 << 0
BETA_LOGIT = 1 << 1
BETA_LOGIT_DOUBLED = 1 << 2
STATE_V_FIRST = 1 << 3
L2NORM = 1 << 4
FINAL_STATE = 1 << 5  # the operator returns it
UNCUT = 1 << 6  # auto_cp=False
BATCH_INVARIANT = 1 << 7
SMALL_WORKSPACE = 1 << 8  # of a backward
TILED_KEY_HEADS = 1 << 13  # those between are other operators'
FIRST_SLOT_SHIFT = 16  # from this bit on: gd_inputs.first_slot

DTYPES = {
    torch.float32: _lib.DTYPE_F32,
    torch.bfloat16: _lib.DTYPE_BF16,
    torch.float16: _lib.DTYPE_F16,
    torch.int32: _lib.DTYPE_I32,
    torch.int64: _lib.DTYPE_I64,
}


def nothing(like: Tensor) -> Tensor:
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
    if tensor.dtype not in DTYPES:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise RuntimeError(f"gatedelta: {name}: dtype is {dtype}, must be {_lib.allowed_dtypes(name)}")
    if tensor.dim() > _lib.MAX_RANK:
        raise RuntimeError(f"gatedelta: {name} has rank {tensor.dim()}, more than any tensor here")
    result.dtype = DTYPES[tensor.dtype]
    result.rank = tensor.dim()
    stride = 1
    for i in reversed(range(tensor.dim())):
        result.shape[i] = tensor.shape[i]
        result.stride[i] = stride
        stride *= tensor.shape[i]
    return result


def _saved_bytes(tensors: dict[str, Tensor | None], o: Tensor, options: int) -> int:
    """The bytes chunk_fwd_save saves. With symbolic shapes they depend on the call: torch gets a new symbol."""
    if any(not isinstance(size, int) for tensor in tensors.values() if tensor is not None for size in tensor.shape):
        return torch.library.get_ctx().new_dynamic_size()
    args = _lib.ForwardArgs()
    if o.is_cuda:
        args.exec.device = _lib.CUDA
    else:
        args.exec.isa = _FORCED_ISA
    for name, tensor in tensors.items():
        setattr(args.inputs, name, _describe(tensor, name))
    args.inputs.gate = _lib.GATE_RAW if options & GATE_RAW else _lib.GATE_LOG
    args.inputs.state_layout = _lib.STATE_VK if options & STATE_V_FIRST else _lib.STATE_KV
    args.inputs.l2norm = bool(options & L2NORM)  # the kind of beta does not matter here
    args.out = _describe(o, "out")
    return _lib.size_query("gd_forward_saved_size", args)


def check_devices(first: str, **arguments: object) -> None:
    """torch also calls the fake operator where a single tensor is on `meta`: the call would write nothing."""
    device = arguments[first].device
    for name, tensor in arguments.items():
        if isinstance(tensor, Tensor) and tensor.device != device:
            raise RuntimeError(f"gatedelta: {name} is on {tensor.device}, but {first} is on {device}")


def _outputs(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, options: int) -> tuple[Tensor, Tensor]:
    """o and the final state."""
    if not options & FINAL_STATE:
        return q.new_empty(v.shape), nothing(q)
    return q.new_empty(v.shape), empty_states(q, v, cu_seqlens, bool(options & STATE_V_FIRST))


@torch.library.register_fake("gatedelta::chunk_fwd")
@torch.library.register_fake("gatedelta::recurrent")
def _(
    q, k, v, g, beta, options, cu_seqlens=None, initial_state=None, scale=None, A_log=None, dt_bias=None,
    initial_state_indices=None,
):  # fmt: skip
    check_devices("q", **locals())
    return _outputs(q, v, cu_seqlens, options)


@torch.library.register_fake("gatedelta::chunk_fwd_save")
def _(
    q, k, v, g, beta, options, cu_seqlens=None, initial_state=None, scale=None, A_log=None, dt_bias=None,
    initial_state_indices=None,
):  # fmt: skip
    check_devices("q", **locals())
    tensors = {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens,
        "initial_state": initial_state, "initial_state_indices": initial_state_indices,
    }  # fmt: skip
    o, states = _outputs(q, v, cu_seqlens, options)
    return o, states, q.new_empty((_saved_bytes(tensors, o, options),), dtype=torch.uint8)


@torch.library.register_fake("gatedelta::chunk_fwd_out")
def _(
    q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log, dt_bias, initial_state_indices, out,
    final_state, final_state_indices, in_place, checkpoints, checkpoint_indices, checkpoint_every,
    checkpoint_offsets=None,
):  # fmt: skip
    check_devices("q", **locals())


@torch.library.register_fake("gatedelta::chunk_bwd")
def _(
    q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log, dt_bias, initial_state_indices, do, dht,
    saved, wanted,
):  # fmt: skip
    check_devices("q", **locals())
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    return tuple(x.new_empty(x.shape) if wanted >> i & 1 else nothing(q) for i, x in enumerate(inputs))


@torch.library.register_fake("gatedelta::recurrent_out")
def _(
    q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log, dt_bias, initial_state_indices, out,
    final_state, final_state_indices, in_place, accept_lengths, step_states, step_indices, previous_accept_lengths=None,
):  # fmt: skip
    check_devices("q", **locals())

"""The gated delta rule on numpy arrays, without torch.

Arrays are float32, float16 or (with the ml_dtypes package) bfloat16, of any strides that are not negative, as long as
the last dimension of q, k, v, the two last of a state, and cu_seqlens are contiguous; nothing is copied. Arguments
mean what they mean in ``gatedelta.torch``; the keywords of ``Layer`` are common to all functions. A refused call raises
TypeError or ValueError, or UnsupportedError where this build or machine lacks something, and has written nothing.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np

from . import _lib
from ._lib import UnsupportedError
from ._numpy_conv1d import Conv1d, Conv1dGradients, causal_conv1d, causal_conv1d_backward
from ._numpy_layer_step import layer_step
from ._numpy_norm import NormGradients, rms_norm_gated, rms_norm_gated_backward

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Conv1d", "Conv1dGradients", "Forward", "Gradients", "Layer", "NormGradients", "Recurrent", "UnsupportedError",
    "backward", "causal_conv1d", "causal_conv1d_backward", "forward", "layer_step", "recurrent", "rms_norm_gated",
    "rms_norm_gated_backward",
]  # fmt: skip

_DTYPES = {
    "float32": _lib.DTYPE_F32,
    "bfloat16": _lib.DTYPE_BF16,
    "float16": _lib.DTYPE_F16,
    "int32": _lib.DTYPE_I32,
    "int64": _lib.DTYPE_I64,
}
_ALIGNMENT = 64
_ZERO, _ONE = np.float32(0), np.float32(1)


class Layer(TypedDict, total=False):
    """Keywords all functions take, with their defaults. g and beta may be None: no decay, and a beta of 1."""

    scale: float | None  # None
    initial_state: np.ndarray | None  # None
    use_qk_l2norm_in_kernel: bool  # False
    use_gate_in_kernel: bool  # False
    A_log: np.ndarray | None  # None
    dt_bias: np.ndarray | None  # None
    use_beta_sigmoid_in_kernel: bool  # False
    allow_neg_eigval: bool  # False
    state_v_first: bool  # False
    cu_seqlens: np.ndarray | None  # None
    key_head_order: str  # "grouped"


class Forward(NamedTuple):
    o: np.ndarray
    final_state: np.ndarray | None
    saved: np.ndarray | None  # what `backward` takes; None without save=True


class Gradients(NamedTuple):
    """Each is None where the input is."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dg: np.ndarray | None
    dbeta: np.ndarray | None
    dA_log: np.ndarray | None
    d_dt_bias: np.ndarray | None
    d_initial_state: np.ndarray | None


class Recurrent(NamedTuple):
    o: np.ndarray
    final_state: np.ndarray | None


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray | None,
    beta: np.ndarray | None,
    *,
    output_final_state: bool = False,
    initial_state_indices: np.ndarray | None = None,
    out: np.ndarray | None = None,
    final_state: np.ndarray | None = None,
    final_state_indices: np.ndarray | None = None,
    checkpoints: np.ndarray | None = None,
    checkpoint_indices: np.ndarray | None = None,
    checkpoint_every: int = 0,
    checkpoint_offsets: np.ndarray | None = None,
    null_index: int = -1,
    save: bool = False,
    num_threads: int | None = None,
    **layer: Unpack[Layer],
) -> Forward:
    """Chunked forward. ``final_state`` is a buffer or pool to write to; the initial state's own array = in place.

    save: the result holds what ``backward`` takes as ``saved``.
    """
    args = _lib.ForwardArgs()
    _set_inputs(args, q, k, v, g, beta, **layer)
    out, final_state = _set_outputs(
        args, q, v, output_final_state, initial_state_indices, out, final_state, final_state_indices, layer
    )
    args.checkpoints = _tensor(checkpoints, "checkpoints", written=True)
    args.checkpoint_indices = _tensor(checkpoint_indices, "checkpoint_indices")
    if not 0 <= checkpoint_every < 1 << 63:
        raise ValueError(f"checkpoint_every is {checkpoint_every}, must be a positive multiple of {_lib.CHUNK}")
    args.checkpoint_every = checkpoint_every
    args.checkpoint_offsets = _tensor(checkpoint_offsets, "checkpoint_offsets")
    _set_null_index(args, null_index, initial_state_indices, final_state_indices, checkpoint_indices)
    saved = None
    _set_threads(args, num_threads)
    if save:
        args.saved_bytes = _lib.size_query("gd_forward_saved_size", args)
        saved = _aligned_bytes(args.saved_bytes)
        args.saved = _address(saved)
    _run("gd_forward", args)
    return Forward(out, final_state, saved)


def backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray | None,
    beta: np.ndarray | None,
    do: np.ndarray,
    dht: np.ndarray | None = None,
    *,
    saved: np.ndarray | None = None,
    num_threads: int | None = None,
    **layer: Unpack[Layer],
) -> Gradients:
    """Chunked backward, from what ``forward(..., save=True)`` of the same inputs saved, or recomputing it."""
    args = _lib.BackwardArgs()
    _set_inputs(args, q, k, v, g, beta, **layer)
    args.d_o = _tensor(do, "do")
    args.d_final_state = _tensor(dht, "dht")
    if saved is not None:
        if saved.dtype != np.uint8 or saved.ndim != 1 or not saved.flags.c_contiguous:
            raise ValueError("saved is not what forward(..., save=True) returned")
        args.saved, args.saved_bytes = _address(saved), saved.size
    inputs = (q, k, v, g, beta, *(layer.get(name) for name in ("A_log", "dt_bias", "initial_state")))
    gradients = Gradients(*(None if x is None else np.empty(x.shape, x.dtype) for x in inputs))
    for name, array in gradients._asdict().items():
        setattr(args, name, _tensor(array, name, written=True))
    _set_threads(args, num_threads)
    _run("gd_backward", args)
    return gradients


def recurrent(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray | None,
    beta: np.ndarray | None,
    *,
    output_final_state: bool = False,
    initial_state_indices: np.ndarray | None = None,
    out: np.ndarray | None = None,
    final_state: np.ndarray | None = None,
    final_state_indices: np.ndarray | None = None,
    accept_lengths: np.ndarray | None = None,
    step_states: np.ndarray | None = None,
    step_indices: np.ndarray | None = None,
    previous_accept_lengths: np.ndarray | None = None,
    null_index: int = -1,
    batch_invariant: bool = False,
    num_threads: int | None = None,
    **layer: Unpack[Layer],
) -> Recurrent:
    """Token by token: decode and draft verification. ``final_state`` as in ``forward``."""
    args = _lib.RecurrentArgs()
    _set_inputs(args, q, k, v, g, beta, **layer)
    out, final_state = _set_outputs(
        args, q, v, output_final_state, initial_state_indices, out, final_state, final_state_indices, layer
    )
    args.accept_lengths = _tensor(accept_lengths, "accept_lengths")
    args.step_states = _tensor(step_states, "step_states", written=True)
    args.step_indices = _tensor(step_indices, "step_indices")
    args.previous_accept_lengths = _tensor(previous_accept_lengths, "previous_accept_lengths")
    _set_null_index(args, null_index, initial_state_indices, final_state_indices, step_indices)
    args.batch_invariant = batch_invariant
    _set_threads(args, num_threads)
    _run("gd_recurrent", args)
    return Recurrent(out, final_state)


def _tensor(array: np.ndarray | None, name: str, written: bool = False) -> _lib.Tensor:
    result = _lib.Tensor()
    if array is None:
        return result
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, not {type(array).__name__}")
    if written and not array.flags.writeable:
        raise ValueError(f"{name} is written to, but the array is read-only")
    dtype = _DTYPES.get(array.dtype.name) if array.dtype.isnative else None
    if dtype is None:
        allowed = _lib.allowed_dtypes(name)
        raise ValueError(f"{name} has dtype {array.dtype}; it must be {allowed} in native byte order")
    if array.ndim > _lib.MAX_RANK:
        raise ValueError(f"{name} has rank {array.ndim}, more than any tensor here")
    if any(stride % array.itemsize for stride in array.strides):
        raise ValueError(f"{name} has strides that are no multiple of its element size")
    result.data = array.ctypes.data
    result.dtype = dtype
    result.rank = array.ndim
    result.shape[: array.ndim] = array.shape
    if array.size:
        result.stride[: array.ndim] = [stride // array.itemsize for stride in array.strides]
    else:  # numpy gives empty arrays strides of 0: those of a contiguous array instead
        result.stride[: array.ndim] = [math.prod(array.shape[i + 1 :]) for i in range(array.ndim)]
    return result


def _set_inputs(
    args,
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    key_head_order="grouped",
) -> None:
    """The defaults here are those of ``Layer``."""
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval doubles the sigmoid of beta, so it needs use_beta_sigmoid_in_kernel=True")
    inputs = args.inputs
    inputs.q = _tensor(q, "q")
    inputs.k = _tensor(k, "k")
    inputs.v = _tensor(v, "v")
    if g is None:
        if use_gate_in_kernel:
            raise ValueError("use_gate_in_kernel=True takes raw `a` as g, but g is None")
        g = np.broadcast_to(_ZERO, v.shape[:3])
    if beta is None:
        if use_beta_sigmoid_in_kernel:
            raise ValueError("use_beta_sigmoid_in_kernel=True takes logits as beta, but beta is None")
        beta = np.broadcast_to(_ONE, v.shape[:3])
    inputs.g = _tensor(g, "g")
    inputs.beta = _tensor(beta, "beta")
    inputs.A_log = _tensor(A_log, "A_log")
    inputs.dt_bias = _tensor(dt_bias, "dt_bias")
    inputs.cu_seqlens = _tensor(cu_seqlens, "cu_seqlens")
    inputs.initial_state = _tensor(initial_state, "initial_state")
    inputs.gate = _lib.GATE_RAW if use_gate_in_kernel else _lib.GATE_LOG
    inputs.beta_kind = use_beta_sigmoid_in_kernel + allow_neg_eigval
    inputs.state_layout = _lib.STATE_VK if state_v_first else _lib.STATE_KV
    inputs.l2norm = use_qk_l2norm_in_kernel
    inputs.key_head_order = _lib.key_head_order(key_head_order)
    inputs.has_scale = scale is not None
    inputs.scale = 0.0 if scale is None else scale


def _set_outputs(
    args, q, v, output_final_state, initial_state_indices, out, final_state, final_state_indices, layer
) -> tuple[np.ndarray, np.ndarray | None]:
    """What forward and recurrent share. Returns out and final_state, made here where the caller gives none."""
    if out is None:
        out = np.empty(v.shape, q.dtype)
    if final_state is None and output_final_state:
        shape = _state_shape(q, v, layer.get("cu_seqlens"), layer.get("state_v_first", False))
        final_state = np.empty(shape, np.float32)
    args.inputs.initial_indices = _tensor(initial_state_indices, "initial_state_indices")
    args.o = _tensor(out, "out", written=True)
    args.final_state = _tensor(final_state, "final_state", written=True)
    args.final_indices = _tensor(final_state_indices, "final_state_indices")
    return out, final_state


def _set_null_index(args, null_index: int, *indices: np.ndarray | None) -> None:
    _lib.check_null_index(null_index, *indices)
    args.inputs.first_slot = null_index + 1


def _state_shape(q: np.ndarray, v: np.ndarray, cu_seqlens: np.ndarray | None, state_v_first: bool) -> tuple[int, ...]:
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q and v must have rank 4, not {q.ndim} and {v.ndim}")
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.size - 1
    matrix = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    return (count, v.shape[2], *matrix)


def _set_threads(args, num_threads: int | None) -> None:
    if num_threads is not None and not 1 <= num_threads <= _lib.MAX_THREADS:
        raise ValueError(
            f"num_threads is {num_threads}; it must be from 1 to {_lib.MAX_THREADS}, or None for every CPU of the "
            "process"
        )
    _lib.set_threads(args.exec, num_threads or 0)


def _aligned_bytes(size: int) -> np.ndarray:
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]


def _address(memory: np.ndarray) -> int | None:
    """None without bytes: numpy gives an empty array any address."""
    return memory.ctypes.data if memory.size else None


def _run(function: str, args: ctypes.Structure) -> None:
    args.exec.workspace_bytes = _lib.size_query(f"{function}_workspace", args)
    workspace = _aligned_bytes(args.exec.workspace_bytes)
    args.exec.workspace = _address(workspace)
    _lib.check(getattr(_lib.library(), function)(ctypes.byref(args)))

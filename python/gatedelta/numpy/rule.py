"""The gated delta rule on numpy arrays: forward, backward, recurrent."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np

from .. import _lib
from . import arrays

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
    saved: _lib.Saved | None  # what `backward` takes; None without save=True


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
    _check_keywords("forward", layer)
    arrays.check_given(q=q, k=k, v=v)
    args = _lib.ForwardArgs()
    _set_inputs(args, q, k, v, g, beta, **layer)
    out, final_state = _set_outputs(
        args, q, v, output_final_state, initial_state_indices, out, final_state, final_state_indices, layer
    )
    args.checkpoints = arrays.tensor(checkpoints, "checkpoints", written=True)
    args.checkpoint_indices = arrays.tensor(checkpoint_indices, "checkpoint_indices")
    _lib.check_integer("checkpoint_every", checkpoint_every)
    if not 0 <= checkpoint_every < 1 << 63:
        raise ValueError(f"checkpoint_every is {checkpoint_every}, must be a positive multiple of {_lib.CHUNK}")
    args.checkpoint_every = checkpoint_every
    args.checkpoint_offsets = arrays.tensor(checkpoint_offsets, "checkpoint_offsets")
    arrays.set_null_index(args, null_index, initial_state_indices, final_state_indices, checkpoint_indices)
    saved = None
    arrays.set_threads(args, num_threads)
    if save:
        args.saved_bytes = _lib.size_query("gd_forward_saved_size", args)
        saved = _lib.Saved(arrays.aligned_bytes(args.saved_bytes), _lib.saved_call(args))
        args.saved = arrays.address(saved.data)
    arrays.run("gd_forward", args)
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
    saved: _lib.Saved | None = None,
    num_threads: int | None = None,
    **layer: Unpack[Layer],
) -> Gradients:
    """Chunked backward, from what ``forward(..., save=True)`` of the same inputs saved, or recomputing it. What a
    forward of other shapes or options saved is refused; other contents of the same shapes cannot be told."""
    _check_keywords("backward", layer)
    arrays.check_given(q=q, k=k, v=v, do=do)
    args = _lib.BackwardArgs()
    _set_inputs(args, q, k, v, g, beta, **layer)
    args.do = arrays.tensor(do, "do")
    args.dht = arrays.tensor(dht, "dht")
    if saved is not None:
        if not isinstance(saved, _lib.Saved) or not arrays.are_bytes(saved.data):
            raise ValueError("saved is not what forward(..., save=True) returned")
        args.saved, args.saved_bytes = arrays.address(saved.data), saved.data.size
        _lib.set_saved_call(args, saved)
    inputs = (q, k, v, g, beta, *(layer.get(name) for name in ("A_log", "dt_bias", "initial_state")))
    gradients = Gradients(*(None if x is None else np.empty(x.shape, x.dtype) for x in inputs))
    for name, array in gradients._asdict().items():
        setattr(args, name, arrays.tensor(array, name, written=True))
    arrays.set_threads(args, num_threads)
    arrays.run("gd_backward", args)
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
    _check_keywords("recurrent", layer)
    arrays.check_given(q=q, k=k, v=v)
    args = _lib.RecurrentArgs()
    _set_inputs(args, q, k, v, g, beta, **layer)
    out, final_state = _set_outputs(
        args, q, v, output_final_state, initial_state_indices, out, final_state, final_state_indices, layer
    )
    args.accept_lengths = arrays.tensor(accept_lengths, "accept_lengths")
    args.step_states = arrays.tensor(step_states, "step_states", written=True)
    args.step_indices = arrays.tensor(step_indices, "step_indices")
    args.previous_accept_lengths = arrays.tensor(previous_accept_lengths, "previous_accept_lengths")
    arrays.set_null_index(args, null_index, initial_state_indices, final_state_indices, step_indices)
    args.batch_invariant = batch_invariant
    arrays.set_threads(args, num_threads)
    arrays.run("gd_recurrent", args)
    return Recurrent(out, final_state)


def _check_keywords(function: str, layer: Layer) -> None:
    for name in layer:
        if name not in Layer.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def _set_inputs(
    args, q, k, v, g, beta, *, initial_state=None, A_log=None, dt_bias=None, cu_seqlens=None, **options
) -> None:
    """The keywords of ``Layer``: tensors, and the fields of RuleOptions."""
    options, inputs = _lib.RuleOptions(**options), args.inputs
    _lib.set_options(inputs, options)
    inputs.q = arrays.tensor(q, "q")
    inputs.k = arrays.tensor(k, "k")
    inputs.v = arrays.tensor(v, "v")
    if g is None:
        if options.use_gate_in_kernel:
            raise ValueError("use_gate_in_kernel=True takes raw `a` as g, but g is None")
        g = np.broadcast_to(_ZERO, v.shape[:3])
    if beta is None:
        if options.use_beta_sigmoid_in_kernel:
            raise ValueError("use_beta_sigmoid_in_kernel=True takes logits as beta, but beta is None")
        beta = np.broadcast_to(_ONE, v.shape[:3])
    inputs.g = arrays.tensor(g, "g")
    inputs.beta = arrays.tensor(beta, "beta")
    inputs.A_log = arrays.tensor(A_log, "A_log")
    inputs.dt_bias = arrays.tensor(dt_bias, "dt_bias")
    inputs.cu_seqlens = arrays.tensor(cu_seqlens, "cu_seqlens")
    inputs.initial_state = arrays.tensor(initial_state, "initial_state")


def _set_outputs(
    args, q, v, output_final_state, initial_state_indices, out, final_state, final_state_indices, layer
) -> tuple[np.ndarray, np.ndarray | None]:
    """What forward and recurrent share. Returns out and final_state, made here where the caller gives none."""
    if out is None:
        out = np.empty(v.shape, q.dtype)
    if final_state is None and output_final_state:
        shape = _state_shape(q, v, layer.get("cu_seqlens"), layer.get("state_v_first", False))
        final_state = np.empty(shape, np.float32)
    args.inputs.initial_state_indices = arrays.tensor(initial_state_indices, "initial_state_indices")
    args.out = arrays.tensor(out, "out", written=True)
    args.final_state = arrays.tensor(final_state, "final_state", written=True)
    args.final_state_indices = arrays.tensor(final_state_indices, "final_state_indices")
    return out, final_state


def _state_shape(q: np.ndarray, v: np.ndarray, cu_seqlens: np.ndarray | None, state_v_first: bool) -> tuple[int, ...]:
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q and v must have rank 4, not {q.ndim} and {v.ndim}")
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.size - 1
    matrix = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    return (count, v.shape[2], *matrix)

"""The causal convolution on numpy arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import _lib
from . import arrays

_ACTIVATIONS = {None: _lib.CONV1D_LINEAR, "silu": _lib.CONV1D_SILU, "swish": _lib.CONV1D_SILU}


class Conv1d(NamedTuple):
    y: np.ndarray | None
    final_state: np.ndarray | None


class Conv1dGradients(NamedTuple):
    """dbias and d_initial_state are None where their input is."""

    dx: np.ndarray
    dweight: np.ndarray
    dbias: np.ndarray | None
    d_initial_state: np.ndarray | None


def causal_conv1d(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: np.ndarray | None = None,
    initial_state: np.ndarray | None = None,
    output_final_state: bool = False,
    state_size: int | None = None,
    out: np.ndarray | None = None,
    output_y: bool = True,
    initial_state_indices: np.ndarray | None = None,
    final_state: np.ndarray | None = None,
    final_state_indices: np.ndarray | None = None,
    null_index: int = -1,
    previous_accept_lengths: np.ndarray | None = None,
    step_states: np.ndarray | None = None,
    num_threads: int | None = None,
) -> Conv1d:
    """Causal depthwise convolution of x ``[B, T, D]`` with weight ``[D, W]``, W from 2 to 4; strides are free.

    Arguments mean what they mean in ``gatedelta.torch.causal_conv1d``.
    """
    arrays.check_given(x=x, weight=weight)
    args = _lib.Conv1dArgs()
    _set_inputs(args, x, weight, bias, activation, cu_seqlens, initial_state)
    _lib.check_null_index(null_index, initial_state_indices, final_state_indices)
    args.inputs.initial_state_indices = arrays.tensor(initial_state_indices, "initial_state_indices")
    args.inputs.first_slot = null_index + 1
    if not output_y:
        if out is not None:
            raise ValueError("out= is given, but output_y=False computes no y")
    elif out is None:
        out = np.empty_like(x)
    if state_size is not None and not output_final_state:
        raise ValueError("state_size is given, but no final state is asked for: output_final_state is False")
    if state_size is not None:
        _lib.check_integer("state_size", state_size)
    if final_state is None and output_final_state:
        count = x.shape[0] if cu_seqlens is None else cu_seqlens.size - 1
        if state_size is None:
            state_size = weight.shape[-1] - 1 if initial_state is None else initial_state.shape[-1]
        final_state = np.empty((count, x.shape[2], state_size), x.dtype)
    args.out = arrays.tensor(out, "out", written=True)
    args.final_state = arrays.tensor(final_state, "final_state", written=True)
    args.final_state_indices = arrays.tensor(final_state_indices, "final_state_indices")
    args.previous_accept_lengths = arrays.tensor(previous_accept_lengths, "previous_accept_lengths")
    args.step_states = arrays.tensor(step_states, "step_states", written=True)
    arrays.set_threads(args, num_threads)
    arrays.run("gd_conv1d", args)
    return Conv1d(out, final_state)


def causal_conv1d_backward(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    dy: np.ndarray,
    dht: np.ndarray | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: np.ndarray | None = None,
    initial_state: np.ndarray | None = None,
    num_threads: int | None = None,
) -> Conv1dGradients:
    """Gradients of ``causal_conv1d`` from those of y and of the final state. Each has the dtype of its input."""
    arrays.check_given(x=x, weight=weight, dy=dy)
    args = _lib.Conv1dBackwardArgs()
    _set_inputs(args, x, weight, bias, activation, cu_seqlens, initial_state)
    args.dy = arrays.tensor(dy, "dy")
    args.dht = arrays.tensor(dht, "dht")
    inputs = (x, weight, bias, initial_state)
    gradients = Conv1dGradients(*(None if t is None else np.empty_like(t) for t in inputs))
    for name, array in gradients._asdict().items():
        setattr(args, name, arrays.tensor(array, name, written=True))
    arrays.set_threads(args, num_threads)
    arrays.run("gd_conv1d_backward", args)
    return gradients


def _set_inputs(args, x, weight, bias, activation, cu_seqlens, initial_state) -> None:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, must be None, 'silu' or 'swish'")
    args.inputs.x = arrays.tensor(x, "x")
    if x.ndim != 3 or getattr(weight, "ndim", 2) != 2:
        raise ValueError(f"x must have rank 3 and weight rank 2, not {x.ndim} and {weight.ndim}")
    args.inputs.weight = arrays.tensor(weight, "weight")
    args.inputs.bias = arrays.tensor(bias, "bias")
    args.inputs.cu_seqlens = arrays.tensor(cu_seqlens, "cu_seqlens")
    args.inputs.initial_state = arrays.tensor(initial_state, "initial_state")
    args.inputs.activation = _ACTIVATIONS[activation]

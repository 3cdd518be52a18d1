"""The stages of context parallelism on torch tensors, through the C ABI: no process group, no autograd.

Inputs are ``[1, T, ...]`` of one pack, or ``[B, T, ...]``, as everywhere; ``options`` are the keywords of
``chunk_gated_delta_rule`` that say how inputs are meant. States are float32, ``[K, V]`` or with state_v_first
``[V, K]``; a transition M is ``[K, K]`` and acts on states ``[K, V]``.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _lib
from .._lib import Saved
from . import arguments, ops, queries, refusals

_ALIGNMENT = 64
_INPUTS = frozenset(name for name, _ in _lib.Inputs._fields_)
# How many of an argument's last dimensions the kernels need contiguous: others are copied, as the operators do.
_DENSE_DIMS = {
    "q": 1, "k": 1, "v": 1, "do": 1, "cu_seqlens": 1, "initial_state": 2, "dht": 2, "values": 2, "transitions": 2,
}  # fmt: skip


class Options(NamedTuple):
    """Keywords of ``chunk_gated_delta_rule`` that say how its inputs are read."""

    scale: float | None = None
    use_qk_l2norm_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    use_gate_in_kernel: bool = False
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    cu_seqlens: Tensor | None = None
    key_head_order: str = "grouped"
    auto_cp: bool = True
    batch_invariant: bool = False


class Summary(NamedTuple):
    """M and S_loc of sequences: ``S_out = M S_in + S_loc`` for the state that one begins with."""

    local_state: Tensor  # [n, Hv, K, V], or [n, Hv, V, K]
    transition: Tensor  # M, [n, Hv, K, K]
    fade: Tensor  # [n, Hv], a bound of log2 |M|; -inf where M is given as 0


def matrix_shape(K: int, V: int, state_v_first: bool) -> tuple[int, int]:
    return (V, K) if state_v_first else (K, V)


def summary(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    options: Options,
    first_sequence: int = 0,
    sequence_count: int = 0,
    *,
    exact: bool = False,
    local_state: Tensor | None = None,
    transition: Tensor | None = None,
    q: Tensor | None = None,
    saved: Saved | None = None,
    prepared: bool = False,
) -> Summary:
    """Summaries of sequences first_sequence ... first_sequence + sequence_count - 1 (0: all that follow).

    exact: M of every head. Otherwise heads that fade are read at their ends alone, and their M is 0: what that leaves
        out is below 2^-24 of the old state and of what was written since, and M below 2^-48.
    local_state, transition: buffers for the results.
    saved: of ``empty_saved``, with q: a GPU leaves there what it prepares, for ``forward`` and for another summary of
        the same inputs (prepared).
    """
    ops.check_rank(k, "k")
    ops.check_rank(v, "v")
    count = _count(first_sequence, sequence_count, k, options.cu_seqlens)
    Hv, K, V = v.shape[2], k.shape[3], v.shape[3]
    if local_state is None:
        local_state = k.new_empty(count, Hv, *matrix_shape(K, V, options.state_v_first), dtype=torch.float32)
    if transition is None:
        transition = k.new_empty(count, Hv, K, K, dtype=torch.float32)
    fade = k.new_empty(count, Hv, dtype=torch.float32)
    args = _lib.SummaryArgs()
    _set_inputs(args, options, k=k, v=v, g=g, beta=beta)
    if saved is not None and _bytes_of(saved, k).numel():
        _set(args, q=q)
        _set_saved(args, saved, k, reads=prepared)
        args.prepared = prepared
    else:
        args.inputs.has_scale, args.inputs.scale = 0, 0.0
    _set_results(args, local_state=local_state, transition=transition, fade=fade)
    args.first_sequence, args.sequence_count = first_sequence, count
    args.skip_faded = not exact
    if count > 0:
        _run("gd_summary", args, k)
    return Summary(local_state, transition, fade)


def merge(
    values: Tensor,
    transitions: Tensor,
    first: Tensor,
    count: Tensor,
    *,
    transposed: bool = False,
    state_v_first: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The state that enters each of R segments: ``S <- M_i S + values_i`` over i = first ... first + count - 1.

    values ``[P, Hv, K, V]`` and transitions ``[P, Hv, K, K]`` of all segments in the order of time; first and count are
    integers ``[R]`` on the same device. transposed: gradients, with transposed transitions, from the last i to the
    first. Returns ``[R, Hv, K, V]``.
    """
    check_tensors(4, values=values, transitions=transitions, first=first, count=count, out=out)
    arguments.check_written(("out",), out)
    if first.dim() != 1:
        raise ValueError(f"first: shape is {list(first.shape)}, must be [R]")
    if out is None:
        out = values.new_empty(first.shape[0], *values.shape[1:], dtype=torch.float32)
    args = _lib.MergeArgs()
    _set(args, values=values, transitions=transitions, first=first, count=count)
    _set_results(args, state=out)
    args.transposed = transposed
    args.state_layout = _lib.STATE_VK if state_v_first else _lib.STATE_KV
    if first.shape[0]:
        _run("gd_merge", args, values)
    return out


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    options: Options,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    *,
    save: bool = True,
    saved: Saved | None = None,
    prepared: bool = False,
) -> tuple[Tensor, Saved | None]:
    """(o, what ``backward`` takes as saved). initial_state_indices: the row of initial_state each sequence begins
    with, -1 for none. saved: of ``empty_saved``; prepared: a summary has left there what it prepared. Its bytes are
    those of the result, which says that it is of this call."""
    o = q.new_empty(v.shape)
    if save and saved is None:
        saved = empty_saved(q, k, v, g, beta, options)
    args = _forward_args(q, k, v, g, beta, options, o)
    _set(args, initial_state=initial_state, initial_state_indices=initial_state_indices)
    if saved is not None:
        _set_saved(args, saved, q, reads=prepared)
        args.prepared = prepared and bool(args.saved)
    _run("gd_forward", args, q)
    return o, None if saved is None else Saved(saved.data, _lib.saved_call(args))


def empty_saved(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, options: Options) -> Saved:
    """Room for what a forward saves for its backward."""
    args = _forward_args(q, k, v, g, beta, options, q.new_empty(v.shape, device="meta"))
    _set_exec(args.exec, q)
    data, _ = _aligned(_lib.size_query("gd_forward_saved_size", args), q)
    return Saved(data, _lib.saved_call(args), written=False)


def check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, options: Options, summarises: bool) -> None:
    """Refuses what ``forward`` and, with summarises, ``summary`` would refuse, without running them."""
    ops.check_devices("q", q=q, k=k, v=v, g=g, beta=beta, A_log=options.A_log, dt_bias=options.dt_bias)
    args = _forward_args(q, k, v, g, beta, options, q.new_empty(v.shape, device="meta"))
    _set_exec(args.exec, q)
    _lib.size_query("gd_forward_workspace", args)
    if summarises:
        args = _lib.SummaryArgs()
        _set_inputs(args, options, k=k, v=v, g=g, beta=beta)
        args.inputs.has_scale, args.inputs.scale = 0, 0.0
        shape = 1, v.shape[2], *matrix_shape(k.shape[3], v.shape[3], options.state_v_first)
        _set_results(args, local_state=torch.empty(shape, device="meta"))
        args.sequence_count = 1
        _set_exec(args.exec, k)
        _lib.size_query("gd_summary_workspace", args)


def _forward_args(q, k, v, g, beta, options: Options, o: Tensor) -> _lib.ForwardArgs:
    args = _lib.ForwardArgs()
    _set_inputs(args, options, q=q, k=k, v=v, g=g, beta=beta)
    _set_results(args, out=o)
    args.context_parallel = _lib.CP_AUTO if options.auto_cp else _lib.CP_OFF
    args.batch_invariant = options.batch_invariant
    return args


def backward_summary(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor,
    options: Options,
    first_sequence: int = 0,
    sequence_count: int = 0,
    *,
    exact: bool = False,
    saved: Saved | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Gradients of the states that sequences begin with, as if nothing followed them: G_loc ``[n, Hv, K, V]``.

    exact: of all tokens; otherwise tokens behind which 2^-48 of a gradient is left at most are not read.
    """
    ops.check_rank(k, "k")
    ops.check_rank(do, "do")
    count = _count(first_sequence, sequence_count, k, options.cu_seqlens)
    if out is None:
        matrix = matrix_shape(k.shape[3], do.shape[3], options.state_v_first)
        out = k.new_empty(count, do.shape[2], *matrix, dtype=torch.float32)
    args = _lib.BackwardSummaryArgs()
    _set_inputs(args, options, q=q, k=k, g=g, beta=beta)
    _set(args, do=do)
    _set_results(args, d_local=out)
    _set_written(args, saved, q)
    args.first_sequence, args.sequence_count = first_sequence, count
    args.skip_faded = not exact
    if count > 0:
        _run("gd_backward_summary", args, q)
    return out


class Gradients(NamedTuple):
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dg: Tensor | None
    dbeta: Tensor | None
    dA_log: Tensor | None
    d_dt_bias: Tensor | None


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor,
    options: Options,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    dht: Tensor | None = None,
    dht_indices: Tensor | None = None,
    *,
    saved: Saved | None = None,
    wanted: tuple[bool, ...] = (True,) * 7,
) -> Gradients:
    """Every gradient but that of the initial state. dht: gradients of final states, and dht_indices: the row of each
    sequence, -1 for none."""
    inputs = (q, k, v, g, beta, options.A_log, options.dt_bias)
    results = [
        torch.empty_like(x, memory_format=torch.contiguous_format) if x is not None and want else None
        for x, want in zip(inputs, wanted)
    ]
    if all(result is None for result in results):
        return Gradients(*results)
    args = _lib.BackwardArgs()
    _set_inputs(args, options, q=q, k=k, v=v, g=g, beta=beta)
    _set(
        args, initial_state=initial_state, initial_state_indices=initial_state_indices, do=do, dht=dht,
        dht_indices=dht_indices,
    )  # fmt: skip
    _set_written(args, saved, q)
    _set_results(args, **dict(zip(Gradients._fields, results)))
    args.context_parallel = _lib.CP_AUTO if options.auto_cp else _lib.CP_OFF
    args.batch_invariant = options.batch_invariant
    _run("gd_backward", args, q)
    return Gradients(*results)


def check_tensors(required: int, **tensors: Tensor | None) -> None:
    """Those that a stage gets: the first `required` of them are tensors with memory of their own to read, and none is
    one of a transform's."""
    arguments.check_tensors(tuple(tensors), *tensors.values(), required=required)
    for name, tensor in tensors.items():
        if tensor is not None and tensor.layout is not torch.strided:
            raise ValueError(f"{name} has layout {tensor.layout}, must be dense")
    if arguments.in_transform():
        for tensor in tensors.values():
            if tensor is not None and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                raise NotImplementedError(arguments.NO_TRANSFORM)


def _count(first_sequence: int, sequence_count: int, k: Tensor, cu_seqlens: Tensor | None) -> int:
    """How many sequences a summary is of: the library's own rule, for results that are made before it is asked."""
    _lib.check_integer("first_sequence", first_sequence)
    _lib.check_integer("sequence_count", sequence_count)
    total = queries.sequence_count(k.shape[0], cu_seqlens)
    if not 0 <= first_sequence <= total:
        raise ValueError(f"first_sequence is {first_sequence}, but there are {total} sequences")
    if not 0 <= sequence_count <= total - first_sequence:
        raise ValueError(
            f"sequence_count is {sequence_count}, but {total - first_sequence} sequences follow "
            f"first_sequence = {first_sequence}"
        )
    return sequence_count or total - first_sequence


def _tensor(x: Tensor | None, name: str) -> _lib.Tensor:
    result = queries.describe(x, name)
    if x is not None and x.device.type != "meta":
        result.data = x.data_ptr() or None
    return result


def _set(args: ctypes.Structure, **tensors: Tensor | None) -> None:
    """Arguments that a call reads. It keeps the copies of those that had to be copied."""
    for name, x in tensors.items():
        x = arguments.as_memory(x, _DENSE_DIMS.get(name, 0))
        args.kept = (*getattr(args, "kept", ()), x)
        setattr(args.inputs if name in _INPUTS else args, name, _tensor(x, name))


def _set_results(args: ctypes.Structure, **tensors: Tensor | None) -> None:
    arguments.check_written(tuple(tensors), *tensors.values())
    for name, x in tensors.items():
        setattr(args, name, _tensor(x, name))


def _set_inputs(args: ctypes.Structure, options: Options, **tensors: Tensor) -> None:
    _set(args, **tensors, A_log=options.A_log, dt_bias=options.dt_bias, cu_seqlens=options.cu_seqlens)
    _lib.set_options(args.inputs, options)


def _bytes_of(saved: Saved, like: Tensor) -> Tensor:
    data = saved.data if isinstance(saved, Saved) else None
    if not isinstance(data, Tensor) or data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ValueError("saved is not what empty_saved or a forward returned")
    if data.device != like.device:
        raise ValueError(f"saved is on {data.device}, but the inputs are on {like.device}")
    return data


def _set_saved(args: ctypes.Structure, saved: Saved, like: Tensor, reads: bool) -> None:
    data = _bytes_of(saved, like)
    if data.numel():
        args.saved, args.saved_bytes = data.data_ptr(), data.numel()
    if reads:
        _lib.set_saved_call(args, saved)


def _set_written(args: ctypes.Structure, saved: Saved | None, like: Tensor) -> None:
    """What a forward has left for this call."""
    if saved is None:
        return
    _set_saved(args, saved, like, reads=True)
    if not saved.written:
        raise ValueError(_lib.NOT_WRITTEN)


def _aligned(size: int, like: Tensor) -> tuple[Tensor, int | None]:
    """So many bytes on the device of `like`, and their address."""
    memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device=like.device)
    start = -memory.data_ptr() % _ALIGNMENT
    part = memory[start : start + size]
    return part, part.data_ptr() if size else None


def _set_exec(call: _lib.Exec, like: Tensor) -> None:
    if like.is_cuda:
        call.device, call.device_index, call.kernels = _lib.CUDA, like.device.index, _lib.forced_kernels()
        call.stream = torch.cuda.current_stream(like.device).cuda_stream
    else:
        _lib.set_threads(call, torch.get_num_threads())


def _run(function: str, args: ctypes.Structure, like: Tensor) -> None:
    _set_exec(args.exec, like)
    args.exec.workspace_bytes = _lib.size_query(f"{function}_workspace", args)
    _memory, args.exec.workspace = _aligned(args.exec.workspace_bytes, like)
    refusals.check(getattr(_lib.library(), function)(ctypes.byref(args)))

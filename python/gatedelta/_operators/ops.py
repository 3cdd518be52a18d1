"""The operators ``torch.ops.gatedelta.*``: loads the binding and gives torch the shapes of their results.

They have no gradients of their own (autograd.py gives them some). An output the caller did not request is an empty
tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _lib
from . import queries, refusals

if torch.__version__ < (2, 10):
    raise ImportError(f"gatedelta.torch needs torch 2.10 or newer; this is torch {torch.__version__}")

_lib.forced_isa()  # a wrong GATEDELTA_ISA fails here, not in the first call
KERNELS = _lib.forced_kernels()  # likewise GATEDELTA_KERNELS
torch.ops.load_library(str(_lib.library_path("gatedelta_torch")))

chunk_fwd = refusals.raising(torch.ops.gatedelta.chunk_fwd.default)
chunk_fwd_save = refusals.raising(torch.ops.gatedelta.chunk_fwd_save.default)
chunk_fwd_out = refusals.raising(torch.ops.gatedelta.chunk_fwd_out.default)
chunk_bwd = refusals.raising(torch.ops.gatedelta.chunk_bwd.default)
recurrent = refusals.raising(torch.ops.gatedelta.recurrent.default)
recurrent_out = refusals.raising(torch.ops.gatedelta.recurrent_out.default)

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


def nothing(like: Tensor) -> Tensor:
    return like.new_empty((0,), dtype=torch.uint8)


def empty_states(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, state_v_first: bool) -> Tensor:
    """[N, Hv, K, V] or [N, Hv, V, K] in float32, not filled."""
    check_rank(v, "v")
    check_rank(q, "q")
    count = queries.sequence_count(q.shape[0], cu_seqlens)
    matrix = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    return q.new_empty((count, v.shape[2], *matrix), dtype=torch.float32)


def check_devices(first: str, **arguments: object) -> None:
    """torch also calls the fake operator where a single tensor is on `meta`: the call would write nothing."""
    device = arguments[first].device
    for name, tensor in arguments.items():
        if isinstance(tensor, Tensor) and tensor.device != device:
            raise ValueError(f"gatedelta: {name} is on {tensor.device}, but {first} is on {device}")


def check_rank(tensor: Tensor, name: str) -> None:
    if tensor.dim() != 4:
        raise ValueError(f"gatedelta: {name} must have rank 4, not {tensor.dim()}")


def _outputs(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, options: int) -> tuple[Tensor, Tensor]:
    """o and the final state."""
    check_rank(v, "v")
    o = q.new_empty(v.shape)
    if not options & FINAL_STATE:
        return o, nothing(q)
    return o, empty_states(q, v, cu_seqlens, bool(options & STATE_V_FIRST))


def _describe_call(args: Any, given: dict[str, Any]) -> None:
    """The arguments that all of the rule's operators share, as bindings/torch/inputs.cpp describes them."""
    inputs, options = args.inputs, given["options"]
    for name in ("q", "k", "v"):
        setattr(inputs, name, queries.describe(given[name], name, 1))
    for name in ("g", "beta", "A_log", "dt_bias"):
        setattr(inputs, name, queries.describe(given[name], name))
    inputs.cu_seqlens = queries.describe(given["cu_seqlens"], "cu_seqlens", 1)
    indices = given["initial_state_indices"]
    if given.get("in_place"):
        inputs.initial_state = queries.describe(given["final_state"], "initial_state")
    else:
        inputs.initial_state = queries.describe(given["initial_state"], "initial_state", 2 if indices is None else 0)
    inputs.initial_state_indices = queries.describe_indices(indices, "initial_state_indices")
    inputs.gate = _lib.GATE_RAW if options & GATE_RAW else _lib.GATE_LOG
    if options & BETA_LOGIT_DOUBLED:
        inputs.beta_kind = _lib.BETA_LOGIT_DOUBLED
    else:
        inputs.beta_kind = _lib.BETA_LOGIT if options & BETA_LOGIT else _lib.BETA_VALUE
    inputs.state_layout = _lib.STATE_VK if options & STATE_V_FIRST else _lib.STATE_KV
    inputs.l2norm = bool(options & L2NORM)
    inputs.key_head_order = _lib.KEY_HEAD_ORDERS["tiled" if options & TILED_KEY_HEADS else "grouped"]
    scale = given["scale"]
    inputs.has_scale, inputs.scale = scale is not None, 0.0 if scale is None else scale
    inputs.first_slot = options >> FIRST_SLOT_SHIFT
    args.batch_invariant = bool(options & BATCH_INVARIANT)
    if not isinstance(args, _lib.RecurrentArgs):
        args.context_parallel = _lib.CP_OFF if options & UNCUT else _lib.CP_AUTO


def _describe_results(args: Any, o: Tensor, states: Tensor, options: int) -> None:
    args.out = queries.describe(o, "out")
    if options & FINAL_STATE:
        args.final_state = queries.describe(states, "final_state")


@torch.library.register_fake("gatedelta::chunk_fwd")
def _(
    q, k, v, g, beta, options, cu_seqlens=None, initial_state=None, scale=None, A_log=None, dt_bias=None,
    initial_state_indices=None,
):  # fmt: skip
    given = locals()
    check_devices("q", **given)
    o, states = _outputs(q, v, cu_seqlens, options)
    if queries.is_concrete(given):
        args = _lib.ForwardArgs()
        _describe_call(args, given)
        _describe_results(args, o, states, options)
        queries.ask("gd_forward_workspace", args, q)
    return o, states


@torch.library.register_fake("gatedelta::recurrent")
def _(
    q, k, v, g, beta, options, cu_seqlens=None, initial_state=None, scale=None, A_log=None, dt_bias=None,
    initial_state_indices=None,
):  # fmt: skip
    given = locals()
    check_devices("q", **given)
    o, states = _outputs(q, v, cu_seqlens, options)
    if queries.is_concrete(given):
        args = _lib.RecurrentArgs()
        _describe_call(args, given)
        _describe_results(args, o, states, options)
        queries.ask("gd_recurrent_workspace", args, q)
    return o, states


@torch.library.register_fake("gatedelta::chunk_fwd_save")
def _(
    q, k, v, g, beta, options, cu_seqlens=None, initial_state=None, scale=None, A_log=None, dt_bias=None,
    initial_state_indices=None,
):  # fmt: skip
    given = locals()
    check_devices("q", **given)
    o, states = _outputs(q, v, cu_seqlens, options)
    if queries.is_concrete(given):
        args = _lib.ForwardArgs()
        _describe_call(args, given)
        _describe_results(args, o, states, options)
        size = args.saved_bytes = queries.ask("gd_forward_saved_size", args, q)
        queries.ask("gd_forward_workspace", args, q)
    else:  # the bytes depend on the call: a new symbol
        size = torch.library.get_ctx().new_dynamic_size()
    return o, states, q.new_empty((size,), dtype=torch.uint8)


@torch.library.register_fake("gatedelta::chunk_fwd_out")
def _(
    q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log, dt_bias, initial_state_indices, out,
    final_state, final_state_indices, in_place, checkpoints, checkpoint_indices, checkpoint_every,
    checkpoint_offsets=None,
):  # fmt: skip
    given = locals()
    check_devices("q", **given)
    if not queries.is_concrete(given):
        return
    args = _lib.ForwardArgs()
    _describe_call(args, given)
    for name in ("out", "final_state", "checkpoints"):
        setattr(args, name, queries.describe(given[name], name))
    for name in ("final_state_indices", "checkpoint_indices", "checkpoint_offsets"):
        setattr(args, name, queries.describe_indices(given[name], name))
    args.checkpoint_every = checkpoint_every
    queries.ask("gd_forward_workspace", args, q)


@torch.library.register_fake("gatedelta::chunk_bwd")
def _(
    q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log, dt_bias, initial_state_indices, do, dht,
    saved, wanted,
):  # fmt: skip
    given = locals()
    check_devices("q", **given)
    inputs = {
        "dq": q, "dk": k, "dv": v, "dg": g, "dbeta": beta, "dA_log": A_log, "d_dt_bias": dt_bias,
        "d_initial_state": initial_state,
    }  # fmt: skip
    results = tuple(x.new_empty(x.shape) if wanted >> i & 1 else nothing(q) for i, x in enumerate(inputs.values()))
    if queries.is_concrete(given):
        args = _lib.BackwardArgs()
        _describe_call(args, given)
        args.small_workspace = bool(options & SMALL_WORKSPACE)
        args.do, args.dht = queries.describe(do, "do", 1), queries.describe(dht, "dht", 2)
        args.saved_bytes = 0 if saved is None else saved.numel()
        for i, (name, result) in enumerate(zip(inputs, results)):
            if wanted >> i & 1:
                setattr(args, name, queries.describe(result, name))
        queries.ask("gd_backward_workspace", args, q)
    return results


@torch.library.register_fake("gatedelta::recurrent_out")
def _(
    q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log, dt_bias, initial_state_indices, out,
    final_state, final_state_indices, in_place, accept_lengths, step_states, step_indices, previous_accept_lengths=None,
):  # fmt: skip
    given = locals()
    check_devices("q", **given)
    if not queries.is_concrete(given):
        return
    args = _lib.RecurrentArgs()
    _describe_call(args, given)
    for name in ("out", "final_state", "step_states"):
        setattr(args, name, queries.describe(given[name], name))
    for name in ("final_state_indices", "accept_lengths", "step_indices", "previous_accept_lengths"):
        setattr(args, name, queries.describe_indices(given[name], name))
    queries.ask("gd_recurrent_workspace", args, q)

"""Checks of what callers pass to the torch functions, and the packing of flags into the operators' options."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _lib
from . import ops, queries

_NONE = "builtins.NoneType"
NO_GRADIENT = (
    "a call that writes to buffers of yours (out=, final_state=, checkpoints=, step_states=, ...) has no gradient, but "
    "an input requires one: call it under torch.no_grad(), or without the buffers"
)
NO_FORWARD_MODE = (
    "gatedelta's functions have no forward-mode derivative (torch.func.jvp, jacfwd, linearize, hessian, "
    "torch.autograd.forward_ad): use reverse mode (backward, torch.func.grad, vjp)"
)
NO_VMAP = (
    "torch.vmap over gatedelta's functions is not supported: fold the mapped dimension into the batch, or loop over it"
)

NO_TRANSFORM = (
    "context parallelism cannot run in a transform of torch.func (grad, vjp, ...): its gradients are those of "
    "backward() and torch.autograd.grad"
)


def check_tensors(names: tuple[str, ...], *tensors: Tensor | None, required: int = 0) -> None:
    """The first `required` of them are tensors, and the others tensors or None. None is one of vmap's or carries a
    tangent of forward-mode AD."""
    for tensor in tensors[:required]:
        if not isinstance(tensor, Tensor):
            raise _no_tensor(names, tensors, tensor)
    for tensor in tensors[required:]:
        if tensor is not None and not isinstance(tensor, Tensor):
            raise _no_tensor(names, tensors, tensor)
    if in_transform() and any(x is not None and torch._C._functorch.is_batchedtensor(x) for x in tensors):
        raise NotImplementedError(NO_VMAP)
    refuse_tangents(*tensors)


def _no_tensor(names: tuple[str, ...], tensors: tuple[object, ...], found: object) -> TypeError:
    name = next(name for name, x in zip(names, tensors) if x is found)
    kind = type(found)
    return TypeError(f"{name} must be a torch.Tensor, not {kind.__module__}.{kind.__qualname__}".replace(_NONE, "None"))


def in_transform() -> bool:
    """Whether torch.func.grad, vmap, jvp or the like runs the caller. A wrapped tensor then hides from requires_grad
    what an outer transform differentiates: only GatedDeltaRule is safe to call."""
    return torch._C._are_functorch_transforms_active()


def refuse_tangents(*tensors: Tensor | None) -> None:
    """The operators would drop a tangent, and the derivative would be 0."""
    if forward_ad._current_level < 0:  # no forward-mode AD is active
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(NO_FORWARD_MODE)


def as_memory(tensor: Tensor | None, dense_dims: int = 0) -> Tensor | None:
    """The tensor, or a copy where its memory does not hold it as it is read: where torch has only marked it as negated
    or conjugated, and where its last `dense_dims` dimensions have gaps or another order.

    Operators need this for no argument: the dispatcher resolves the marks, and the binding copies. Whatever reads the
    memory of a tensor without them has to."""
    if tensor is None:
        return None
    tensor = tensor.resolve_conj().resolve_neg()
    if queries.is_dense(tensor.shape, tensor.stride(), dense_dims):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def with_gates(
    v: Tensor, g: Tensor | None, beta: Tensor | None, raw_gate: bool, beta_sigmoid: bool
) -> tuple[Tensor, Tensor]:
    """g and beta, with no decay and a beta of 1 where they are None: one number, expanded."""
    if g is None:
        if raw_gate:
            raise ValueError("use_gate_in_kernel=True takes raw `a` as g, but g is None")
        g = v.new_zeros((), dtype=torch.float32).expand(v.shape[:3])
    if beta is None:
        if beta_sigmoid:
            raise ValueError("use_beta_sigmoid_in_kernel=True takes logits as beta, but beta is None")
        beta = v.new_ones((), dtype=torch.float32).expand(v.shape[:3])
    return g, beta


def pack_options(
    raw_gate: bool = False,
    beta_sigmoid: bool = False,
    neg_eigval: bool = False,
    state_v_first: bool = False,
    l2norm: bool = False,
    auto_cp: bool = True,
    batch_invariant: bool = False,
    key_head_order: str = "grouped",
) -> int:
    """The operators' options, except FINAL_STATE and SMALL_WORKSPACE."""
    options = 0
    if raw_gate:
        options |= ops.GATE_RAW
    if neg_eigval:
        _lib.check_neg_eigval(neg_eigval, beta_sigmoid)
        options |= ops.BETA_LOGIT_DOUBLED
    elif beta_sigmoid:
        options |= ops.BETA_LOGIT
    if state_v_first:
        options |= ops.STATE_V_FIRST
    if l2norm:
        options |= ops.L2NORM
    if not auto_cp:
        options |= ops.UNCUT
    if batch_invariant:
        options |= ops.BATCH_INVARIANT
    if key_head_order != "grouped" and _lib.key_head_order(key_head_order):
        options |= ops.TILED_KEY_HEADS
    return options


def first_slot_option(null_index: int, *indices: Tensor | None) -> int:
    """The operators' option for null_index."""
    _lib.check_null_index(null_index, *indices)
    return (null_index + 1) << ops.FIRST_SLOT_SHIFT


def state_layout(state_v_first: bool, transpose_state_layout: bool) -> bool:
    if state_v_first:
        raise ValueError("state_v_first and its older name transpose_state_layout are both given")
    if not torch.compiler.is_compiling():  # which cannot trace a warning
        warnings.warn("transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=3)
    return transpose_state_layout


def check_hints(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, chunk_indices: Tensor | None) -> None:
    if cu_seqlens_cpu is not None and (cu_seqlens is None or cu_seqlens_cpu.shape != cu_seqlens.shape):
        raise ValueError("cu_seqlens_cpu must be a copy of cu_seqlens, which is absent or has another shape")
    if chunk_indices is not None and (cu_seqlens is None or chunk_indices.dim() != 2 or chunk_indices.shape[1] != 2):
        raise ValueError("chunk_indices must come with cu_seqlens and have shape [number of chunks, 2]")


def needs_graph(*tensors: Tensor | None) -> bool:
    """Whether autograd records this call."""
    if not torch.is_grad_enabled():
        return False
    return in_transform() or any(tensor is not None and tensor.requires_grad for tensor in tensors)


def check_number(name: str, number: float | Tensor | None) -> None:
    """torch takes a tensor with one element for a number."""
    if isinstance(number, Tensor) and (number.numel() != 1 or number.is_meta):
        raise ValueError(f"{name} is a tensor of shape {list(number.shape)} on {number.device}, must be a number")


def refuse_gradient(name: str, number: float | Tensor | None) -> None:
    """A number that is differentiated would get no gradient."""
    check_number(name, number)
    if not isinstance(number, Tensor) or not torch.is_grad_enabled():
        return
    if number.requires_grad or (in_transform() and torch._C._functorch.is_gradtrackingtensor(number)):
        instead = ", or scale=1.0 and multiply o by it" if name == "scale" else ""
        raise ValueError(
            f"{name} requires a gradient, but it is a number, which gets none: pass float({name}){instead}"
        )


def check_gradient(initial_state: Tensor | None, initial_state_indices: Tensor | None) -> None:
    if initial_state_indices is not None and initial_state is not None and initial_state.requires_grad:
        raise ValueError(
            "initial_state requires a gradient, but with initial_state_indices it is a pool, which has none: pass "
            "initial_state=pool[indices] without the indices"
        )


def check_written(names: tuple[str, ...], *tensors: Tensor | None) -> None:
    """A call overwrites these behind autograd's back: none is a parameter, a view of one, or part of a graph. Their
    memory must be what they show, too: torch writes none of these operators' results back to a negated view."""
    for i, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if tensor.requires_grad:  # a view requires it where its base does
            raise ValueError(
                f"{names[i]} is written to, but it requires a gradient, or is a view of a tensor that does: pass a "
                f"buffer of its own, or {names[i]}.detach() to overwrite it all the same"
            )
        if not torch.compiler.is_compiling() and tensor.is_neg():
            raise ValueError(
                f"{names[i]} is written to, but it is a view that torch has only marked as negated (an imaginary part "
                "of a conjugate, say): pass a buffer of its own"
            )


def final_state_buffer(q, v, cu_seqlens, state_v_first, output_final_state, final_state, final_state_indices):
    if final_state is None and final_state_indices is not None:
        raise ValueError("final_state_indices needs final_state=, the pool to write to")
    if final_state is None and output_final_state:
        return ops.empty_states(q, v, cu_seqlens, state_v_first)
    return final_state


def mark_written(*tensors: Tensor | None) -> None:
    """So that a graph that saved one of these for its backward refuses to use the new contents."""
    if torch.compiler.is_compiling():
        return  # compiled graphs write back with copy_, which does it
    torch.autograd.graph.increment_version([x for x in tensors if x is not None and not x.is_inference()])

"""What a forward saves for its backward, and which call that is of."""

from __future__ import annotations

from ctypes import byref
from typing import Any, NamedTuple

from .load import check, library
from .structs import ForwardArgs, SavedCallStruct

NOT_WRITTEN = "saved is of empty_saved, and no forward has run: pass what the forward returned"


class SavedCall(NamedTuple):
    """The call that bytes are of: all that they depend on but the contents of tensors. As gd_saved_call has it."""

    batch: int  # B
    tokens: int  # T
    sequences: int  # N
    key_heads: int  # Hk
    value_heads: int  # Hv
    key_dim: int  # K
    value_dim: int  # V
    device: int
    kernels: int
    dtype: int
    gate: int
    beta_kind: int
    state_layout: int
    l2norm: int
    key_head_order: int
    cu_seqlens: int  # from here on: whether it is given
    dt_bias: int
    initial_state: int
    batch_invariant: int
    scale: float  # the one used, also where none was given


class Saved(NamedTuple):
    """What a forward saves for the backward of the same inputs, which refuses that of another call.

    Numbers of the host lie beside the bytes, so no check waits for a GPU. An autograd function keeps ``data`` with
    ``save_for_backward``, and ``call`` as it is.
    """

    data: Any  # bytes: a tensor or an array
    call: SavedCall
    written: bool = True  # False: room alone, no forward has run


def saved_call(args: ForwardArgs) -> SavedCall:
    """Of a forward with these arguments."""
    struct = SavedCallStruct()
    check(library().gd_forward_saved_call(byref(args), byref(struct)))
    return SavedCall(*(getattr(struct, name) for name in SavedCall._fields))


def set_saved_call(args: Any, saved: Saved) -> None:
    args.saved_call = SavedCallStruct(*saved.call)

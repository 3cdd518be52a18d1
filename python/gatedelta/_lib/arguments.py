"""Arguments that numpy's and torch's functions share: what they may be, and how they reach the C structs."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from . import structs


class RuleOptions(NamedTuple):
    """The keywords that all forms of the rule share, but for tensors."""

    scale: float | None = None
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    key_head_order: str = "grouped"


def set_options(inputs: structs.Inputs, options: Any) -> None:
    """options: a RuleOptions, or anything with its fields."""
    check_neg_eigval(options.allow_neg_eigval, options.use_beta_sigmoid_in_kernel)
    inputs.gate = structs.GATE_RAW if options.use_gate_in_kernel else structs.GATE_LOG
    if options.allow_neg_eigval:
        inputs.beta_kind = structs.BETA_LOGIT_DOUBLED
    else:
        inputs.beta_kind = structs.BETA_LOGIT if options.use_beta_sigmoid_in_kernel else structs.BETA_VALUE
    inputs.state_layout = structs.STATE_VK if options.state_v_first else structs.STATE_KV
    inputs.l2norm = options.use_qk_l2norm_in_kernel
    inputs.key_head_order = key_head_order(options.key_head_order)
    inputs.has_scale = options.scale is not None
    inputs.scale = 0.0 if options.scale is None else options.scale


def check_neg_eigval(allow_neg_eigval: bool, use_beta_sigmoid_in_kernel: bool) -> None:
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval doubles the sigmoid of beta, so it needs use_beta_sigmoid_in_kernel=True")


def allowed_dtypes(name: str) -> str:
    """The dtypes an argument may have, in words."""
    is_index = name in ("cu_seqlens", "checkpoint_offsets") or name.endswith(("_indices", "accept_lengths"))
    return "int32 or int64" if is_index else "float32, bfloat16 or float16"


def check_integer(name: str, value: Any) -> None:
    """An int, or what stands for one (numpy's integers)."""
    if isinstance(value, int):
        return
    try:
        operator.index(value)
    except (TypeError, RuntimeError):  # torch raises the latter for a tensor without a value
        raise TypeError(f"{name} is {value!r}, must be an integer") from None


def check_null_index(null_index: int, *indices: Any) -> None:
    """The library gets first_slot = null_index + 1, so its own messages would name another number."""
    check_integer("null_index", null_index)
    if not -1 <= null_index < structs.MAX_SLOTS:
        raise ValueError(f"null_index is {null_index}, must be from -1 to {structs.MAX_SLOTS - 1}")
    if null_index != -1 and all(array is None for array in indices):
        raise ValueError(f"null_index is {null_index}, but the call has no indices")


def key_head_order(name: str) -> int:
    if name not in structs.KEY_HEAD_ORDERS:
        raise ValueError(f"key_head_order is {name!r}, must be 'grouped' or 'tiled'")
    return structs.KEY_HEAD_ORDERS[name]

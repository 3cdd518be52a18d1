"""The recurrent step straight from Python to the library, past torch's dispatcher, for calls that need none of it."""

from __future__ import annotations

import ctypes

import torch
from torch.autograd import forward_ad

from .. import _lib


def _load():
    c = torch._C
    try:
        table = torch.Tensor.__dlpack_c_exchange_api__
        helpers = (
            None, True, False, 0,
            float, int, torch.Tensor, torch.nn.Parameter, RuntimeError,
            torch.empty_like, c._increment_version, c.TensorBase.is_neg, "requires_grad",
            vars(forward_ad), "_current_level",
            c._len_torch_dispatch_stack,
            c._is_torch_function_mode_enabled, c._are_functorch_transforms_active, c._autograd._profiler_enabled,
            c._get_tracing_state,
            "grouped", "tiled",
        )  # fmt: skip
    except AttributeError:  # names of torch's own, which it may change
        return None
    make = ctypes.PyDLL(str(_lib.library_path("gatedelta_torch"))).gatedelta_make_direct_recurrent
    make.restype, make.argtypes = ctypes.py_object, (ctypes.py_object, ctypes.py_object)
    try:
        return make(table, helpers)
    except ValueError:  # torch's table of functions is of another version than this library's
        return None


# bindings/torch/direct.cpp. Takes the arguments of fused_recurrent_gated_delta_rule in their order, and returns its
# results; or None, having written nothing, where a call needs the operator. None itself where torch lacks a helper.
recurrent = _load()

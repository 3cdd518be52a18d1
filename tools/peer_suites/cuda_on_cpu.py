"""Lets a test suite that is written for CUDA run on a machine without a GPU: what it asks to have on "cuda" lies in the
CPU's memory, and torch.cuda answers as on a Hopper GPU. For suites whose kernels have been replaced by ours."""

from __future__ import annotations

import contextlib

import torch
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """Replaces the device of every torch call that names a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*map(_moved, args), **{name: _moved(value) for name, value in (kwargs or {}).items()})


def _moved(value):
    if (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
    ):
        return torch.device("cpu")
    return value


def install() -> None:
    _OnCpu().__enter__()  # for the life of the process: tests make tensors as they are imported, too
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "is_current_stream_capturing": False,
        "mem_get_info": (1 << 30, 1 << 30),  # tests of pools of many GiB skip themselves
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name in ("synchronize", "manual_seed", "manual_seed_all", "empty_cache"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.device = lambda *_, **__: contextlib.nullcontext()

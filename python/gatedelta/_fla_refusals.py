"""What calls of FLA's functions are asked before GateDelta takes them. A refusal is a reason, as FLA logs it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import info

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def is_float(dtype: torch.dtype) -> bool:
    return dtype in _FLOATS


def tensor_refusal(device: torch.device, tensors: dict[str, Tensor | None]) -> str | None:
    if device.type not in ("cpu", "cuda"):
        return f"device is {device.type}; cpu and cuda are taken"
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device != device:
            return f"{name} is on {tensor.device}, other tensors on {device}"
        if not is_float(tensor.dtype):
            return f"{name} is {tensor.dtype}; float32, bfloat16 and float16 are taken"
    return None


@functools.cache
def _device_refusal(index: int, least: tuple[int, int]) -> str | None:
    if not info()["cuda_compiled"]:
        return "this gatedelta was built without CUDA"
    capability = torch.cuda.get_device_capability(index)
    if capability < least or (least == (9, 0) and capability != least):
        needed = "9.0 (Hopper)" if least == (9, 0) else "8.0 or later"
        return f"compute capability {capability[0]}.{capability[1]}, needed is {needed}"
    return None


def cuda_refusal(x: Tensor, least: tuple[int, int]) -> str | None:
    """Why the GPU of this tensor, if it is on one, cannot do it. The chunked kernels are for (9, 0) alone."""
    return _device_refusal(x.device.index, least) if x.is_cuda else None

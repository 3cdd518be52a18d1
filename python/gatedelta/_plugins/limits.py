"""What the kernels take, for plug-ins to check before they hand on a call. A refusal is a reason in words.

Whole sequences, steps and gradients have the same limits, on the CPU and on every GPU. Context parallelism on GPUs has
narrower ones, which this module does not check.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import _lib

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
HEAD_STEP = 16
LEAST_CAPABILITY = (8, 0)


def dtype_refusal(dtype: torch.dtype) -> str | None:
    return None if dtype in DTYPES else f"dtype is {dtype}; float32, bfloat16 and float16 are taken"


def head_refusal(key_dim: int, value_dim: int) -> str | None:
    for size in (key_dim, value_dim):
        if not 0 < size <= MAX_HEAD_DIM or size % HEAD_STEP:
            taken = f"multiples of {HEAD_STEP} up to {MAX_HEAD_DIM} are taken"
            return f"head sizes are K = {key_dim}, V = {value_dim}; {taken}"
    return None


def device_refusal(device: torch.device) -> str | None:
    if device.type == "cuda":
        return _gpu_refusal(device.index)
    return None if device.type == "cpu" else f"device is {device.type}; cpu and cuda are taken"


@torch.compiler.assume_constant_result  # torch.compile does not look into it
def _gpu_refusal(index: int) -> str | None:
    return build_refusal() or _capability_refusal(index)


@functools.cache
def build_refusal() -> str | None:
    """Why this build takes no GPU, or None."""
    if not _lib.get_info().cuda_compiled:
        return "this gatedelta was built without CUDA"
    return None if torch.version.hip is None else "this torch is for ROCm; of GPUs NVIDIA's are taken"


@functools.cache
def _capability_refusal(index: int) -> str | None:
    major, minor = torch.cuda.get_device_capability(index)
    return None if (major, minor) >= LEAST_CAPABILITY else f"compute capability {major}.{minor}, needed is 8.0 or later"


def tensors_refusal(device: torch.device, tensors: dict[str, Tensor | None]) -> str | None:
    """Why these tensors are not taken: they must be on this device, each of a dtype that is taken."""
    reason = device_refusal(device)
    if reason:
        return reason
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device != device:
            return f"{name} is on {tensor.device}, other tensors on {device}"
        reason = dtype_refusal(tensor.dtype)
        if reason:
            return f"{name}: {reason}"
    return None

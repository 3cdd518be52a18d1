"""Arrays as the C ABI takes them, and what every call on the CPU needs: threads, a workspace, the call itself."""

from __future__ import annotations

import ctypes
import math

import numpy as np

from .. import _lib

_DTYPES = {
    "float32": _lib.DTYPE_F32,
    "bfloat16": _lib.DTYPE_BF16,
    "float16": _lib.DTYPE_F16,
    "int32": _lib.DTYPE_I32,
    "int64": _lib.DTYPE_I64,
}
_ALIGNMENT = 64


def tensor(array: np.ndarray | None, name: str, written: bool = False) -> _lib.Tensor:
    result = _lib.Tensor()
    if array is None:
        return result
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, not {type(array).__name__}")
    if written and not array.flags.writeable:
        raise ValueError(f"{name} is written to, but the array is read-only")
    dtype = _DTYPES.get(array.dtype.name) if array.dtype.isnative else None
    if dtype is None:
        allowed = _lib.allowed_dtypes(name)
        raise ValueError(f"{name} has dtype {array.dtype}; it must be {allowed} in native byte order")
    if array.ndim > _lib.MAX_RANK:
        raise ValueError(f"{name} has rank {array.ndim}, more than any tensor here")
    if any(stride % array.itemsize for stride in array.strides):
        raise ValueError(f"{name} has strides that are no multiple of its element size")
    result.data = array.ctypes.data
    result.dtype = dtype
    result.rank = array.ndim
    result.shape[: array.ndim] = array.shape
    if array.size:
        result.stride[: array.ndim] = [stride // array.itemsize for stride in array.strides]
    else:  # numpy gives empty arrays strides of 0: those of a contiguous array instead
        result.stride[: array.ndim] = [math.prod(array.shape[i + 1 :]) for i in range(array.ndim)]
    return result


def check_given(**arrays: np.ndarray) -> None:
    """Those a call cannot do without."""
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            kind = "None" if array is None else type(array).__name__
            raise TypeError(f"{name} must be a numpy array, not {kind}")


def set_null_index(args, null_index: int, *indices: np.ndarray | None) -> None:
    _lib.check_null_index(null_index, *indices)
    args.inputs.first_slot = null_index + 1


def set_threads(args, num_threads: int | None) -> None:
    if num_threads is not None:
        _lib.check_integer("num_threads", num_threads)
    if num_threads is not None and not 1 <= num_threads <= _lib.MAX_THREADS:
        raise ValueError(
            f"num_threads is {num_threads}; it must be from 1 to {_lib.MAX_THREADS}, or None for every CPU of the "
            "process"
        )
    _lib.set_threads(args.exec, num_threads or 0)


def aligned_bytes(size: int) -> np.ndarray:
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]


def are_bytes(memory: object) -> bool:
    return (
        isinstance(memory, np.ndarray) and memory.dtype == np.uint8 and memory.ndim == 1 and memory.flags.c_contiguous
    )


def address(memory: np.ndarray) -> int | None:
    """None without bytes: numpy gives an empty array any address."""
    return memory.ctypes.data if memory.size else None


def run(function: str, args: ctypes.Structure) -> None:
    args.exec.workspace_bytes = _lib.size_query(f"{function}_workspace", args)
    workspace = aligned_bytes(args.exec.workspace_bytes)
    args.exec.workspace = address(workspace)
    _lib.check(getattr(_lib.library(), function)(ctypes.byref(args)))

"""What the library would refuse of a call, asked without one: fake and meta tensors meet the rules and messages of real
ones, as far as those are about shapes, strides, dtypes and options."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _lib
from . import refusals

DTYPES = {
    torch.float32: _lib.DTYPE_F32,
    torch.bfloat16: _lib.DTYPE_BF16,
    torch.float16: _lib.DTYPE_F16,
    torch.int32: _lib.DTYPE_I32,
    torch.int64: _lib.DTYPE_I64,
}
_NORM_RANK = 4  # of rows in the C ABI


def is_dense(shape: Sequence[int], strides: Sequence[int], dims: int) -> bool:
    """Whether the last `dims` dimensions are contiguous."""
    stride = 1
    for i in range(len(shape) - 1, max(-1, len(shape) - 1 - dims), -1):
        if shape[i] != 1 and strides[i] != stride:
            return False
        stride *= shape[i]
    return True


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides


def describe(tensor: Tensor | None, name: str, dense_dims: int = 0) -> _lib.Tensor:
    """The tensor without its address, or the copy that the binding makes where its last `dense_dims` dimensions are not
    contiguous."""
    result = _lib.Tensor()
    if tensor is None:
        return result
    if tensor.dim() > _lib.MAX_RANK:
        raise ValueError(f"gatedelta: {name} has rank {tensor.dim()}, more than any tensor here")
    if tensor.dtype not in DTYPES:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"gatedelta: {name}: dtype is {dtype}, must be {_lib.allowed_dtypes(name)}")
    shape, strides = tuple(tensor.shape), tensor.stride()
    result.dtype, result.rank = DTYPES[tensor.dtype], len(shape)
    result.shape[: len(shape)] = shape
    result.stride[: len(shape)] = strides if is_dense(shape, strides, dense_dims) else contiguous_strides(shape)
    return result


def describe_indices(tensor: Tensor | None, name: str) -> _lib.Tensor:
    """The same of slots and lengths, of which the binding copies expanded ones."""
    if tensor is None:
        return _lib.Tensor()
    expanded = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))
    return describe(tensor, name, tensor.dim() if expanded else 0)


def describe_rows(tensor: Tensor | None, name: str, dense_dims: int = 0) -> _lib.Tensor:
    """Rows of the norm, with missing dimensions added in front."""
    result = describe(tensor, name, dense_dims)
    if tensor is None or result.rank == _NORM_RANK:
        return result
    if not 1 <= result.rank <= _NORM_RANK:
        raise ValueError(f"gatedelta: {name} has rank {result.rank}, must be from 1 to {_NORM_RANK}")
    missing, shape, stride = _NORM_RANK - result.rank, list(result.shape), list(result.stride)
    result.shape[:_NORM_RANK] = [1] * missing + shape[: result.rank]
    result.stride[:_NORM_RANK] = [0] * missing + stride[: result.rank]
    result.rank = _NORM_RANK
    return result


def is_concrete(given: dict[str, object]) -> bool:
    """Whether no size or number of a call is a symbol: about those nothing can be asked."""
    for value in given.values():
        numbers = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
        if any(isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) for number in numbers):
            return False
    return True


def sequence_count(batch: int, cu_seqlens: Tensor | None) -> int:
    if cu_seqlens is None:
        return batch
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError("gatedelta: cu_seqlens must have rank 1 and at least one entry")
    return cu_seqlens.shape[0] - 1


def ask(query: str, args: ctypes.Structure, like: Tensor) -> int:
    """The size that the library answers. A call that it would refuse is refused as the operators do it."""
    if like.is_cuda:
        args.exec.device, args.exec.kernels = _lib.CUDA, _lib.forced_kernels()
    else:
        args.exec.isa = _lib.forced_isa()
    size = ctypes.c_size_t()
    refusals.check(getattr(_lib.library(), query)(ctypes.byref(args), ctypes.byref(size)))
    return size.value

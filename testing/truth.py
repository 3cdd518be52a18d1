"""The truth library (testing/truth.h) for Python: cases, fp64 truth, tolerances. The same ones the C++ tests use."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p

import ml_dtypes
import numpy as np
from gatedelta import _lib

from tools.dev_paths import BUILD

NUMPY_DTYPES = {
    _lib.DTYPE_F32: np.dtype(np.float32),
    _lib.DTYPE_BF16: np.dtype(ml_dtypes.bfloat16),
    _lib.DTYPE_F16: np.dtype(np.float16),
    _lib.DTYPE_I32: np.dtype(np.int32),
    _lib.DTYPE_I64: np.dtype(np.int64),
}
GD_DTYPES = {dtype.name: number for number, dtype in NUMPY_DTYPES.items()}
# Which dimension of a quantity counts heads.
HEAD_AXIS = {
    "o": 2, "final_state": 1, "checkpoints": 1, "step_states": 2, "dq": 2, "dk": 2, "dv": 2, "dg": 2, "dbeta": 2,
    "dA_log": 0, "d_dt_bias": 0, "d_initial_state": 1,
}  # fmt: skip


class _Comparison(ctypes.Structure):
    _fields_ = [
        ("error", c_double),
        ("margin", c_double),
        ("head", c_int64),
        ("max_abs", c_double),
        ("non_finite", c_int64),
        ("ok", c_int32),
        ("reserved", c_int32),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    path = os.environ.get("GATEDELTA_TESTING_LIB", str(BUILD / "testing" / "libgatedelta_testing.so"))
    lib = ctypes.CDLL(path)
    doubles = c_void_p
    signatures = {
        "gdt_error": (c_char_p, []),
        "gdt_create": (c_void_p, [c_char_p]),
        "gdt_destroy": (None, [c_void_p]),
        "gdt_forward_args": (POINTER(_lib.ForwardArgs), [c_void_p]),
        "gdt_backward_args": (POINTER(_lib.BackwardArgs), [c_void_p]),
        "gdt_recurrent_args": (POINTER(_lib.RecurrentArgs), [c_void_p]),
        "gdt_reset": (None, [c_void_p]),
        "gdt_damage": (c_char_p, [c_void_p]),
        "gdt_reference_forward": (c_int, [POINTER(_lib.ForwardArgs)] + [doubles] * 3),
        "gdt_reference_backward": (c_int, [POINTER(_lib.BackwardArgs)] + [doubles] * 8),
        "gdt_reference_recurrent": (c_int, [POINTER(_lib.RecurrentArgs)] + [doubles] * 3),
        "gdt_tolerance": (
            c_int, [c_char_p, c_int32, c_int32, c_int32, c_char_p, POINTER(c_double), POINTER(c_double)],
        ),
        "gdt_compare": (
            c_int, [POINTER(_lib.Tensor), doubles, c_int32, c_double, c_double, POINTER(_Comparison)],
        ),
    }  # fmt: skip
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(_library().gdt_error().decode())


def _as_numpy(tensor: _lib.Tensor) -> np.ndarray | None:
    """A view of the case's own memory, strides and all."""
    if tensor.dtype == 0:
        return None
    dtype = NUMPY_DTYPES[tensor.dtype]
    shape, stride = tensor.shape[: tensor.rank], tensor.stride[: tensor.rank]
    if 0 in shape:
        return np.empty(shape, dtype)
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride))
    memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(tensor.data)
    flat = np.frombuffer(memory, dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [step * dtype.itemsize for step in stride])


def _as_torch(tensor: _lib.Tensor):
    import torch

    view = _as_numpy(tensor)
    if view is None:
        return None
    if tensor.dtype != _lib.DTYPE_BF16:
        return torch.from_numpy(view)
    return torch.from_numpy(view.view(np.int16)).view(torch.bfloat16)


def describe(array) -> _lib.Tensor:
    """Of a torch tensor or a numpy array."""
    if isinstance(array, np.ndarray):
        data, dtype = array.ctypes.data, array.dtype.name
        strides = [step // array.itemsize for step in array.strides]
    else:
        data, dtype, strides = array.data_ptr(), str(array.dtype).removeprefix("torch."), array.stride()
    result = _lib.Tensor(data=data, dtype=GD_DTYPES[dtype], rank=len(array.shape))
    result.shape[: len(array.shape)] = array.shape
    result.stride[: len(array.shape)] = strides
    return result


CUDA = 1000  # GDT_CUDA of testing/truth.h


def tolerance(quantity: str, dtype: int, stored: int, spec: str, cuda: bool = False) -> tuple[float, float]:
    """Relative and absolute bound of a quantity in the shared table."""
    relative, absolute = c_double(), c_double()
    _check(
        _library().gdt_tolerance(
            quantity.encode(),
            dtype,
            CUDA if cuda else _lib.forced_isa(),
            stored,
            spec.encode(),
            byref(relative),
            byref(absolute),
        )
    )
    return relative.value, absolute.value


def compare(quantity: str, got, truth: np.ndarray, relative: float = 0.0, absolute: float = 0.0) -> _Comparison:
    """The worst head of a result against the truth."""
    result = _Comparison()
    truth = np.ascontiguousarray(truth)
    _check(
        _library().gdt_compare(
            byref(describe(got)), truth.ctypes.data, HEAD_AXIS[quantity], relative, absolute, byref(result)
        )
    )
    return result


def reference_forward(args: _lib.ForwardArgs, *outputs: np.ndarray | None) -> None:
    """Writes o, final_state and checkpoints (None = not wanted) of any forward arguments."""
    _check(_library().gdt_reference_forward(byref(args), *_pointers(outputs, 3)))


def reference_backward(args: _lib.BackwardArgs, *outputs: np.ndarray | None) -> None:
    """Writes dq, dk, dv, dg, dbeta, dA_log, d_dt_bias and d_initial_state of any backward arguments."""
    _check(_library().gdt_reference_backward(byref(args), *_pointers(outputs, 8)))


def _pointers(outputs, count: int) -> list[int | None]:
    pointers = [None if array is None else array.ctypes.data for array in outputs]
    return pointers + [None] * (count - len(pointers))


class Case:
    """One problem of the shared generator: tensors over its memory, its truth, and the verdict on results.

    Tensors are torch's, or numpy arrays with ``numpy=True``.
    """

    def __init__(self, spec: str, numpy: bool = False):
        self._view = _as_numpy if numpy else _as_torch
        self._handle = _library().gdt_create(spec.encode())
        if not self._handle:
            raise ValueError(_library().gdt_error().decode())
        self.spec = spec
        self.forward_args = _library().gdt_forward_args(self._handle).contents
        self.backward_args = _library().gdt_backward_args(self._handle).contents
        self.recurrent_args = _library().gdt_recurrent_args(self._handle).contents
        inputs = self.forward_args.inputs
        gates = ("g", "beta", "A_log", "dt_bias")
        for name in ("q", "k", "v", *gates, "cu_seqlens", "initial_state", "initial_state_indices"):
            setattr(self, name, self._view(getattr(inputs, name)))
        self.do = self._view(self.backward_args.do)
        self.dht = self._view(self.backward_args.dht)

    def reset(self) -> None:
        """Outputs NaN again, states that are updated in place as at first."""
        _library().gdt_reset(self._handle)

    def damage(self) -> str:
        """What was written that must not be; empty if nothing."""
        return _library().gdt_damage(self._handle).decode()

    def buffers(self, args: ctypes.Structure, *names: str) -> dict:
        """Output and index tensors of an argument struct; the final state is the initial one's object if in place."""
        result = {name: self._view(getattr(args, name)) for name in names}
        if args.final_state.dtype and args.final_state.data == args.inputs.initial_state.data:
            result["final_state"] = self.initial_state
        return result

    def __del__(self):
        if getattr(self, "_handle", None):
            _library().gdt_destroy(self._handle)

    @property
    def options(self) -> dict:
        """How the inputs are meant, as keywords of the Python functions."""
        inputs = self.forward_args.inputs
        return {
            "scale": inputs.scale if inputs.has_scale else None,
            "use_qk_l2norm_in_kernel": bool(inputs.l2norm),
            "use_gate_in_kernel": inputs.gate == _lib.GATE_RAW,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_beta_sigmoid_in_kernel": inputs.beta_kind != _lib.BETA_VALUE,
            "allow_neg_eigval": inputs.beta_kind == _lib.BETA_LOGIT_DOUBLED,
            "state_v_first": inputs.state_layout == _lib.STATE_VK,
            "cu_seqlens": self.cu_seqlens,
            "key_head_order": list(_lib.KEY_HEAD_ORDERS)[inputs.key_head_order],
        }

    @property
    def sequence_count(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def _state_shape(self) -> tuple[int, ...]:
        key, value = self.q.shape[3], self.v.shape[3]
        matrix = (value, key) if self.forward_args.inputs.state_layout == _lib.STATE_VK else (key, value)
        return (self.sequence_count, self.v.shape[2], *matrix)

    def forward_truth(self) -> dict[str, np.ndarray]:
        result = {"o": np.empty(self.v.shape), "final_state": np.empty(self._state_shape())}
        if self.forward_args.checkpoints.dtype:
            count = self.forward_args.checkpoints.shape[0]
            if self.forward_args.checkpoint_indices.dtype:
                count = self.forward_args.checkpoint_indices.shape[0]
            result["checkpoints"] = np.empty((count, *self._state_shape()[1:]))
        reference_forward(self.forward_args, *result.values())
        return result

    def recurrent_truth(self) -> dict[str, np.ndarray]:
        result = {
            "o": np.empty(self.v.shape),
            "final_state": np.empty(self._state_shape()),
            "step_states": np.empty((*self.v.shape[:2], *self._state_shape()[1:])),
        }
        pointers = [array.ctypes.data for array in result.values()]
        _check(_library().gdt_reference_recurrent(byref(self.recurrent_args), *pointers))
        return result

    def backward_truth(self) -> dict[str, np.ndarray]:
        shapes = {
            "dq": self.q.shape,
            "dk": self.k.shape,
            "dv": self.v.shape,
            "dg": self.g.shape,
            "dbeta": self.beta.shape,
            "dA_log": None if self.A_log is None else self.A_log.shape,
            "d_dt_bias": None if self.dt_bias is None else self.dt_bias.shape,
            "d_initial_state": None if self.initial_state is None else self._state_shape(),
        }
        result = {name: np.empty(shape) for name, shape in shapes.items() if shape is not None}
        reference_backward(self.backward_args, *(result.get(name) for name in shapes))
        return result

    def check(self, quantity: str, got, truth: np.ndarray) -> None:
        """Fails if `got` is further from the truth than the shared tolerance table allows."""
        assert tuple(got.shape) == truth.shape, f"{quantity}: shape {tuple(got.shape)}, not {truth.shape}"
        inputs = self.forward_args.inputs.q.dtype
        on_cuda = getattr(got, "is_cuda", False)
        got = got.cpu() if on_cuda else got
        relative, absolute = tolerance(quantity, inputs, describe(got).dtype, self.spec, on_cuda)
        result = compare(quantity, got, truth, relative, absolute)
        assert result.ok, (
            f"{quantity} of case '{self.spec}': error {result.error:.3g} at head {result.head}, "
            f"{result.margin:.2f} of its bound ({relative:.2g} relative, {absolute:.2g} absolute), "
            f"largest difference {result.max_abs:.3g}, non-finite at {result.non_finite}"
        )

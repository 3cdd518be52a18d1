"""A quick check of an installation with the standard library alone: every usable instruction set against the recurrence
in double precision, gradients against its slope. It says what it did not check. The repository's tests are the thorough
ones."""

from __future__ import annotations

import array
import ctypes
import importlib.util
import math
import random
import struct
from collections.abc import Iterator
from typing import NamedTuple

from . import _lib

T, HEADS, K, V = 70, 2, 16, 32  # one chunk and a bit; two value heads share one key head
SCALE = K**-0.5


class Result(NamedTuple):
    name: str
    passed: bool | None  # None: not checked
    detail: str


class _Layer(NamedTuple):
    """Inputs as flat lists: q, k [T, K]; v [T, HEADS, V]; g, beta [T, HEADS]; state [HEADS, K, V]."""

    q: list[float]
    k: list[float]
    v: list[float]
    g: list[float]
    beta: list[float]
    state: list[float]


def run() -> Iterator[Result]:
    layer, d_o, d_state = _make_layer()
    o, state = _recurrence(layer)
    slopes = [_slope(layer, i, d_o, d_state) for i in range(len(layer))]
    info = _lib.get_info()
    for isa in range(1, _lib.ISA_COUNT):
        if not info.cpu_isa_usable >> isa & 1:
            if info.cpu_isa_compiled >> isa & 1:
                yield Result(_lib.isa_name(isa), None, "this machine cannot run it")
            continue
        for dtype, name, bound in ((_lib.DTYPE_F32, "float32", 1e-5), (_lib.DTYPE_BF16, "bfloat16", 1e-2)):
            for form in ("forward", "recurrent"):
                got_o, got_state = _run_forward(f"gd_{form}", layer, dtype, isa)
                error = max(_error(got_o, o), _error(got_state, state))
                yield Result(f"{form} {_lib.isa_name(isa)} {name}", error < bound, f"relative error {error:.1e}")
            gradients = _run_backward(layer, d_o, d_state, dtype, isa)
            error = 0.0
            for i, (gradient, (slope, scale)) in enumerate(zip(gradients, slopes)):
                along = math.fsum(map(float.__mul__, gradient, _direction(i, len(gradient))))
                error = max(error, abs(slope - along) / scale)
            yield Result(f"backward {_lib.isa_name(isa)} {name}", error < bound, f"relative error {error:.1e}")
    yield _check_torch(layer, o)
    yield Result("CUDA", None, "this check runs on the CPU alone" if info.cuda_compiled else "not in this build")


def _make_layer() -> tuple[_Layer, list[float], list[float]]:
    rng = random.Random(1)

    def normal(count: int, scale: float = 1.0) -> list[float]:
        return [_round_to_bf16(rng.gauss(0, scale)) for _ in range(count)]

    layer = _Layer(
        q=normal(T * K, K**-0.5),
        k=normal(T * K, K**-0.5),
        v=normal(T * HEADS * V),
        g=[-rng.random() / 8 for _ in range(T * HEADS)],
        beta=[rng.random() for _ in range(T * HEADS)],
        state=normal(HEADS * K * V),
    )
    return layer, normal(T * HEADS * V), normal(HEADS * K * V)


def _recurrence(layer: _Layer) -> tuple[list[float], list[float]]:
    o, states = [0.0] * (T * HEADS * V), list(layer.state)
    for h in range(HEADS):
        state = [states[(h * K + i) * V : (h * K + i + 1) * V] for i in range(K)]
        for t in range(T):
            q, k = layer.q[t * K : (t + 1) * K], layer.k[t * K : (t + 1) * K]
            v = layer.v[(t * HEADS + h) * V : (t * HEADS + h + 1) * V]
            alpha, beta = math.exp(layer.g[t * HEADS + h]), layer.beta[t * HEADS + h]
            for j in range(V):
                column = [alpha * row[j] for row in state]
                error = v[j] - sum(map(float.__mul__, column, k))
                column = [s + beta * error * x for s, x in zip(column, k)]
                o[(t * HEADS + h) * V + j] = SCALE * sum(map(float.__mul__, column, q))
                for row, s in zip(state, column):
                    row[j] = s
        states[h * K * V : (h + 1) * K * V] = [s for row in state for s in row]
    return o, states


def _direction(index: int, count: int) -> list[float]:
    rng = random.Random(100 + index)
    return [rng.gauss(0, 1) for _ in range(count)]


def _slope(layer: _Layer, index: int, d_o: list[float], d_state: list[float]) -> tuple[float, float]:
    """Derivative of <o, d_o> + <final state, d_state> along a direction of one input, and a size to compare with."""
    step = 1e-4
    direction = _direction(index, len(layer[index]))
    values = []
    for sign in (1, -1):
        moved = [x + sign * step * d for x, d in zip(layer[index], direction)]
        o, state = _recurrence(layer._replace(**{layer._fields[index]: moved}))
        values.append(math.fsum(map(float.__mul__, o, d_o)) + math.fsum(map(float.__mul__, state, d_state)))
    slope = (values[0] - values[1]) / (2 * step)
    return slope, max(abs(slope), math.sqrt(len(direction)))


def _error(got: list[float], want: list[float]) -> float:
    return math.dist(got, want) / math.hypot(*want)


# ---- buffers -------------------------------------------------------------------------------------------------------


def _round_to_bf16(x: float) -> float:
    return struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", x))[0] & 0xFFFF0000))[0]


class _Buffer:
    """A tensor in float32 or bfloat16 that owns its memory."""

    def __init__(self, values: list[float], shape: tuple[int, ...], dtype: int):
        self.dtype = dtype
        if dtype == _lib.DTYPE_BF16:
            self.data = array.array("H", (struct.unpack("<I", struct.pack("<f", x))[0] >> 16 for x in values))
        else:
            self.data = array.array("f", values)
        self.tensor = _lib.Tensor(data=self.data.buffer_info()[0], dtype=dtype, rank=len(shape))
        stride = 1
        for i in reversed(range(len(shape))):
            self.tensor.shape[i], self.tensor.stride[i] = shape[i], stride
            stride *= shape[i]

    def values(self) -> list[float]:
        if self.dtype == _lib.DTYPE_BF16:
            return [struct.unpack("<f", struct.pack("<I", x << 16))[0] for x in self.data]
        return list(self.data)


_ROWS, _VALUE_ROWS, _GATES, _STATE = (1, T, 1, K), (1, T, HEADS, V), (1, T, HEADS), (1, HEADS, K, V)
_SHAPES = _Layer(q=_ROWS, k=_ROWS, v=_VALUE_ROWS, g=_GATES, beta=_GATES, state=_STATE)


def _set_inputs(args, layer: _Layer, dtype: int, isa: int) -> None:
    names = ("q", "k", "v", "g", "beta", "initial_state")
    dtypes = (dtype,) * 3 + (_lib.DTYPE_F32,) * 3
    buffers = [_Buffer(*each) for each in zip(layer, _SHAPES, dtypes)]
    for name, buffer in zip(names, buffers):
        setattr(args.inputs, name, buffer.tensor)
    args.exec.isa = isa
    args.owners = buffers  # live as long as the arguments


def _call(function: str, args) -> None:
    args.exec.workspace_bytes = _lib.size_query(f"{function}_workspace", args)
    memory = ctypes.create_string_buffer(args.exec.workspace_bytes + 64)
    args.exec.workspace = -(-ctypes.addressof(memory) // 64) * 64
    _lib.check(getattr(_lib.library(), function)(ctypes.byref(args)))


def _run_forward(function: str, layer: _Layer, dtype: int, isa: int) -> tuple[list[float], list[float]]:
    args = _lib.ForwardArgs() if function == "gd_forward" else _lib.RecurrentArgs()
    _set_inputs(args, layer, dtype, isa)
    o = _Buffer([0.0] * len(layer.v), _VALUE_ROWS, dtype)
    state = _Buffer([0.0] * len(layer.state), _STATE, _lib.DTYPE_F32)
    args.out, args.final_state = o.tensor, state.tensor
    _call(function, args)
    return o.values(), state.values()


def _run_backward(layer: _Layer, d_o, d_state, dtype: int, isa: int) -> list[list[float]]:
    args = _lib.BackwardArgs()
    _set_inputs(args, layer, dtype, isa)
    incoming = [_Buffer(d_o, _VALUE_ROWS, dtype), _Buffer(d_state, _STATE, _lib.DTYPE_F32)]
    args.do, args.dht = (buffer.tensor for buffer in incoming)
    names = ("dq", "dk", "dv", "dg", "dbeta", "d_initial_state")
    gradients = [_Buffer([0.0] * len(x), shape, _lib.DTYPE_F32) for x, shape in zip(layer, _SHAPES)]
    for name, buffer in zip(names, gradients):
        setattr(args, name, buffer.tensor)
    _call("gd_backward", args)
    return [buffer.values() for buffer in gradients]


def _check_torch(layer: _Layer, o: list[float]) -> Result:
    if importlib.util.find_spec("torch") is None:
        return Result("torch binding", None, "torch is not installed")
    import torch

    from .torch import chunk_gated_delta_rule

    q, k, v, g, beta, state = (torch.tensor(x).view(shape) for x, shape in zip(layer, _SHAPES))
    got, _ = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state)
    error = _error(got.flatten().tolist(), o)
    return Result(f"torch binding, torch {torch.__version__}", error < 1e-5, f"relative error {error:.1e}")

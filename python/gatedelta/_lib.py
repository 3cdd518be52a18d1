"""The C ABI (gatedelta.h) through ctypes: structs, functions, errors. Needs the standard library alone."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

MAX_RANK = 5
CHUNK = 64

OK = 0
INVALID_ARGUMENT = 1
UNSUPPORTED = 2

DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_I32, DTYPE_I64 = 1, 2, 3, 4, 5
ISA_COUNT = 8  # of the CPU
ISA_CUDA_PORTABLE = 64
CPU, CUDA = 0, 1
GATE_LOG, GATE_RAW = 0, 1
BETA_VALUE, BETA_LOGIT, BETA_LOGIT_DOUBLED = 0, 1, 2
STATE_KV, STATE_VK = 0, 1
KEY_HEAD_ORDERS = {"grouped": 0, "tiled": 1}
NORM_SILU, NORM_SIGMOID = 0, 1
CONV1D_LINEAR, CONV1D_SILU = 0, 1
CP_AUTO, CP_OFF = 0, 1
MAX_THREADS = 1024  # of one call
MAX_SLOTS = 1 << 44  # of a pool

# What the C ABI calls a thing, and what the Python functions call it: in_python_names() translates messages. The torch
# binding has the same table (bindings/torch/names.cpp; a test compares them).
PYTHON_NAMES = {
    "initial_indices": "initial_state_indices",
    "final_indices": "final_state_indices",
    "o": "out",
    "d_o": "do",
    "d_final_state": "dht",
    "z": "gate",
    "y": "out",
    "d_y": "dy",
    "isa": "GATEDELTA_ISA",
    # Of the layer's step, whose messages say which operation they are about.
    "conv: x": "mixed_qkv",
    "conv: weight": "conv_weight",
    "conv: bias": "conv_bias",
    "conv: initial_state": "conv_state",
    "conv: final_state": "conv_state",
    "conv: initial_indices": "state_indices",
    "conv: final_indices": "final_state_indices",
    "rule: g": "a",
    "rule: beta": "b",
    "rule: initial_state": "state",
    "rule: final_state": "state",
    "rule: initial_indices": "state_indices",
    "norm: z": "z",
    "norm: weight": "norm_weight",
    "conv.in.x": "mixed_qkv",
    "conv.in.initial_state": "conv_state",
    "conv.final_state": "conv_state",
    "rule.in.initial_state": "state",
    "rule.final_state": "state",
    "rule.step_states": "step_states",
    "norm.z": "z",
    "norm.y": "out",
    "gate is not raw": "use_gate_in_kernel is not True",
}

# struct_size first, and room at the end, in every struct that crosses the ABI.
_RESERVED = ("reserved", c_uint64 * 4)


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("shape", c_int64 * MAX_RANK),
        ("stride", c_int64 * MAX_RANK),
    ]


class Exec(ctypes.Structure):
    _fields_ = [
        ("device", c_int32),
        ("device_index", c_int32),
        ("stream", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("isa", c_int32),
        ("num_threads", c_int32),
        ("parallel_for", c_void_p),
        ("parallel_for_context", c_void_p),
        _RESERVED,
    ]


class Inputs(ctypes.Structure):
    _fields_ = [
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("g", Tensor),
        ("beta", Tensor),
        ("A_log", Tensor),
        ("dt_bias", Tensor),
        ("cu_seqlens", Tensor),
        ("initial_state", Tensor),
        ("initial_indices", Tensor),
        ("gate", c_int32),
        ("beta_kind", c_int32),
        ("state_layout", c_int32),
        ("l2norm", c_int32),
        ("has_scale", c_int32),
        ("scale", c_float),
        ("first_slot", c_int64),
        ("key_head_order", c_int32),
        ("reserved_flags", c_int32),
        ("reserved", c_uint64 * 2),
    ]


class _Args(ctypes.Structure):
    def __init__(self) -> None:
        super().__init__(struct_size=ctypes.sizeof(self))


class ForwardArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("inputs", Inputs),
        ("o", Tensor),
        ("final_state", Tensor),
        ("final_indices", Tensor),
        ("checkpoints", Tensor),
        ("checkpoint_indices", Tensor),
        ("checkpoint_every", c_int64),
        ("saved", c_void_p),
        ("saved_bytes", c_size_t),
        ("context_parallel", c_int32),
        ("segment_chunks", c_int32),
        ("batch_invariant", c_int32),
        ("prepared", c_int32),
        ("checkpoint_offsets", Tensor),
        ("persistent_segment_chunks", c_int32),
        ("segment_halves", c_int32),
        ("reserved", c_uint64 * 3),
    ]


class BackwardArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("inputs", Inputs),
        ("d_o", Tensor),
        ("d_final_state", Tensor),
        ("saved", c_void_p),
        ("saved_bytes", c_size_t),
        ("dq", Tensor),
        ("dk", Tensor),
        ("dv", Tensor),
        ("dg", Tensor),
        ("dbeta", Tensor),
        ("dA_log", Tensor),
        ("d_dt_bias", Tensor),
        ("d_initial_state", Tensor),
        ("context_parallel", c_int32),
        ("segment_chunks", c_int32),
        ("batch_invariant", c_int32),
        ("small_workspace", c_int32),
        ("d_final_indices", Tensor),
        ("d_initial_indices", Tensor),
        _RESERVED,
    ]


class SummaryArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("inputs", Inputs),
        ("local_state", Tensor),
        ("transition", Tensor),
        ("fade", Tensor),
        ("first_sequence", c_int64),
        ("sequence_count", c_int64),
        ("skip_faded", c_int32),
        ("prepared", c_int32),
        ("saved", c_void_p),
        ("saved_bytes", c_size_t),
        ("reserved", c_uint64 * 2),
    ]


class BackwardSummaryArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("inputs", Inputs),
        ("d_o", Tensor),
        ("d_local", Tensor),
        ("saved", c_void_p),
        ("saved_bytes", c_size_t),
        ("first_sequence", c_int64),
        ("sequence_count", c_int64),
        ("skip_faded", c_int32),
        ("reserved_flags", c_int32),
        _RESERVED,
    ]


class FoldArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("values", Tensor),
        ("maps", Tensor),
        ("first", Tensor),
        ("count", Tensor),
        ("state", Tensor),
        ("transposed", c_int32),
        ("state_layout", c_int32),
        _RESERVED,
    ]


class RecurrentArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("inputs", Inputs),
        ("o", Tensor),
        ("final_state", Tensor),
        ("final_indices", Tensor),
        ("accept_lengths", Tensor),
        ("step_states", Tensor),
        ("step_indices", Tensor),
        ("previous_accept_lengths", Tensor),
        ("batch_invariant", c_int32),
        ("reserved_flags", c_int32),
        _RESERVED,
    ]


class GatedNormArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("x", Tensor),
        ("z", Tensor),
        ("weight", Tensor),
        ("y", Tensor),
        ("activation", c_int32),
        ("round_before_gate", c_int32),
        ("has_eps", c_int32),
        ("eps", c_float),
        _RESERVED,
    ]


class GatedNormBackwardArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("x", Tensor),
        ("z", Tensor),
        ("weight", Tensor),
        ("d_y", Tensor),
        ("dx", Tensor),
        ("dz", Tensor),
        ("dweight", Tensor),
        ("activation", c_int32),
        ("round_before_gate", c_int32),
        ("has_eps", c_int32),
        ("eps", c_float),
        _RESERVED,
    ]


class Conv1dInputs(ctypes.Structure):
    _fields_ = [
        ("x", Tensor),
        ("weight", Tensor),
        ("bias", Tensor),
        ("cu_seqlens", Tensor),
        ("initial_state", Tensor),
        ("initial_indices", Tensor),
        ("first_slot", c_int64),
        ("activation", c_int32),
        ("reserved_flags", c_int32),
        _RESERVED,
    ]


class Conv1dArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("inputs", Conv1dInputs),
        ("y", Tensor),
        ("final_state", Tensor),
        ("final_indices", Tensor),
        ("previous_accept_lengths", Tensor),
        ("step_states", Tensor),
        _RESERVED,
    ]


class Conv1dBackwardArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("inputs", Conv1dInputs),
        ("d_y", Tensor),
        ("d_final_state", Tensor),
        ("dx", Tensor),
        ("dweight", Tensor),
        ("dbias", Tensor),
        ("d_initial_state", Tensor),
        _RESERVED,
    ]


class LayerStepArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("conv", Conv1dArgs),
        ("rule", RecurrentArgs),
        ("norm", GatedNormArgs),
        ("key_heads", c_int64),
        _RESERVED,
    ]


class Info(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("abi_version", c_int32),
        ("version_major", c_int32),
        ("version_minor", c_int32),
        ("version_patch", c_int32),
        ("cpu_isa_compiled", c_int32),
        ("cpu_isa_usable", c_int32),
        ("cpu_isa_best", c_int32),
        ("cpu_count", c_int32),
        ("cuda_compiled", c_int32),
        ("cuda_devices", c_int32),
        _RESERVED,
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "gd_forward": (c_int32, [POINTER(ForwardArgs)]),
    "gd_forward_workspace": (c_int32, [POINTER(ForwardArgs), POINTER(c_size_t)]),
    "gd_forward_saved_size": (c_int32, [POINTER(ForwardArgs), POINTER(c_size_t)]),
    "gd_backward": (c_int32, [POINTER(BackwardArgs)]),
    "gd_backward_workspace": (c_int32, [POINTER(BackwardArgs), POINTER(c_size_t)]),
    "gd_summary": (c_int32, [POINTER(SummaryArgs)]),
    "gd_summary_workspace": (c_int32, [POINTER(SummaryArgs), POINTER(c_size_t)]),
    "gd_backward_summary": (c_int32, [POINTER(BackwardSummaryArgs)]),
    "gd_backward_summary_workspace": (c_int32, [POINTER(BackwardSummaryArgs), POINTER(c_size_t)]),
    "gd_fold": (c_int32, [POINTER(FoldArgs)]),
    "gd_fold_workspace": (c_int32, [POINTER(FoldArgs), POINTER(c_size_t)]),
    "gd_recurrent": (c_int32, [POINTER(RecurrentArgs)]),
    "gd_recurrent_workspace": (c_int32, [POINTER(RecurrentArgs), POINTER(c_size_t)]),
    "gd_gated_norm": (c_int32, [POINTER(GatedNormArgs)]),
    "gd_gated_norm_workspace": (c_int32, [POINTER(GatedNormArgs), POINTER(c_size_t)]),
    "gd_gated_norm_backward": (c_int32, [POINTER(GatedNormBackwardArgs)]),
    "gd_gated_norm_backward_workspace": (c_int32, [POINTER(GatedNormBackwardArgs), POINTER(c_size_t)]),
    "gd_conv1d": (c_int32, [POINTER(Conv1dArgs)]),
    "gd_conv1d_workspace": (c_int32, [POINTER(Conv1dArgs), POINTER(c_size_t)]),
    "gd_conv1d_backward": (c_int32, [POINTER(Conv1dBackwardArgs)]),
    "gd_conv1d_backward_workspace": (c_int32, [POINTER(Conv1dBackwardArgs), POINTER(c_size_t)]),
    "gd_layer_step": (c_int32, [POINTER(LayerStepArgs)]),
    "gd_layer_step_workspace": (c_int32, [POINTER(LayerStepArgs), POINTER(c_size_t)]),
    "gd_get_info": (c_int32, [POINTER(Info)]),
    "gd_isa_name": (c_char_p, [c_int32]),
    "gd_last_error": (c_char_p, []),
    "gd_thread_pool_create": (c_int32, [c_int32, POINTER(c_void_p)]),
    "gd_thread_pool_destroy": (None, [c_void_p]),
    "gd_thread_pool_size": (c_int32, [c_void_p]),
}


class UnsupportedError(RuntimeError):
    """The call is legal, but this build or machine cannot do it."""


def library_directory() -> Path:
    """Where the shared libraries are: GATEDELTA_LIBRARY_DIR, or beside the installed package's files."""
    override = os.environ.get("GATEDELTA_LIBRARY_DIR")
    return Path(override) if override else Path(__file__).parent / "lib"


def library_path(name: str) -> Path:
    """The file of one of our shared libraries, 'gatedelta' or 'gatedelta_torch'."""
    directory = library_directory()
    found = sorted(directory.glob(f"lib{name}.so*"), key=lambda path: len(path.name))
    if not found:
        raise ImportError(
            f"lib{name}.so is not in {directory}. Install the package (pip install .), or point "
            "GATEDELTA_LIBRARY_DIR at the folder of a build that holds it."
        )
    return found[0]


@functools.cache
def library() -> ctypes.CDLL:
    """libgatedelta, loaded once."""
    lib = ctypes.CDLL(str(library_path("gatedelta")))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def in_python_names(message: str) -> str:
    return re.sub(rf"\b({'|'.join(map(re.escape, PYTHON_NAMES))})\b", lambda name: PYTHON_NAMES[name[0]], message)


def allowed_dtypes(name: str) -> str:
    """Those of an argument, in words."""
    is_index = name in ("cu_seqlens", "checkpoint_offsets") or name.endswith(("_indices", "accept_lengths"))
    return "int32 or int64" if is_index else "float32, bfloat16 or float16"


def check_null_index(null_index: int, *indices: Any) -> None:
    """The library knows first_slot = null_index + 1: its own messages would name another number."""
    if not -1 <= null_index < MAX_SLOTS:
        raise ValueError(f"null_index is {null_index}, must be from -1 to {MAX_SLOTS - 1}")
    if null_index != -1 and all(array is None for array in indices):
        raise ValueError(f"null_index is {null_index}, but the call has no indices")


def key_head_order(name: str) -> int:
    if name not in KEY_HEAD_ORDERS:
        raise ValueError(f"key_head_order is {name!r}, must be 'grouped' or 'tiled'")
    return KEY_HEAD_ORDERS[name]


def check(status: int) -> None:
    """Raises what a status other than GD_OK means, with the library's message in Python's names."""
    if status == OK:
        return
    message = in_python_names(library().gd_last_error().decode())
    if status == INVALID_ARGUMENT:
        raise ValueError(message)
    if status == UNSUPPORTED:
        raise UnsupportedError(message)
    raise RuntimeError(message)


def isa_name(isa: int) -> str:
    return library().gd_isa_name(isa).decode()


@functools.cache
def forced_isa() -> int:
    """GATEDELTA_ISA as a gd_isa value of the CPU; read once. "portable" concerns CUDA tensors."""
    wanted = os.environ.get("GATEDELTA_ISA")
    if not wanted:
        return 0
    names = [isa_name(i) for i in range(ISA_COUNT)]
    portable = isa_name(ISA_CUDA_PORTABLE)
    if wanted == portable:
        return 0
    if wanted not in names:
        raise ValueError(f"GATEDELTA_ISA is {wanted!r}, which is none of {', '.join([*names, portable])}")
    return names.index(wanted)


@functools.cache
def forced_cuda_isa() -> int:
    """The same for CUDA: one set of kernels can be forced there."""
    return ISA_CUDA_PORTABLE if os.environ.get("GATEDELTA_ISA") == isa_name(ISA_CUDA_PORTABLE) else 0


@functools.cache
def _thread_pool(num_threads: int, process: int) -> c_void_p:
    """A pool that lives as long as the process; threads do not survive a fork, hence one per process."""
    pool = c_void_p()
    check(library().gd_thread_pool_create(num_threads, byref(pool)))
    return pool


def set_threads(call: Exec, num_threads: int) -> None:
    """Lets a call on the CPU run on a pool of so many threads; 0: one for every CPU of the process."""
    call.isa = forced_isa()
    call.num_threads = 1
    if num_threads == 1:
        return
    lib = library()
    pool = _thread_pool(num_threads, os.getpid())
    call.num_threads = lib.gd_thread_pool_size(pool)
    call.parallel_for = ctypes.cast(lib.gd_thread_pool_parallel_for, c_void_p)
    call.parallel_for_context = pool


def get_info() -> Info:
    info = Info()
    check(library().gd_get_info(byref(info)))
    return info


def size_query(query: str, args: ctypes.Structure) -> int:
    """Runs a gd_*_workspace or gd_forward_saved_size query."""
    size = c_size_t()
    check(getattr(library(), query)(byref(args), byref(size)))
    return size.value

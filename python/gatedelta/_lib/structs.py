"""The constants, structs and functions of the C ABI (gatedelta.h), as ctypes has them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

MAX_RANK = 5
CHUNK = 64

OK = 0
INVALID_ARGUMENT = 1
UNSUPPORTED = 2
WORKSPACE_TOO_SMALL = 3

DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_I32, DTYPE_I64 = 1, 2, 3, 4, 5
ISA_COUNT = 8
KERNELS = {"auto": 0, "portable": 1}  # on CUDA
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


class Tuning(ctypes.Structure):
    def __init__(self) -> None:
        super().__init__(struct_size=ctypes.sizeof(self))

    _fields_ = [
        ("struct_size", c_size_t),
        ("segment_chunks", c_int32),
        ("persistent_segment_chunks", c_int32),
        ("segment_halves", c_int32),
        ("reserved_flags", c_int32),
        ("reserved", c_uint64 * 2),
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
        ("tuning", POINTER(Tuning)),
        ("kernels", c_int32),
        ("reserved_flags", c_int32),
        ("reserved", c_uint64 * 2),
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
        ("initial_state_indices", Tensor),
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


class SavedCallStruct(ctypes.Structure):
    _fields_ = [
        ("batch", c_int64),
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("key_heads", c_int64),
        ("value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("device", c_int32),
        ("kernels", c_int32),
        ("dtype", c_int32),
        ("gate", c_int32),
        ("beta_kind", c_int32),
        ("state_layout", c_int32),
        ("l2norm", c_int32),
        ("key_head_order", c_int32),
        ("cu_seqlens", c_int32),
        ("dt_bias", c_int32),
        ("initial_state", c_int32),
        ("batch_invariant", c_int32),
        ("scale", c_float),
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
        ("out", Tensor),
        ("final_state", Tensor),
        ("final_state_indices", Tensor),
        ("checkpoints", Tensor),
        ("checkpoint_indices", Tensor),
        ("checkpoint_every", c_int64),
        ("saved", c_void_p),
        ("saved_bytes", c_size_t),
        ("context_parallel", c_int32),
        ("batch_invariant", c_int32),
        ("prepared", c_int32),
        ("reserved_flags", c_int32),
        ("checkpoint_offsets", Tensor),
        ("saved_call", SavedCallStruct),
        _RESERVED,
    ]


class BackwardArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("inputs", Inputs),
        ("do", Tensor),
        ("dht", Tensor),
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
        ("batch_invariant", c_int32),
        ("small_workspace", c_int32),
        ("reserved_flags", c_int32),
        ("dht_indices", Tensor),
        ("d_initial_state_indices", Tensor),
        ("saved_call", SavedCallStruct),
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
        ("saved_call", SavedCallStruct),
        ("reserved", c_uint64 * 2),
    ]


class BackwardSummaryArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("inputs", Inputs),
        ("do", Tensor),
        ("d_local", Tensor),
        ("saved", c_void_p),
        ("saved_bytes", c_size_t),
        ("first_sequence", c_int64),
        ("sequence_count", c_int64),
        ("skip_faded", c_int32),
        ("reserved_flags", c_int32),
        ("saved_call", SavedCallStruct),
        _RESERVED,
    ]


class MergeArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("values", Tensor),
        ("transitions", Tensor),
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
        ("out", Tensor),
        ("final_state", Tensor),
        ("final_state_indices", Tensor),
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
        ("gate", Tensor),
        ("weight", Tensor),
        ("out", Tensor),
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
        ("gate", Tensor),
        ("weight", Tensor),
        ("dy", Tensor),
        ("dx", Tensor),
        ("dgate", Tensor),
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
        ("initial_state_indices", Tensor),
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
        ("out", Tensor),
        ("final_state", Tensor),
        ("final_state_indices", Tensor),
        ("previous_accept_lengths", Tensor),
        ("step_states", Tensor),
        _RESERVED,
    ]


class Conv1dBackwardArgs(_Args):
    _fields_ = [
        ("struct_size", c_size_t),
        ("exec", Exec),
        ("inputs", Conv1dInputs),
        ("dy", Tensor),
        ("dht", Tensor),
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


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "gd_forward": (c_int32, [POINTER(ForwardArgs)]),
    "gd_forward_workspace": (c_int32, [POINTER(ForwardArgs), POINTER(c_size_t)]),
    "gd_forward_saved_size": (c_int32, [POINTER(ForwardArgs), POINTER(c_size_t)]),
    "gd_forward_saved_call": (c_int32, [POINTER(ForwardArgs), POINTER(SavedCallStruct)]),
    "gd_backward": (c_int32, [POINTER(BackwardArgs)]),
    "gd_backward_workspace": (c_int32, [POINTER(BackwardArgs), POINTER(c_size_t)]),
    "gd_summary": (c_int32, [POINTER(SummaryArgs)]),
    "gd_summary_workspace": (c_int32, [POINTER(SummaryArgs), POINTER(c_size_t)]),
    "gd_backward_summary": (c_int32, [POINTER(BackwardSummaryArgs)]),
    "gd_backward_summary_workspace": (c_int32, [POINTER(BackwardSummaryArgs), POINTER(c_size_t)]),
    "gd_merge": (c_int32, [POINTER(MergeArgs)]),
    "gd_merge_workspace": (c_int32, [POINTER(MergeArgs), POINTER(c_size_t)]),
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

"""Whatever a caller gets wrong is a ValueError or a TypeError (or a NotImplementedError), from every function."""

from __future__ import annotations

import inspect

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gatedelta import context_parallel as cp  # noqa: E402
from gatedelta import flash_qla  # noqa: E402
from gatedelta import numpy as gn  # noqa: E402
from gatedelta import torch as gd  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

B, T, HK, HV, K, V, W = 1, 5, 2, 4, 32, 16, 4
D = 2 * HK * K + HV * V
ZEROS = torch.zeros


def rule(**more):
    return {
        "q": ZEROS(B, T, HK, K), "k": ZEROS(B, T, HK, K), "v": ZEROS(B, T, HV, V), "g": ZEROS(B, T, HV),
        "beta": ZEROS(B, T, HV), **more,
    }  # fmt: skip


def offsets():
    return torch.tensor([0, T])


def slot():
    return torch.tensor([1])


def plain():
    return rule(
        scale=1.0, initial_state=ZEROS(1, HV, K, V), output_final_state=True, cu_seqlens=offsets(), A_log=ZEROS(HV),
        use_gate_in_kernel=True,
    )  # fmt: skip


def pools(**more):
    return rule(
        scale=0.5, initial_state=ZEROS(4, HV, K, V), cu_seqlens=offsets(), initial_state_indices=slot(),
        A_log=ZEROS(HV), dt_bias=ZEROS(HV), use_gate_in_kernel=True, null_index=-1, key_head_order="grouped",
        out=ZEROS(B, T, HV, V), final_state=ZEROS(4, HV, K, V), final_state_indices=slot(), **more,
    )  # fmt: skip


def checkpoints():
    return pools(checkpoints=ZEROS(1, HV, K, V), checkpoint_indices=slot() * 0, checkpoint_every=64)


def checkpoint_offsets():
    return rule(checkpoints=ZEROS(1, HV, K, V), checkpoint_offsets=torch.tensor([0]), out=ZEROS(B, T, HV, V))


def steps():
    return pools(accept_lengths=slot(), step_states=ZEROS(9, HV, K, V), step_indices=torch.arange(T)[None])


def drafts():
    return rule(
        initial_state=ZEROS(9, HV, K, V), initial_state_indices=torch.arange(T)[None], previous_accept_lengths=slot()
    )


def forward():
    return rule(scale=1.0, initial_state=ZEROS(1, HV, K, V), cu_seqlens=offsets())


def backward(**more):
    return rule(do=ZEROS(B, T, HV, V), dht=ZEROS(B, HV, K, V), scale=1.0, **more)


def saved():
    return backward(saved=gd.chunk_gated_delta_rule_fwd(**rule(), scale=1.0)[-1])


def recomputed():
    return backward(saved=None, initial_state=ZEROS(1, HV, K, V), cu_seqlens=offsets())


def convolution(**more):
    return {
        "x": ZEROS(1, T, 24), "weight": ZEROS(24, W), "bias": ZEROS(24), "activation": "silu",
        "initial_state": ZEROS(1, 24, W - 1), **more,
    }  # fmt: skip


def convolution_states(**more):
    return convolution(cu_seqlens=offsets(), output_final_state=True, state_size=3, **more)


def convolution_pools():
    pool = {"initial_state": ZEROS(4, 24, 3), "initial_state_indices": slot(), "final_state": ZEROS(4, 24, 3)}
    buffers = {"out": ZEROS(1, T, 24), "final_state_indices": slot(), "step_states": ZEROS(1, T, 24, 3)}
    return convolution() | pool | buffers | {"null_index": -1}


def rows(**more):
    return {
        "x": ZEROS(2, 3, HV, V), "gate": ZEROS(2, 3, HV, V), "weight": ZEROS(V), "eps": 1e-6, "activation": "silu",
        **more,
    }  # fmt: skip


def layer():
    return {
        "mixed_qkv": ZEROS(2, T, D), "z": ZEROS(2, T, HV, V), "a": ZEROS(2, T, HV), "b": ZEROS(2, T, HV),
        "conv_weight": ZEROS(D, W), "conv_bias": ZEROS(D), "norm_weight": ZEROS(V), "A_log": ZEROS(HV),
        "dt_bias": ZEROS(HV), "conv_state": ZEROS(5, D, W - 1), "state": ZEROS(5, HV, K, V), "key_heads": HK,
        "state_indices": torch.tensor([1, 2]), "final_state_indices": torch.tensor([1, 2]), "out": ZEROS(2, T, HV, V),
        "scale": 1.0, "norm_eps": 1e-6, "null_index": -1, "conv_activation": "silu", "norm_activation": "silu",
        "key_head_order": "grouped",
    }  # fmt: skip


def stage(*without, **more):
    inputs = rule(
        cu_seqlens=offsets(), scale=1.0, A_log=ZEROS(HV), dt_bias=ZEROS(HV), use_gate_in_kernel=True,
        key_head_order="grouped", **more,
    )  # fmt: skip
    return {name: x for name, x in inputs.items() if name not in without}


def entering(**more):
    return stage(entering=ZEROS(3, HV, K, V), entering_indices=slot(), **more)


def leaving():
    return entering(do=ZEROS(B, T, HV, V), leaving=ZEROS(3, HV, K, V), leaving_indices=slot())


def segments():
    return {
        "values": ZEROS(3, HV, K, V), "transitions": ZEROS(3, HV, K, K), "first": torch.tensor([0]),
        "count": torch.tensor([2]), "out": ZEROS(1, HV, K, V),
    }  # fmt: skip


def shared(make=rule):
    return make() | {"cp_context": cp.build_context([0, 2, T])}


def shared_convolution():
    return {name: x for name, x in shared(convolution).items() if name != "initial_state"}


def as_numpy(make):
    return lambda: {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in make().items()}


TABLE = {
    "chunk": (gd.chunk_gated_delta_rule, plain),
    "chunk with checkpoints": (gd.chunk_gated_delta_rule, checkpoints),
    "chunk with checkpoint_offsets": (gd.chunk_gated_delta_rule, checkpoint_offsets),
    "chunk with a context": (gd.chunk_gated_delta_rule, shared),
    "recurrent": (gd.fused_recurrent_gated_delta_rule, plain),
    "recurrent with steps": (gd.fused_recurrent_gated_delta_rule, steps),
    "recurrent after drafts": (gd.fused_recurrent_gated_delta_rule, drafts),
    "forward": (gd.chunk_gated_delta_rule_fwd, forward),
    "backward": (gd.chunk_gated_delta_rule_bwd, saved),
    "backward that recomputes": (gd.chunk_gated_delta_rule_bwd, recomputed),
    "positions": (gd.cu_seqlens_from_positions, lambda: {"position_ids": torch.arange(T)}),
    "convolution": (gd.causal_conv1d, convolution_states),
    "convolution with pools": (gd.causal_conv1d, convolution_pools),
    "states of a convolution": (gd.causal_conv1d, lambda: convolution_states(output_y=False) | {"state_size": None}),
    "norm": (gd.rms_norm_gated, rows),
    "norm with out": (gd.rms_norm_gated, lambda: rows(out=ZEROS(2, 3, HV, V))),
    "layer step": (gd.gated_delta_layer_step, layer),
    "build_context": (cp.build_context, lambda: {"cu_seqlens": offsets(), "layout": "contiguous", "scheme": "auto"}),
    "convolution with a context": (cp.causal_conv1d, shared_convolution),
    "forward_prepare": (cp.forward_prepare, lambda: stage("q", first_sequence=0, sequence_count=1)),
    "empty_saved": (cp.empty_saved, stage),
    "forward_apply": (cp.forward_apply, entering),
    "backward_prepare": (cp.backward_prepare, lambda: stage("v", do=ZEROS(B, T, HV, V), first_sequence=0)),
    "backward_apply": (cp.backward_apply, leaving),
    "merge": (cp.merge, segments),
    "numpy forward": (gn.forward, as_numpy(checkpoints)),
    "numpy backward": (gn.backward, as_numpy(recomputed)),
    "numpy recurrent": (gn.recurrent, as_numpy(steps)),
    "numpy convolution": (gn.causal_conv1d, as_numpy(convolution_states)),
    "numpy convolution's backward": (
        gn.causal_conv1d_backward, as_numpy(lambda: convolution(dy=ZEROS(1, T, 24), dht=ZEROS(1, 24, 3))),
    ),
    "numpy norm": (gn.rms_norm_gated, as_numpy(rows)),
    "numpy norm's backward": (gn.rms_norm_gated_backward, as_numpy(lambda: rows(dy=ZEROS(2, 3, HV, V)))),
    "numpy layer step": (gn.layer_step, as_numpy(layer)),
    "FlashQLA": (flash_qla.chunk_gated_delta_rule, lambda: rule(scale=1.0, initial_state=ZEROS(1, HV, K, V))),
    "FlashQLA's forward": (flash_qla.chunk_gated_delta_rule_fwd, forward),
    "FlashQLA's backward": (flash_qla.chunk_gated_delta_rule_bwd, lambda: backward(A=saved()["saved"].data)),
}  # fmt: skip


def shapes(shape):
    for rank in range(7):
        yield (1,) * rank
        yield (2,) * rank
    for i in range(len(shape)):
        for size in (0, shape[i] + 1):
            yield (*shape[:i], size, *shape[i + 1 :])


def wrong_tensors(x):
    yield from (None, 3, "a", x.tolist(), x.numpy(), x.to("meta"), x.to_sparse())
    for dtype in ["float64", "float32", "float8_e4m3fn", "int16", "int32", "bool", "complex64"]:
        yield x.to(getattr(torch, dtype))
    yield from (ZEROS(shape, dtype=x.dtype) for shape in shapes(x.shape))
    yield from (x.clone().requires_grad_(),) if x.is_floating_point() else (x - 100, x + 10**9)


def wrong_arrays(x):
    yield from (None, 3, "a", x.tolist(), torch.from_numpy(x))
    for dtype in ["float64", "float32", ">f4", "int16", "int32", "bool", "complex64", "object", "U3"]:
        yield x.astype(dtype)
    yield from (np.zeros(shape, x.dtype) for shape in shapes(x.shape))
    yield from () if x.dtype.kind == "f" else (x - 100, x + 10**9)
    fixed = x.copy()
    fixed.flags.writeable = False
    yield fixed


def wrong_values(x):
    """Some of these an argument may be: such a call must not raise anything else, either."""
    if isinstance(x, torch.Tensor):
        return wrong_tensors(x)
    if isinstance(x, np.ndarray):
        return wrong_arrays(x)
    if isinstance(x, bool):
        return (None, "a", 2)
    numbers = (0, 1.5, -1, 10**6, 2**70, -(2**70), float("nan"), float("inf"), 1j)
    return (None, "a", b"a", object(), [1], (), *numbers, np.zeros(3), ZEROS(2), ZEROS(()))


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_argument(name):
    function, make = TABLE[name]
    function(**make())
    refused = 0
    for argument, right in make().items():
        for wrong in wrong_values(right):
            arguments = make() | {argument: wrong}
            try:
                function(**arguments)
            except (ValueError, TypeError, NotImplementedError):
                refused += 1
            except Exception as error:
                shown = list(wrong.shape) if hasattr(wrong, "shape") else wrong
                pytest.fail(f"{argument} = {shown!r} ({type(wrong).__name__}) raises {error!r}")
    assert refused > 5


@pytest.mark.parametrize("name", TABLE)
def test_an_unknown_argument(name):
    function, make = TABLE[name]
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        function(**make(), colour=1)


def test_every_function_is_in_the_table():
    tested = {function for function, _ in TABLE.values()}
    others = {cp.as_context, cp.chunk_gated_delta_rule}  # which the rule's cp_context goes through
    for module in (gd, cp, gn):
        public = {getattr(module, name) for name in module.__all__}
        assert {x for x in public if inspect.isfunction(x)} <= tested | others


def test_what_is_no_mistake_of_the_callers():
    q, gates = ZEROS(1, 1, 1, 16).expand(1, 2**43, 1, 16), ZEROS(1, 1, 1).expand(1, 2**43, 1)
    with pytest.raises(RuntimeError, match=r"^gatedelta failed: ") as caught:
        gd.chunk_gated_delta_rule(q, q, q, gates, gates)  # there is no memory for its o
    assert type(caught.value) is RuntimeError
    with FakeTensorMode():
        q, g = torch.empty(1, 5, 2, 128, device="cuda:0").bfloat16(), torch.empty(1, 5, 4, device="cuda:0")
        v = torch.empty(1, 5, 4, 128, device="cuda:0").bfloat16()
        with pytest.raises(NotImplementedError, match=r"^gatedelta: unsupported: key_head_order is tiled"):
            gd.chunk_gated_delta_rule(q, q, v, g, g, key_head_order="tiled")


def test_a_refusal_in_a_compiled_graph_has_the_same_words():
    """Its call of the operator is not the one that chooses the exception."""
    compiled = torch.compile(gd.chunk_gated_delta_rule, backend="aot_eager", fullgraph=True)
    pool = {"initial_state": ZEROS(4, HV, K, V), "initial_state_indices": torch.tensor([9])}
    with pytest.raises(RuntimeError, match=r"^gatedelta: initial_state_indices\[0\] is 9, but"):
        compiled(**rule(**pool))

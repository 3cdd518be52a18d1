"""The layer's step on a GPU, through torch: against the CPU, in a captured graph, and compiled."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gatedelta import info  # noqa: E402
from gatedelta import torch as gd  # noqa: E402
from test_layer_step import check, make  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not info()["cuda_compiled"], reason="no GPU, or a library without CUDA"
)


def on_gpu(arguments):
    return {name: t.cuda() if torch.is_tensor(t) else t for name, t in arguments.items()}


def compare(on_cpu, arguments, out, got):
    check(got.cpu(), out.double(), out.dtype)
    check(arguments["state"].cpu(), on_cpu["state"].double(), out.dtype)
    assert torch.equal(arguments["conv_state"].cpu(), on_cpu["conv_state"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("T", [1, 3])
def test_agrees_with_the_cpu(dtype, T):
    on_cpu = make(B=3, T=T, dtype=dtype, slots=7, v_first=True)
    arguments, slots = on_gpu(on_cpu), torch.tensor([5, 0, 3], dtype=torch.int32)
    out = gd.gated_delta_layer_step(**on_cpu, state_indices=slots)
    compare(on_cpu, arguments, out, gd.gated_delta_layer_step(**arguments, state_indices=slots.cuda()))


def test_graph():
    """Slots are read at every replay; a padded row is zero."""
    on_cpu = make(B=4, dtype=torch.bfloat16, slots=9)
    arguments, slots = on_gpu(on_cpu), torch.tensor([1, 2, 3, 4])
    on_device = slots.cuda()
    states = {name: arguments[name].clone() for name in ("state", "conv_state")}
    graph = torch.cuda.CUDAGraph()
    gd.gated_delta_layer_step(**arguments, state_indices=on_device, null_index=0)
    with torch.cuda.graph(graph):
        got = gd.gated_delta_layer_step(**arguments, state_indices=on_device, null_index=0)
    for name, first in states.items():
        arguments[name].copy_(first)
    for indices in ([1, 2, 3, 4], [8, 0, 1, 5]):
        on_device.copy_(torch.tensor(indices))
        graph.replay()
        out = gd.gated_delta_layer_step(**on_cpu, state_indices=torch.tensor(indices), null_index=0)
        compare(on_cpu, arguments, out, got)
        assert all(not row.any() for index, row in zip(indices, got) if index == 0)


def test_compiled():
    on_cpu = make(dtype=torch.bfloat16)
    arguments = on_gpu(on_cpu)
    out = gd.gated_delta_layer_step(**on_cpu)
    compiled = torch.compile(
        lambda arguments: gd.gated_delta_layer_step(**arguments), fullgraph=True, backend="aot_eager"
    )
    compare(on_cpu, arguments, out, compiled(arguments))

"""The causal convolution on CUDA tensors: against the formula in float64, streams, graphs, the compiler."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import gatedelta  # noqa: E402
from gatedelta import torch as gd  # noqa: E402
from test_conv1d import BOUNDS, DTYPES, doubles, error, make, truth  # noqa: E402
from torch.utils._triton import has_triton  # noqa: E402

pytestmark = pytest.mark.skipif(
    not gatedelta.info()["cuda_compiled"] or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 8,
    reason="no GPU of compute capability 8.0 or later, or a build without CUDA",
)


def on_gpu(*shape, **options):
    return [t.detach().cuda().requires_grad_(t.requires_grad) for t in make(*shape, **options)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channel_major", [False, True])
@pytest.mark.parametrize("shape", [(2, 1000, 96, 4, 3), (3, 1, 40, 4, 4), (1, 256, 7, 2, 1), (2, 0, 8, 4, 3)], ids=str)
def test_forward_and_gradients(shape, channel_major, dtype):
    x, weight, bias, state = on_gpu(*shape, dtype=dtype, grad=True)
    rows = x.transpose(1, 2).contiguous().transpose(1, 2) if channel_major else x
    y, final = gd.causal_conv1d(rows, weight, bias, "silu", initial_state=state, output_final_state=True)
    copies = doubles(x, weight, bias, state)
    expected, expected_state = truth(*copies[:3], "silu", copies[3])
    assert y.is_cuda and y.dtype == dtype and error(y, expected) < BOUNDS[dtype]
    assert torch.equal(final.double(), expected_state)
    dy, dht = torch.randn_like(y), torch.randn_like(final)
    got = torch.autograd.grad((y, final), (x, weight, bias, state), (dy, dht))
    wanted = torch.autograd.grad((expected, expected_state), copies, (dy.double(), dht.double()))
    for derivative, right in zip(got, wanted):
        assert derivative.dtype == dtype and error(derivative, right) < BOUNDS[dtype]


def test_as_on_the_cpu():
    """A slice of a wider row, a pack, a pool with another order of memory, and each tensor in a type of its own."""
    x = torch.randn(1, 90, 72)[..., 4:68].bfloat16()
    weight, bias = torch.randn(64, 4).half(), torch.randn(64)
    pool, slots = torch.randn(9, 3, 64).transpose(1, 2), torch.tensor([7, -1, 2, 0])
    cu = torch.tensor([0, 40, 40, 41, 85], dtype=torch.int32)
    results = []
    for device in ("cpu", "cuda"):
        states = pool.to(device, copy=True)
        y, _ = gd.causal_conv1d(x.to(device), weight.to(device), bias.to(device), "silu", cu.to(device), states,
                                final_state=states, initial_state_indices=slots.to(device),
                                final_state_indices=slots.to(device))  # fmt: skip
        results.append((y.cpu(), states.cpu()))
    assert error(results[1][0], results[0][0].double()) < BOUNDS[torch.bfloat16]
    assert torch.equal(results[0][1], results[1][1])


def test_streams_and_graphs():
    """A decode step in a graph: each replay moves the states on."""
    x, weight, bias, _ = on_gpu(8, 20, 256, dtype=torch.bfloat16)
    expected, _ = gd.causal_conv1d(x, weight, bias, "silu")
    pool, slots = torch.zeros(16, 256, 3, device="cuda", dtype=torch.bfloat16), torch.randperm(16, device="cuda")[:8]
    token, y = x[:, :1].clone(), torch.empty(8, 1, 256, device="cuda", dtype=torch.bfloat16)

    def step():
        gd.causal_conv1d(token, weight, bias, "silu", initial_state=pool, final_state=pool, out=y,
                         initial_state_indices=slots, final_state_indices=slots)  # fmt: skip

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        pool.zero_()
        for t in range(20):
            token.copy_(x[:, t : t + 1])
            graph.replay()
            assert torch.equal(y, expected[:, t : t + 1])
    stream.synchronize()


@pytest.mark.skipif(not has_triton(), reason="torch.compile on CUDA needs triton")
def test_compile():
    x, weight, bias, state = on_gpu(2, 33, 64, dtype=torch.bfloat16, grad=True)

    def layer(x, weight, bias, state):
        return gd.causal_conv1d(x * 2, weight, bias, "silu", None, state, True)

    torch._dynamo.reset()
    results = [f(x, weight, bias, state) for f in (layer, torch.compile(layer, fullgraph=True))]
    assert all(torch.equal(a, b) for a, b in zip(*results))
    derivatives = [torch.autograd.grad(r[0].sum() + r[1].sum(), (x, weight, bias, state)) for r in results]
    for a, b in zip(*derivatives):
        torch.testing.assert_close(a, b)

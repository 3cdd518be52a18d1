"""The gated RMSNorm on CUDA tensors: against the formula in float64, streams, graphs, the compiler."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import gatedelta  # noqa: E402
from gatedelta import torch as gd  # noqa: E402
from test_norm import BOUNDS, DTYPES, error, make, truth  # noqa: E402
from torch.utils._triton import has_triton  # noqa: E402

pytestmark = pytest.mark.skipif(
    not gatedelta.info()["cuda_compiled"] or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 8,
    reason="no GPU of compute capability 8.0 or later, or a build without CUDA",
)


def on_gpu(*shape, **options):
    return [t.detach().cuda().requires_grad_(t.requires_grad) for t in make(*shape, **options)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 300, 4, 128), (7, 64), (48,), (4, 3, 256), (0, 3, 64)], ids=str)
def test_forward_and_gradients(shape, dtype):
    inputs = on_gpu(*shape, dtype=dtype, weight=torch.float32, grad=True)
    y = gd.rms_norm_gated(*inputs)
    dy = torch.randn(shape, device="cuda").to(dtype)
    got = torch.autograd.grad(y, inputs, dy)
    copies = [t.detach().double().requires_grad_() for t in inputs]
    expected = truth(*copies)
    if y.numel() == 0:
        assert not got[2].any()
        return
    assert y.is_cuda and y.dtype == dtype and error(y, expected) < BOUNDS[dtype]
    for derivative, right in zip(got, torch.autograd.grad(expected, copies, dy.double())):
        assert error(derivative, right) < BOUNDS[derivative.dtype]


def test_as_on_the_cpu():
    """A slice of a wider row, a transposed gate, and each tensor in a type of its own."""
    wide = torch.randn(5, 7, 3 * 64 + 24, device="cuda", dtype=torch.bfloat16)
    x = wide[..., 8 : 8 + 192].unflatten(-1, (3, 64))
    gate = torch.randn(5, 3, 7, 64, device="cuda").half().transpose(1, 2)
    weight = torch.randn(64, device="cuda")
    out = torch.empty(5, 7, 3, 64, device="cuda")
    for options in ({}, {"activation": "sigmoid"}, {"round_before_gate": True}, {"eps": 0.1}):
        got = gd.rms_norm_gated(x, gate, weight, out=out, **options)
        expected = torch.empty(out.shape)
        gd.rms_norm_gated(x.cpu(), gate.cpu(), weight.cpu(), out=expected, **options)
        assert error(got.cpu(), expected.double()) < 1e-3


def test_runs_on_the_current_stream_and_in_graphs():
    x, gate, weight = on_gpu(64, 8, 128, dtype=torch.bfloat16)
    expected = gd.rms_norm_gated(x, gate, weight)
    stream = torch.cuda.Stream()
    out = torch.empty_like(x)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            gd.rms_norm_gated(x, gate, weight, out=out)
        out.zero_()
        graph.replay()
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(not has_triton(), reason="torch.compile for CUDA needs triton")
def test_compile():
    torch._dynamo.reset()
    inputs = on_gpu(3, 40, 4, 128, dtype=torch.bfloat16, grad=True)
    compiled = torch.compile(lambda x, gate, weight: gd.rms_norm_gated(x, gate, weight), fullgraph=True)
    y, expected = compiled(*inputs), gd.rms_norm_gated(*inputs)
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy)):
        assert torch.equal(a, b)


def test_devices_must_agree():
    x, gate, weight = on_gpu(3, 64)
    with pytest.raises(ValueError, match="gate is not on the device x is on"):
        gd.rms_norm_gated(x, gate.cpu(), weight)

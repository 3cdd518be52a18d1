"""The gated RMSNorm, torch and numpy, against the formula in float64 and transformers' module."""

from __future__ import annotations

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")

import gatedelta.numpy as gdn  # noqa: E402
from gatedelta import torch as gd  # noqa: E402
from gatedelta._operators import norm  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from tools.dev_paths import ROOT  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3.2e-3, torch.float16: 4e-4}  # those of testing/tolerance.cpp
ARRAYS = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def truth(x, gate, weight, eps=1e-6, activation="silu"):
    x = x.double()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.double()
    if gate is not None:
        y = y * (torch.sigmoid if activation == "sigmoid" else torch.nn.functional.silu)(gate.double())
    return y


def make(*shape, dtype=torch.float32, weight=None, grad=False):
    generator = torch.Generator().manual_seed(7)
    x, gate = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    w = (1 + 0.25 * torch.randn(shape[-1:], generator=generator)).to(weight or dtype)
    return [t.requires_grad_(grad) for t in (x, gate, w)]


def error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


def arrays(*tensors):
    return [None if t is None else t.detach().float().numpy().astype(ARRAYS[t.dtype]) for t in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 5, 3, 128), (7, 64), (48,), (4, 3, 256), (2, 3, 2, 2, 2, 32), (0, 3, 64)], ids=str
)
def test_any_rank(shape, dtype):
    x, gate, weight = make(*shape, dtype=dtype, weight=torch.float32, grad=True)
    y = gd.rms_norm_gated(x, gate, weight)
    assert y.shape == x.shape and y.dtype == dtype
    copies = [t.detach().double().requires_grad_() for t in (x, gate, weight)]
    expected = truth(*copies)
    dy = torch.randn(shape).to(dtype)
    got = torch.autograd.grad(y, (x, gate, weight), dy)
    wanted = torch.autograd.grad(expected, copies, dy.double())
    if x.numel() == 0:
        assert [t.shape for t in got] == [x.shape, gate.shape, weight.shape] and not got[2].any()
        return
    assert error(y, expected) < BOUNDS[dtype]
    for t, derivative, right in zip((x, gate, weight), got, wanted):
        assert derivative.dtype == t.dtype and derivative.shape == t.shape
        assert error(derivative, right) < max(BOUNDS[t.dtype], 1e-5)
    if len(shape) <= 4:
        assert np.array_equal(
            gdn.rms_norm_gated(*arrays(x, gate, weight)).astype(np.float32), y.detach().float().numpy()
        )
        gradients = gdn.rms_norm_gated_backward(*arrays(x, gate, weight, dy))
        for array, derivative in zip(gradients, got):
            assert np.array_equal(array.astype(np.float32), derivative.float().numpy())


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_options(activation, eps):
    x, gate, weight = make(3, 4, 64)
    expected = truth(x, gate, weight, eps, activation)
    assert error(gd.rms_norm_gated(x, gate, weight, eps, activation), expected) < 1e-5
    got = gdn.rms_norm_gated(*arrays(x, gate, weight), eps=eps, activation=activation, num_threads=2)
    assert error(torch.from_numpy(got), expected) < 1e-5


@pytest.mark.parametrize("present", [(True, False), (False, True), (False, False)], ids=["weight", "gate", "neither"])
def test_optional_inputs(present):
    x, gate, weight = make(5, 3, 32, grad=True)
    weight, gate = (t if there else None for t, there in zip((weight, gate), present))
    y = gd.rms_norm_gated(x, gate, weight)
    assert error(y, truth(x, gate, weight)) < 1e-5
    inputs = [t for t in (x, gate, weight) if t is not None]
    derivatives = torch.autograd.grad(y.sum(), inputs)
    wanted = torch.autograd.grad(truth(x, gate, weight).sum(), inputs)
    assert all(error(a, b.double()) < 1e-5 for a, b in zip(derivatives, wanted))
    gradients = gdn.rms_norm_gated_backward(*arrays(x, gate, weight), np.ones(x.shape, np.float32))
    assert [g is None for g in gradients] == [False, gate is None, weight is None]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("same", [True, False], ids=["weight in its type", "weight in float32"])
def test_rounds_as_transformers_does(dtype, same):
    """Bit for bit, but for numbers next to a tie: torch adds up the squares in another order."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    module = modeling.Qwen3NextRMSNormGated(128)
    x, gate, weight = make(200, 128, dtype=dtype)
    module.weight = torch.nn.Parameter(weight if same else weight.float())
    expected = module(x, gate)
    ours = gd.rms_norm_gated(x, gate, module.weight, round_before_gate=True)
    assert (ours != expected.to(dtype)).float().mean() < 2e-3
    assert (gd.rms_norm_gated(x, gate, module.weight) != expected.to(dtype)).float().mean() > 0.1


def test_strides():
    x, gate, weight = make(4, 6, 3, 64)
    mixed = torch.randn(4, 6, 3 * 64 + 40)
    sliced = mixed[..., 8 : 8 + 3 * 64].unflatten(-1, (3, 64))
    assert torch.equal(gd.rms_norm_gated(sliced, gate, weight), gd.rms_norm_gated(sliced.contiguous(), gate, weight))
    turned = x.transpose(1, 2)
    got = gd.rms_norm_gated(turned, gate.transpose(1, 2), weight)
    assert torch.equal(got.transpose(1, 2), gd.rms_norm_gated(x, gate, weight))
    scattered = torch.randn(4, 6, 64, 3).mT  # the last dimension has gaps: copied
    assert torch.equal(gd.rms_norm_gated(scattered, gate, weight), gd.rms_norm_gated(scattered.clone(), gate, weight))
    with pytest.raises(ValueError, match="rows must be contiguous"):
        gdn.rms_norm_gated(scattered.numpy(), None, None)
    assert np.array_equal(gdn.rms_norm_gated(turned.numpy(), gate.transpose(1, 2).numpy(), weight.numpy()), got.numpy())


@pytest.mark.parametrize("shape", [(2, 3, 4, 64), (2, 2, 3, 4, 32)], ids=str)
def test_out(shape):
    x, gate, weight = make(*shape)
    buffer = torch.empty(shape, dtype=torch.bfloat16)
    before = buffer._version
    assert gd.rms_norm_gated(x, gate, weight, out=buffer) is buffer and buffer._version > before
    assert torch.equal(buffer, gd.rms_norm_gated(x, gate, weight).bfloat16())
    if len(shape) == 4:
        result = np.empty(shape, np.float32)
        assert gdn.rms_norm_gated(*arrays(x, gate, weight), out=result) is result
    with pytest.raises(ValueError, match="has no gradient, but an input requires one"):
        gd.rms_norm_gated(x, gate, weight.requires_grad_(), out=buffer)
    with pytest.raises(ValueError, match="out is written to, but it requires a gradient"):
        gd.rms_norm_gated(x, gate, weight.detach(), out=torch.empty(shape, requires_grad=True))


def test_gradcheck_like_directional_derivatives():
    x, gate, weight = make(9, 48, grad=True)
    derivatives = torch.autograd.grad(gd.rms_norm_gated(x, gate, weight, activation="sigmoid").sum(), (x, gate, weight))
    for i, t in enumerate((x, gate, weight)):
        direction, step = torch.randn_like(t), 1e-4
        inputs = [s.detach().double() for s in (x, gate, weight)]
        values = []
        for sign in (1, -1):
            inputs[i] = t.detach().double() + sign * step * direction.double()
            values.append(truth(*inputs, activation="sigmoid").sum())
        slope = ((values[0] - values[1]) / (2 * step)).item()
        assert (derivatives[i] * direction).sum().item() == pytest.approx(slope, rel=1e-3, abs=1e-3)


def test_refused_transforms():
    x, gate, weight = make(3, 32)

    def f(x):
        return gd.rms_norm_gated(x, gate[0], weight)

    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(f, (x[0],), (x[1],))
    with pytest.raises(NotImplementedError, match=r"torch\.vmap over gatedelta's functions"):
        torch.func.vmap(f)(x)
    leaf = x[0].clone().requires_grad_()
    (derivative,) = torch.autograd.grad(f(leaf).sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="rms_norm_gated cannot be differentiated again"):
        torch.autograd.grad(derivative.sum(), leaf)
    functional = torch.func.grad(lambda y: f(y).sum())(x[0])
    assert torch.equal(functional, derivative)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(dynamic):
    def layer(x, gate, weight):
        return gd.rms_norm_gated(x * 2, gate, weight, round_before_gate=True) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 8):
        inputs = make(2, tokens, 3, 64, dtype=torch.bfloat16, grad=True)
        y, expected = compiled(*inputs), layer(*inputs)
        assert torch.equal(y, expected)
        dy = torch.randn_like(y)
        for a, b in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy)):
            assert torch.equal(a, b)


def test_compile_out():
    x, gate, weight = make(3, 64)
    buffer = torch.zeros(3, 64)
    compiled = torch.compile(
        lambda: gd.rms_norm_gated(x, gate, weight, out=buffer).sum(), fullgraph=True, backend="aot_eager"
    )
    assert compiled() == gd.rms_norm_gated(x, gate, weight).sum() and buffer.any()


def test_opcheck():
    x, gate, weight = make(2, 3, 2, 32)
    for options in (0, norm.SIGMOID, norm.ROUND_BEFORE_GATE):
        torch.library.opcheck(norm.forward.__wrapped__, (x, gate, weight, 1e-6, options))
        torch.library.opcheck(norm.backward.__wrapped__, (x, gate, weight, None, options, torch.randn_like(x), 0b111))
    torch.library.opcheck(norm.forward.__wrapped__, (x, None, None, 1e-6, 0))
    torch.library.opcheck(norm.backward.__wrapped__, (x, None, weight, 1e-6, 0, torch.randn_like(x), 0b101))
    torch.library.opcheck(norm.forward_out.__wrapped__, (x, gate, weight, 1e-6, 0, torch.empty_like(x)))


def test_fake_on_cuda():
    with FakeTensorMode():
        x = torch.empty(2, 3, 4, 128, dtype=torch.bfloat16, device="cuda:0")
        y = gd.rms_norm_gated(x, x, None)
    assert y.is_cuda and y.shape == x.shape and y.dtype == x.dtype


def test_option_bits_are_those_of_the_binding():
    source = (ROOT / "bindings" / "torch" / "gated_norm.cpp").read_text()
    theirs = {name.lower(): 1 << int(bit) for name, bit in re.findall(r"\bk(\w+) = 1 << (\d+)", source)}
    assert theirs == {"sigmoid": norm.SIGMOID, "roundbeforegate": norm.ROUND_BEFORE_GATE}


X, GATE, WEIGHT = make(2, 3, 32)
REFUSED = {
    "activation": ({"activation": "gelu"}, ValueError, "^activation is 'gelu', must be 'silu', 'swish' or 'sigmoid'$"),
    "activation of nothing": (
        {"gate": None, "activation": "sigmoid"},
        ValueError,
        "^activation is 'sigmoid', but gate is None: there is nothing it would act on$",
    ),
    "no tensor": ({"x": [1.0]}, TypeError, "^x must be a torch.Tensor, not builtins.list$"),
    "shape of the gate": (
        {"gate": GATE[0]},
        ValueError,
        r"^gate has shape \[3, 32\], must have that of x, \[2, 3, 32\]$",
    ),
    "shape of out": ({"out": torch.empty(3, 32)}, ValueError, r"^out has shape \[3, 32\], must have that of x"),
    "shape of the weight": (
        {"weight": torch.ones(31)},
        ValueError,
        r"^gatedelta: weight: shape is \[31\], must be \[D\] = \[32\]$",
    ),
    "size": (
        {"x": torch.ones(4, 20), "gate": None, "weight": None},
        ValueError,
        "^gatedelta: D is 20, must be a multiple of 16 from 16 to 512$",
    ),
    "dtype": (
        {"gate": GATE.double()},
        ValueError,
        "^gatedelta: gate: dtype is float64, must be float32, bfloat16 or float16$",
    ),
    "integer": (
        {"gate": GATE.int()},
        ValueError,
        r"^gatedelta: gate: dtype is int32, must be float32, bfloat16 or float16$",
    ),
    "eps": ({"eps": -1.0}, ValueError, "^gatedelta: eps is -1, must be finite and not negative$"),
    "device": ({"gate": GATE.to("meta")}, ValueError, "^gatedelta: gate is on meta, but x is on cpu$"),
    "overlap": ({"out": X}, ValueError, "^gatedelta: x and out overlap in memory$"),
    "no dimension": ({"x": torch.tensor(1.0), "gate": None, "weight": None}, ValueError, "x has rank 0, must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    arguments, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        gd.rms_norm_gated(**{"x": X, "gate": GATE, "weight": WEIGHT, **arguments})


NUMPY_REFUSED = {
    "activation": ({"activation": "gelu"}, ValueError, "^activation is 'gelu', must be"),
    "activation of nothing": ({"gate": None, "activation": "sigmoid"}, ValueError, "but gate is None"),
    "no array": ({"x": [1.0]}, TypeError, "^x must be a numpy array, not list$"),
    "shape of the gate": ({"gate": GATE[0].numpy()}, ValueError, r"^gate has shape \[3, 32\], must have that of x"),
    "rank": (
        {"x": np.ones((1, 1, 1, 1, 32), np.float32), "gate": None},
        ValueError,
        "^x has rank 5, must be from 1 to 4$",
    ),
    "overlap": ({"out": X.numpy()}, ValueError, "^x and out overlap in memory$"),
    "eps": ({"eps": float("nan")}, ValueError, "^eps is nan, must be finite and not negative$"),
    "threads": ({"num_threads": 0}, ValueError, "^num_threads is 0"),
}


@pytest.mark.parametrize("name", NUMPY_REFUSED)
def test_numpy_refusals(name):
    arguments, kind, message = NUMPY_REFUSED[name]
    with pytest.raises(kind, match=message):
        gdn.rms_norm_gated(**{"x": X.numpy(), "gate": GATE.numpy(), "weight": WEIGHT.numpy(), **arguments})

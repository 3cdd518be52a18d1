"""The causal convolution, torch and numpy, against the formula in float64 and transformers' functions."""

from __future__ import annotations

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")

import gatedelta.numpy as gdn  # noqa: E402
from gatedelta import torch as gd  # noqa: E402
from gatedelta._operators import conv1d  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from tools.dev_paths import ROOT  # noqa: E402

F = torch.nn.functional
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3.2e-3, torch.float16: 4e-4}  # those of testing/tolerance.cpp
ARRAYS = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch.manual_seed(11)  # a few numbers in fp16 may round by more than the bound, which is one of a norm


def make(B, T, D, W=4, S=None, dtype=torch.float32, grad=False):
    """x, weight, bias, state."""
    generator = torch.Generator().manual_seed(11)
    shapes = ((B, T, D), (D, W), (D,), (B, D, S or W - 1))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes]


def truth(x, weight, bias=None, activation=None, state=None):
    """y and the last inputs of each row, as many as the state has."""
    (T, D), W = x.shape[1:], weight.shape[1]
    if state is None:
        state = x.new_zeros(len(x), D, W - 1)
    rows = torch.cat([state, x.transpose(1, 2)], -1)
    first = state.shape[-1] - (W - 1)
    y = sum(weight[:, i : i + 1] * rows[..., first + i : first + i + T] for i in range(W)).transpose(1, 2)
    if bias is not None:
        y = y + bias
    return F.silu(y) if activation else y, rows[..., T:]


def doubles(*tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def error(got, expected):
    if expected.norm() == 0:
        return got.double().norm().item()
    return ((got.double() - expected).norm() / expected.norm()).item()


def arrays(*tensors):
    return [None if t is None else t.detach().float().numpy().astype(ARRAYS[t.dtype]) for t in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize(
    "shape", [(2, 70, 24, 4, 3), (3, 1, 40, 4, 4), (1, 5, 7, 2, 1), (2, 2, 16, 3, 6), (2, 0, 8, 4, 3)], ids=str
)
def test_values_and_gradients(shape, activation, dtype):
    x, weight, bias, state = make(*shape, dtype=dtype, grad=True)
    y, final = gd.causal_conv1d(x, weight, bias, activation, initial_state=state, output_final_state=True)
    copies = doubles(x, weight, bias, state)
    expected, expected_state = truth(*copies[:3], activation, copies[3])
    assert y.dtype == final.dtype == dtype and y.shape == x.shape and final.shape == state.shape
    assert error(y, expected) < BOUNDS[dtype] and torch.equal(final.double(), expected_state)
    dy, dht = torch.randn_like(y), torch.randn_like(final)
    got = torch.autograd.grad((y, final), (x, weight, bias, state), (dy, dht))
    wanted = torch.autograd.grad((expected, expected_state), copies, (dy.double(), dht.double()))
    for derivative, right in zip(got, wanted):
        assert derivative.dtype == dtype and error(derivative, right) < BOUNDS[dtype]
    result = gdn.causal_conv1d(
        *arrays(x, weight, bias), activation, initial_state=arrays(state)[0], output_final_state=True
    )
    assert np.array_equal(result.y.astype(np.float32), y.detach().float().numpy())
    assert np.array_equal(result.final_state.astype(np.float32), final.detach().float().numpy())
    gradients = gdn.causal_conv1d_backward(
        *arrays(x, weight, bias, dy, dht), activation=activation, initial_state=arrays(state)[0], num_threads=2
    )
    for array, derivative in zip(gradients, got):
        assert np.array_equal(array.astype(np.float32), derivative.float().numpy())


def test_optional_inputs():
    x, weight, _, _ = make(2, 9, 12, grad=True)
    y, state = gd.causal_conv1d(x, weight)
    assert state is None and error(y, truth(*doubles(x, weight))[0]) < 1e-5
    derivatives = torch.autograd.grad(y.sum(), (x, weight))
    copies = doubles(x, weight)
    wanted = torch.autograd.grad(truth(*copies)[0].sum(), copies)
    assert all(error(a, b) < 1e-5 for a, b in zip(derivatives, wanted))
    assert gdn.causal_conv1d_backward(*arrays(x, weight), None, np.ones(x.shape, np.float32))[2:] == (None, None)
    _, state = gd.causal_conv1d(x[:, :2], weight, output_final_state=True, state_size=5)
    assert torch.equal(state, F.pad(x[:, :2].transpose(1, 2), (3, 0)))
    (only_state,) = torch.autograd.grad(state.sum(), x)  # the gradient of y is missing
    assert torch.equal(only_state[:, :2], torch.ones(2, 2, 12)) and not only_state[:, 2:].any()


def test_a_module_s_weight():
    module = torch.nn.Conv1d(10, 10, 4, groups=10, padding=3)
    x = torch.randn(2, 6, 10)
    y, _ = gd.causal_conv1d(x, module.weight, module.bias)
    torch.testing.assert_close(y, module(x.transpose(1, 2))[..., :6].transpose(1, 2), rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert module.weight.grad.shape == (10, 1, 4) and module.bias.grad.shape == (10,)
    with pytest.raises(ValueError, match=r"weight has shape \[10, 2, 4\], must be \[D, W\] or \[D, 1, W\]"):
        gd.causal_conv1d(x, torch.randn(10, 2, 4))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_channel_major(dtype):
    """[B, D, T] memory, as causal-conv1d's callers have it."""
    x, weight, bias, _ = make(2, 33, 20, dtype=dtype)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    y, _ = gd.causal_conv1d(turned, weight, bias, "silu")
    assert y.stride() == turned.stride() and torch.equal(y, gd.causal_conv1d(x, weight, bias, "silu")[0])
    (dx,) = torch.autograd.grad(y.sum(), turned)
    assert dx.stride() == turned.stride()
    sliced = torch.randn(2, 33, 50).to(dtype)[..., 3:23]
    assert torch.equal(gd.causal_conv1d(sliced, weight)[0], gd.causal_conv1d(sliced.contiguous(), weight)[0])
    array = arrays(turned)[0]
    result = gdn.causal_conv1d(array.transpose(0, 2, 1).copy().transpose(0, 2, 1), *arrays(weight, bias), "silu").y
    assert np.array_equal(result.astype(np.float32), y.detach().float().numpy())


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
def test_packed_sequences(offsets):
    lengths = [3, 0, 1, 70, 2]
    x, weight, bias, _ = make(1, sum(lengths) + 5, 16, grad=True)
    state = torch.randn(len(lengths), 16, 4, requires_grad=True)
    cu = torch.tensor([0, *np.cumsum(lengths)]).to(offsets)
    y, final = gd.causal_conv1d(x, weight, bias, "silu", cu, state, True)
    assert not y[:, sum(lengths) :].any()
    begin = 0
    for n, length in enumerate(lengths):
        alone = gd.causal_conv1d(x[:, begin : begin + length], weight, bias, "silu", None, state[n : n + 1], True)
        assert torch.equal(y[:, begin : begin + length], alone[0]) and torch.equal(final[n : n + 1], alone[1])
        begin += length
    dx, dw, db, ds = torch.autograd.grad((y.sum() + 2 * final.sum()), (x, weight, bias, state))
    parts = x[0, : sum(lengths)].split(lengths)
    loss = sum(
        (a.sum() + 2 * b.sum()).double()
        for a, b in (
            truth(p[None].double(), weight.double(), bias.double(), "silu", state[n : n + 1].double())
            for n, p in enumerate(parts)
        )
    )
    for got, right in zip((dx, dw, db, ds), torch.autograd.grad(loss, (x, weight, bias, state))):
        assert error(got, right) < 1e-5


def test_decode_in_a_pool():
    """A prompt, then tokens one by one, in place; the last slot belongs to no sequence of this batch."""
    x, weight, bias, _ = make(3, 20, 24)
    expected, _ = gd.causal_conv1d(x, weight, bias, "silu")
    pool = torch.full((9, 24, 3), float("nan"))
    slots = torch.tensor([7, 2, 4])
    y, same = gd.causal_conv1d(
        x[:, :15], weight, bias, "silu", initial_state=pool, final_state=pool, final_state_indices=slots,
        initial_state_indices=torch.full((3,), -1),
    )  # fmt: skip
    assert same is pool and torch.equal(y, expected[:, :15])
    before = pool._version
    for t in range(15, 20):
        y, _ = gd.causal_conv1d(
            x[:, t : t + 1], weight, bias, "silu", initial_state=pool, final_state=pool, final_state_indices=slots,
            initial_state_indices=slots,
        )  # fmt: skip
        assert torch.equal(y, expected[:, t : t + 1])
    assert pool._version > before and torch.isnan(pool[[0, 1, 3, 5, 6, 8]]).all()
    array = pool.numpy().copy()
    token = torch.randn(3, 1, 24)
    y, _ = gd.causal_conv1d(token, weight, bias, "silu", initial_state=pool, final_state=pool,
                            initial_state_indices=slots, final_state_indices=slots)  # fmt: skip
    result = gdn.causal_conv1d(token.numpy(), weight.numpy(), bias.numpy(), "silu", initial_state=array,
                               final_state=array, initial_state_indices=slots.numpy(),
                               final_state_indices=slots.numpy())  # fmt: skip
    assert np.array_equal(result.y, y.numpy()) and np.array_equal(array, pool.numpy(), equal_nan=True)


def test_null_slot():
    """vLLM's slot 0: padded rows of a batch."""
    x, weight, _, _ = make(4, 1, 8)
    x[1] = x[3] = float("nan")
    pool = torch.randn(5, 3, 8).transpose(1, 2)  # [slots, S, D] in memory
    before = pool.clone()
    slots = torch.tensor([3, 0, 1, 0], dtype=torch.int32)
    y, _ = gd.causal_conv1d(x, weight, initial_state=pool, final_state=pool, initial_state_indices=slots,
                            final_state_indices=slots, null_index=0)  # fmt: skip
    assert not y[[1, 3]].any() and torch.isfinite(y).all()
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])
    assert torch.equal(pool[3], torch.cat([before[3, :, 1:], x[0].T], -1))
    with pytest.raises(ValueError, match="null_index is 0, but the call has no indices"):
        gd.causal_conv1d(x, weight, null_index=0)
    with pytest.raises(ValueError, match="null_index is -2, must be from -1 to"):
        gdn.causal_conv1d(x.numpy(), weight.numpy(), null_index=-2)


def test_draft_windows():
    """Windows of four tokens, of which some are accepted: the outputs of those are the outputs of the sequence."""
    x, weight, bias, _ = make(2, 40, 16)
    expected, _ = gd.causal_conv1d(x, weight, bias, "silu")
    state = torch.zeros(2, 16, 2 + 4)
    at, accepted = [0, 0], torch.ones(2, dtype=torch.int32)
    for turn in range(9):
        taken = [1 + turn % 4, 1 + (turn + 2) % 4]
        window = torch.randn(2, 4, 16)
        for n in range(2):
            window[n, : taken[n]] = x[n, at[n] : at[n] + taken[n]]
        y, _ = gd.causal_conv1d(window, weight, bias, "silu", initial_state=state, final_state=state,
                                previous_accept_lengths=accepted)  # fmt: skip
        for n in range(2):
            assert torch.equal(y[n, : taken[n]], expected[n, at[n] : at[n] + taken[n]])
            at[n] += taken[n]
        accepted = torch.tensor(taken)
    with pytest.raises(ValueError, match=r"previous_accept_lengths\[0\] is 5, must be from 1 to S - W \+ 2 = 4"):
        gd.causal_conv1d(
            window, weight, initial_state=state, final_state=state, previous_accept_lengths=accepted + 5 - taken[0]
        )


def test_step_states():
    x, weight, bias, state = make(2, 5, 12)
    steps = torch.full((2, 5, 12, 3), float("nan"))
    y, final = gd.causal_conv1d(x, weight, bias, initial_state=state, output_final_state=True, step_states=steps)
    rows = torch.cat([state, x.transpose(1, 2)], -1)
    assert torch.equal(steps, torch.stack([rows[..., t + 1 : t + 4] for t in range(5)], 1))
    assert torch.equal(final, steps[:, -1]) and torch.equal(y, gd.causal_conv1d(x, weight, bias, None, None, state)[0])


def test_states_alone():
    x, weight, _, state = make(2, 5, 12)
    y, final = gd.causal_conv1d(x, weight, initial_state=state, output_final_state=True, output_y=False)
    assert y is None and torch.equal(final, x[:, -3:].transpose(1, 2))
    assert gdn.causal_conv1d(x.numpy(), weight.numpy(), output_final_state=True, output_y=False).y is None
    with pytest.raises(ValueError, match="out= is given, but output_y=False computes no y"):
        gd.causal_conv1d(x, weight, out=torch.empty_like(x), output_y=False)
    with pytest.raises(ValueError, match="nothing to compute: out, final_state and step_states are absent"):
        gd.causal_conv1d(x, weight, output_y=False)


def test_out():
    x, weight, bias, _ = make(2, 5, 12)
    buffer = torch.empty(2, 5, 12, dtype=torch.bfloat16)
    before = buffer._version
    y, _ = gd.causal_conv1d(x, weight, bias, out=buffer)
    assert y is buffer and buffer._version > before
    assert torch.equal(buffer, gd.causal_conv1d(x, weight, bias)[0].bfloat16())
    with pytest.raises(ValueError, match="has no gradient, but an input requires one"):
        gd.causal_conv1d(x, weight.requires_grad_(), out=buffer)
    with pytest.raises(ValueError, match="out is written to, but it requires a gradient"):
        gd.causal_conv1d(x, weight.detach(), out=torch.empty(2, 5, 12, requires_grad=True))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"activation": "relu"}, ValueError, "activation is 'relu', must be None, 'silu' or 'swish'"),
        ({"state_size": 3}, ValueError, "state_size is given, but no final state is asked for"),
        ({"weight": torch.randn(12, 5)}, ValueError, "weight has W = 5 taps, must have from 2 to 4"),
        ({"weight": torch.randn(11, 4)}, ValueError, r"weight: shape is \[11, 4\], must be \[D, W\] = \[12, any\]"),
        ({"x": torch.randn(5, 12)}, ValueError, "x must have rank 3, not 2"),
        ({"bias": torch.randn(12).double()}, ValueError, "bias: dtype is float64"),
        ({"bias": "none"}, TypeError, "bias must be a torch.Tensor, not builtins.str"),
        ({"initial_state": torch.randn(2, 12, 2)}, ValueError, "initial_state has S = 2 columns, must have at least"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "B is 2, must be 1 with cu_seqlens"),
        ({"final_state_indices": torch.tensor([0, 1])}, ValueError, "final_state_indices is given without"),
        (
            {"final_state_indices": torch.tensor([0, 1]), "output_final_state": True},
            ValueError,
            "final_state_indices needs final_state=, the pool to write to",
        ),
        ({"previous_accept_lengths": torch.tensor([1, 1])}, ValueError, "given without initial_state"),
    ],
)  # fmt: skip
def test_messages(change, kind, message):
    x, weight, bias, _ = make(2, 5, 12)
    with pytest.raises(kind, match=message):
        gd.causal_conv1d(**{"x": x, "weight": weight, "bias": bias, **change})


def test_other_derivatives_are_refused():
    x, weight, _, _ = make(1, 5, 8, grad=True)
    (dx,) = torch.autograd.grad(gd.causal_conv1d(x, weight)[0].sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        dx.sum().backward()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda t: gd.causal_conv1d(t, weight.detach())[0], (x.detach(),), (x.detach(),))
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda t: gd.causal_conv1d(t, weight)[0])(torch.randn(3, 1, 5, 8))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    def layer(x, weight, bias, state, cu):
        y, final = gd.causal_conv1d(x * 2, weight, bias, "silu", cu, state, True)
        return y + 1, final

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for T in (17, 40):
        x, weight, bias, _ = make(1, T, 12, grad=True)
        state, cu = torch.randn(3, 12, 3, requires_grad=True), torch.tensor([0, 5, 5, T - 2])
        results = [f(x, weight, bias, state, cu) for f in (layer, compiled)]
        for a, b in zip(*results):
            assert torch.equal(a, b)
        derivatives = [torch.autograd.grad(r[0].sum() + r[1].sum(), (x, weight, bias, state)) for r in results]
        for a, b in zip(*derivatives):
            torch.testing.assert_close(a, b)
    pool, slots = torch.randn(5, 12, 3), torch.tensor([3, 1])
    token = torch.randn(2, 1, 12)

    def step(token, pool):
        return gd.causal_conv1d(token, weight.detach(), initial_state=pool, final_state=pool,
                                initial_state_indices=slots, final_state_indices=slots)[0]  # fmt: skip

    other = pool.clone()
    assert torch.equal(step(token, pool), torch.compile(step, fullgraph=True)(token, other))
    assert torch.equal(pool, other)


def test_operators():
    x, weight, bias, state = make(2, 6, 8)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    for rows in (x, turned):
        torch.library.opcheck(conv1d.forward.__wrapped__, (rows, weight, bias, conv1d.SILU, None, state, 0))
        torch.library.opcheck(conv1d.forward.__wrapped__, (rows, weight, None, conv1d.FINAL_STATE, None, None, 3))
        torch.library.opcheck(
            conv1d.backward.__wrapped__, (rows, weight, bias, conv1d.SILU, None, state, rows, state, 0b1111)
        )
    torch.library.opcheck(
        conv1d.forward_out.__wrapped__,
        (x, weight, bias, 0, None, None, None, 0, torch.empty_like(x), state.clone(), None, True, None, None),
    )


def test_fake_tensors():
    with FakeTensorMode():
        x, weight = torch.empty(2, 6, 8, dtype=torch.bfloat16), torch.empty(8, 4)
        y, state = gd.causal_conv1d(x, weight, output_final_state=True)
        assert (y.shape, y.dtype, state.shape, state.dtype) == (x.shape, x.dtype, (2, 8, 3), x.dtype)
    with pytest.raises(ValueError, match="weight is on meta, but x is on cpu"):
        gd.causal_conv1d(torch.empty(2, 6, 8), torch.empty(8, 4, device="meta"))


def test_options_are_the_binding_s():
    text = (ROOT / "bindings/torch/conv1d.cpp").read_text()
    bits = dict(re.findall(r"k(\w+) = 1 << (\d+)", text))
    assert bits == {"Silu": "0", "FinalState": "1"}
    assert (conv1d.SILU, conv1d.FINAL_STATE) == (1, 2)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_as_transformers_does(dtype):
    """Their functions take [B, D, T] and states of W columns."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x, weight, _, _ = make(2, 12, 16, dtype=dtype)
    conv = torch.nn.Conv1d(16, 16, 4, groups=16, padding=3, bias=False)
    conv.weight = torch.nn.Parameter(weight.unsqueeze(1))
    expected = F.silu(conv(x.transpose(1, 2))[..., :12])
    y, state = gd.causal_conv1d(x, conv.weight, None, "silu", None, None, True, state_size=4)
    assert error(y.transpose(1, 2), expected.double()) < 2 * BOUNDS[dtype]  # theirs rounds twice
    theirs = state.detach().clone()
    token = torch.randn(2, 16, 1).to(dtype)
    wanted = modeling.causal_conv1d_update(token, theirs, weight, None, "silu")
    ours = state.detach()
    got, _ = gd.causal_conv1d(token.transpose(1, 2), weight, None, "silu", initial_state=ours, final_state=ours)
    assert error(got.transpose(1, 2), wanted.double()) < 2 * BOUNDS[dtype] and torch.equal(ours, theirs)

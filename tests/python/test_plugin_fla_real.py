"""gatedelta.fla with flash-linear-attention itself: its functions, layer and model on a CPU, where its own kernels
cannot run, against plain torch code; on a GPU against its own kernels."""

from __future__ import annotations

import itertools
import warnings

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # FLA warns where there is no GPU
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    pytest.importorskip("fla.backends", reason="this flash-linear-attention has no fla.backends (0.6)")
    import fla.modules
    import fla.ops.gated_delta_rule as ops

    try:
        import fla.layers.gated_deltanet
        import fla.models
    except ImportError:  # they need transformers
        transformers = False
    else:
        transformers = True

import gatedelta.fla  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from gatedelta._plugins import limits  # noqa: E402
from test_plugin_fla import close, inputs, recurrence  # noqa: E402

needs_transformers = pytest.mark.skipif(not transformers, reason="FLA's layers and models need transformers")
DEVICES = ["cpu"]
if torch.cuda.is_available() and limits.device_refusal(torch.device("cuda", 0)) is None:
    DEVICES.append("cuda")


@pytest.fixture(autouse=True)
def registered():
    gatedelta.fla.register()
    torch.manual_seed(0)
    yield
    gatedelta.fla.unregister()


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def theirs(function):
    """What FLA's own kernels give."""
    gatedelta.fla.unregister()
    try:
        return function()
    finally:
        gatedelta.fla.register()


# The functions


@pytest.mark.parametrize(("K", "V"), [(32, 32), (60, 100)])
def test_chunk(device, K, V):
    dtype, bound = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 1e-2)
    call = inputs(K, V, T=100, dtype=dtype, device=device)
    state = torch.randn(2, 4, K, V, device=device)
    leaves = [x.clone().requires_grad_() for x in (*call.values(), state)]
    truth = [x.clone().requires_grad_() for x in (*call.values(), state)]
    o, final = ops.chunk_gdn(
        *leaves[:5], initial_state=leaves[5], output_final_state=True, use_qk_l2norm_in_kernel=True, chunk_size=32
    )
    expected, end = recurrence(*truth[:5], K**-0.5, truth[5])
    close(o, expected, bound)
    close(final, end, bound)
    do = torch.randn_like(o)
    gradients = torch.autograd.grad([o, final], leaves, [do, torch.ones_like(final)])
    for a, b in zip(gradients, torch.autograd.grad([expected, end], truth, [do.double(), torch.ones_like(end)])):
        close(a, b, 2 * bound)


def test_recurrent(device):
    assert ops.fused_recurrent_gdn is ops.fused_recurrent_gated_delta_rule
    assert not transformers or fla.layers.gated_deltanet.fused_recurrent_gated_delta_rule is ops.fused_recurrent_gdn
    call = inputs(60, 44, device=device)
    call["v"] = call["v"].half()
    state = torch.randn(2, 4, 44, 60, device=device)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        o, final = ops.fused_recurrent_gdn(
            **call, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            transpose_state_layout=True,
        )  # fmt: skip
    expected, end = recurrence(*call.values(), 60**-0.5, state.mT)
    assert o.dtype == torch.float16
    close(o, expected, 1e-3)
    close(final.mT, end)


def test_undo(monkeypatch):
    called = []
    monkeypatch.setattr("gatedelta.fla.rule.chunk_refusal", lambda *args, **kwargs: called.append(1))
    gatedelta.fla.register()  # with what was just put in place
    ops.chunk_gdn(**inputs())
    assert called == [1]
    gatedelta.fla.unregister()
    assert not hasattr(ops.fused_recurrent_gdn, "__wrapped__")
    assert not transformers or fla.layers.gated_deltanet.fused_recurrent_gated_delta_rule is ops.fused_recurrent_gdn
    with pytest.raises(Exception):  # noqa: B017 (FLA's own, whatever it says of tensors on a CPU)
        ops.chunk_gdn(**inputs())
    gatedelta.fla.register()
    monkeypatch.setenv("FLA_GATEDELTA", "0")
    with pytest.raises(Exception):  # noqa: B017
        ops.chunk_gdn(**inputs())
    assert called == [1]


# Convolution and norm


def convolution(module, x, cache=None):
    """x [B, T, D] -> y, the last W inputs, of torch's own convolution."""
    before = x.new_zeros(x.shape[0], module.kernel_size[0], x.shape[2]) if cache is None else cache.mT
    row = torch.cat([before, x], 1)
    y = F.conv1d(row.mT[..., 1:], module.weight, module.bias, groups=x.shape[2]).mT
    return F.silu(y) if module.activation else y, row[:, -module.kernel_size[0] :].mT


def short_convolution(taps, bias, activation, device):
    return fla.modules.ShortConvolution(48, taps, bias=bias, activation=activation).to(device)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("taps", "bias", "activation"), [(4, False, "silu"), (3, True, None), (2, True, "silu")])
def test_convolution(device, taps, bias, activation, residual):
    module = short_convolution(taps, bias, activation, device)
    x = torch.randn(2, 37, 48, device=device, requires_grad=True)
    cache = torch.randn(2, 48, taps, device=device, requires_grad=True)
    more = torch.randn_like(x).requires_grad_() if residual else None
    y, state = module(x, residual=more, cache=cache, output_final_state=True)
    expected, end = convolution(module, x, cache)
    expected = expected + more if residual else expected
    close(y, expected)
    assert torch.equal(state, end)
    wanted = [x, cache, *module.parameters(), *([more] if residual else [])]
    dy, dstate = torch.randn_like(y), torch.randn_like(state)
    for a, b in zip(torch.autograd.grad([y, state], wanted, [dy, dstate]),
                    torch.autograd.grad([expected, end], wanted, [dy, dstate])):  # fmt: skip
        close(a, b, 1e-5)


def test_convolution_of_packs_and_of_tokens(device):
    module = short_convolution(4, True, "silu", device)
    x = torch.randn(1, 40, 48, device=device, requires_grad=True)
    ends = [0, 1, 3, 40]
    y, states = module(x, cu_seqlens=torch.tensor(ends, device=device), output_final_state=True)
    parts = [convolution(module, x[:, a:b]) for a, b in itertools.pairwise(ends)]
    close(y, torch.cat([part for part, _ in parts], 1))
    assert torch.equal(states, torch.cat([state for _, state in parts]))
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    (expected,) = torch.autograd.grad(torch.cat([part for part, _ in parts], 1), x, dy)
    close(dx, expected, 1e-5)
    tokens = torch.randn(3, 1, 48, device=device)
    cache = states.detach().clone()
    with torch.no_grad():
        expected, end = convolution(module, tokens, cache)
        for rows, offsets in ((tokens, None), (tokens.view(1, 3, 48), torch.arange(4, device=device))):
            updated = cache.clone()
            y, state = module(rows, cache=updated, output_final_state=True, cu_seqlens=offsets)
            close(y.view(3, 1, 48), expected)
            assert torch.equal(state, end) and state is updated
            y, _ = module(rows, residual=rows, cache=cache.clone(), cu_seqlens=offsets)
            close(y.view(3, 1, 48), expected + tokens)


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("prenorm", [False, True])
def test_norm(device, activation, prenorm):
    module = fla.modules.FusedRMSNormGated(64, activation=activation).to(device)
    torch.nn.init.normal_(module.weight)
    x, gate = (torch.randn(2, 9, 3, 64, device=device, requires_grad=True) for _ in range(2))
    results = module(x, gate, prenorm=prenorm)
    act = F.silu if activation == "swish" else torch.sigmoid
    expected = F.rms_norm(x, (64,), module.weight, module.eps) * act(gate)
    y = results[0] if prenorm else results
    close(y, expected)
    dy, wanted = torch.randn_like(y), [x, gate, module.weight]
    outputs, gradients = ([y, results[1]], [dy, x.detach()]) if prenorm else ([y], [dy])
    expected = [expected, x.clone()] if prenorm else [expected]
    for a, b in zip(torch.autograd.grad(outputs, wanted, gradients), torch.autograd.grad(expected, wanted, gradients)):
        close(a, b, 1e-5)


# Layer and model


def make_layer(device="cpu", dtype=torch.float32, **options):
    layer = fla.layers.GatedDeltaNet(
        **{
            "hidden_size": 64,
            "head_dim": 32,
            "num_heads": 2,
            "num_v_heads": 4,
            "expand_v": 1,
            "layer_idx": 0,
            **options,
        }
    )
    return layer.to(device, dtype)


def layer_in_torch(layer, x):
    q, k, v = (
        convolution(conv, projection(x))[0].unflatten(-1, (-1, size))
        for conv, projection, size in (
            (layer.q_conv1d, layer.q_proj, layer.head_k_dim),
            (layer.k_conv1d, layer.k_proj, layer.head_k_dim),
            (layer.v_conv1d, layer.v_proj, layer.head_v_dim),
        )
    )
    g = -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)
    beta = layer.b_proj(x).sigmoid() * (2 if layer.allow_neg_eigval else 1)
    zeros = x.new_zeros(x.shape[0], v.shape[2], q.shape[3], v.shape[3])
    o, _ = recurrence(q, k, v, g, beta, layer.head_k_dim**-0.5, zeros)
    o = F.rms_norm(o.float(), (layer.head_v_dim,), layer.o_norm.weight, layer.o_norm.eps)
    gate = layer.g_proj(x).unflatten(-1, (-1, layer.head_v_dim))
    return layer.o_proj((o * F.silu(gate)).flatten(-2))


@needs_transformers
@pytest.mark.parametrize("options", [{}, {"allow_neg_eigval": True, "conv_bias": True, "head_dim": 24, "expand_v": 2}])
def test_layer(options):
    layer = make_layer(**options)
    x = torch.randn(2, 70, 64)
    y, expected = layer(x)[0], layer_in_torch(layer, x)
    close(y, expected, 1e-5)
    parameters = dict(layer.named_parameters())
    dy = torch.randn_like(y)
    ours = torch.autograd.grad(y, list(parameters.values()), dy)
    for name, a, b in zip(parameters, ours, torch.autograd.grad(expected, list(parameters.values()), dy)):
        assert a is not None, name
        close(a, b, 1e-5)


@needs_transformers
def test_layer_padded_packed_and_short():
    layer = make_layer().eval()
    x = torch.randn(2, 96, 64)
    mask = torch.ones(2, 96, dtype=torch.long)
    mask[1, :40] = 0
    with torch.no_grad():
        whole, alone = layer(x)[0], layer(x[1:, 40:])[0]
        close(layer(x[:, :60])[0], whole[:, :60], 1e-5)  # 64 tokens or fewer: the recurrent function
        padded = layer(x, attention_mask=mask)[0]
    close(padded[:1], whole[:1], 1e-5)
    close(padded[1:, 40:], alone, 1e-5)
    layer.train()
    ends = [0, 30, 31, 96]
    packed = layer(x[:1], cu_seqlens=torch.tensor(ends))[0]
    close(packed, torch.cat([layer(x[:1, a:b])[0] for a, b in itertools.pairwise(ends)], 1), 1e-5)


@needs_transformers
@pytest.mark.skipif("cuda" not in DEVICES, reason="no GPU, or none that is supported")
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_layer_as_with_its_own_kernels(head_dim):
    layer = make_layer("cuda", torch.bfloat16, hidden_size=512, head_dim=head_dim)
    x = torch.randn(2, 300, 512, device="cuda", dtype=torch.bfloat16)

    def results():
        layer.zero_grad()
        y = layer(x)[0]
        y.float().square().mean().backward()
        return [y.detach(), *(p.grad.clone() for p in layer.parameters())]

    for a, b in zip(results(), theirs(results)):
        close(a, b, 4e-2)


@needs_transformers
def test_model(monkeypatch):
    """Training and generation, left padding included. The rest of FLA's model has a way without Triton, except for the
    gate of its MLP."""
    monkeypatch.setattr("fla.modules.mlp.swiglu", lambda x, y: F.silu(x) * y)
    config = fla.models.GatedDeltaNetConfig(
        hidden_size=64, head_dim=32, num_heads=2, expand_v=1, num_hidden_layers=2, vocab_size=50, intermediate_size=64,
        fuse_norm=False, fuse_swiglu=False, fuse_cross_entropy=False, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    model = fla.models.GatedDeltaNetForCausalLM(config)
    tokens = torch.randint(1, 50, (2, 70))
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    mask = torch.ones_like(tokens)
    mask[1, :25] = 0
    with torch.no_grad():
        generated = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
        for row, begin in ((0, 0), (1, 25)):
            sequence = generated[row : row + 1, begin:]
            logits = model(sequence, use_cache=False).logits
            assert torch.equal(logits[0, 69 - begin : -1].argmax(-1), sequence[0, 70 - begin :])

"""Every public function on every kind of torch view: the bits of the call on dense copies."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gatedelta import context_parallel as cp  # noqa: E402
from gatedelta import flash_qla, flashinfer  # noqa: E402
from gatedelta import torch as gd  # noqa: E402

B, T, HK, HV, K, V = 2, 5, 2, 4, 32, 16
D, W = 2 * HK * K + HV * V, 4


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def rule(batch=B, tokens=T, seed=0):
    return {
        "q": randn(batch, tokens, HK, K, seed=seed), "v": randn(batch, tokens, HV, V, seed=seed + 1),
        "k": torch.nn.functional.normalize(randn(batch, tokens, HK, K, seed=seed + 2), dim=-1),
        "g": -randn(batch, tokens, HV, seed=seed + 3).abs(), "beta": randn(batch, tokens, HV, seed=seed + 4).sigmoid(),
    }  # fmt: skip


def pack():
    return rule(1, 12) | {"cu_seqlens": torch.tensor([0, 5, 12])}


GATE = {"A_log": torch.linspace(-1, 1, HV), "dt_bias": torch.linspace(1, 2, HV)}
SLOTS = torch.tensor([3, 1], dtype=torch.int32)


def states(count=B):
    return randn(count, HV, K, V, seed=9)


# ---- kinds of views: of the same values, except for expanded ones ----------------------------------------------------


def padded(x):
    """Rows of the first dimension further apart, from an offset on."""
    if x.dim() < 2:
        return None
    inside = x[0].numel()
    whole = x.new_zeros(3 + x.shape[0] * (inside + 8))
    strides = [*x[:1].contiguous().stride()]
    strides[0] = inside + 8
    return torch.as_strided(whole, x.shape, strides, 3).copy_(x)


def negated(x):
    return torch._neg_view(-x)


KINDS = {
    "negated": negated,
    "negated, with gaps": lambda x: torch._neg_view((-x).repeat_interleave(2, -1))[..., ::2],
    "an imaginary part": lambda x: torch.complex(x, -x).conj().imag if x.dtype == torch.float32 else None,
    "one row of it, expanded": lambda x: torch.complex(x, -x).conj().imag.select(0, 0).unsqueeze(0).expand_as(x)
    if x.dtype == torch.float32 and x.dim() > 2 else None,
    "offset": lambda x: torch.cat([x.new_ones(3), x.flatten()])[3:].view(x.shape),
    "padded": padded,
    "negated and padded": lambda x: None if x.dim() < 2 else torch._neg_view(padded(-x)),
    "gaps": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "expanded rows": lambda x: x[:1].expand_as(x) if x.is_floating_point() else None,
    "expanded elements": lambda x: x[..., :1].expand_as(x) if x.is_floating_point() else None,
    "one element": lambda x: x.flatten()[0].expand_as(x) if x.is_floating_point() else None,
}  # fmt: skip
# What a call writes to, and pools, must hold whole matrices and no element twice. Buffers are not negated, either.
OF_POOLS = ("negated", "offset", "padded", "negated and padded")


# ---- every function: the call, its arguments, and those it writes to -------------------------------------------------


def layer_step():
    return {
        "mixed_qkv": randn(B, T, D), "z": randn(B, T, HV, V), "a": randn(B, T, HV), "b": randn(B, T, HV, seed=5),
        "conv_weight": randn(D, W), "conv_bias": randn(D), "norm_weight": randn(V), **GATE,
        "conv_state": randn(5, D, W - 1), "state": states(5), "state_indices": SLOTS,
        "out": torch.zeros(B, T, HV, V),
    }  # fmt: skip


def prefill():
    inputs = {name: x[0] for name, x in rule(1, 12).items()}
    return inputs | {"g": inputs["g"].exp(), "cu_seqlens": torch.tensor([0, 5, 12]), "initial_state": states().mT}


def backward(function):
    def call(do, dht, **inputs):
        initial_state = inputs.pop("initial_state")
        *_, saved = gd.chunk_gated_delta_rule_fwd(**inputs, initial_state=initial_state)
        return function(**inputs, initial_state=initial_state, saved=saved, do=do, dht=dht)

    return call


def gradients(**inputs):
    """Of the leaves behind the views."""
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    o, state = gd.chunk_gated_delta_rule(**leaves, use_gate_in_kernel=True, output_final_state=True)
    return torch.autograd.grad((o.square().sum() + state.sum()), [x for x in leaves.values() if x.requires_grad])


def applied(entering, leaving, do, **inputs):
    o, saved = cp.forward_apply(**inputs, entering=entering)
    return o, *cp.backward_apply(**inputs, do=do, entering=entering, leaving=leaving, saved=saved)


RAW = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
POOLS = {"initial_state_indices": SLOTS, "final_state_indices": SLOTS}
CALLS = {
    "chunk": (gd.chunk_gated_delta_rule, lambda: rule() | {"initial_state": states()}, ()),
    "chunk, raw gates": (lambda **x: gd.chunk_gated_delta_rule(**x, **RAW), lambda: rule() | GATE, ()),
    "chunk, packed": (
        lambda **x: gd.chunk_gated_delta_rule(**x, output_final_state=True),
        lambda: pack() | {"initial_state": states()}, (),
    ),
    "chunk, buffers": (
        gd.chunk_gated_delta_rule,
        lambda: rule() | POOLS | {
            "initial_state": states(5), "final_state": torch.zeros(5, HV, K, V), "out": torch.zeros(B, T, HV, V),
        },
        ("initial_state", "final_state", "out"),
    ),
    "chunk, gradients": (gradients, lambda: rule() | GATE | {"initial_state": states()}, ()),
    "forward": (gd.chunk_gated_delta_rule_fwd, lambda: rule() | {"initial_state": states()}, ()),
    "backward": (
        backward(gd.chunk_gated_delta_rule_bwd),
        lambda: rule() | {"initial_state": states(), "do": randn(B, T, HV, V), "dht": randn(B, HV, K, V)}, (),
    ),
    "convolution": (
        lambda **x: gd.causal_conv1d(**x, activation="silu", output_final_state=True),
        lambda: {
            "x": randn(B, T, 24), "weight": randn(24, W), "bias": randn(24), "initial_state": randn(B, 24, W - 1),
        }, (),
    ),
    "convolution, buffers": (
        gd.causal_conv1d,
        lambda: POOLS | {
            "x": randn(B, T, 24), "weight": randn(24, W), "initial_state": randn(5, 24, W - 1),
            "final_state": torch.zeros(5, 24, W - 1), "out": torch.zeros(B, T, 24),
        },
        ("initial_state", "final_state", "out"),
    ),
    "norm": (
        gd.rms_norm_gated,
        lambda: {"x": randn(B, T, HV, V), "gate": randn(B, T, HV, V, seed=1), "weight": randn(V)}, (),
    ),
    "norm of rank 5": (
        gd.rms_norm_gated, lambda: {"x": randn(2, B, T, HV, V), "gate": randn(2, B, T, HV, V, seed=1), "weight": None},
        (),
    ),
    "norm into a buffer": (
        gd.rms_norm_gated,
        lambda: {"x": randn(B, T, HV, V), "gate": None, "weight": None, "out": torch.zeros(B, T, HV, V)}, ("out",),
    ),
    "layer step": (
        lambda **x: gd.gated_delta_layer_step(**x, key_heads=HK), layer_step, ("conv_state", "state", "out"),
    ),
    "summary": (cp.forward_prepare, lambda: {n: x for n, x in pack().items() if n != "q"}, ()),
    "summary, raw gates": (
        lambda **x: cp.forward_prepare(**x, **RAW), lambda: {n: x for n, x in (rule() | GATE).items() if n != "q"}, (),
    ),
    "summary of gradients": (
        cp.backward_prepare, lambda: {n: x for n, x in pack().items() if n != "v"} | {"do": randn(1, 12, HV, V)}, (),
    ),
    "stages": (
        applied,
        lambda: pack() | {"entering": states(), "leaving": randn(B, HV, K, V), "do": randn(1, 12, HV, V)}, (),
    ),
    "merge": (
        cp.merge,
        lambda: {
            "values": randn(3, HV, K, V), "transitions": randn(3, HV, K, K) / K, "first": torch.tensor([0, 1]),
            "count": torch.tensor([2, 2]),
        }, (),
    ),
    "FlashQLA's rule": (flash_qla.chunk_gated_delta_rule, lambda: rule() | {"initial_state": states()}, ()),
    "FlashInfer's prefill": (
        lambda **x: flashinfer.chunk_gated_delta_rule(**x, output_final_state=True), prefill, (),
    ),
}  # fmt: skip


def results(function, arguments, written):
    arguments = {name: x.clone() if name in written and not x.is_neg() and x.is_contiguous() else x
                 for name, x in arguments.items()}  # fmt: skip
    found = function(**arguments)
    found = found if isinstance(found, tuple | list) else (found,)
    found = [x.data if isinstance(x, gd.Saved) else x for x in found if x is not None]
    return found + [arguments[name] for name in written]


def dense(x):
    return x.resolve_neg().clone(memory_format=torch.contiguous_format)


def check(function, make, written, name, kind):
    arguments = make()
    view = KINDS[kind](arguments[name])
    if view is None:
        return
    wanted = results(function, arguments | {name: dense(view)}, written)
    found = results(function, arguments | {name: view}, written)
    for x, y in zip(found, wanted, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(dense(x).nan_to_num(9), dense(y).nan_to_num(9)), (name, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_a_view_is_what_it_shows(call, kind):
    function, make, written = CALLS[call]
    for name, x in make().items():
        if x is None or (name in written and kind not in OF_POOLS):
            continue
        if name in written and name != "initial_state" and kind.startswith("negated"):
            with pytest.raises(ValueError, match="is written to, but it is a view that torch has only marked as neg"):
                function(**make() | {name: KINDS[kind](x)})
        else:
            check(function, make, written, name, kind)


@pytest.fixture(scope="module")
def group():
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_context(group, kind):
    context = cp.build_context([0, 5, 12])

    def forward(**x):
        return gd.chunk_gated_delta_rule(**x, cp_context=context, use_gate_in_kernel=True)[0]

    def conv(**x):
        return cp.causal_conv1d(**x, cp_context=context)[0]

    def with_gradients(**x):
        leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
        return torch.autograd.grad(forward(**leaves).square().sum(), list(leaves.values()))

    def of_do(do, **x):
        leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
        return torch.autograd.grad(forward(**leaves), list(leaves.values()), do)

    conv_inputs = {"x": randn(1, 12, 24), "weight": randn(24, W), "bias": randn(24)}
    for name in (*rule(), *GATE):
        check(forward, lambda: rule(1, 12) | GATE, (), name, kind)
        check(with_gradients, lambda: rule(1, 12) | GATE, (), name, kind)
    check(of_do, lambda: rule(1, 12) | GATE | {"do": randn(1, 12, HV, V)}, (), "do", kind)
    for name in conv_inputs:
        check(conv, lambda: conv_inputs, (), name, kind)


@pytest.mark.parametrize("call", ["chunk", "chunk, raw gates", "convolution", "norm"])
def test_functorchs_wrappers(call):
    function, make, _ = CALLS[call]
    arguments = make()
    wanted = results(function, arguments, ())
    for name in arguments:

        def of_one(x, name=name):
            return tuple(results(function, arguments | {name: x}, ()))

        found, _ = torch.func.vjp(of_one, negated(arguments[name]))
        for x, y in zip(found, wanted, strict=True):
            assert torch.equal(x, y)


def test_a_negated_buffer_of_the_merge_is_refused():
    values, indices = torch.zeros(1, 1, 16, 16), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^out is written to, but it is a view that torch has only marked"):
        cp.merge(values, values, indices, indices, out=torch._neg_view(torch.zeros(1, 1, 16, 16)))


def test_transforms_are_refused_with_a_context(group):
    context, inputs = cp.build_context([0, 5, 12]), rule(1, 12)

    def of_q(q):
        return gd.chunk_gated_delta_rule(**inputs | {"q": q}, cp_context=context)[0].sum()

    def of_x(x):
        return cp.causal_conv1d(x, randn(24, W), cp_context=context)[0].sum()

    for function, x in ((of_q, inputs["q"]), (of_x, randn(1, 12, 24))):
        with pytest.raises(NotImplementedError, match=r"^context parallelism cannot run in a transform of torch.func"):
            torch.func.grad(function)(x)
        with pytest.raises(NotImplementedError, match=r"^context parallelism cannot run in a transform of torch.func"):
            torch.func.vjp(function, x)


def test_the_negated_pool_is_another_one_for_flashinfer():
    pool = states().mT.contiguous()
    arguments = prefill() | {"initial_state": pool, "output_final_state": True}
    with pytest.raises(ValueError, match="is written to, but it is a view that torch has only marked as neg"):
        flashinfer.chunk_gated_delta_rule(**arguments, output_state=torch._neg_view(pool))
    assert torch.equal(pool, states().mT)

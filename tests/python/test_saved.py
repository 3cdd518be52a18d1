"""What a forward saves belongs to its call: the backward of another one refuses it, on the host and in words."""

from __future__ import annotations

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import gatedelta as gd  # noqa: E402
import gatedelta.numpy as gn  # noqa: E402
from gatedelta import context_parallel as cp  # noqa: E402
from gatedelta._lib import SavedCall  # noqa: E402
from gatedelta._operators import stages  # noqa: E402
from gatedelta.torch import Saved  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

B, T, HK, HV, K, V = 2, 70, 2, 4, 32, 32
NAMES = ("q", "k", "v", "g", "beta")


def make(B=B, T=T, HK=HK, HV=HV, K=K, V=V, dtype=torch.float32, **more):
    """The inputs of a forward, as keywords of both torch's and numpy's functions."""
    random = torch.Generator().manual_seed(1)
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, HK, K, generator=random), dim=-1) for _ in range(2))
    v, g = torch.randn(B, T, HV, V, generator=random), -torch.rand(B, T, HV, generator=random)
    rows = {"q": q, "k": k, "v": v, "g": g, "beta": torch.rand(B, T, HV, generator=random)}
    return {**rows, **{name: rows[name].to(dtype) for name in "qkv"}, **more}


H0 = torch.randn(B, HV, K, V, generator=torch.Generator().manual_seed(2))
# The forward's arguments, the backward's, and what is said about them.
OTHERS = {
    "longer": ({"T": 71}, {}, "with T = 71", "with T = 70"),
    "shorter": ({"T": 64}, {}, "with T = 64", "with T = 70"),
    "much longer": ({"T": 700}, {}, "with T = 700", "with T = 70"),
    "batch": ({"B": 1}, {}, "with B = 1", "with B = 2"),
    "key heads": ({"HK": 1}, {}, "with Hk = 1", "with Hk = 2"),
    "value heads": ({"HV": 6}, {}, "with Hv = 6", "with Hv = 4"),
    "K": ({"K": 48}, {}, "with K = 48", "with K = 32"),
    "V": ({"V": 16}, {}, "with V = 16", "with V = 32"),
    "dtype": ({"dtype": torch.float16}, {}, "with dtype float16", "with dtype float32"),
    "scale": ({"scale": 0.5}, {}, "with scale = 0.5", "with scale = 0.176777"),
    "layout": ({"state_v_first": True}, {}, "with state_layout VK", "with state_layout KV"),
    "no state": ({}, {"initial_state": H0}, "without initial_state", "with initial_state"),
    "a state": ({"initial_state": H0}, {}, "with initial_state", "without initial_state"),
    "a pack": ({"B": 1, "cu_seqlens": torch.tensor([0, 70])}, {"B": 1}, "with cu_seqlens", "without cu_seqlens"),
    "another pack": ({"B": 1, "cu_seqlens": torch.tensor([0, 5, 70])}, {"B": 1, "cu_seqlens": torch.tensor([0, 70])},
                     "with N = 2", "with N = 1"),
}  # fmt: skip
# Options that only whole functions have.
OF_NUMPY = {
    "l2norm": ({"use_qk_l2norm_in_kernel": True}, {}, "with l2norm", "without l2norm"),
    "logits": ({}, {"use_beta_sigmoid_in_kernel": True}, "with beta_kind value", "with beta_kind logit"),
    "gate": ({}, {"use_gate_in_kernel": True, "A_log": torch.zeros(HV)}, "with gate log", "with gate raw"),
    "order": ({"key_head_order": "tiled"}, {}, "with key_head_order tiled", "with key_head_order grouped"),
}


def numpy_of(arguments):
    return {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


def backward(arguments, saved):
    return gd.chunk_gated_delta_rule_bwd(**arguments, saved=saved, do=torch.ones_like(arguments["v"]))


def message_of(there, here):
    return f"saved is of a call {there}, but this one is {here}: give it what a forward of its own inputs saved"


@pytest.mark.parametrize("name", OTHERS)
def test_torch_refuses_what_another_call_saved(name):
    first, second, there, here = OTHERS[name]
    *_, saved = gd.chunk_gated_delta_rule_fwd(**make(**first))
    with pytest.raises(ValueError, match=f"^gatedelta: {re.escape(message_of(there, here))}$"):
        backward(make(**second), saved)


@pytest.mark.parametrize("name", [*OTHERS, *OF_NUMPY])
def test_numpy_refuses_what_another_call_saved(name):
    first, second, there, here = (OTHERS | OF_NUMPY)[name]
    saved = gn.forward(**numpy_of(make(**first)), save=True).saved
    inputs = numpy_of(make(**second))
    with pytest.raises(ValueError, match=f"^{re.escape(message_of(there, here))}$"):
        gn.backward(**inputs, do=np.ones_like(inputs["v"]), saved=saved)


@pytest.mark.parametrize("name", OTHERS)
def test_fake_tensors_refuse_alike(name):
    first, second, there, here = OTHERS[name]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [{n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in make(**more).items()}
                 for more in (first, second)]  # fmt: skip
        *_, saved = gd.chunk_gated_delta_rule_fwd(**fakes[0])
        with pytest.raises(ValueError, match=f"^gatedelta: {re.escape(message_of(there, here))}$"):
            backward(fakes[1], saved)


@pytest.mark.parametrize("more", [x for pair in OTHERS.values() for x in pair[:2] if x], ids=lambda x: "-".join(x))
def test_torch_and_the_library_describe_a_call_alike(more):
    arguments = make(**more)
    *_, saved = gd.chunk_gated_delta_rule_fwd(**arguments)
    expected = gn.forward(**numpy_of(arguments), save=True).saved
    assert saved.call._replace(scale=0) == expected.call._replace(scale=0)
    assert saved.call.scale == pytest.approx(expected.call.scale, rel=1e-6)
    assert saved.data.numel() == expected.data.size and saved.written and expected.written


def test_the_default_scale_may_be_given():
    arguments = make()
    *_, saved = gd.chunk_gated_delta_rule_fwd(**arguments)
    expected = backward(arguments, saved)
    for scale in (K**-0.5, np.float32(K) ** np.float32(-0.5)):
        results = backward(arguments | {"scale": float(scale)}, saved)
        assert all(x is y is None or torch.allclose(x, y) for x, y in zip(results, expected, strict=True))


def test_no_saved_of_a_forward():
    arguments = make()
    *_, saved = gd.chunk_gated_delta_rule_fwd(**arguments)
    for other in (saved.data, tuple(saved), saved._replace(call=tuple(saved.call)), 5):
        with pytest.raises(TypeError, match=r"^saved must be what chunk_gated_delta_rule_fwd returned, a Saved, or"):
            backward(arguments, other)
    with pytest.raises(TypeError, match=r"^saved must be a torch\.Tensor, not builtins\.int$"):
        backward(arguments, saved._replace(data=5))
    zeros = saved._replace(call=SavedCall(*[0] * len(SavedCall._fields)))
    with pytest.raises(ValueError, match=r"saved is of a call with B = 0, but this one is with B = 2"):
        backward(arguments, zeros)
    inputs = numpy_of(arguments)
    for call in (SavedCall(*[0] * len(SavedCall._fields)), SavedCall(*range(90, 90 + len(SavedCall._fields)))):
        with pytest.raises(ValueError, match=r"^saved is (given without saved_call|of a call with B = 90, but)"):
            gn.backward(**inputs, do=inputs["v"], saved=gn.Saved(saved.data.numpy(), call))


def test_compiled_as_one_graph_and_in_two():
    arguments = make(initial_state=H0)
    torch._dynamo.reset()

    def both(**inputs):
        o, state, saved = gd.chunk_gated_delta_rule_fwd(**inputs)
        return o, state, *backward(inputs, saved)

    expected = both(**arguments)
    options = {"fullgraph": True, "backend": "aot_eager"}
    for dynamic in (False, True):
        results = torch.compile(both, dynamic=dynamic, **options)(**arguments)
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    *_, saved = torch.compile(gd.chunk_gated_delta_rule_fwd, **options)(**arguments)
    assert isinstance(saved, Saved) and saved.call == gd.chunk_gated_delta_rule_fwd(**arguments)[2].call
    results = torch.compile(backward, **options)(arguments, saved)
    assert all(torch.equal(x, y) for x, y in zip(results, expected[2:], strict=True))
    *_, other = gd.chunk_gated_delta_rule_fwd(**make())
    with pytest.raises(Exception, match=r"saved is of a call|Observed exception"):
        torch.compile(backward, **options)(arguments, other)


class Rule(torch.autograd.Function):
    """What a caller with a function of its own writes."""

    @staticmethod
    def forward(ctx, *rows):
        o, _, saved = gd.chunk_gated_delta_rule_fwd(*rows)
        ctx.save_for_backward(*rows, saved.data)
        ctx.call = saved.call
        return o

    @staticmethod
    def backward(ctx, do):
        *rows, data = ctx.saved_tensors
        q, k, v, g, beta = rows
        dq, dk, dv, dbeta, dg, _ = gd.chunk_gated_delta_rule_bwd(q, k, v, g, beta, Saved(data, ctx.call), do)
        return dq, dk, dv, dg, dbeta


@pytest.mark.parametrize("how", ["plain", "checkpoint", "offloaded"])
def test_in_an_autograd_function_of_the_callers(how):
    leaves = [x.requires_grad_() for x in make().values()]
    expected = torch.autograd.grad(gd.chunk_gated_delta_rule(*leaves)[0].sum(), leaves)
    if how == "offloaded":
        with torch.autograd.graph.save_on_cpu():
            o = Rule.apply(*leaves)
    elif how == "checkpoint":
        o = torch.utils.checkpoint.checkpoint(Rule.apply, *leaves, use_reentrant=False)
    else:
        o = Rule.apply(*leaves)
    results = torch.autograd.grad(o.sum(), leaves)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def pack(T=T, **more):
    return make(B=1, T=T, **more)


def test_stages():
    rows, longer = pack(), pack(T=300)
    room, other = cp.empty_saved(**rows), cp.empty_saved(**longer)
    do, h0 = torch.ones_like(rows["v"]), H0[:1]
    message = re.escape(message_of("with T = 300", "with T = 70"))
    with pytest.raises(ValueError, match=message):
        cp.forward_prepare(*(rows[n] for n in NAMES[1:]), q=rows["q"], saved=other, prepared=True)
    cp.forward_prepare(*(rows[n] for n in NAMES[1:]), q=rows["q"], saved=other)  # it only writes
    with pytest.raises(ValueError, match=message):
        cp.forward_apply(**rows, entering=None, saved=other, prepared=True)
    for call in (
        lambda saved: cp.backward_prepare(*(rows[n] for n in ("q", "k", "g", "beta")), do, saved=saved),
        lambda saved: cp.backward_apply(**rows, do=do, entering=h0, saved=saved),
    ):
        with pytest.raises(ValueError, match=r"^saved is of empty_saved, and no forward has run"):
            call(room)
        with pytest.raises(ValueError, match=message):
            call(cp.forward_apply(**longer, entering=None)[1])
        with pytest.raises(ValueError, match=r"^saved is on meta, but the inputs are on cpu$"):
            call(room._replace(data=room.data.to("meta")))
    _, stateless = cp.forward_apply(**rows, entering=None, saved=room)
    _, saved = cp.forward_apply(**rows, entering=h0, saved=room, prepared=True)
    assert isinstance(saved, cp.Saved) and saved.written and saved.data is room.data
    with pytest.raises(ValueError, match=re.escape(message_of("without initial_state", "with initial_state"))):
        cp.backward_apply(**rows, do=do, entering=h0, saved=stateless)
    assert cp.backward_apply(**rows, do=do, entering=h0, saved=saved).dq.isfinite().all()
    cp.backward_prepare(*(rows[n] for n in ("q", "k", "g", "beta")), do, saved=saved)


def test_flags_of_stages():
    rows = pack()
    options = stages.Options(use_qk_l2norm_in_kernel=True, batch_invariant=True)
    _, saved = stages.forward(**rows, options=options)
    for other, there, here in (
        (options._replace(use_qk_l2norm_in_kernel=False), "with l2norm", "without l2norm"),
        (options._replace(batch_invariant=False), "with batch_invariant", "without batch_invariant"),
    ):
        with pytest.raises(ValueError, match=re.escape(message_of(there, here))):
            stages.backward(**rows, do=rows["v"], options=other, saved=saved)
    assert stages.backward(**rows, do=rows["v"], options=options, saved=saved).dq.isfinite().all()

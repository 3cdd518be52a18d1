"""Derivatives that torch's transforms would take and this library has not: refused, never a silent 0."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gatedelta import torch as gd  # noqa: E402
from test_torch_calls import make  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

FORMS = {
    "chunk": lambda *x: gd.chunk_gated_delta_rule(*x)[0],
    "recurrent": lambda q, k, v, g, beta: gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)[0],
    "fwd": lambda *x: gd.chunk_gated_delta_rule_fwd(*x)[0],
}


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def dual_call(function, *tensors):
    with forward_ad.dual_level():
        return function(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in tensors))


FORWARD_MODE = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: torch.func.jacfwd(lambda y: f(y).sum())(x),
    "linearize": lambda f, x: torch.func.linearize(f, x),
    "dual tensors": lambda f, x: dual_call(f, x),
    "dual tensors that require grad": lambda f, x: dual_call(f, x.clone().requires_grad_()),
}


@pytest.mark.parametrize("name", FORWARD_MODE)
@pytest.mark.parametrize("position", range(5))
def test_forward_mode_is_refused(form, name, position):
    tensors = make(T=3)[:5]

    def function(x):
        return form(*tensors[:position], x, *tensors[position + 1 :])

    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative.*use reverse mode"):
        FORWARD_MODE[name](function, tensors[position])


def test_forward_mode_through_states_and_buffers_is_refused():
    q, k, v, g, beta, h0 = make(T=3)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        dual_call(lambda h0: gd.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=h0), h0)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        dual_call(lambda q: gd.chunk_gated_delta_rule(q, k, v, g, beta, out=torch.empty_like(v)), q)


def test_forward_mode_through_the_backward_is_refused():
    q, k, v, g, beta, _ = make(T=3)
    q.requires_grad_()
    o, _ = gd.chunk_gated_delta_rule(q, k, v, g, beta)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        dual_call(lambda do: torch.autograd.grad(o, q, do), v)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        dual_call(lambda do: gd.chunk_gated_delta_rule_bwd(q, k, v, g, beta, None, do), v)
    with pytest.raises(NotImplementedError, match="forward mode AD"):  # torch's own words, from its autograd function
        torch.func.hessian(lambda q: gd.chunk_gated_delta_rule(q, k, v, g, beta)[0].sum())(q.detach())


def test_tensors_without_tangents_pass_in_a_dual_level():
    tensors = make(T=3)[:5]
    want, _ = gd.chunk_gated_delta_rule(*tensors)
    with forward_ad.dual_level():
        assert torch.equal(gd.chunk_gated_delta_rule(*tensors)[0], want)


VMAP = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda y: f(y).sum()))(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda y: torch.func.vmap(f)(y).sum())(x),
    "jvp of vmap": lambda f, x: torch.func.jvp(torch.func.vmap(f), (x,), (x,)),
    "vmap of leaves": lambda f, x: torch.func.vmap(f)(x.clone().requires_grad_()),
    "jacrev": lambda f, x: torch.func.jacrev(lambda y: f(y).sum((1, 2)))(x[0]),
}


@pytest.mark.parametrize("name", VMAP)
def test_vmap_is_refused(name):
    q, k, v, g, beta, _ = make(T=3)
    with pytest.raises(NotImplementedError, match=r"torch\.vmap.*fold the mapped dimension into the batch"):
        VMAP[name](lambda q: gd.chunk_gated_delta_rule(q, k, v, g, beta)[0], torch.stack([q, q]))


def test_torch_func_vjp_and_grad_of_several():
    tensors = make()[:5]

    def loss(*x):
        return gd.chunk_gated_delta_rule(*x)[0].square().sum()

    leaves = [x.clone().requires_grad_() for x in tensors]
    want = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.func.grad(loss, argnums=tuple(range(5)))(*tensors)
    pulled = torch.func.vjp(loss, *tensors)[1](torch.tensor(1.0))
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(want, got, pulled, strict=True))


def test_a_transform_of_another_tensor_changes_nothing():
    q, k, v, g, beta, h0 = make(T=3)
    want, _ = gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=h0)

    def scaled(factor):
        with torch.no_grad():
            state = h0.clone()
            o, _ = gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=state, final_state=state)
        return (o * factor).sum()

    assert torch.equal(torch.func.grad(scaled)(torch.tensor(2.0)), want.sum())


def test_numbers_that_require_a_gradient_are_refused():
    q, k, v, g, beta, _ = make(T=3)
    scale, pattern = torch.tensor(0.5, requires_grad=True), r"^scale requires a gradient, .* scale=1\.0 and multiply o"
    for call in (
        lambda scale: gd.chunk_gated_delta_rule(q, k, v, g, beta, scale)[0],
        lambda scale: gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, scale=scale)[0],
    ):
        with pytest.raises(ValueError, match=pattern):
            call(scale)
        with pytest.raises(ValueError, match=pattern):
            torch.func.grad(lambda scale, call=call: call(scale).sum())(scale.detach())
        with torch.no_grad():
            assert torch.equal(call(scale), call(0.5))
        assert torch.equal(call(scale.detach()), call(0.5))
    with pytest.raises(ValueError, match=r"^eps requires a gradient, but it is a number, which gets none: pass float"):
        gd.rms_norm_gated(v, None, None, eps=torch.tensor(1e-6, requires_grad=True))

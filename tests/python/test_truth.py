"""The fp64 truth itself, against torch's autograd through the recurrence written token by token in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from testing.truth import Case  # noqa: E402


def recurrence(case: Case, q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None):
    """The definition, with every transform of the inputs, as differentiable float64 torch code."""
    options = case.options
    if options["use_qk_l2norm_in_kernel"]:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if options["use_gate_in_kernel"]:
        a = g if dt_bias is None else g + dt_bias
        g = -A_log.exp() * torch.where(a > 20, a, torch.nn.functional.softplus(a.clamp(max=20)))
    if options["use_beta_sigmoid_in_kernel"]:
        beta = beta.sigmoid() * (2 if options["allow_neg_eigval"] else 1)
    scale = options["scale"] if options["scale"] is not None else 1 / math.sqrt(q.shape[-1])
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    if options["state_v_first"] and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)

    if case.cu_seqlens is None:
        spans = [(n, 0, q.shape[1]) for n in range(q.shape[0])]
    else:
        offsets = case.cu_seqlens.tolist()
        spans = [(0, begin, end) for begin, end in pairwise(offsets)]
    rows = [[torch.zeros_like(v[b, t]) for t in range(v.shape[1])] for b in range(v.shape[0])]
    states = []
    for n, (b, begin, end) in enumerate(spans):
        state = torch.zeros(v.shape[2], q.shape[3], v.shape[3], dtype=torch.float64)
        if initial_state is not None:
            state = initial_state[n]
        for t in range(begin, end):
            state = state * g[b, t].exp()[:, None, None]
            error = v[b, t] - torch.einsum("hkv,hk->hv", state, k[b, t])
            state = state + torch.einsum("hk,hv->hkv", beta[b, t][:, None] * k[b, t], error)
            rows[b][t] = scale * torch.einsum("hkv,hk->hv", state, q[b, t])
        states.append(state.transpose(-1, -2) if options["state_v_first"] else state)
    return torch.stack([torch.stack(row) for row in rows]), torch.stack(states)


@pytest.mark.parametrize(
    "spec",
    [
        "B=2 T=20 Hk=1 Hv=2 K=16 V=32 dtype=fp32",
        "B=1 T=70 Hk=2 Hv=4 K=32 V=16 dtype=bf16 gate=strong layout=vk",
        "B=1 T=20 Hk=2 Hv=4 K=16 V=16 dtype=fp32 gate=raw beta=logit2 l2norm=1 keys=loose scale=0.3",
        "lengths=5+0+17 Hk=1 Hv=3 K=16 V=16 dtype=fp32 gate=raw beta=logit l2norm=1 dt_bias=0 keys=correlated",
        "lengths=9+20 pad=4 Hk=1 Hv=1 K=16 V=16 dtype=fp16 h0=0 beta=two",
    ],
)
def test_truth_is_the_recurrence_and_its_derivative(spec):
    case = Case(spec)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    leaves = {}
    for name in names:
        tensor = getattr(case, name)
        if tensor is not None:
            # Padding is NaN on purpose; the recurrence above never reads it, but autograd's zeros times NaN would.
            leaves[name] = tensor.detach().double().nan_to_num(0).requires_grad_()
    o, final_state = recurrence(case, **leaves)
    truth = case.forward_truth()
    np.testing.assert_allclose(o.detach().numpy(), truth["o"], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(final_state.detach().numpy(), truth["final_state"], rtol=1e-9, atol=1e-11)

    do = case.do.double().nan_to_num(0)
    gradients = torch.autograd.grad([o, final_state], list(leaves.values()), [do, case.dht.double()])
    truth = case.backward_truth()
    for name, gradient in zip(leaves, gradients, strict=True):
        quantity = name if name in truth else f"d_{name}" if f"d_{name}" in truth else f"d{name}"
        np.testing.assert_allclose(gradient.numpy(), truth[quantity], rtol=1e-8, atol=1e-10, err_msg=name)

"""Every torch function against the fp64 recurrence: dtypes, layouts, gates, packed sequences, pools, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gatedelta import torch as gd  # noqa: E402

from testing.truth import Case  # noqa: E402

CASES = [
    "B=2 T=130 Hk=2 Hv=4 K=64 V=32 dtype=fp32",
    "B=2 T=130 Hk=2 Hv=4 K=64 V=32 dtype=bf16",
    "B=2 T=130 Hk=2 Hv=4 K=64 V=32 dtype=fp16",
    "B=1 T=200 Hk=1 Hv=1 K=128 V=128 dtype=bf16 layout=vk",
    "B=1 T=200 Hk=1 Hv=3 K=16 V=48 dtype=fp32 layout=vk h0=0",
    "B=1 T=65 Hk=1 Hv=2 K=256 V=256 dtype=bf16 h0=0",
    "B=2 T=1 Hk=2 Hv=2 K=32 V=32 dtype=fp32",
    "T=130 Hk=2 Hv=8 K=64 V=64 dtype=bf16 gate=strong gdtype=bf16",
    "T=130 Hk=2 Hv=4 K=64 V=64 dtype=bf16 gate=spiky keys=correlated",
    "T=130 Hk=1 Hv=4 K=64 V=64 dtype=fp32 gate=inf beta=two",
    "T=130 Hk=1 Hv=4 K=64 V=64 dtype=fp32 gate=huge beta=zeros",
    "T=130 Hk=2 Hv=4 K=64 V=64 dtype=bf16 gate=raw beta=logit l2norm=1 keys=loose",
    "T=130 Hk=2 Hv=4 K=64 V=64 dtype=fp32 gate=raw beta=logit2 l2norm=1 dt_bias=0 scale=0.25",
    "lengths=3x64+0+130+1 pad=37 Hk=2 Hv=4 K=64 V=32 dtype=bf16",
    "lengths=0+17+0+200+64 pad=5 Hk=1 Hv=2 K=32 V=64 dtype=fp32 i64=1 layout=vk",
    "lengths=5+60+65 Hk=2 Hv=2 K=64 V=64 dtype=fp32 strided=1 gate=raw beta=logit l2norm=1",
    "B=2 T=100 Hk=2 Hv=4 K=64 V=64 dtype=bf16 strided=1 layout=vk state=bf16",
]
GRADIENT_NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "d_dt_bias", "d_initial_state")


def run_chunk(case: Case, tensors: dict | None = None, **more):
    t = tensors or {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta", "initial_state")}
    options = case.options
    for name in ("A_log", "dt_bias"):
        if tensors and name in tensors:
            options[name] = tensors[name]
    return gd.chunk_gated_delta_rule(
        t["q"], t["k"], t["v"], t["g"], t["beta"], initial_state=t["initial_state"], output_final_state=True,
        **options, **more,
    )  # fmt: skip


@pytest.mark.parametrize("spec", CASES)
def test_chunk_forward(spec):
    case = Case(spec)
    o, final_state = run_chunk(case)
    truth = case.forward_truth()
    assert o.dtype == case.q.dtype and final_state.dtype == torch.float32
    case.check("o", o, truth["o"])
    case.check("final_state", final_state, truth["final_state"])
    assert case.damage() == ""


@pytest.mark.parametrize("spec", CASES)
def test_recurrent_forward(spec):
    case = Case(spec)
    options = case.options
    o, final_state = gd.fused_recurrent_gated_delta_rule(
        case.q, case.k, case.v, case.g, beta=case.beta, initial_state=case.initial_state, output_final_state=True,
        **options,
    )  # fmt: skip
    truth = case.recurrent_truth()
    case.check("o", o, truth["o"])
    case.check("final_state", final_state, truth["final_state"])


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
@pytest.mark.parametrize("spec", CASES)
def test_chunk_gradients(spec, recompute):
    case = Case(spec)
    check_gradients(case, lambda tensors: run_chunk(case, tensors, recompute=recompute))


@pytest.mark.parametrize("spec", CASES[:3] + CASES[11:14])
def test_recurrent_gradients(spec):
    case = Case(spec)

    def call(t):
        options = {**case.options, "A_log": t.get("A_log"), "dt_bias": t.get("dt_bias")}
        return gd.recurrent_gated_delta_rule(
            t["q"], t["k"], t["v"], t["g"], beta=t["beta"], initial_state=t["initial_state"], output_final_state=True,
            **options,
        )  # fmt: skip

    check_gradients(case, call)


def check_gradients(case: Case, call) -> None:
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    tensors = {name: None if getattr(case, name) is None else getattr(case, name).detach() for name in names}
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items() if tensor is not None}
    o, final_state = call({**tensors, **leaves})
    results = torch.autograd.grad([o, final_state], list(leaves.values()), [case.do, case.dht])
    truth = case.backward_truth()
    for (name, leaf), gradient in zip(leaves.items(), results, strict=True):
        assert gradient.dtype == leaf.dtype
        quantity = GRADIENT_NAMES[names.index(name)]
        case.check(quantity, gradient, truth[quantity])


def test_only_o_or_only_final_state_is_used():
    case = Case("T=130 Hk=1 Hv=2 K=32 V=32 dtype=fp32 dht=0")
    q = case.q.detach().requires_grad_()
    o, _ = gd.chunk_gated_delta_rule(q, case.k, case.v, case.g, case.beta, initial_state=case.initial_state)
    (dq,) = torch.autograd.grad(o, q, case.do)
    case.check("dq", dq, case.backward_truth()["dq"])

    case = Case("T=130 Hk=1 Hv=2 K=32 V=32 dtype=fp32")
    case.do.zero_()
    k = case.k.detach().requires_grad_()
    _, final_state = gd.chunk_gated_delta_rule(
        case.q, k, case.v, case.g, case.beta, initial_state=case.initial_state, output_final_state=True
    )
    (dk,) = torch.autograd.grad(final_state, k, case.dht)
    case.check("dk", dk, case.backward_truth()["dk"])


@pytest.mark.parametrize("spec", CASES[:5] + CASES[13:15])
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "recompute"])
def test_low_level(spec, saved):
    case = Case(spec)
    common = {
        "scale": None,
        "initial_state": case.initial_state,
        "cu_seqlens": case.cu_seqlens,
        "state_v_first": case.options["state_v_first"],
    }
    o, final_state, kept = gd.chunk_gated_delta_rule_fwd(case.q, case.k, case.v, case.g, case.beta, **common)
    truth = case.forward_truth()
    case.check("o", o, truth["o"])
    case.check("final_state", final_state, truth["final_state"])
    results = gd.chunk_gated_delta_rule_bwd(
        case.q, case.k, case.v, case.g, case.beta, kept if saved else None, case.do, case.dht, **common
    )
    truth = case.backward_truth()
    names = ("dq", "dk", "dv", "dbeta", "dg", "d_initial_state")
    for name, gradient in zip(names, results, strict=True):
        if name in truth:
            case.check(name, gradient, truth[name])
        else:
            assert gradient is None


POOLS = [
    "lengths=64+130+0+1+70 pad=9 Hk=1 Hv=2 K=64 V=32 dtype=bf16 pool=1 inplace=1 every=64",
    "lengths=64+130+0+1+70 pad=9 Hk=1 Hv=2 K=64 V=32 dtype=fp32 pool=1 inplace=1 layout=vk state=bf16 i64=1",
    "lengths=64+130+300+1+70 Hk=2 Hv=2 K=32 V=64 dtype=fp32 pool=1 every=128 strided=1",
    "B=3 T=200 Hk=1 Hv=2 K=64 V=64 dtype=bf16 every=64 state=bf16",
    "B=3 T=130 Hk=1 Hv=2 K=64 V=64 dtype=fp16 inplace=1 state=fp16",
]


def check_states(case: Case, quantity: str, pool, indices, truth: np.ndarray) -> None:
    """States of a buffer or, where slots are given and not negative, of a pool."""
    if pool is None:
        return
    if indices is not None:
        stored = (indices >= 0).numpy()
        pool, truth = pool[indices[indices >= 0].long()], truth[stored]
    case.check(quantity, pool, truth)


@pytest.mark.parametrize("spec", POOLS)
def test_chunk_into_buffers(spec):
    case = Case(spec)
    truth = case.forward_truth()
    args = case.forward_args
    b = case.buffers(args, "out", "final_state", "final_state_indices", "checkpoints", "checkpoint_indices")
    o, final_state = gd.chunk_gated_delta_rule(
        case.q, case.k, case.v, case.g, case.beta, initial_state=case.initial_state, out=b["out"],
        initial_state_indices=case.initial_state_indices, final_state=b["final_state"],
        final_state_indices=b["final_state_indices"], checkpoints=b["checkpoints"],
        checkpoint_indices=b["checkpoint_indices"], checkpoint_every=args.checkpoint_every, **case.options,
    )  # fmt: skip
    assert o is b["out"] and final_state is b["final_state"]
    case.check("o", o, truth["o"])
    check_states(case, "final_state", final_state, b["final_state_indices"], truth["final_state"])
    check_states(case, "checkpoints", b["checkpoints"], b["checkpoint_indices"], truth.get("checkpoints"))
    assert case.damage() == ""


@pytest.mark.parametrize(
    "spec",
    [
        "B=5 T=1 Hk=2 Hv=4 K=128 V=128 dtype=bf16 pool=1 inplace=1 layout=vk",
        "B=3 T=4 Hk=1 Hv=2 K=64 V=32 dtype=bf16 pool=1 inplace=1 accept=1 state=bf16",
        "B=3 T=4 Hk=1 Hv=2 K=64 V=32 dtype=fp32 steps=dense i64=1",
        "B=3 T=8 Hk=1 Hv=2 K=64 V=32 dtype=fp32 pool=1 steps=pool accept=1 gate=raw beta=logit l2norm=1",
        "lengths=1+4+0+3 pad=2 Hk=1 Hv=2 K=64 V=32 dtype=fp32 pool=1 inplace=1 accept=1 strided=1",
    ],
)
def test_recurrent_into_buffers(spec):
    case = Case(spec)
    truth = case.recurrent_truth()
    args = case.recurrent_args
    b = case.buffers(args, "out", "final_state", "final_state_indices", "accept_lengths", "step_states", "step_indices")
    o, final_state = gd.fused_recurrent_gated_delta_rule(
        case.q, case.k, case.v, case.g, beta=case.beta, initial_state=case.initial_state, out=b["out"],
        initial_state_indices=case.initial_state_indices, final_state=b["final_state"],
        final_state_indices=b["final_state_indices"], accept_lengths=b["accept_lengths"], step_states=b["step_states"],
        step_indices=b["step_indices"], **case.options,
    )  # fmt: skip
    case.check("o", o, truth["o"])
    check_states(case, "final_state", final_state, b["final_state_indices"], truth["final_state"])
    steps = b["step_states"]
    if steps is not None and b["step_indices"] is None:
        case.check("step_states", steps, truth["step_states"])
    elif steps is not None:
        indices = b["step_indices"]
        stored = steps[indices[indices >= 0].long()]
        expected = truth["step_states"][(indices >= 0).numpy()]
        case.check("step_states", stored.unsqueeze(0), expected[np.newaxis])
    assert case.damage() == ""


def test_commit_moves_the_states_without_o():
    case = Case("B=3 T=4 Hk=1 Hv=2 K=64 V=32 dtype=fp32 accept=1")
    lengths = case.buffers(case.recurrent_args, "accept_lengths")["accept_lengths"]
    o, final_state = gd.fused_recurrent_gated_delta_rule(
        case.q, case.k, case.v, case.g, beta=case.beta, initial_state=case.initial_state, output_final_state=True,
        accept_lengths=lengths, output_o=False,
    )  # fmt: skip
    assert o is None
    case.check("final_state", final_state, case.recurrent_truth()["final_state"])


def test_recurrent_defaults_mean_no_decay_and_beta_one():
    case = Case("B=2 T=3 Hk=2 Hv=4 K=32 V=16 dtype=fp32")
    got = gd.fused_recurrent_gated_delta_rule(case.q, case.k, case.v)[0]
    want = gd.fused_recurrent_gated_delta_rule(
        case.q, case.k, case.v, torch.zeros_like(case.g), beta=torch.ones_like(case.beta)
    )[0]
    assert torch.equal(got, want)


def test_a_prefix_restored_from_a_checkpoint_continues_as_if_never_cut():
    case = Case("T=300 Hk=1 Hv=2 K=64 V=64 dtype=fp32 h0=0")
    checkpoints = torch.empty(2, 2, 64, 64)
    full, _ = gd.chunk_gated_delta_rule(
        case.q, case.k, case.v, case.g, case.beta, checkpoints=checkpoints, checkpoint_every=128
    )
    rest = [x[:, 256:] for x in (case.q, case.k, case.v, case.g, case.beta)]
    continued, _ = gd.chunk_gated_delta_rule(*rest, initial_state=checkpoints[1:])
    assert torch.equal(full[:, 256:], continued)


def test_rows_with_gaps_inside_are_copied():
    """A causal convolution leaves q, k, v channel-first: the last dimension's stride is T."""
    case = Case("B=2 T=70 Hk=2 Hv=2 K=32 V=32 dtype=fp32")
    want = run_chunk(case)

    def channel_first(x):
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    tensors = {name: channel_first(getattr(case, name)) for name in ("q", "k", "v")}
    tensors |= {"g": case.g, "beta": case.beta}
    tensors["initial_state"] = case.initial_state.transpose(2, 3).contiguous().transpose(2, 3)
    assert tensors["q"].stride(-1) == 70
    got = run_chunk(case, tensors)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_expanded_output_gradient():
    """`o.sum().backward()` hands over a gradient whose strides are all 0."""
    case = Case("T=70 Hk=1 Hv=1 K=32 V=32 dtype=fp32 dht=0")
    q = case.q.detach().requires_grad_()
    o, _ = gd.chunk_gated_delta_rule(q, case.k, case.v, case.g, case.beta, initial_state=case.initial_state)
    o.sum().backward()
    case.do.fill_(1)
    case.check("dq", q.grad, case.backward_truth()["dq"])

"""Tiled key heads (value head h uses key head h % Hk): numpy and torch against the fp64 recurrence, and against the
grouped order with the heads reordered."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

import gatedelta.numpy as gn  # noqa: E402
from gatedelta import torch as gt  # noqa: E402
from gatedelta.torch import _direct, _functional  # noqa: E402

from testing.truth import Case  # noqa: E402

SPECS = [
    "tiled T=150 Hk=2 Hv=6 K=32 V=48 dtype=fp32 l2norm gate=raw beta=logit",
    "tiled lengths=70+0+129+5 pad=3 Hk=3 Hv=6 K=64 V=32 dtype=bf16 layout=vk",
]
HK, HV, K, V = 2, 6, 32, 16
# Where each value head of the grouped order stands in the tiled one.
ORDER = [i % (HV // HK) * HK + i // (HV // HK) for i in range(HV)]
MESSAGE = "key_head_order is 'mixed', must be 'grouped' or 'tiled'"


@pytest.mark.parametrize("spec", SPECS)
def test_numpy_is_the_recurrence(spec):
    case = Case(spec, numpy=True)
    inputs, h0 = (case.q, case.k, case.v, case.g, case.beta), case.initial_state
    truth = case.forward_truth()
    forward = gn.forward(*inputs, initial_state=h0, output_final_state=True, save=True, **case.options)
    case.check("o", forward.o, truth["o"])
    case.check("final_state", forward.final_state, truth["final_state"])
    gradients = gn.backward(*inputs, do=case.do, dht=case.dht, saved=forward.saved, initial_state=h0, **case.options)
    for name, expected in case.backward_truth().items():
        case.check(name, getattr(gradients, name), expected)
    recurrent = gn.recurrent(*inputs, initial_state=h0, output_final_state=True, **case.options)
    truth = case.recurrent_truth()
    case.check("o", recurrent.o, truth["o"])
    case.check("final_state", recurrent.final_state, truth["final_state"])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("recompute", [False, True])
def test_torch_is_the_recurrence(spec, recompute):
    case = Case(spec)
    names = ("q", "k", "v", "g", "beta", "initial_state")
    leaves = [getattr(case, name).clone().requires_grad_() for name in names]
    *inputs, h0 = leaves
    options = {**case.options}
    more = [options[name] for name in ("A_log", "dt_bias") if options[name] is not None]
    for tensor in more:
        tensor.requires_grad_()
    o, final = gt.chunk_gated_delta_rule(
        *inputs, initial_state=h0, output_final_state=True, recompute=recompute, **options
    )
    truth = case.forward_truth()
    case.check("o", o.detach(), truth["o"])
    case.check("final_state", final.detach(), truth["final_state"])
    torch.autograd.backward([o, final], [case.do, case.dht])
    expected = case.backward_truth()
    quantities = ("dq", "dk", "dv", "dg", "dbeta", "d_initial_state", "dA_log", "d_dt_bias")
    for quantity, tensor in zip(quantities, leaves + more, strict=False):
        case.check(quantity, tensor.grad, expected[quantity])


@pytest.mark.parametrize("direct", [True, False])
def test_torch_steps_are_the_recurrence(direct, monkeypatch):
    if direct and _direct.recurrent is None:
        pytest.skip("this torch has no direct call")
    if not direct:
        monkeypatch.setattr(_functional._direct, "recurrent", None)
    case = Case("tiled B=3 T=4 Hk=2 Hv=6 K=32 V=48 dtype=fp32 l2norm gate=raw beta=logit")
    o, final = gt.fused_recurrent_gated_delta_rule(
        case.q, case.k, case.v, g=case.g, beta=case.beta, initial_state=case.initial_state, output_final_state=True,
        **case.options,
    )  # fmt: skip
    truth = case.recurrent_truth()
    case.check("o", o, truth["o"])
    case.check("final_state", final, truth["final_state"])


def arrays(heads_of_v=slice(None)) -> dict:
    """Inputs of the layer's step, value heads in the order given."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.standard_normal(shape).astype(np.float32)

    def by_head(x, axis):
        return np.ascontiguousarray(np.take(x, np.arange(HV)[heads_of_v], axis))

    keys = 2 * HK * K
    x, weight, window = normal(3, 2, keys + HV * V), normal(keys + HV * V, 4), normal(3, keys + HV * V, 3)

    def channels(x, axis):
        q_k, v = np.split(x, [keys], axis)
        shape = v.shape[:axis] + (HV, V) + v.shape[axis + 1 :]
        return np.concatenate([q_k, by_head(v.reshape(shape), axis).reshape(v.shape)], axis)

    return {
        "mixed_qkv": channels(x, 2), "z": by_head(normal(3, 2, HV, V), 2),
        "a": by_head(normal(3, 2, HV), 2), "b": by_head(normal(3, 2, HV), 2), "key_heads": HK,
        "conv_weight": channels(weight, 0), "conv_state": channels(window, 1),
        "A_log": by_head(normal(HV), 0), "state": by_head(normal(3, HV, K, V), 1), "norm_weight": normal(V),
    }  # fmt: skip


@pytest.mark.parametrize("torch_too", [False, True])
def test_layer_step_is_that_of_reordered_heads(torch_too):
    """Bit for bit: heads do not touch each other."""

    def step(arguments, **keywords):
        if not torch_too:
            return gn.layer_step(**arguments, **keywords), arguments["state"]
        tensors = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
        return gt.gated_delta_layer_step(**tensors, **keywords).numpy(), tensors["state"].numpy()

    out, state = step(arrays(), key_head_order="tiled")
    grouped_out, grouped_state = step(arrays(ORDER))
    assert np.array_equal(out[:, :, ORDER], grouped_out)
    assert np.array_equal(state[:, ORDER], grouped_state)
    plain_out, _ = step(arrays())
    assert not np.array_equal(out, plain_out)


def test_unknown_orders_are_refused():
    case = Case("T=3 Hk=1 Hv=2 K=16 V=16", numpy=True)
    inputs = (case.q, case.k, case.v, case.g, case.beta)
    tensors = [torch.from_numpy(x) for x in inputs]
    q, k, v, g, beta = tensors
    for call in (
        lambda: gn.forward(*inputs, key_head_order="mixed"),
        lambda: gn.recurrent(*inputs, key_head_order="mixed"),
        lambda: gn.layer_step(**arrays(), key_head_order="mixed"),
        lambda: gt.chunk_gated_delta_rule(*tensors, key_head_order="mixed"),
        lambda: gt.fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, key_head_order="mixed"),
    ):
        with pytest.raises(ValueError, match=MESSAGE):
            call()

"""The layer's step, torch and numpy: against transformers' torch code, against the rule and the norm in float64, and
what it refuses."""

from __future__ import annotations

import importlib
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")

import gatedelta.numpy as gdn  # noqa: E402
from gatedelta import torch as gd  # noqa: E402
from gatedelta._operators import layer_step, ops  # noqa: E402
from torch.nn import functional  # noqa: E402

from tools.dev_paths import ROOT  # noqa: E402

HK, HV, K, V, W = 2, 4, 32, 16, 4
D = 2 * HK * K + HV * V
# Those of testing/tolerance.cpp: what lies between the operations is rounded to the inputs' dtype.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3.2e-3, torch.float16: 4e-4}
ARRAYS = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def make(B=3, T=1, dtype=torch.float32, state_dtype=torch.float32, slots=None, columns=W - 1, v_first=False, seed=0):
    """The function's arguments; the states are pools with slots."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype=dtype, scale=1.0):
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    slots = B if slots is None else slots
    return {
        "mixed_qkv": normal(B, T, D), "z": normal(B, T, HV, V), "a": normal(B, T, HV), "b": normal(B, T, HV),
        "key_heads": HK, "conv_weight": normal(D, W, scale=0.5), "conv_bias": normal(D, scale=0.2),
        "conv_state": normal(slots, D, columns), "A_log": normal(HV, dtype=torch.float32), "dt_bias": normal(HV),
        "state": normal(slots, HV, *((V, K) if v_first else (K, V)), dtype=state_dtype, scale=0.3),
        "norm_weight": 1 + normal(V, scale=0.2), "state_v_first": v_first,
    }  # fmt: skip


def truth(arguments, rows=None):
    """In float64, of dense sequences with a state each, rounded between the operations: out, conv states, states."""
    x, dtype = arguments["mixed_qkv"].double(), arguments["mixed_qkv"].dtype
    conv_state, state = arguments["conv_state"].double(), arguments["state"].double()
    if rows is not None:
        conv_state, state = conv_state[rows], state[rows]
    if arguments["state_v_first"]:
        state = state.transpose(-1, -2)
    T, weight = x.shape[1], arguments["conv_weight"].double()
    window = torch.cat([conv_state, x.transpose(1, 2)], -1)
    inputs = window.unfold(-1, W, 1)[:, :, -T:]
    y = functional.silu((inputs * weight[:, None]).sum(-1) + arguments["conv_bias"].double()[:, None])
    q, k, v = y.transpose(1, 2).to(dtype).double().split([HK * K, HK * K, HV * V], -1)
    q, k = (t.unflatten(-1, (HK, K)).repeat_interleave(HV // HK, 2) for t in (q, k))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    v = v.unflatten(-1, (HV, V))
    decay = -arguments["A_log"].double().exp() * functional.softplus(
        arguments["a"].double() + arguments["dt_bias"].double()
    )
    beta = arguments["b"].double().sigmoid()
    outputs, states = [], []
    for t in range(T):
        state = state * decay[:, t].exp()[..., None, None]
        error = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * error[:, :, None]
        states.append(state)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * K**-0.5)
    o = torch.stack(outputs, 1).to(dtype).double()
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-6) * arguments["norm_weight"].double()
    states = torch.stack(states, 1)
    if arguments["state_v_first"]:
        states = states.transpose(-1, -2)
    return o * functional.silu(arguments["z"].double()), window[:, :, -conv_state.shape[-1] :], states


def check(got, expected, dtype):
    bound = (BOUNDS[dtype] ** 2 + BOUNDS[got.dtype] ** 2) ** 0.5
    assert ((got.double() - expected).norm() / expected.norm()).item() <= bound


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("T", "v_first"), [(1, False), (1, True), (3, False)])
def test_truth(dtype, T, v_first):
    arguments = make(T=T, dtype=dtype, v_first=v_first)
    out, windows, states = truth(arguments)
    got = gd.gated_delta_layer_step(**arguments)
    assert got.dtype == dtype
    check(got, out, dtype)
    check(arguments["state"], states[:, -1], dtype)
    assert torch.equal(arguments["conv_state"].double(), windows)


def test_pools():
    """Slots that no index names keep their bits, whatever they are; padded rows are zero."""
    arguments = make(B=4, slots=9, dtype=torch.bfloat16)
    slots = torch.tensor([7, 2, 0, 4], dtype=torch.int32)
    named = [7, 2, 4]
    for name in ("state", "conv_state"):
        unnamed = torch.ones(9, dtype=torch.bool)
        unnamed[named] = False
        arguments[name][unnamed] = torch.nan
    arguments["mixed_qkv"][2] = arguments["a"][2] = torch.nan
    rows = {name: t[[0, 1, 3]] if name in ("mixed_qkv", "z", "a", "b") else t for name, t in arguments.items()}
    out, windows, states = truth(rows, rows=named)
    got = gd.gated_delta_layer_step(**arguments, state_indices=slots, null_index=0)
    check(got[[0, 1, 3]], out, torch.bfloat16)
    assert not got[2].any()
    check(arguments["state"][named], states[:, -1], torch.bfloat16)
    assert torch.equal(arguments["conv_state"][named].double(), windows)
    assert arguments["state"].isfinite().flatten(1).all(1).nonzero().flatten().tolist() == sorted(named)
    assert arguments["conv_state"].isfinite().flatten(1).all(1).nonzero().flatten().tolist() == sorted(named)


def test_final_slots():
    arguments = make(B=2, slots=5)
    expected = {name: t.clone() if torch.is_tensor(t) else t for name, t in arguments.items()}
    before = expected["state"].clone(), expected["conv_state"].clone()
    out = gd.gated_delta_layer_step(**expected, state_indices=torch.tensor([3, 1]))
    got = gd.gated_delta_layer_step(
        **arguments, state_indices=torch.tensor([3, 1]), final_state_indices=torch.tensor([0, 4])
    )
    assert torch.equal(got, out)
    for name, first in zip(("state", "conv_state"), before):
        assert torch.equal(arguments[name][[0, 4]], expected[name][[3, 1]])
        assert torch.equal(arguments[name][1:4], first[1:4])


def test_draft_windows():
    """Two windows, of which some tokens of the first are kept, have the bits of the kept tokens one by one."""
    T, kept = 3, [2, 1]
    arguments = make(B=2, T=2 * T, slots=2 * T + 2, columns=W - 2 + T)
    slots = 1 + torch.arange(2 * T).view(2, T)
    first = slots[:, 0]
    plain = {name: t.clone() if torch.is_tensor(t) else t for name, t in arguments.items()}
    plain["conv_state"] = arguments["conv_state"][..., : W - 1].clone()  # a prefill's state, of which 1 token counts
    draft = dict(arguments)

    def tokens(source, begin, rows):
        part = dict(source)
        for name in ("mixed_qkv", "z", "a", "b"):
            part[name] = torch.stack([source[name][row, begin[row] : begin[row] + rows] for row in range(2)])
        return part

    accepted = torch.ones(2, dtype=torch.int32)
    begin = [0, 0]
    for keep in (kept, [3, 3]):
        got = gd.gated_delta_layer_step(
            **tokens(draft, begin, T), state_indices=slots, step_indices=slots, previous_accept_lengths=accepted,
            null_index=0,
        )  # fmt: skip
        for row in range(2):
            for t in range(keep[row]):
                one = tokens(plain, [begin[row] + t] * 2, 1)
                one = {n: x[row : row + 1] if n in ("mixed_qkv", "z", "a", "b") else x for n, x in one.items()}
                out = gd.gated_delta_layer_step(**one, state_indices=first[row : row + 1])
                assert torch.equal(out[0, 0], got[row, t])
            assert torch.equal(plain["state"][first[row]], draft["state"][slots[row, keep[row] - 1]])
        accepted = torch.tensor(keep, dtype=torch.int32)
        begin = [b + k for b, k in zip(begin, keep)]


def test_packed_equals_dense():
    arguments = make(B=3, T=2)
    packed = {
        name: t.flatten(0, 1)[None] if name in ("mixed_qkv", "z", "a", "b") else t for name, t in arguments.items()
    }
    packed |= {name: arguments[name].clone() for name in ("state", "conv_state")}
    steps = torch.empty(3, 2, HV, K, V)
    dense = gd.gated_delta_layer_step(**arguments, step_states=steps)
    out = torch.empty(1, 6, HV, V)
    got = gd.gated_delta_layer_step(**packed, cu_seqlens=torch.tensor([0, 2, 4, 6]), out=out)
    assert got is out
    assert torch.equal(got.view(dense.shape), dense)
    assert torch.equal(packed["state"], steps[:, -1])
    assert torch.equal(packed["conv_state"], arguments["conv_state"])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_numpy_has_the_bits_of_torch(dtype):
    arguments = make(dtype=dtype, slots=5)

    def array(t):
        return t.float().numpy().astype(ARRAYS[t.dtype])

    arrays = {name: array(t) if torch.is_tensor(t) else t for name, t in arguments.items()}
    slots = torch.tensor([4, 0, 2])
    out = gd.gated_delta_layer_step(**arguments, state_indices=slots, norm_activation="sigmoid", allow_neg_eigval=True)
    got = gdn.layer_step(
        **arrays, state_indices=slots.numpy(), norm_activation="sigmoid", allow_neg_eigval=True, num_threads=1
    )
    assert np.array_equal(got.astype(np.float32), out.float().numpy())
    for name in ("state", "conv_state"):
        assert np.array_equal(arrays[name].astype(np.float32), arguments[name].float().numpy())
    steps = np.empty((3, 1, HV, K, V), np.float32)
    gdn.layer_step(**arrays, state_indices=slots.numpy(), step_states=steps)
    slot_steps = slots.numpy()[:, None]
    gdn.layer_step(**arrays, state_indices=slots.numpy(), step_indices=slot_steps)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_transformers_decode(family):
    """A decode step of transformers' own layer, with its projections and its cache's layout."""
    pytest.importorskip("transformers")
    try:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ImportError:
        pytest.skip(f"this transformers has no {family}")
    conv_update = getattr(module, "causal_conv1d_update", None) or getattr(module, "torch_causal_conv1d_update", None)
    if conv_update is None or not hasattr(module, "torch_recurrent_gated_delta_rule"):
        pytest.skip("this transformers calls its layer's operations in another way")
    norm_class = next(
        (value for name, value in vars(module).items() if name.endswith("RMSNormGated") and isinstance(value, type)),
        None,
    )
    if norm_class is None:
        pytest.skip("this transformers has no RMSNormGated of its own")
    arguments = make(B=2, columns=W)  # its cache keeps W columns
    del arguments["conv_bias"]
    norm = norm_class(V, eps=1e-6)
    norm.weight.data.copy_(arguments["norm_weight"])
    conv_state, state = arguments["conv_state"].clone(), arguments["state"].clone()
    with torch.no_grad():
        y = conv_update(
            arguments["mixed_qkv"].transpose(1, 2), conv_state, arguments["conv_weight"], None, "silu"
        ).transpose(1, 2)
        q, k, v = y.split([HK * K, HK * K, HV * V], -1)
        q, k = (t.unflatten(-1, (HK, K)).repeat_interleave(HV // HK, 2) for t in (q, k))
        decay = -arguments["A_log"].exp() * functional.softplus(arguments["a"] + arguments["dt_bias"])
        o, state = module.torch_recurrent_gated_delta_rule(
            q, k, v.unflatten(-1, (HV, V)), g=decay, beta=arguments["b"].sigmoid(), initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        expected = norm(o.flatten(0, -2), arguments["z"].flatten(0, -2)).view(o.shape)
        got = gd.gated_delta_layer_step(**arguments, round_before_gate=True)
    check(got, expected.double(), torch.float32)
    check(arguments["state"], state.double(), torch.float32)
    assert torch.equal(arguments["conv_state"], conv_state)


def test_opcheck():
    arguments = make(slots=4)
    operands = [
        *(arguments[name] for name in ("mixed_qkv", "z", "a", "b", "conv_weight", "conv_bias", "conv_state", "A_log")),
        arguments["dt_bias"], arguments["state"], arguments["norm_weight"], HK, ops.L2NORM | layer_step.CONV_SILU,
    ]  # fmt: skip
    slots, out = torch.tensor([3, 0, 1]), torch.empty(3, 1, HV, V)
    for final, steps, step_indices in [
        (slots, None, None),
        (None, torch.empty(3, 1, HV, K, V), None),
        (None, torch.empty(4, HV, K, V), slots[:, None]),
    ]:
        torch.library.opcheck(
            torch.ops.gatedelta.layer_step.default,
            (*operands, slots, final, None, None, steps, step_indices, None, None, out),
        )


@pytest.mark.parametrize("steps", [False, True], ids=["final", "steps"])
def test_compiled_updates_states(steps):
    arguments = make(slots=5, dtype=torch.bfloat16)
    compiled = {name: t.clone() if torch.is_tensor(t) else t for name, t in arguments.items()}
    slots = torch.tensor([4, 0, 2])
    options = {"state_indices": slots, **({"step_indices": slots[:, None]} if steps else {})}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(arguments):
        return 2 * gd.gated_delta_layer_step(**arguments, **options)

    expected = gd.gated_delta_layer_step(**arguments, **options)
    assert torch.equal(layer(compiled), 2 * expected)
    for name in ("state", "conv_state"):
        assert torch.equal(compiled[name], arguments[name])


def test_meta_and_fake_shapes():
    with torch.device("meta"):
        out = gd.gated_delta_layer_step(**make_on("meta"))
    assert out.shape == (3, 1, HV, V)
    arguments = make()
    arguments["state"] = arguments["state"].to("meta")
    with pytest.raises(ValueError, match="state is on meta, but mixed_qkv is on cpu"):
        gd.gated_delta_layer_step(**arguments)


def make_on(device):
    return {name: t.to(device) if torch.is_tensor(t) else t for name, t in make().items()}


def test_no_gradient():
    arguments = make()
    arguments["conv_weight"].requires_grad_()
    with pytest.raises(ValueError, match=r"updates states in place and has no gradient, .*torch\.no_grad"):
        gd.gated_delta_layer_step(**arguments)
    with torch.no_grad():
        gd.gated_delta_layer_step(**arguments)
    arguments = make()
    arguments["state"].requires_grad_()
    with torch.no_grad(), pytest.raises(ValueError, match="state is written to, but it requires a gradient"):
        gd.gated_delta_layer_step(**arguments)


def test_versions_move():
    arguments = make()
    before = arguments["state"]._version, arguments["conv_state"]._version
    gd.gated_delta_layer_step(**arguments)
    assert (arguments["state"]._version, arguments["conv_state"]._version) == (before[0] + 1, before[1] + 1)


REFUSALS = [
    ({"conv_activation": "relu"}, ValueError, "conv_activation is 'relu', must be 'silu', 'swish' or None"),
    ({"norm_activation": "relu"}, ValueError, "norm_activation is 'relu', must be 'silu', 'swish' or 'sigmoid'"),
    ({"z": None}, ValueError, "give out= where z is None: one of them says Hv and V"),
    ({"key_heads": 3}, ValueError, "mixed_qkv has 192 channels, must have 2 key_heads K + Hv V = 2 * 3 * K + 4 * 16"),
    ({"state_indices": torch.tensor([0, 1, 9])}, ValueError, "state_indices[2] is 9, but conv_state has 3 slots"),
    ({"null_index": 0}, ValueError, "null_index is 0, but the call has no indices"),
    ({"conv_weight": torch.zeros(D, 5)}, ValueError, "conv_weight has W = 5 taps"),
    ({"a": torch.zeros(3, 1, 3)}, ValueError, "a: shape is [3, 1, 3], must be [B, T, Hv] = [3, 1, 4]"),
    ({"norm_weight": torch.zeros(V + 1)}, ValueError, "norm_weight: shape is [17], must be [D] = [16]"),
    ({"conv_state": torch.zeros(3, D, 2)}, ValueError, "conv_state has S = 2 columns, must have at least W - 1 = 3"),
    ({"state": torch.zeros(2, HV, K, V)}, ValueError, "state: shape is [2, 4, 32, 16], must be [N, Hv, K, V]"),
    ({"A_log": np.zeros(HV)}, TypeError, "A_log must be a torch.Tensor, not numpy.ndarray"),
    (
        {"step_states": torch.zeros(3, 1, HV, K, V), "final_state_indices": torch.tensor([0, 1, 2])},
        ValueError,
        "final_state_indices is given, but with step_states or step_indices there is no final state",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSALS, ids=[next(iter(r[0])) for r in REFUSALS])
def test_refusals(change, error, message):
    arguments = make() | change
    states = {name: t.clone() for name, t in arguments.items() if name in ("state", "conv_state")}
    with pytest.raises(error) as caught:
        gd.gated_delta_layer_step(**arguments)
    assert any(part in str(caught.value) for part in message.split("|"))
    for name, before in states.items():
        assert torch.equal(arguments[name], before)


def test_numpy_refusals():
    arrays = {name: t.numpy() if torch.is_tensor(t) else t for name, t in make().items()}
    for change, message in [
        ({"conv_activation": "relu"}, "conv_activation is 'relu', must be 'silu', 'swish' or None"),
        ({"norm_activation": "relu"}, "norm_activation is 'relu', must be"),
        ({"z": None}, "give out= where z is None"),
        ({"key_heads": 3}, "mixed_qkv has 192 channels"),
        ({"norm_weight": np.zeros(V + 1, np.float32)}, "norm_weight: shape is [17]"),
        ({"null_index": -2}, "null_index is -2"),
        ({"step_indices": np.zeros((3, 1), int), "final_state_indices": np.zeros(3, int)}, "there is no final state"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            gdn.layer_step(**(arrays | change))
    frozen = arrays["state"].copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="state is written to, but the array is read-only"):
        gdn.layer_step(**(arrays | {"state": frozen}))


def test_options_are_those_of_the_binding():
    source = (ROOT / "bindings/torch/layer_step.cpp").read_text()
    bits = {name: 1 << int(bit) for name, bit in re.findall(r"k(\w+) = 1 << (\d+)", source)}
    assert bits == {
        "ConvSilu": layer_step.CONV_SILU,
        "NormSigmoid": layer_step.NORM_SIGMOID,
        "NormRoundBeforeGate": layer_step.NORM_ROUND_BEFORE_GATE,
        "StepsInState": layer_step.STEPS_IN_STATE,
    }

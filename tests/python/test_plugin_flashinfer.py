"""gatedelta.flashinfer: FlashInfer's signatures and meanings, results against the fp64 recurrence, refusals,
registration."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

import gatedelta.flashinfer as shim  # noqa: E402
import plugin_signatures  # noqa: E402
from gatedelta._plugins import limits  # noqa: E402

from testing.truth import Case  # noqa: E402

HOMES = {
    "chunk_gated_delta_rule": "gdn_prefill",
    "gated_delta_rule_decode_pretranspose": "gdn_decode",
    "gated_delta_rule_decode": "gdn_decode",
    "gated_delta_rule_mtp": "gdn_decode",
}
PREFILL = [
    "lengths=64+130+0+1+70+200 pad=9 Hk=1 Hv=2 K=64 V=32 dtype=fp32 layout=vk",
    "lengths=64+130+0+1+70 pad=3 Hk=2 Hv=2 K=32 V=64 dtype=bf16 layout=vk h0=0",
    "lengths=300 Hk=2 Hv=4 K=32 V=32 dtype=fp32 layout=vk l2norm=1 i64=1",
]
DECODE = [
    "B=5 T=1 Hk=2 Hv=4 K=128 V=128 dtype=bf16 layout=vk gate=raw beta=logit l2norm=1",
    "B=3 T=4 Hk=1 Hv=2 K=64 V=32 dtype=fp32 layout=vk gate=raw beta=logit l2norm=1",
    "B=3 T=3 Hk=1 Hv=1 K=32 V=32 dtype=bf16 state=bf16 layout=vk gate=raw beta=logit",
]


def prefill_arguments(case: Case) -> dict:
    """Of a case with log gates: tokens in the first dimension, and the decay itself."""
    rows = {name: getattr(case, name)[0] for name in ("q", "k", "v", "beta")}
    options = case.options
    return rows | {
        "g": case.g[0].float().exp(),
        "scale": options["scale"],
        "cu_seqlens": case.cu_seqlens,
        "use_qk_l2norm_in_kernel": options["use_qk_l2norm_in_kernel"],
    }


def decode_arguments(case: Case) -> dict:
    options = case.options
    return {
        **{name: getattr(case, name) for name in ("q", "k", "v", "A_log", "dt_bias")},
        "a": case.g,
        "b": case.beta,
        "scale": options["scale"],
        "use_qk_l2norm": options["use_qk_l2norm_in_kernel"],
    }


def strided(states):
    """The same states, with a gap between any two elements."""
    return torch.stack([states, torch.full_like(states, torch.nan)], -1)[..., 0]


@pytest.mark.parametrize("name", HOMES)
def test_signatures_are_flashinfers(name):
    kept = plugin_signatures.kept("flashinfer")["functions"]
    assert plugin_signatures.of(getattr(shim, name)) == kept[f"{HOMES[name]}.py:{name}"]


def test_kept_signatures_are_the_installed_ones():
    plugin_signatures.compare_with_installed("flashinfer")


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("spec", PREFILL)
def test_prefill(spec, given):
    case = Case(spec)
    truth = case.forward_truth()
    arguments = prefill_arguments(case) | {"initial_state": case.initial_state}
    if given:
        count = case.sequence_count
        arguments["output"] = torch.full_like(case.v[0], torch.nan)
        arguments["output_state"] = torch.full((count, *truth["final_state"].shape[1:]), 123.0)
    o, states = shim.chunk_gated_delta_rule(**arguments, output_final_state=True)
    assert not given or (o is arguments["output"] and states is arguments["output_state"])
    case.check("o", o[None], truth["o"])
    full = (case.cu_seqlens[1:] > case.cu_seqlens[:-1]).numpy()
    if given:  # an empty sequence leaves its state as it was
        assert (states[~full] == 123).all()
    case.check("final_state", states[full], truth["final_state"][full])
    assert torch.equal(shim.chunk_gated_delta_rule(**arguments), o)
    assert case.damage() == ""


@pytest.mark.parametrize("make", [torch.clone, strided], ids=["dense", "strided"])
@pytest.mark.parametrize("in_place", [False, True])
def test_prefill_of_a_pool(make, in_place):
    """The slots that no index names hold NaN, before and after; an empty sequence leaves its slot untouched."""
    case = Case(PREFILL[0])
    truth = case.forward_truth()
    slots = torch.tensor([7, 2, 4, 0, 9, 5])
    empty = 4
    pool = torch.full((11, *case.initial_state.shape[1:]), torch.nan)
    pool[slots] = case.initial_state
    pool = make(pool)
    target = pool if in_place else make(torch.full(pool.shape, torch.nan))
    again = target.view(target.shape) if in_place else target  # another object over the same memory
    o, states = shim.chunk_gated_delta_rule(
        **prefill_arguments(case), initial_state=pool, output_final_state=True, output_state=again, state_indices=slots
    )
    assert states is again
    case.check("o", o[None], truth["o"])
    full = np.arange(6) != 2
    case.check("final_state", target[slots[full]].contiguous(), truth["final_state"][full])
    rest = [slot for slot in range(11) if slot not in slots.tolist()]
    assert target[rest].isnan().all()
    assert torch.equal(target[empty], case.initial_state[2]) if in_place else target[empty].isnan().all()
    assert case.damage() == ""


def test_prefill_from_a_pool_without_final_states():
    case = Case(PREFILL[0])
    slots = torch.tensor([7, 2, 4, 0, 9, 5], dtype=torch.int32)
    pool = torch.full((11, *case.initial_state.shape[1:]), torch.nan)
    pool[slots] = case.initial_state
    o = shim.chunk_gated_delta_rule(**prefill_arguments(case), initial_state=pool, state_indices=slots)
    case.check("o", o[None], case.forward_truth()["o"])


@pytest.mark.parametrize("make", [torch.clone, strided], ids=["dense", "strided"])
def test_prefill_of_padded_rows(make):
    """A negative slot: o is 0 and nothing is stored, whichever rows there are beside it."""
    case = Case(PREFILL[0])
    arguments = prefill_arguments(case)
    for slots in ([7, -1, -1, 0, -1, 5], [-1] * 6):
        slots = torch.tensor(slots)
        pool = make(torch.randn(11, *case.initial_state.shape[1:]))
        before = pool.clone()
        o, _ = shim.chunk_gated_delta_rule(
            **arguments, initial_state=pool, output_final_state=True, output_state=pool, state_indices=slots
        )
        for n, slot in enumerate(slots.tolist()):
            start, end = case.cu_seqlens[n : n + 2].tolist()
            assert o[start:end].any() == (slot >= 0 and end > start)
        changed = (pool != before).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == sorted(slot for slot in slots.tolist() if slot >= 0)


def test_prefill_checkpoints():
    case = Case(PREFILL[0] + " every=64")
    arguments = prefill_arguments(case)
    counts = (case.cu_seqlens.diff() // 64).tolist()
    starts = torch.tensor([sum(counts[:n]) for n in range(len(counts) + 1)])
    checkpoints = torch.full((sum(counts), 2, 32, 64), torch.nan)
    shim.chunk_gated_delta_rule(
        **arguments, initial_state=case.initial_state, state_checkpoints=checkpoints, checkpoint_cu_starts=starts,
        checkpoint_every_n_tokens=64, use_cp=True, _cp_chunk_len=64, max_seqlen=200,
    )  # fmt: skip
    case.check("checkpoints", checkpoints, case.forward_truth()["checkpoints"])


@pytest.mark.parametrize("heads", [(4, 1, 1), (6, 2, 2)])
def test_prefill_with_more_query_than_value_heads(heads):
    """Each query head has gates and a state of its own, and shares k and v."""
    torch.manual_seed(0)
    queries, keys, values = heads
    offsets = torch.tensor([0, 70, 70, 100])
    q, k, v = (torch.nn.functional.normalize(torch.randn(100, h, 32), dim=-1) for h in heads)
    g, beta = torch.rand(100, queries), torch.rand(100, queries)
    o, states = shim.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, cu_seqlens=offsets)
    assert o.shape == (100, queries, 32) and states.shape == (3, queries, 32, 32)
    for h in range(queries):
        one = [x[:, [i]] for x, i in ((q, h), (k, h // (queries // keys)), (v, h // (queries // values)))]
        expected, state = shim.chunk_gated_delta_rule(
            *one, g[:, [h]], beta[:, [h]], output_final_state=True, cu_seqlens=offsets
        )
        assert torch.equal(o[:, [h]], expected) and torch.equal(states[:, [h]], state)


def test_prefill_defaults():
    """scale 0 is the default one, no g means no decay, no beta means 1, a decay of 0 forgets everything."""
    torch.manual_seed(0)
    q, k, v = (torch.nn.functional.normalize(torch.randn(70, 1, 32), dim=-1) for _ in range(3))
    ones, offsets = torch.ones(70, 1), torch.tensor([0, 70])
    expected = shim.chunk_gated_delta_rule(q, k, v, ones, ones, 32**-0.5, cu_seqlens=offsets)
    for scale in (None, 0, 0.0):
        assert torch.equal(shim.chunk_gated_delta_rule(q, k, v, scale=scale, cu_seqlens=offsets), expected)
    g = ones.clone()
    g[40] = 0
    o = shim.chunk_gated_delta_rule(q, k, v, g, ones, cu_seqlens=offsets)
    split = shim.chunk_gated_delta_rule(q, k, v, cu_seqlens=torch.tensor([0, 40, 70]))
    torch.testing.assert_close(o, split, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("make", [torch.clone, strided], ids=["dense", "strided"])
@pytest.mark.parametrize("spec", DECODE)
def test_decode_pretranspose(spec, make, pooled, given):
    case = Case(spec)
    truth = case.recurrent_truth()
    batch = case.q.shape[0]
    slots = torch.tensor([6, 0, 4, 2, 8][:batch], dtype=torch.int32) if pooled else torch.arange(batch)
    pool = torch.full(
        (9 if pooled else batch, *case.initial_state.shape[1:]), torch.nan, dtype=case.initial_state.dtype
    )
    pool[slots] = case.initial_state
    pool = make(pool)
    states = {"initial_state": pool, "initial_state_indices": slots} if pooled else {}
    output = torch.full(case.v.shape, torch.nan) if given else None
    o, returned = shim.gated_delta_rule_decode_pretranspose(
        **decode_arguments(case), state=None if pooled else pool, **states, output=output
    )
    assert returned is pool and (o is output if given else o.dtype == case.q.dtype)
    case.check("o", o, truth["o"])
    case.check("final_state", pool[slots].contiguous(), truth["final_state"])
    rest = [slot for slot in range(pool.shape[0]) if slot not in slots.tolist()]
    assert pool[rest].isnan().all()
    assert case.damage() == ""


@pytest.mark.parametrize("make", [torch.clone, strided, lambda x: x.mT.contiguous().mT], ids=["dense", "strided", "vk"])
def test_decode(make):
    case = Case(DECODE[0].replace("layout=vk ", ""))
    truth = case.recurrent_truth()
    state = make(case.initial_state)
    o, returned = shim.gated_delta_rule_decode(**decode_arguments(case), state=state)
    assert returned is state
    case.check("o", o, truth["o"])
    case.check("final_state", state.contiguous(), truth["final_state"])


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", ["nothing", "final", "buffer", "both", "slots"])
def test_mtp(kind, given):
    """Row 1 is padding: its inputs are NaN, no state of it is stored, and its rows of output stay as they are."""
    case = Case("B=4 T=3 Hk=1 Hv=2 K=64 V=32 dtype=fp32 layout=vk gate=raw beta=logit l2norm=1 steps=dense")
    truth = case.recurrent_truth()
    live = np.array([0, 2, 3])
    arguments = decode_arguments(case)
    for name in ("q", "k", "v", "a", "b"):
        arguments[name] = arguments[name].clone()
        arguments[name][1] = torch.nan
    read = torch.tensor([6, -1, 4, 0], dtype=torch.int32)
    write = torch.tensor([6, 5, -1, 3])  # of a padded row no slot is written; -1 alone: o is computed
    pool = torch.full((20, *case.initial_state.shape[1:]), torch.nan)
    pool[read[live].long()] = case.initial_state[live]
    before = pool.clone()
    buffer = torch.full((5, 4, *pool.shape[1:]), 123.0) if kind in ("buffer", "both") else None
    slots = torch.arange(8, 20, dtype=torch.int32).reshape(4, 3) if kind == "slots" else None
    output = torch.full(case.v.shape, 42.0, dtype=torch.float16) if given else None
    o, returned = shim.gated_delta_rule_mtp(
        initial_state=pool, initial_state_indices=read, **arguments, output=output, ssm_state_indices=slots,
        output_state_indices=write if kind in ("final", "both") else None, intermediate_states_buffer=buffer,
        disable_state_update=kind in ("nothing", "buffer"),
    )  # fmt: skip
    assert returned is pool and (o is output if given else o.dtype == case.q.dtype)
    assert (o[1] == (42 if given else 0)).all()
    case.check("o", o[live], truth["o"][live])
    written = []
    if kind in ("final", "both"):
        written = [6, 3]
        case.check("final_state", pool[written], truth["final_state"][[0, 3]])
    if kind == "slots":
        written = slots[live].flatten().tolist()
        case.check("step_states", pool[slots[live].long()], truth["step_states"][live])
    if buffer is not None:
        case.check("step_states", buffer[live, :3], truth["step_states"][live])
        assert (buffer[1] == 123).all() and (buffer[4] == 123).all() and (buffer[:, 3] == 123).all()
    kept = [slot for slot in range(20) if slot not in written]
    torch.testing.assert_close(pool[kept], before[kept], rtol=0, atol=0, equal_nan=True)
    assert case.damage() == ""


def test_a_padded_row_does_not_touch_slot_0_of_a_bfloat16_pool():
    """FlashInfer overwrites it."""
    case = Case("B=3 T=1 Hk=1 Hv=2 K=128 V=128 dtype=bf16 state=bf16 layout=vk gate=raw beta=logit l2norm=1")
    pool = torch.randn(5, 2, 128, 128).bfloat16()
    before = pool.clone()
    o, _ = shim.gated_delta_rule_decode_pretranspose(
        **decode_arguments(case), state=None, initial_state=pool, initial_state_indices=torch.tensor([-1, 3, -1])
    )
    assert not o[[0, 2]].any() and o[1].any()
    assert torch.equal(pool[[0, 1, 2, 4]], before[[0, 1, 2, 4]]) and not torch.equal(pool[3], before[3])


def test_float16_inputs_become_bfloat16():
    case = Case(DECODE[0])
    arguments = decode_arguments(case)
    expected, _ = shim.gated_delta_rule_decode_pretranspose(**arguments, state=case.initial_state.clone())
    half = arguments | {name: arguments[name].half() for name in ("q", "k", "v", "a", "b")}
    o, _ = shim.gated_delta_rule_decode_pretranspose(**half, state=case.initial_state.clone())
    same = {name: half[name].bfloat16().equal(arguments[name]) for name in ("q", "k", "v")}
    assert o.dtype == torch.float16 and all(same.values())
    torch.testing.assert_close(o, expected.half(), rtol=1e-2, atol=1e-3)


def test_no_gradient_as_in_flashinfer():
    case = Case(DECODE[0])
    arguments = decode_arguments(case)
    o, _ = shim.gated_delta_rule_decode_pretranspose(
        **arguments | {"q": case.q.clone().requires_grad_()}, state=case.initial_state.clone()
    )
    assert not o.requires_grad
    case = Case(PREFILL[0])
    arguments = prefill_arguments(case)
    assert not shim.chunk_gated_delta_rule(**arguments | {"q": case.q[0].clone().requires_grad_()}).requires_grad


def test_mtp_warns_without_disable_state_update():
    case = Case(DECODE[1])
    pool = case.initial_state.clone()
    with pytest.warns(FutureWarning, match="disable_state_update is not given: True is meant now") as record:
        shim.gated_delta_rule_mtp(**decode_arguments(case), initial_state=pool, initial_state_indices=torch.arange(3))
    assert record[0].filename == __file__ and torch.equal(pool, case.initial_state)


X = torch.zeros(4, 2, 32)
OFFSETS = torch.tensor([0, 4])
STATE = torch.zeros(1, 2, 32, 32)
TOKEN = torch.zeros(1, 1, 2, 32)
GATE = torch.zeros(1, 1, 2)
SLOT = torch.tensor([0])
CALLS = {
    "chunk_gated_delta_rule": {"q": X, "k": X, "v": X, "cu_seqlens": OFFSETS},
    "gated_delta_rule_decode": {"state": STATE},
    "gated_delta_rule_decode_pretranspose": {"state": STATE},
    "gated_delta_rule_mtp": {"initial_state": STATE, "initial_state_indices": SLOT, "disable_state_update": False},
}
GATES = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2), "a": GATE, "b": GATE}
RULE, DECODE_KV, DECODE_VK, MTP = CALLS
REFUSED = [
    (RULE, {"backend": "cudnn"}, NotImplementedError, "backend 'cudnn' names kernels of FlashInfer's own: pass 'auto'"),
    (RULE, {"backend": "triton"}, ValueError, "backend 'triton' is unknown"),
    (RULE, {"use_cp": "always"}, ValueError, "use_cp must be 'auto', True or False, not 'always'"),
    (RULE, {"cu_seqlens": None}, ValueError, "cu_seqlens is required"),
    (RULE, {"cu_seqlens": torch.tensor([0])}, ValueError, "cu_seqlens must have at least two elements"),
    (RULE, {"q": X[None]}, ValueError, r"q, k and v must be \[tokens, heads, head size\]"),
    (RULE, {"k": X[:, :1]}, ValueError, "2 query, 1 key and 2 value heads: either q and k have the same number"),
    (RULE, {"max_seqlen": 5}, ValueError, "max_seqlen is 5, but the longest of 1 sequences with 4 tokens"),
    (RULE, {"_cp_chunk_len": 100}, ValueError, "_cp_chunk_len must be a multiple of 64, not 100"),
    (RULE, {"checkpoint_every_n_tokens": -1}, ValueError, "checkpoint_every_n_tokens must be non-negative, not -1"),
    (RULE, {"checkpoint_every_n_tokens": 100}, ValueError, r"must be a multiple of the chunk size \(64\), not 100"),
    (RULE, {"checkpoint_every_n_tokens": 64}, ValueError, "state_checkpoints and checkpoint_cu_starts must both be"),
    (RULE, {"state_checkpoints": STATE}, ValueError, "state_checkpoints and checkpoint_cu_starts must be None"),
    (
        RULE,
        {"checkpoint_every_n_tokens": 64, "state_checkpoints": STATE, "checkpoint_cu_starts": torch.tensor([0])},
        ValueError,
        r"checkpoint_cu_starts must have 2 elements, not \[1\]",
    ),
    (
        RULE,
        {"state_indices": SLOT, "output_final_state": True},
        ValueError,
        "state_indices needs an explicit output_state pool",
    ),
    (RULE, {"state_indices": SLOT}, ValueError, "state_indices is given, but neither initial_state nor output_state"),
    *(
        (
            RULE,
            {"checkpoint_every_n_tokens": 64, "state_checkpoints": STATE, "checkpoint_cu_starts": torch.tensor(starts)},
            ValueError,
            rf"checkpoint_cu_starts is {re.escape(str(starts))}, but sequences .* from \[0, 0\] on",
        )
        for starts in ([9, 5], [-3, 100], [0, 1])
    ),
    (
        RULE,
        {"initial_state": STATE.to(torch.float8_e4m3fn)},
        NotImplementedError,
        "initial_state is torch.float8_e4m3fn: states of 8 bits are not supported",
    ),
    (RULE, {"output_state": STATE.int()}, ValueError, "output_state must have dtype float32, bfloat16 or float16"),
    (DECODE_KV, {"backend": "cake_gdn"}, NotImplementedError, "backend 'cake_gdn' names kernels"),
    (DECODE_KV, {"q": TOKEN.expand(1, 2, 2, 32)}, ValueError, "decode takes one token a row, not 2"),
    (DECODE_VK, {"backend": "rubin"}, NotImplementedError, "backend 'rubin' names kernels"),
    (DECODE_VK, {"initial_state": STATE}, ValueError, "initial_state and initial_state_indices must be given together"),
    (DECODE_VK, {"state": None}, ValueError, "either state, or initial_state with initial_state_indices"),
    (DECODE_VK, {"output_state_indices": SLOT}, ValueError, "output_state_indices needs initial_state"),
    (
        DECODE_VK,
        {"state": None, "initial_state": STATE.view(1, 2, 2, 16, 32), "initial_state_indices": SLOT},
        NotImplementedError,
        "a pool of ugpu_state_pool",
    ),
    (MTP, {"cache_replayssm": True}, NotImplementedError, "ReplaySSM is not supported"),
    (MTP, {"replayssm_g": GATE}, NotImplementedError, "ReplaySSM is not supported"),
    (
        MTP,
        {"ssm_state_indices": SLOT[None], "intermediate_states_buffer": STATE[None]},
        ValueError,
        "ssm_state_indices and intermediate_states_buffer are mutually exclusive",
    ),
    (
        MTP,
        {"ssm_state_indices": SLOT[None], "disable_state_update": True},
        ValueError,
        "ssm_state_indices requires state writes",
    ),
    (
        MTP,
        {"ssm_state_indices": SLOT[None], "initial_state": strided(STATE)},
        ValueError,
        r"ssm_state_indices needs a pool whose \[V, K\] matrices are contiguous",
    ),
    (
        MTP,
        {"intermediate_states_buffer": STATE[None, :0]},
        ValueError,
        r"intermediate_states_buffer is \[1, 0, 2, 32, 32\], but it must have room for 1 rows of 1 tokens",
    ),
    (
        MTP,
        {"intermediate_states_buffer": STATE[None].to(torch.float8_e5m2)},
        NotImplementedError,
        "intermediate_states_buffer is torch.float8_e5m2",
    ),
]


@pytest.mark.parametrize(("name", "more", "error", "message"), REFUSED)
def test_refusals(name, more, error, message):
    arguments = CALLS[name] if name == RULE else {"q": TOKEN, "k": TOKEN, "v": TOKEN, **GATES, **CALLS[name]}
    getattr(shim, name)(**arguments)
    with pytest.raises(error, match=message):
        getattr(shim, name)(**arguments | more)


@pytest.fixture
def fake_package(monkeypatch):
    """flashinfer, as far as registration looks at it; of an older version, whose last argument was not there yet."""
    modules = {name: ModuleType(name) for name in ("flashinfer", "flashinfer.gdn_prefill", "flashinfer.gdn_decode")}
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    for name, home in HOMES.items():
        names = [f"{x}={default}" if default else x for x, default in plugin_signatures.of(getattr(shim, name))]
        exec(f"def {name}({', '.join(names[:-1])}): return 'theirs'", vars(modules[f"flashinfer.{home}"]))
    package = modules["flashinfer"]
    package.chunk_gated_delta_rule = sys.modules["flashinfer.gdn_prefill"].chunk_gated_delta_rule
    yield package
    shim.unregister()


def test_register(fake_package):
    theirs = fake_package.chunk_gated_delta_rule
    shim.register()
    shim.register()
    assert fake_package.chunk_gated_delta_rule is shim.chunk_gated_delta_rule
    for name, home in HOMES.items():
        assert getattr(sys.modules[f"flashinfer.{home}"], name) is getattr(shim, name)
    shim.unregister()
    shim.unregister()
    assert fake_package.chunk_gated_delta_rule is theirs
    assert sys.modules["flashinfer.gdn_decode"].gated_delta_rule_mtp is not shim.gated_delta_rule_mtp


def test_register_in_the_real_package(run_python):
    pytest.importorskip("flashinfer")
    code = """
import flashinfer, flashinfer.gdn_decode as decode, gatedelta.flashinfer as shim
theirs = flashinfer.chunk_gated_delta_rule, decode.gated_delta_rule_mtp
shim.register()
ours = shim.chunk_gated_delta_rule, shim.gated_delta_rule_mtp
assert (flashinfer.chunk_gated_delta_rule, decode.gated_delta_rule_mtp) == ours
shim.unregister()
assert (flashinfer.chunk_gated_delta_rule, decode.gated_delta_rule_mtp) == theirs
"""
    run_python("-c", code)


def test_import_needs_no_flashinfer(run_python):
    code = "import sys, gatedelta.flashinfer; print('flashinfer' in sys.modules)"
    assert run_python("-c", code).stdout.strip() == "False"


@pytest.mark.skipif(
    not torch.cuda.is_available() or limits.device_refusal(torch.device("cuda", 0)) is not None,
    reason="no GPU, or none that is supported",
)
@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 48)])
@pytest.mark.parametrize("make", [torch.clone, strided], ids=["dense", "strided"])
def test_a_graph_of_prefill_and_decode(make, K, V):
    """Nothing waits for the GPU: a batch with a padded row and an empty sequence is captured."""
    torch.manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, device="cuda").bfloat16()  # noqa: E731
    q, k, v = (torch.nn.functional.normalize(randn(300, h, size), dim=-1) for h, size in ((2, K), (2, K), (4, V)))
    g, beta = torch.rand(300, 4, device="cuda"), torch.rand(300, 4, device="cuda")
    offsets = torch.tensor([0, 130, 130, 300, 300], dtype=torch.int32, device="cuda")
    slots = torch.tensor([5, 1, 3, -1], device="cuda")
    one = {"q": randn(4, 1, 2, K), "k": randn(4, 1, 2, K), "v": randn(4, 1, 4, V)}
    one |= {"a": randn(4, 1, 4), "b": randn(4, 1, 4)}
    one |= {"A_log": torch.randn(4, device="cuda"), "dt_bias": torch.randn(4, device="cuda")}
    first = make(torch.randn(7, 4, V, K, device="cuda"))
    pool, target = first.clone(), make(torch.zeros_like(first))

    def step():
        shim.chunk_gated_delta_rule(
            q, k, v, g, beta, None, pool, True, offsets, True, output_state=target, state_indices=slots
        )
        return shim.gated_delta_rule_decode_pretranspose(
            state=None, **one, initial_state=target, initial_state_indices=slots
        )[0]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    slots.copy_(torch.tensor([2, 0, -1, 4]))
    offsets.copy_(torch.tensor([0, 64, 200, 200, 300]))
    target.zero_()
    expected, expected_target = step().clone(), target.clone()
    target.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected) and torch.equal(target, expected_target)
    assert expected[0].any() and not expected[2].any() and not target[[1, 3, 5, 6]].any()

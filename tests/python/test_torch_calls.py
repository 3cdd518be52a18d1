"""How the torch functions may be called: signatures, refusals with messages, autograd's rules, packed sequences."""

from __future__ import annotations

import inspect
import re
import warnings

import pytest

torch = pytest.importorskip("torch")

import gatedelta  # noqa: E402
from gatedelta import torch as gd  # noqa: E402
from gatedelta._operators import ops  # noqa: E402

from tools.dev_paths import ROOT  # noqa: E402


def names(text):
    return text.split()


# As published: flash-linear-attention 0.5.2 to 0.6.0 and FlashQLA c18a486.
FLA_CHUNK = names(
    "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
    "allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context"
)
FLA_CHUNK_KEYWORDS = names("use_gate_in_kernel A_log dt_bias chunk_size transpose_state_layout")
FLA_RECURRENT = names(
    "q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel A_log "
    "dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens"
)
QLA_CHUNK = names(
    "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens state_v_first auto_cp"
)  # but for head_first and enable_fwd_cp_cache, which gatedelta.flash_qla takes
QLA_FWD = names(
    "q k v g beta scale initial_state cu_seqlens output_final_state auto_cp state_v_first"
)  # but for output_h and enable_fwd_cp_cache
# FlashQLA: q k v g_cumsum beta A do ...; ours has g and saved in the places of g_cumsum and A.
QLA_BWD = names("q k v g beta saved do dht scale initial_state cu_seqlens state_v_first auto_cp")


def make(B=1, T=70, H=1, HV=2, K=32, V=16, dtype=torch.float32, N=None):
    generator = torch.Generator().manual_seed(5)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    q, k = (torch.nn.functional.normalize(randn(B, T, H, K), dim=-1).to(dtype) for _ in range(2))
    v = randn(B, T, HV, V).to(dtype)
    g = torch.nn.functional.logsigmoid(randn(B, T, HV)) / 16
    return [q, k, v, g, randn(B, T, HV).sigmoid(), randn(N or B, HV, K, V)]


def positional(function):
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


def test_signatures_follow_fla_and_flashqla():
    assert positional(gd.chunk_gated_delta_rule) == FLA_CHUNK
    assert positional(gd.fused_recurrent_gated_delta_rule) == FLA_RECURRENT
    assert positional(gd.chunk_gated_delta_rule_fwd) == QLA_FWD
    assert positional(gd.chunk_gated_delta_rule_bwd) == QLA_BWD
    parameters = set(inspect.signature(gd.chunk_gated_delta_rule).parameters)
    assert parameters >= {*FLA_CHUNK_KEYWORDS, *QLA_CHUNK}
    assert gd.recurrent_gated_delta_rule is gd.fused_recurrent_gated_delta_rule


@pytest.mark.parametrize("name", gd.__all__)
def test_every_argument_is_named_and_exported(name):
    function = getattr(gatedelta, name)
    assert function is getattr(gd, name)
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}


def test_what_readme_and_api_show_runs():
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/api.md")]
    (chunk,), (recurrent,) = (re.findall(r"```python\n(.*?)```", text, re.DOTALL) for text in texts)
    assert "gatedelta.transformers.patch()" in texts[0]  # run by test_plugin_transformers.py
    q1, k1, v1, a, b, pool = make(B=2, T=1, N=5)
    slots = torch.tensor([3, 1])
    before = pool.clone()
    names = {"q1": q1, "k1": k1, "v1": v1, "a": a, "b": b, "A_log": torch.zeros(2), "dt_bias": torch.zeros(2),
             "pool": pool, "slots": slots}  # fmt: skip
    exec(chunk + recurrent, names)
    assert names["o"].shape == names["v"].shape and names["v"].grad.norm() > 0
    assert [slot for slot in range(5) if not torch.equal(pool[slot], before[slot])] == [1, 3]


def test_defaults_are_those_of_fla():
    parameters = inspect.signature(gd.chunk_gated_delta_rule).parameters
    assert [parameters[name].default for name in FLA_CHUNK[5:]] == [
        None, None, False, False, False, False, False, None, None, None, None,
    ]  # fmt: skip


# ---- refused by these functions ------------------------------------------------------------------------------------

CHUNK_REFUSALS = [
    ({"cp_context": object()}, TypeError, "cp_context is builtins.object"),
    ({"chunk_size": 32}, ValueError, "chunk_size is 32.*64"),
    ({"allow_neg_eigval": True}, ValueError, "use_beta_sigmoid_in_kernel"),
    ({"cu_seqlens_cpu": torch.tensor([0, 70])}, ValueError, "cu_seqlens_cpu"),
    ({"chunk_indices": torch.zeros(2, 2)}, ValueError, "chunk_indices"),
    ({"state_v_first": True, "transpose_state_layout": True}, ValueError, "transpose_state_layout"),
    ({"small_workspace": True, "recompute": True}, ValueError, "small_workspace needs what the forward saves"),
    ({"final_state_indices": torch.tensor([0])}, ValueError, "final_state_indices needs final_state="),
]


@pytest.mark.parametrize("arguments, kind, message", CHUNK_REFUSALS, ids=[next(iter(c[0])) for c in CHUNK_REFUSALS])
def test_chunk_refuses(arguments, kind, message):
    q, k, v, g, beta, _ = make()
    with pytest.raises(kind, match=message):
        gd.chunk_gated_delta_rule(q, k, v, g, beta, **arguments)


def test_recurrent_refuses():
    q, k, v, g, beta, _ = make(T=2)
    for name in ("gk", "gv"):
        with pytest.raises(NotImplementedError, match="gk and gv"):
            gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **{name: v})
    with pytest.raises(ValueError, match="g is None"):
        gd.fused_recurrent_gated_delta_rule(q, k, v, use_gate_in_kernel=True, A_log=torch.zeros(2))
    with pytest.raises(ValueError, match="beta is None"):
        gd.fused_recurrent_gated_delta_rule(q, k, v, g, use_beta_sigmoid_in_kernel=True)
    with pytest.raises(ValueError, match="output_o=False"):
        gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, out=torch.empty_like(v), output_o=False)


def test_unknown_arguments_are_refused():
    q, k, v, g, beta, _ = make()
    for name in ("seq_idx", "head_first", "enable_fwd_cp_cache"):  # the last two are FlashQLA's: gatedelta.flash_qla
        with pytest.raises(TypeError, match=name):
            gd.chunk_gated_delta_rule(q, k, v, g, beta, **{name: None})
    with pytest.raises(TypeError, match="output_h"):
        gd.chunk_gated_delta_rule_fwd(q, k, v, g, beta, output_h=True)


def test_documented_hints_are_accepted_and_change_nothing():
    q, k, v, g, beta, _ = make()
    offsets = torch.tensor([0, 30, 70])
    want, _ = gd.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=offsets)
    got, _ = gd.chunk_gated_delta_rule(
        q, k, v, g, beta, cu_seqlens=offsets, cu_seqlens_cpu=offsets, chunk_indices=torch.tensor([[0, 0], [1, 0]]),
        chunk_size=64, auto_cp=False, batch_invariant=True,
    )  # fmt: skip
    assert torch.equal(got, want)


def test_older_name_of_state_v_first():
    q, k, v, g, beta, h0 = make()
    h0 = h0.transpose(2, 3).contiguous()
    want = gd.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=h0, output_final_state=True, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        got = gd.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=h0, output_final_state=True, transpose_state_layout=True
        )
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


# ---- refused by the library ----------------------------------------------------------------------------------------


def change(index, to):
    def apply(tensors):
        tensors[index] = to(tensors[index])

    return apply


LIBRARY_REFUSALS = {
    "rank of q": (change(0, lambda q: q[0]), {}, r"\bq\b.*rank"),
    "rank of v": (change(2, lambda v: v[0]), {}, r"\bv\b.*rank"),
    "dtype of v": (change(2, lambda v: v.bfloat16()), {}, r"\bv\b.*(dtype|bfloat16)"),
    "float64": (change(0, lambda q: q.double()), {}, r"\bq\b.*dtype"),
    "head ratio": (change(2, lambda v: v[:, :, :1].expand(-1, -1, 3, -1).contiguous()), {}, r"\bg\b|heads"),
    "tokens of k": (change(1, lambda k: k[:, :-1]), {}, r"\bk\b"),
    "shape of beta": (change(4, lambda beta: beta[:, :, :1]), {}, "beta"),
    "offsets that decrease": (None, {"cu_seqlens": torch.tensor([0, 40, 30, 70])}, "cu_seqlens"),
    "offsets past the end": (None, {"cu_seqlens": torch.tensor([0, 40, 71])}, "cu_seqlens"),
    "float offsets": (None, {"cu_seqlens": torch.tensor([0.0, 70.0])}, "cu_seqlens"),
    "gate without A_log": (None, {"use_gate_in_kernel": True}, "A_log"),
    "A_log without gate": (None, {"A_log": torch.zeros(2)}, "A_log"),
    "shape of initial_state": (None, {"initial_state": torch.zeros(2, 2, 32, 16)}, "initial_state"),
    "layout of initial_state": (None, {"initial_state": torch.zeros(1, 2, 16, 32)}, "initial_state"),
    "shape of out": (None, {"out": torch.empty(1, 70, 2, 32)}, r"\bo\b|out"),
    "checkpoints without interval": (None, {"checkpoints": torch.empty(1, 2, 32, 16)}, "checkpoint_every"),
    "checkpoint interval": (None, {"checkpoints": torch.empty(1, 2, 32, 16), "checkpoint_every": 32}, "64"),
    "slot out of range": (
        None,
        {"initial_state": torch.zeros(4, 2, 32, 16), "initial_state_indices": torch.tensor([4])},
        "initial",
    ),
}


@pytest.mark.parametrize("name", LIBRARY_REFUSALS)
def test_library_refuses(name):
    mutate, arguments, message = LIBRARY_REFUSALS[name]
    tensors = make()[:5]
    if mutate:
        mutate(tensors)
    with pytest.raises(ValueError) as caught:
        gd.chunk_gated_delta_rule(*tensors, **arguments)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert str(caught.value).startswith("gatedelta: ")


@pytest.mark.parametrize(
    "operator, options",
    [
        (ops.chunk_fwd, ops.BATCH_INVARIANT << 1),
        (ops.chunk_fwd_save, -1),
        (ops.recurrent, ops.UNCUT),
        (ops.recurrent, ops.SMALL_WORKSPACE),
    ],
)
def test_operators_refuse_options_they_lack(operator, options):
    with pytest.raises(ValueError, match=f"gatedelta: options is {options}, "):
        operator(*make()[:5], options)


def test_the_other_operators_return_no_final_state():
    q, k, v, g, beta, h0 = make()
    common = [q, k, v, g, beta, ops.FINAL_STATE, *[None] * 6]
    for call in (
        lambda: ops.chunk_bwd(*common, v, None, None, 1),
        lambda: ops.chunk_fwd_out(*common, v.clone(), h0.clone(), None, False, None, None, 0),
        lambda: ops.recurrent_out(*common, v.clone(), h0.clone(), None, False, None, None, None),
    ):
        with pytest.raises(ValueError, match=f"gatedelta: options is {ops.FINAL_STATE}, "):
            call()


def test_refused_call_writes_nothing():
    q, k, v, g, beta, _ = make()
    out, pool = torch.full_like(v, 7), torch.full((3, 2, 32, 16), 7.0)
    with pytest.raises(ValueError, match="final"):
        gd.chunk_gated_delta_rule(
            q, k, v, g, beta, out=out, final_state=pool, final_state_indices=torch.tensor([1, 1]),
            cu_seqlens=torch.tensor([0, 10, 70]),
        )  # fmt: skip
    assert (out == 7).all() and (pool == 7).all()


def test_meta_tensors_give_shapes():
    q, k, v, g, beta, _ = (x.to("meta") for x in make())
    o, state = gd.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    assert o.device.type == state.device.type == "meta"
    assert o.shape == v.shape and state.shape == (1, 2, 32, 16)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("kind", ["value", "logit", "doubled"])
def test_every_way_to_the_operator_gives_the_same_bits(kind, v_first):
    """With arguments left out, with all of them, with buffers, keeping what a backward wants, keeping nothing."""
    q, k, v, g, beta, h0 = make(N=2)
    offsets = torch.tensor([0, 30, 70])
    more = {
        "initial_state": h0.mT.contiguous() if v_first else h0, "state_v_first": v_first, "cu_seqlens": offsets,
        "use_beta_sigmoid_in_kernel": kind != "value", "allow_neg_eigval": kind == "doubled",
        "use_qk_l2norm_in_kernel": True, "output_final_state": True, "batch_invariant": True, "auto_cp": False,
    }  # fmt: skip
    want = gd.chunk_gated_delta_rule(q, k, v, g, beta, **more)
    named = gd.chunk_gated_delta_rule(q, k, v, g, beta, scale=q.shape[-1] ** -0.5, **more)
    buffered = gd.chunk_gated_delta_rule(q, k, v, g, beta, out=torch.empty_like(v), **more)
    kept = gd.chunk_gated_delta_rule(q.clone().requires_grad_(), k, v, g, beta, **more)
    again = gd.chunk_gated_delta_rule(q.clone().requires_grad_(), k, v, g, beta, recompute=True, **more)
    for got in (named, buffered, kept, again):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


# ---- without gates -------------------------------------------------------------------------------------------------

NO_GATES = {"g": ("g",), "beta": ("beta",), "g and beta": ("g", "beta")}


def with_and_without(tensors, absent):
    """g and beta as the call gets them, and the explicit zeros and ones they stand for."""
    explicit = {"g": torch.zeros_like(tensors[3]), "beta": torch.ones_like(tensors[4])}
    given = {"g": tensors[3], "beta": tensors[4]}
    return {**given, **dict.fromkeys(absent)}, {**given, **{name: explicit[name] for name in absent}}


@pytest.mark.parametrize("absent", NO_GATES.values(), ids=NO_GATES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("form", [gd.chunk_gated_delta_rule, gd.recurrent_gated_delta_rule])
def test_absent_gates_are_zeros_and_ones(form, packed, absent):
    """Bit for bit: o, the final state, every gradient; with buffers, too."""
    tensors = make(B=1 if packed else 2, N=2, H=2, HV=4, dtype=torch.bfloat16)
    more = {"initial_state": tensors[5], "cu_seqlens": torch.tensor([0, 30, 70]) if packed else None}
    results = []
    for gates in with_and_without(tensors, absent):
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        leaves += [gates[name].clone().requires_grad_() for name in ("g", "beta") if name not in absent]
        gates = {**gates, **dict(zip([n for n in ("g", "beta") if n not in absent], leaves[3:]))}
        o, state = form(*leaves[:3], **gates, **more, output_final_state=True)
        gradients = torch.autograd.grad(o.float().square().sum() + state.sum(), leaves)
        with torch.no_grad():
            buffered = form(*leaves[:3], **gates, **more, out=torch.empty_like(o), output_final_state=True)
        results.append([o, state, *gradients, *buffered])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("absent", NO_GATES.values(), ids=NO_GATES)
def test_absent_gates_of_the_low_level_functions(absent):
    tensors = make()
    q, k, v, _, _, h0 = tensors
    outputs, gradients = [], []
    for gates in with_and_without(tensors, absent):
        *output, saved = gd.chunk_gated_delta_rule_fwd(q, k, v, **gates, initial_state=h0)
        dq, dk, dv, dbeta, dg, dh0 = gd.chunk_gated_delta_rule_bwd(
            q, k, v, gates["g"], gates["beta"], saved, v, initial_state=h0
        )
        outputs.append([*output, saved.data])
        gradients.append({"q": dq, "k": dk, "v": dv, "beta": dbeta, "g": dg, "initial_state": dh0})
    assert all(torch.equal(x, y) for x, y in zip(*outputs, strict=True))
    for name, want in gradients[1].items():
        got = gradients[0][name]
        assert got is None if name in absent else torch.equal(got, want), name


@pytest.mark.parametrize("form", [gd.chunk_gated_delta_rule, gd.recurrent_gated_delta_rule])
def test_absent_gates_have_no_raw_form(form):
    q, k, v, g, beta, _ = make()
    with pytest.raises(ValueError, match="takes raw `a` as g, but g is None"):
        form(q, k, v, g=None, beta=beta, use_gate_in_kernel=True, A_log=torch.zeros(2))
    with pytest.raises(ValueError, match="takes logits as beta, but beta is None"):
        form(q, k, v, g=g, beta=None, use_beta_sigmoid_in_kernel=True)


def test_absent_gates_on_meta():
    q, k, v = (x.to("meta") for x in make()[:3])
    assert gd.chunk_gated_delta_rule(q, k, v, None, None)[0].shape == v.shape


# ---- buffers -------------------------------------------------------------------------------------------------------


def written_arguments():
    """Each argument a call writes to, with the call around it."""
    q, k, v, g, beta, h0 = make(T=64)

    def chunk(**more):
        gd.chunk_gated_delta_rule(q, k, v, g, beta, **more)

    def recurrent(**more):
        gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **more)

    out, state, steps = torch.zeros_like(v), torch.zeros_like(h0), torch.zeros(1, 64, 2, 32, 16)
    return {
        "chunk, out": (chunk, "out", out, {}),
        "chunk, final_state": (chunk, "final_state", state, {}),
        "chunk, checkpoints": (chunk, "checkpoints", state, {"checkpoint_every": 64}),
        "recurrent, out": (recurrent, "out", out, {}),
        "recurrent, final_state": (recurrent, "final_state", state, {}),
        "recurrent, step_states": (recurrent, "step_states", steps, {}),
    }


WAYS_TO_REQUIRE_GRAD = {
    "parameter": torch.nn.Parameter,
    "view of a parameter": lambda x: torch.nn.Parameter(x)[:],
    "view of a parameter, without grad": torch.no_grad()(lambda x: torch.nn.Parameter(x)[:]),
    "leaf": lambda x: x.requires_grad_(),
    "part of a graph": lambda x: x.requires_grad_() * 1,
}


@pytest.mark.parametrize("way", WAYS_TO_REQUIRE_GRAD)
@pytest.mark.parametrize("name", written_arguments())
def test_buffers_that_require_grad_are_refused(name, way):
    call, argument, buffer, more = written_arguments()[name]
    buffer = WAYS_TO_REQUIRE_GRAD[way](buffer)
    with torch.no_grad():
        with pytest.raises(ValueError, match=f"^{argument} is written to, but it requires a gradient"):
            call(**{argument: buffer}, **more)
        assert (buffer == 0).all()
        call(**{argument: buffer.detach()}, **more)
        assert not (buffer == 0).all()


# ---- autograd ------------------------------------------------------------------------------------------------------


def test_double_backward_says_that_it_cannot():
    tensors = [x.requires_grad_() for x in make()]
    o, _ = gd.chunk_gated_delta_rule(*tensors[:5], initial_state=tensors[5])
    first = torch.autograd.grad(o.sum(), tensors[:5], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(first[0].square().sum(), tensors[0])


def test_buffers_and_gradients_exclude_each_other():
    q, k, v, g, beta, h0 = make(T=3)
    q.requires_grad_()
    for call in (
        lambda **more: gd.chunk_gated_delta_rule(q, k, v, g, beta, **more),
        lambda **more: gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **more),
    ):
        with pytest.raises(ValueError, match=r"torch.no_grad\(\)"):
            call(out=torch.empty_like(v))
        with pytest.raises(ValueError, match=r"torch.no_grad\(\)"):
            call(initial_state=h0, final_state=h0)
        with torch.no_grad():
            call(initial_state=h0, final_state=h0)


def test_a_pool_has_no_gradient_but_may_be_read_in_training():
    q, k, v, g, beta, _ = make(T=70)
    pool = torch.randn(3, 2, 32, 16)
    q.requires_grad_()
    o, _ = gd.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=pool, initial_state_indices=torch.tensor([2]))
    (got,) = torch.autograd.grad(o.sum(), q)
    o, _ = gd.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=pool[2:])
    (want,) = torch.autograd.grad(o.sum(), q)
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match=r"pool\[indices\]"):
        gd.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=pool.requires_grad_(), initial_state_indices=torch.tensor([2])
        )


def test_a_padded_row_of_a_call_that_stores_nothing():
    """Draft verification: the read slot alone marks it."""
    q, k, v, g, beta, h0 = make(B=2, T=3)
    o, _ = gd.fused_recurrent_gated_delta_rule(
        q, k, v, g, beta=beta, initial_state=h0, initial_state_indices=torch.tensor([-1, 0])
    )
    want, _ = gd.fused_recurrent_gated_delta_rule(*(x[1:] for x in (q, k, v, g)), beta=beta[1:], initial_state=h0[:1])
    assert not o[0].any() and torch.equal(o[1:], want)


def test_recurrent_training_from_a_pool_needs_final_states():
    """Without them a negative slot would be a padded row in the forward alone."""
    q, k, v, g, beta, h0 = make(B=2, T=3)
    pool = {"initial_state": h0, "initial_state_indices": torch.tensor([1, -1])}
    q.requires_grad_()
    with pytest.raises(ValueError, match=r"pool\[indices\] without the indices, or output_final_state=True"):
        gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **pool)
    o, _ = gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **pool, output_final_state=True)
    (got,) = torch.autograd.grad(o.square().sum(), q)
    states = torch.stack([h0[1], torch.zeros_like(h0[1])])
    want_o, _ = gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=states)
    (want,) = torch.autograd.grad(want_o.square().sum(), q)
    assert torch.equal(o, want_o) and torch.equal(got, want)


def test_a_state_overwritten_before_the_backward_is_noticed():
    q, k, v, g, beta, h0 = make(T=5)
    q.requires_grad_()
    o, _ = gd.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=h0)
    with torch.no_grad():
        gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=h0, final_state=h0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_inference_mode():
    q, k, v, g, beta, h0 = make(T=1)
    want = gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=h0, output_final_state=True)
    with torch.inference_mode():
        pool = h0.clone()
        o, _ = gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=pool, final_state=pool)
        assert torch.equal(o, want[0]) and torch.equal(pool, want[1])


def test_torch_func_grad():
    q, k, v, g, beta, h0 = make()

    def loss(q):
        return gd.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=h0)[0].square().sum()

    leaf = q.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(torch.func.grad(loss)(q), want)


def test_activation_checkpointing():
    tensors = [x.requires_grad_() for x in make()[:5]]

    def layer(*x):
        return gd.chunk_gated_delta_rule(*x)[0]

    want = torch.autograd.grad(layer(*tensors).square().sum(), tensors)
    o = torch.utils.checkpoint.checkpoint(layer, *tensors, use_reentrant=False)
    got = torch.autograd.grad(o.square().sum(), tensors)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_recompute_keeps_only_the_inputs():
    """What a graph holds on to, counted through torch's hooks on saved tensors."""

    def kept(recompute):
        tensors = [x.requires_grad_() for x in make(T=512, K=64, V=64)[:5]]
        pointers = {x.data_ptr() for x in tensors}
        extra = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: extra.append(0 if x.data_ptr() in pointers else x.nbytes) or x, lambda x: x
        ):
            gd.chunk_gated_delta_rule(*tensors, recompute=recompute)
        return sum(extra)

    assert kept(recompute=False) > 0
    assert kept(recompute=True) == 0


def test_directional_derivative():
    tensors = make(B=2, T=90, H=2, HV=4, K=32, V=32)
    directions = [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(tensors)]

    def loss(tensors):
        o, s = gd.chunk_gated_delta_rule(*tensors[:5], initial_state=tensors[5], output_final_state=True)
        return (o.double().sin().sum() + s.double().sin().sum()) / 100

    leaves = [x.clone().requires_grad_() for x in tensors]
    gradients = torch.autograd.grad(loss(leaves), leaves)
    for i, (direction, gradient) in enumerate(zip(directions, gradients, strict=True)):
        step = 2e-3
        ends = []
        for sign in (1, -1):
            moved = list(tensors)
            moved[i] = tensors[i] + sign * step * direction
            ends.append(loss(moved).item())
        slope = (ends[0] - ends[1]) / (2 * step)
        assert slope == pytest.approx((gradient.double() * direction).sum().item(), rel=3e-3, abs=3e-3), f"input {i}"


# ---- packed sequences ----------------------------------------------------------------------------------------------


def test_cu_seqlens_from_positions():
    positions = torch.tensor([0, 1, 2, 0, 1, 5, 6, 0, 0])
    offsets = gd.cu_seqlens_from_positions(positions)
    assert offsets.dtype == torch.int32 and offsets.tolist() == [0, 3, 5, 7, 8, 9]
    # Rows of a batch are sequences of their own, even where the numbers run on.
    assert gd.cu_seqlens_from_positions(torch.tensor([[3, 4, 5], [6, 7, 0]])).tolist() == [0, 3, 5, 6]
    assert gd.cu_seqlens_from_positions(torch.arange(4)[None]).tolist() == [0, 4]
    assert gd.cu_seqlens_from_positions(torch.empty(0, dtype=torch.long)).tolist() == [0]
    with pytest.raises(ValueError, match="integers"):
        gd.cu_seqlens_from_positions(torch.zeros(4))
    with pytest.raises(ValueError, match="multi-axis"):
        gd.cu_seqlens_from_positions(torch.zeros(3, 1, 4, dtype=torch.long))


def test_packed_samples_do_not_leak():
    lengths = [33, 64, 1, 100]
    q, k, v, g, beta, _ = make(T=sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    packed, states = gd.chunk_gated_delta_rule(
        q, k, v, g, beta, cu_seqlens=gd.cu_seqlens_from_positions(positions), output_final_state=True
    )
    begin = 0
    for n, length in enumerate(lengths):
        part = [x[:, begin : begin + length] for x in (q, k, v, g, beta)]
        o, state = gd.chunk_gated_delta_rule(*part, output_final_state=True)
        assert torch.equal(packed[:, begin : begin + length], o) and torch.equal(states[n], state[0])
        begin += length


def test_empty_batches_and_sequences():
    for shape in ({"B": 0}, {"T": 0}, {"B": 0, "T": 0}):
        q, k, v, g, beta, h0 = make(**shape)
        leaf = q.requires_grad_()
        o, state = gd.chunk_gated_delta_rule(leaf, k, v, g, beta, initial_state=h0[: q.shape[0]],
                                             output_final_state=True)  # fmt: skip
        assert o.shape == v.shape
        assert torch.equal(state, h0[: q.shape[0]])
        assert torch.autograd.grad(o.sum(), leaf)[0].shape == q.shape
    q, k, v, g, beta, _ = make(T=0)
    o, state = gd.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=torch.tensor([0]), output_final_state=True)
    assert state.shape == (0, 2, 32, 16)


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors = [x.requires_grad_() for x in make()]
        o, s = gd.chunk_gated_delta_rule(*tensors[:5], initial_state=tensors[5], output_final_state=True)
        (o.sum() + s.sum()).backward()

"""transformers' GDN models on the library: against its own torch code, packed, cached, compiled, exported, refused."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen4_exp", reason="this transformers lacks the models")

import gatedelta.transformers as plugin  # noqa: E402
from transformers_models import CONFIGS, build, error, packed_mask, tokens  # noqa: E402

transformers.logging.set_verbosity_error()
logging.getLogger("kernels").setLevel(logging.ERROR)

LENGTHS = [50, 3, 97]
# Qwen4-exp's sparse attention compresses across a pack's boundaries: of it, layers alone are tested with packs.
PACKED = [family for family in CONFIGS if family != "qwen4_exp"]


def by_patch(model):
    plugin.patch()


def by_kernels(model):
    plugin.register()
    from kernels import Mode, kernelize, use_kernel_mapping

    # Without the mapping of transformers itself, which names repositories of the Hub.
    with warnings.catch_warnings(), use_kernel_mapping(plugin.kernel_mapping(), inherit_mapping=False):
        warnings.simplefilter("ignore")
        kernelize(model, mode=Mode.TRAINING, device="cpu")


@pytest.fixture(params=[by_patch, by_kernels])
def use(request):
    """Lets a model run on the library."""
    if request.param is by_kernels:
        require_kernels()
    return request.param


def require_kernels():
    try:
        plugin.kernel_mapping()
    except ImportError as reason:
        pytest.skip(str(reason))


@pytest.fixture(autouse=True)
def undo():
    yield
    plugin.unpatch()
    plugin.unregister()


@pytest.fixture
def patched():
    plugin.patch()


@pytest.fixture
def calls(monkeypatch):
    """Which of the library's functions ran."""
    from gatedelta.transformers import _functions, _layer

    seen = set()
    for module in (_functions, _layer):
        for name in (
            "causal_conv1d", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "gated_delta_layer_step",
            "rms_norm_gated",
        ):  # fmt: skip
            if (function := getattr(module, name, None)) is not None:

                def counted(*args, _name=name, _function=function, **kwargs):
                    seen.add(_name)
                    return _function(*args, **kwargs)

                monkeypatch.setattr(module, name, counted)
    return seen


def gdn_layer(model):
    return next(module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet"))


def gradients(model, ids, **kwargs):
    model = copy.deepcopy(model).train()
    model(ids, labels=ids, **kwargs).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def pack(ids, lengths=LENGTHS):
    """The first tokens of each row, one after the other; and their positions."""
    row = torch.cat([ids[i, :length] for i, length in enumerate(lengths)])[None]
    return row, torch.cat([torch.arange(length) for length in lengths])[None]


def announced(how, lengths=LENGTHS):
    """A pack as collators announce it. transformers' own with its arguments, TRL's padding_free: all of these."""
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    words = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": max(lengths)}
    words |= {"max_length_k": max(lengths)}
    ids = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))[None]
    return {"offsets": words, "seq_idx": {"seq_idx": ids}, "all": words | {"seq_idx": ids}, "positions": {}}[how]


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_gradients_and_tokens(family, use, calls):
    model, ids = build(family), tokens(3, 150)
    mask = torch.ones_like(ids)
    mask[0, :60], mask[1, :7] = 0, 0

    def run():
        results = {}
        with torch.no_grad():
            results["logits"] = model(ids, use_cache=False).logits
            results["with a new cache"] = model(ids, output_hidden_states=True).logits
            cache = model(ids[:, :70]).past_key_values
            results["in two parts"] = model(ids[:, 70:], past_key_values=cache).logits
        results["gradients"] = gradients(model, ids, use_cache=False)
        results["gradients, with a cache"] = gradients(model, ids)
        results["gradients, left-padded"] = gradients(model, ids, attention_mask=mask, use_cache=False)
        results["tokens"] = model.generate(
            ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None
        )
        return results

    want = run()
    assert not calls
    use(model)
    got = run()
    assert calls >= {"causal_conv1d", "chunk_gated_delta_rule", "rms_norm_gated"}
    whole = use is by_patch or "qwen3_5" in family
    assert ("gated_delta_layer_step" if whole else "fused_recurrent_gated_delta_rule") in calls
    for name, value in want.items():
        if name == "tokens":
            assert torch.equal(got[name], value)
        else:
            assert error(got[name], value) < 1e-5, name
    plugin.unpatch()
    plugin.unregister()
    calls.clear()
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, want["logits"])
    assert not calls


@pytest.mark.parametrize("how", ["offsets", "seq_idx", "all", "positions"])
@pytest.mark.parametrize("family", PACKED)
def test_packs_are_kept_apart(family, how, use):
    model, ids = build(family), tokens(3, 100)
    row, positions = pack(ids)
    inputs = {"position_ids": positions, "attention_mask": packed_mask(LENGTHS), "use_cache": False}

    def gradient_of(logits):
        model.zero_grad()
        logits.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    want = torch.cat([model(ids[i : i + 1, :n], use_cache=False).logits for i, n in enumerate(LENGTHS)], 1)
    want_gradient = gradient_of(want)
    use(model)
    got = model(row, **inputs, **announced(how)).logits
    assert error(got, want) < 1e-5
    assert error(gradient_of(got), want_gradient) < 1e-5
    with torch.no_grad():
        if how == "positions":  # as transformers' attention finds them
            assert error(model(row, position_ids=positions, use_cache=False).logits, want) < 1e-5


class RowByRow(torch.nn.Linear):
    """A product whose bits do not depend on the number of rows, as those of torch's products do."""

    def forward(self, x):
        return (x.unsqueeze(-2) * self.weight).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
def test_packs_have_the_bits_of_single_sequences(family, dtype, patched):
    layer = gdn_layer(build(family)).to(dtype)
    for module in layer.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = RowByRow
    x = torch.randn(1, sum(LENGTHS), 64).to(dtype)
    with torch.no_grad():
        got = layer(x, **announced("offsets"))
        want = torch.cat([layer(part) for part in x.split(LENGTHS, 1)], 1)
    assert torch.equal(got, want)


def test_packs_of_a_collator(patched):
    model, ids = build("qwen3_5"), tokens(3, 100)
    samples = [{"input_ids": ids[i, :n].tolist()} for i, n in enumerate(LENGTHS)]
    with torch.no_grad():
        want = torch.cat([model(ids[i : i + 1, :n], use_cache=False).logits for i, n in enumerate(LENGTHS)], 1)
        for options in ({}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}):
            batch = transformers.DataCollatorWithFlattening(return_tensors="pt", **options)(samples)
            batch.pop("labels")
            got = model(**batch, attention_mask=packed_mask(LENGTHS), use_cache=False).logits
            assert error(got, want) < 1e-5, options


def test_packs_in_several_rows(patched):
    model, ids = build("qwen3_5"), tokens(4, 60)
    rows = ids.view(2, 120)
    positions = torch.arange(60).repeat(2)[None].expand(2, -1)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits.view(2, 120, -1)
        assert error(model(rows, position_ids=positions, use_cache=False).logits, want) < 1e-5
        # Positions of one row stand for all.
        assert error(model(rows, position_ids=positions[:1], use_cache=False).logits, want) < 1e-5
        with pytest.raises(ValueError, match="a pack of 2 rows cannot fill a cache: pass use_cache=False"):
            model(rows, position_ids=positions)


def test_a_cache_goes_on_from_the_last_sequence_of_a_pack(patched):
    layer = gdn_layer(build("qwen3_5"))
    config = transformers.Qwen3_5TextConfig(layer_types=["linear_attention"], num_hidden_layers=1)
    x, y = torch.randn(1, sum(LENGTHS), 64), torch.randn(1, 1, 64)
    with torch.no_grad():
        packed, single = transformers.DynamicCache(config=config), transformers.DynamicCache(config=config)
        layer(x, cache_params=packed, **announced("offsets"))
        layer(x[:, -LENGTHS[-1] :], cache_params=single)
        assert error(layer(y, cache_params=packed), layer(y, cache_params=single)) < 1e-6
        with pytest.raises(ValueError, match="a pack cannot go on from a cache, which has one state a row"):
            layer(x, cache_params=packed, **announced("offsets"))


def test_what_counts_as_a_boundary():
    from gatedelta.transformers._packs import _breaks, _offsets_from_positions

    def offsets(positions, mask=None):
        positions = torch.tensor(positions)
        words = {"input_ids": torch.zeros(positions.shape[-2:], dtype=torch.long), "position_ids": positions}
        found = _offsets_from_positions(words if mask is None else {**words, "attention_mask": torch.tensor(mask)})
        return None if found is None else found.tolist()

    assert offsets([[0, 1, 2, 3]]) is None
    assert offsets([[5, 6, 7, 8]]) is None
    assert offsets([[0, 1, 0, 0]]) == [0, 2, 3, 4]
    assert offsets([[0, 1, 0], [0, 1, 2]]) == [0, 2, 3, 6]
    # Padding has positions of its own, which count nothing; those of tokens do.
    assert offsets([[1, 1, 0, 1], [0, 1, 2, 3]], [[0, 0, 1, 1], [1, 1, 1, 1]]) is None
    assert offsets([[1, 0, 1, 0]], [[0, 1, 1, 1]]) == [0, 3, 4]
    # Four axes: the first counts tokens. Three: an image's tokens share a time, a sequence starts at 0 in all.
    assert offsets([[[0, 1, 0, 1]], [[0, 0, 0, 0]], [[0, 0, 0, 0]], [[0, 0, 0, 0]]]) == [0, 2, 4]
    image = [[0, 1, 1, 1, 3, 0, 0], [0, 1, 1, 2, 3, 0, 0], [0, 1, 2, 1, 3, 0, 1]]
    assert _breaks(torch.tensor(image)[:, None]).tolist() == [[False, False, False, False, True, False]]


@pytest.mark.parametrize("family", CONFIGS)
def test_whole_layer_compiles_without_a_break(family, patched):
    model = build(family)
    layer, x = gdn_layer(model), torch.randn(2, 70, 64)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for words in ({}, {"cu_seq_lens_q": torch.tensor([0, 30, 140], dtype=torch.int32)}):
        results = []
        for run in (layer, compiled):
            layer.zero_grad()
            run(x, **words).square().sum().backward()
            results.append(torch.cat([p.grad.flatten() for p in layer.parameters()]))
        assert error(results[1], results[0]) < 1e-5
    with torch.no_grad():
        caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
        for length in (70, 1):
            want, got = (run(x[:, :length], cache_params=c) for run, c in zip((layer, compiled), caches))
            assert error(got, want) < 1e-6


def test_compiled_model_refuses_packs_by_positions_alone(patched):
    model, ids = build("qwen3_5"), tokens(2, 40)
    positions = torch.arange(40)[None].expand(2, -1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        assert error(compiled(ids, position_ids=positions, use_cache=False).logits, want) < 1e-6
        with pytest.raises(RuntimeError, match="a compiled model cannot find where they begin, pass cu_seq_lens_q"):
            compiled(ids, position_ids=positions % 20, use_cache=False)


def test_export_and_trace_keep_the_torch_code(use):
    model = build("qwen3_5", num_hidden_layers=1, layer_types=["linear_attention"])
    use(model)
    layer, x = gdn_layer(model), torch.randn(1, 20, 64)
    program = torch.export.export(layer, (x,), strict=False)
    assert "gatedelta" not in str(program.graph)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(layer, (x,))
        assert "gatedelta" not in str(traced.inlined_graph)
        assert error(traced(x), layer(x)) < 1e-5


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"linear_conv_kernel_dim": 5}])
def test_what_the_library_lacks_stays_with_transformers(changes):
    model, ids = build("qwen3_5", **changes), tokens(2, 40)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        plugin.patch()
        message = "gatedelta leaves Qwen3_5GatedDeltaNet to transformers: a(ctivation 'gelu'| convolution of 5 taps)"
        with pytest.warns(UserWarning, match=message):
            got = model(ids, use_cache=False).logits
        assert error(got, want) < 1e-5
        with pytest.warns(UserWarning, match=r"to transformers: dtype is torch.float64; float32, bfloat16 and"):
            model.double()(ids, use_cache=False)


def test_calls_on_gpus(monkeypatch):
    """Rule, convolution and norm go to the library where it serves the GPU, and the rule where it serves the heads."""
    from gatedelta._plugins import limits
    from gatedelta.transformers import _functions
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name in ("chunk_rule", "recurrent_rule", "conv1d", "norm"):
        monkeypatch.setattr(_functions, name, lambda *args, **kwargs: "ours")

    def chosen(K, V, dtype):
        def original(*args, **kwargs):
            return "theirs"

        q, v = (torch.zeros(1, 9, 2, size, dtype=dtype, device="cuda") for size in (K, V))
        yield _functions.choose_chunk_rule(original, q, q, v)
        yield _functions.choose_recurrent_rule(original, q, q, v)
        yield _functions.choose_conv1d(original, q[0], torch.zeros(2, 4, device="cuda"))
        yield _functions.choose_norm(original, torch.nn.Identity(), v[..., :16], v[..., :16])

    with FakeTensorMode():
        monkeypatch.setattr(limits, "_gpu_refusal", lambda index: None)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for sizes in ((128, 128), (64, 256), (16, 48)):
                assert list(chosen(*sizes, dtype)) == ["ours"] * 4
            for sizes in ((100, 128), (64, 272)):
                assert list(chosen(*sizes, dtype)) == ["theirs", "theirs", "ours", "ours"]
        monkeypatch.setattr(limits, "_gpu_refusal", lambda index: "why not")
        assert list(chosen(128, 128, torch.bfloat16)) == ["theirs"] * 4


def test_checkpointed_gradients(patched):
    model, ids = build("qwen3_5"), tokens(3, 100)
    row, positions = pack(ids)
    want = gradients(model, row, position_ids=positions, use_cache=False)
    with warnings.catch_warnings():  # transformers 5.23 has another name for it
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable()
    assert error(gradients(model, row, position_ids=positions, use_cache=False), want) < 1e-6


def test_bfloat16_and_autocast(patched):
    model, ids = build("qwen3_5"), tokens(2, 120)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        with torch.autocast("cpu", torch.bfloat16):
            assert error(model(ids, use_cache=False).logits, want) < 2e-2
        model.bfloat16()
        got = model(ids, use_cache=False).logits
        plugin.unpatch()
        theirs = model(ids, use_cache=False).logits
    assert error(got, want) < max(2e-2, 1.2 * error(theirs, want))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"cache_implementation": "static"}])
def test_ways_to_generate(options):
    model, ids = build("qwen3_5"), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    options = {**options, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, **options)
    plugin.patch()
    assert torch.equal(model.generate(ids, **options), want)


@pytest.mark.parametrize("how", ["recording", "gradients"])
def test_states_go_through_the_cache(how):
    """Not in place: where the cache must keep past inputs, and where autograd records."""
    model, x = build("qwen3_5"), torch.randn(2, 30, 64)
    layer = gdn_layer(model)

    def run():
        layer.zero_grad()
        cache = transformers.DynamicCache(config=model.config)
        if how == "recording":
            cache.activate_past_recording()
        with torch.set_grad_enabled(how == "gradients"):
            parts = [layer(part, cache_params=cache) for part in (x[:, :25], x[:, 25:29], x[:, 29:])]
        if how == "gradients":
            parts[0].sum().backward()
            parts.append(torch.cat([p.grad.flatten() for p in layer.parameters()]))
        return [*parts, cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]]

    want = run()
    plugin.patch()
    for got, value in zip(run(), want, strict=True):
        assert error(got.detach(), value.detach()) < 1e-5


def test_offloaded_weights(patched):
    accelerate = pytest.importorskip("accelerate")
    model, ids = build("olmo_hybrid"), tokens(2, 40)
    with torch.no_grad():
        want = [model(ids, use_cache=False).logits, model.generate(ids, max_new_tokens=4, do_sample=False)]
        accelerate.cpu_offload(model, execution_device="cpu")
        assert next(model.parameters()).is_meta
        got = [model(ids, use_cache=False).logits, model.generate(ids, max_new_tokens=4, do_sample=False)]
    assert error(got[0], want[0]) < 1e-6 and torch.equal(got[1], want[1])


def test_patch_and_unpatch_leave_what_they_found():
    import transformers.models.qwen3_5.modeling_qwen3_5 as modeling

    def places():
        kinds = (modeling.Qwen3_5GatedDeltaNet, modeling.Qwen3_5RMSNormGated, modeling.Qwen3_5TextModel)
        names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn")
        return [kind.forward for kind in kinds] + [vars(modeling)[name] for name in names]

    before = places()
    assert plugin.patch() == tuple(CONFIGS)
    first = places()
    assert not any(a is b for a, b in zip(before, first))
    assert plugin.patch() == tuple(CONFIGS)
    assert all(a is b for a, b in zip(first, places()))
    plugin.unpatch()
    plugin.unpatch()
    assert all(a is b for a, b in zip(before, places()))


def test_another_shape_of_transformers_is_refused(monkeypatch):
    import transformers.models.qwen3_next.modeling_qwen3_next as modeling

    forward = modeling.Qwen3NextGatedDeltaNet.forward
    monkeypatch.delattr(modeling, "causal_conv1d_fn")
    with pytest.raises(RuntimeError, match=r"modeling_qwen3_next has no causal_conv1d_fn. Nothing was changed"):
        plugin.patch()
    monkeypatch.undo()
    monkeypatch.setattr(modeling.Qwen3NextGatedDeltaNet, "forward", lambda self, x: x)
    with pytest.raises(RuntimeError, match=r"Qwen3NextGatedDeltaNet\.forward takes self, x. Nothing was changed"):
        plugin.patch()
    monkeypatch.undo()
    assert modeling.Qwen3NextGatedDeltaNet.forward is forward


def test_import_imports_nothing_and_says_what_is_missing(run_python):
    code = "import sys, gatedelta.transformers; print(sys.modules.keys() & {'torch', 'transformers', 'kernels'})"
    assert run_python("-c", code).stdout.strip() == "set()"
    code = "import sys; sys.modules['transformers'] = None; import gatedelta.transformers as p; p.unpatch(); p.patch()"
    result = run_python("-c", code, check=False)
    assert (
        "ImportError: gatedelta.transformers needs transformers: pip install '.[transformers]' in a clone"
        in result.stderr
    )


def test_register_says_which_kernels_it_needs(monkeypatch):
    import transformers.utils.import_utils as versions

    monkeypatch.setattr(versions, "is_kernels_available", lambda: False)
    with pytest.raises(ImportError, match=r"register\(\) needs the kernels package, of a version .* without it"):
        plugin.register()


BROKEN_FLA = """
import sys, types, torch
from transformers_models import build, tokens

def broken(q, k, v, g, beta, initial_state=None, output_final_state=False, **kwargs):
    raise RuntimeError("0 active drivers")

for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__, module.__spec__ = [], None
    module.chunk_gated_delta_rule = module.fused_recurrent_gated_delta_rule = broken
sys.modules["fla"].ops = sys.modules["fla.ops"]
sys.modules["fla.ops"].gated_delta_rule = sys.modules["fla.ops.gated_delta_rule"]
model, ids = build("qwen3_5"), tokens(1, 20)
try:
    model(ids)
except RuntimeError as error:
    print(error)
import gatedelta.transformers
gatedelta.transformers.patch()
print(model.generate(ids, max_new_tokens=2, min_new_tokens=2).shape[1])
"""


def test_fla_on_a_machine_without_a_gpu(run_python, root):
    """transformers prefers FLA to its own code, wherever FLA is installed."""
    result = run_python("-c", BROKEN_FLA, path=root / "tests" / "python")
    assert result.stdout.split("\n")[:2] == ["0 active drivers", "22"]


AS_FLA = """
import sys, types, torch
from gatedelta import torch as gd
for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__, module.__spec__ = [], None
    for function in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        setattr(module, function, getattr(gd, function))
sys.modules["fla"].ops = sys.modules["fla.ops"]
sys.modules["fla.ops"].gated_delta_rule = sys.modules["fla.ops.gated_delta_rule"]
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as wrapped
x = torch.nn.functional.normalize(torch.randn(1, 90, 2, 32), dim=-1)
g, beta = -torch.rand(1, 90, 2), torch.rand(1, 90, 2)
words = dict(output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=torch.tensor([0, 30, 90]))
got = wrapped(x, x, x, g=g, beta=beta, **words, some_argument_of_the_model=1)
want = gd.chunk_gated_delta_rule(x, x, x, g, beta, **words)
print(all(torch.equal(a, b) for a, b in zip(got, want)))
"""


def test_transformers_own_lookup_keeps_our_arguments(run_python):
    """Its wrapper drops every keyword that the implementation does not name; cu_seqlens must get through."""
    assert run_python("-c", AS_FLA).stdout.strip() == "True"


def test_unregister_leaves_the_mapping_as_it_was():
    require_kernels()
    from kernels import register_kernel_mapping
    from kernels.layer.globals import _KERNEL_MAPPING

    class Other:
        def load(self):
            raise AssertionError

    other = Other()
    register_kernel_mapping({"causal_conv1d_fn": {"cpu": other}})
    plugin.register()
    plugin.register()
    mapping = _KERNEL_MAPPING.get()
    assert "gatedelta" in str(next(iter(mapping["causal_conv1d_fn"]["cpu"].repos.values())))
    plugin.unregister()
    assert isinstance(next(iter(mapping["causal_conv1d_fn"]["cpu"].repos.values())), Other)
    assert "RMSNormGated" not in mapping
    mapping.pop("causal_conv1d_fn")

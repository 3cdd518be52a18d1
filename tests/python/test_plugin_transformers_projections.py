"""fuse_projections: one product for a layer's input projections, with the results of one product each."""

from __future__ import annotations

import copy
import io

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen4_exp", reason="this transformers lacks the models")

import gatedelta.transformers as plugin  # noqa: E402
from gatedelta.transformers._families import FAMILIES  # noqa: E402
from gatedelta.transformers._projections import FEW_TOKENS  # noqa: E402
from torch import nn  # noqa: E402
from transformers_models import CONFIGS, build, error, tokens  # noqa: E402

transformers.logging.set_verbosity_error()
LAYERS = 2  # of the models' three
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}


@pytest.fixture(autouse=True)
def patched():
    plugin.patch()
    yield
    plugin.unpatch()


@pytest.fixture
def called(monkeypatch):
    """The linear modules that ran."""
    modules = []
    forward = nn.Linear.forward

    def recording(self, x):
        modules.append(self)
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", recording)
    return modules


def gdn_layers(model):
    return [layer for family in FAMILIES for layer in family.layers(model)]


def projections(model):
    """The modules, layer by layer."""
    return [
        [getattr(layer, name) for group in family.projections for name in group]
        for family in FAMILIES
        for layer in family.layers(model)
    ]


def separate_products(model, called, *inputs, **words):
    """How many of a layer's projections ran as modules of their own, for each layer; without gradients."""
    called.clear()
    with torch.no_grad():
        model(*inputs, **words)
    return [sum(any(module is other for other in called) for module in layer) for layer in projections(model)]


def decoded(model, ids):
    """The logits of a prompt's last token, and of single tokens after it."""
    with torch.no_grad():
        first = model(ids[:, :-4])
        steps = [model(part, past_key_values=first.past_key_values).logits for part in ids[:, -4:].split(1, 1)]
    return torch.cat([first.logits[:, -1:], *steps], 1)


def pointers(model):
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_same_logits_and_tokens(family, batch, called):
    model, ids = build(family), tokens(batch, 74)
    every = [len(layer) for layer in projections(model)]
    short = FEW_TOKENS // batch  # a prompt with as many tokens as one product takes
    want = decoded(model, ids), decoded(model, ids[:, :short]), model.generate(ids, **OPTIONS)
    assert separate_products(model, called, ids[:, :1]) == every
    before, values = pointers(model), {name: value.clone() for name, value in model.state_dict().items()}
    assert plugin.fuse_projections(model) == LAYERS
    assert separate_products(model, called, ids[:, :short]) == [0] * LAYERS
    assert separate_products(model, called, ids) == every
    got = decoded(model, ids), decoded(model, ids[:, :short]), model.generate(ids, **OPTIONS)
    assert error(got[0], want[0]) < 1e-5 and error(got[1], want[1]) < 1e-5 and torch.equal(got[2], want[2])
    # The same parameters, elsewhere.
    assert values.keys() == model.state_dict().keys()
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert sum(a != b for a, b in zip(before.values(), pointers(model).values())) == sum(every)
    assert all(linear.weight.data_ptr() % 16 == 0 for layer in projections(model) for linear in layer)
    # A second time nothing happens.
    after = pointers(model)
    assert plugin.fuse_projections(model) == 0 and pointers(model) == after
    # And back.
    assert plugin.unfuse_projections(model) == LAYERS and plugin.unfuse_projections(model) == 0
    assert separate_products(model, called, ids[:, :1]) == every
    assert torch.equal(decoded(model, ids), want[0])
    weights = [linear.weight for layer in projections(model) for linear in layer]
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights)


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid"])
def test_views_are_aligned_and_not_copied(family):
    """The convolution, the rule and the norm get parts of one tensor, each of which begins at 16 bytes."""
    kind = next(kind for kind in FAMILIES if kind.name == family)
    model = build(family, linear_num_key_heads=1, linear_num_value_heads=3).bfloat16()
    layer, hidden = gdn_layers(model)[0], torch.randn(2, 3, 64).bfloat16()
    with torch.no_grad():
        want = kind.project(layer, hidden)
        plugin.fuse_projections(model)
        got = kind.project(layer, hidden)
    assert len({x.untyped_storage().data_ptr() for x in got}) == 1
    for ours, other in zip(got, want):
        assert ours.shape == other.shape and error(ours, other) < 1e-2
        assert ours.stride(-1) == 1 and ours.data_ptr() % 16 == 0
        assert all(stride * ours.element_size() % 16 == 0 for stride in ours.stride()[:-1])


def test_no_more_memory_than_a_layer_at_once(monkeypatch):
    """When a layer's weights move, those that other layers had before are gone."""
    import weakref

    from gatedelta.transformers import _projections

    model, old, alive = build("qwen3_5"), [], []
    fuse = _projections.fuse

    def watching(layer, groups):
        alive.append(sum(storage() is not None for storage in old))
        # The weights' storages as they are before the move: a tensor is a view that keeps its storage.
        names = [name for group in groups for name in group]
        old.extend(weakref.ref(layer.get_submodule(name).weight.untyped_storage()) for name in names)
        return fuse(layer, groups)

    monkeypatch.setattr(_projections, "fuse", watching)
    assert plugin.fuse_projections(model) == LAYERS and alive == [0] * LAYERS


@pytest.mark.parametrize("family", CONFIGS)
def test_a_saved_model_is_the_same(family, tmp_path, called):
    """The files have every weight once, as if nothing had been moved."""
    import safetensors.torch

    model, ids = build(family), tokens(2, 20)
    want, values = decoded(model, ids), {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "before")
    plugin.fuse_projections(model)
    model.save_pretrained(tmp_path / "after")
    files = [tmp_path / when / "model.safetensors" for when in ("before", "after")]
    assert files[0].read_bytes() == files[1].read_bytes()
    loaded = type(model).from_pretrained(tmp_path / "after")
    assert torch.equal(decoded(loaded, ids), want)
    # What comes from a file can be fused.
    assert plugin.fuse_projections(loaded) == LAYERS
    assert separate_products(loaded, called, ids[:, :1]) == [0] * LAYERS
    assert error(decoded(loaded, ids), want) < 1e-5

    untied = {name: value for name, value in model.state_dict().items() if "lm_head" not in name}
    safetensors.torch.save_file(untied, tmp_path / "file")
    found = safetensors.torch.load_file(tmp_path / "file")
    assert all(torch.equal(found[name], values[name]) for name in untied)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    found = torch.load(file)
    assert all(torch.equal(found[name], value) for name, value in values.items())


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_act(assign, called):
    model, other, ids = build("olmo_hybrid"), build("olmo_hybrid"), tokens(2, 20)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
    want = decoded(other, ids)
    plugin.fuse_projections(model)
    model.load_state_dict(other.state_dict(), assign=assign)
    assert separate_products(model, called, ids[:, :1]) == [6 if assign else 0] * LAYERS
    assert error(decoded(model, ids), want) < 1e-5


@pytest.mark.parametrize("family", CONFIGS)
def test_training_steps(family, called):
    models, ids = [build(family), build(family)], tokens(2, 20)
    plugin.fuse_projections(models[1])
    results = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            model(ids, labels=ids, use_cache=False).loss.backward()
            gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            optimizer.step()
        results.append((gradients, decoded(model, ids)))
    assert torch.equal(results[0][0], results[1][0])  # by the same products
    assert error(results[1][1], results[0][1]) < 1e-5
    assert separate_products(models[1], called, ids[:, :1]) == [0] * LAYERS  # weights were updated where they are


def test_what_autograd_records_has_gradients():
    """Also where only the input, or only some of the weights, want one."""
    layer, x = gdn_layers(build("qwen3_5"))[0], torch.randn(1, 5, 64)
    other = copy.deepcopy(layer)
    plugin.fuse_projections(layer)
    for model in (layer, other):
        model.requires_grad_(False)
    for which in ("input", "in_proj_b"):
        grads = []
        for model in (layer, other):
            hidden = x.clone().requires_grad_(which == "input")
            model.in_proj_b.weight.requires_grad_(which == "in_proj_b")
            model(hidden).square().sum().backward()
            grads.append(hidden.grad if which == "input" else model.in_proj_b.weight.grad)
        assert torch.equal(*grads)
    layer.requires_grad_(False)
    assert error(layer(x), other(x)) < 1e-5


def test_calls_in_inference_mode(called):
    """The weights can be trained afterwards; layers also run there."""
    model, ids = build("qwen3_5"), tokens(1, 20)
    want = decoded(model, ids)
    with torch.inference_mode():
        assert plugin.fuse_projections(model) == LAYERS
        assert separate_products(model, called, ids[:, :1]) == [0] * LAYERS
        assert error(decoded(model, ids), want) < 1e-5
    model(ids, labels=ids, use_cache=False).loss.backward()
    with torch.inference_mode():
        assert plugin.unfuse_projections(model) == LAYERS
    model(ids, labels=ids, use_cache=False).loss.backward()


def test_what_moves_weights_ends_it(called):
    ids = tokens(1, 20)
    for move in (
        lambda model: model.to(torch.bfloat16),
        lambda model: model.double().float(),
        copy.deepcopy,
        lambda model: [setattr(layer.in_proj_z, "weight", nn.Parameter(layer.in_proj_z.weight.clone()))
                       for layer in gdn_layers(model)] and model,
    ):  # fmt: skip
        model = build("qwen3_5")
        plugin.fuse_projections(model)
        assert separate_products(model, called, ids[:, :1]) == [0] * LAYERS
        model = move(model)
        assert separate_products(model, called, ids[:, :1]) == [4] * LAYERS
        want = decoded(build("qwen3_5").to(model.dtype), ids)
        assert torch.equal(decoded(model, ids), want)
    model = build("qwen3_5")
    plugin.fuse_projections(model)
    model.to(torch.float32)  # moves nothing
    assert separate_products(model, called, ids[:, :1]) == [0] * LAYERS


def test_bfloat16_and_autocast(called):
    model, ids = build("qwen3_5"), tokens(2, 20)
    want = decoded(model, ids)
    plugin.fuse_projections(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert separate_products(model, called, ids[:, :1]) == [4] * LAYERS
        assert error(decoded(model, ids), want) < 3e-2
    model.bfloat16()
    other = decoded(model, ids)
    assert plugin.fuse_projections(model) == LAYERS
    assert separate_products(model, called, ids[:, :1]) == [0] * LAYERS
    assert error(decoded(model, ids), want) < max(3e-2, 1.2 * error(other, want))
    with torch.autocast("cpu", torch.bfloat16):
        assert separate_products(model, called, ids[:, :1]) == [0] * LAYERS


class Wrapped(nn.Module):
    """As LoRA's: twice the product."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return 2 * self.base_layer(x)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def double_forward(layer):
    forward = layer.in_proj_z.forward
    layer.in_proj_z.forward = lambda x: 2 * forward(x)


# Each doubles the product of a projection, by other means than its weight alone.
CHANGES = {
    "wrapper": lambda layer: setattr(layer, "in_proj_z", Wrapped(layer.in_proj_z)),
    "class": lambda layer: setattr(layer.in_proj_z, "__class__", Doubled),
    "hook": lambda layer: layer.in_proj_z.register_forward_hook(lambda module, args, result: 2 * result),
    "pre-hook": lambda layer: layer.in_proj_z.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "forward": double_forward,
}


@pytest.mark.parametrize("change", CHANGES)
def test_projections_that_are_more_than_products(change):
    """They act, whether they came before or after the weights were moved."""
    ids = tokens(1, 20)
    doubled = build("qwen3_5")
    with torch.no_grad():
        gdn_layers(doubled)[0].in_proj_z.weight.mul_(2)
    want = decoded(doubled, ids)
    for when in ("before", "after"):
        model = build("qwen3_5")
        if when == "before":
            CHANGES[change](gdn_layers(model)[0])
        assert plugin.fuse_projections(model) == (LAYERS - 1 if when == "before" else LAYERS)
        if when == "after":
            CHANGES[change](gdn_layers(model)[0])
        assert error(decoded(model, ids), want) < 1e-5


def add_bias(layer):
    layer.in_proj_z.bias = nn.Parameter(torch.ones(layer.value_dim))


def tie(layer):
    layer.in_proj_a.weight = layer.in_proj_b.weight


def flatten(layer):
    """As trainers do, to send all weights at once."""
    weights = [linear.weight for linear in (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_a, layer.in_proj_b)]
    flat = torch.cat([weight.detach().flatten() for weight in (*weights, weights[0])])
    for weight in weights:
        weight.data, flat = flat[: weight.numel()].view(weight.shape), flat[weight.numel() :]


def quantise(layer):
    class Quantised(torch.Tensor):
        pass

    layer.in_proj_z.weight = nn.Parameter(layer.in_proj_z.weight.detach().as_subclass(Quantised))


KEPT = {
    "bias": add_bias,
    "tied weights": tie,
    "flat buffer": flatten,
    "tensor subclass": quantise,
    "dtype": lambda layer: layer.in_proj_z.double(),
    "meta": lambda layer: layer.in_proj_z.to("meta"),
    "all meta": lambda layer: layer.to("meta"),
}


@pytest.mark.parametrize("change", KEPT)
def test_weights_that_stay_where_they_are(change):
    model = build("qwen3_5")
    layer = gdn_layers(model)[0]
    KEPT[change](layer)
    before = pointers(layer)
    assert plugin.fuse_projections(model) == LAYERS - 1
    assert pointers(layer) == before
    assert plugin.unfuse_projections(model) == LAYERS - 1
    assert pointers(layer) == before


def test_neighbours_in_a_flat_buffer():
    """Weights that lie side by side for another reason give right results, and are not taken out of the buffer."""
    model, ids = build("qwen3_5", linear_num_key_heads=8, linear_num_value_heads=8), tokens(1, 20)
    want = decoded(model, ids)
    for layer in gdn_layers(model):
        flatten(layer)
    before = pointers(model)
    assert error(decoded(model, ids), want) < 1e-5
    assert plugin.fuse_projections(model) == 0 and plugin.unfuse_projections(model) == 0
    assert pointers(model) == before


def test_models_without_such_layers():
    assert plugin.fuse_projections(nn.Linear(4, 4)) == 0 and plugin.unfuse_projections(nn.Linear(4, 4)) == 0


@pytest.mark.parametrize("family", CONFIGS)
def test_transformers_own_code_takes_the_weights(family):
    model, ids = build(family), tokens(1, 20)
    plugin.unpatch()
    want = decoded(model, ids)
    assert plugin.fuse_projections(model) == LAYERS
    assert torch.equal(decoded(model, ids), want)


@pytest.mark.parametrize("family", CONFIGS)
def test_compiles_without_a_break(family):
    model, x = build(family), torch.randn(1, 30, 64)
    layer = gdn_layers(model)[0]
    other = copy.deepcopy(layer)
    plugin.fuse_projections(model)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
        for length in (30, 1):
            want, got = (run(x[:, :length], cache_params=c) for run, c in zip((other, compiled), caches))
            assert error(got, want) < 1e-5


def test_export_takes_the_weights():
    model = build("qwen3_5", num_hidden_layers=1, layer_types=["linear_attention"])
    layer, x = gdn_layers(model)[0], torch.randn(1, 20, 64)
    want = layer(x)
    plugin.fuse_projections(model)
    program = torch.export.export(layer, (x,), strict=False)
    assert error(program.module()(x), want) < 1e-5

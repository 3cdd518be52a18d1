"""transformers' Qwen3-Next and Qwen3.5 layers with our functions in the place of its torch code."""

from __future__ import annotations

import importlib
import inspect

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gatedelta import torch as gd  # noqa: E402

FAMILIES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
}


def tiny_model(family):
    config_name, model_name = FAMILIES[family]
    package = f"transformers.models.{family}"
    try:
        config_class = getattr(importlib.import_module(f"{package}.configuration_{family}"), config_name)
        module = importlib.import_module(f"{package}.modeling_{family}")
    except (ImportError, AttributeError):
        pytest.skip(f"this transformers has no {family}")
    if not hasattr(module, "torch_chunk_gated_delta_rule"):
        pytest.skip("this transformers calls the gated delta rule in another way")
    config = config_class(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"], num_experts=0,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return module, getattr(module, model_name)(config).float().eval()


@pytest.fixture(params=FAMILIES)
def family(request, monkeypatch):
    """A tiny model, and a way to make it use our functions and count their calls."""
    module, model = tiny_model(request.param)
    calls = []

    def counted(function):
        # As transformers' own lookup does it: a layer hands over whatever the model was called with, and keywords that
        # the implementation does not name are dropped.
        names = inspect.signature(function).parameters

        def call(*args, **kwargs):
            calls.append(function.__name__)
            return function(*args, **{key: value for key, value in kwargs.items() if key in names})

        return call

    def use_ours():
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", counted(gd.chunk_gated_delta_rule))
        monkeypatch.setattr(module, "torch_recurrent_gated_delta_rule", counted(gd.fused_recurrent_gated_delta_rule))

    return model, use_ours, calls


def test_training_step(family):
    model, use_ours, calls = family
    tokens = torch.randint(0, 64, (2, 100), generator=torch.Generator().manual_seed(1))

    def step():
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    loss, gradients = step()
    use_ours()
    our_loss, our_gradients = step()
    assert "chunk_gated_delta_rule" in calls
    torch.testing.assert_close(our_loss, loss, rtol=1e-5, atol=1e-5)
    assert our_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        worst = (our_gradients[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-6)
        assert worst < 1e-3, f"{name}: {worst}"


def test_generation_with_cache(family):
    model, use_ours, calls = family
    tokens = torch.randint(3, 64, (2, 70), generator=torch.Generator().manual_seed(2))

    def generate():
        with torch.no_grad():
            result = model.generate(
                tokens, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True,
                eos_token_id=None,
            )  # fmt: skip
        return result.sequences, torch.stack(result.logits)

    sequences, logits = generate()
    use_ours()
    our_sequences, our_logits = generate()
    assert {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"} <= set(calls)
    assert torch.equal(our_sequences, sequences)
    torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=1e-4)


AS_FLA = """
import sys, types, torch
from gatedelta import torch as gd
fla = types.ModuleType("fla"); fla.__path__ = []; fla.__spec__ = None
ops = types.ModuleType("fla.ops"); ops.__path__ = []
rule = types.ModuleType("fla.ops.gated_delta_rule")
seen = []
for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "recurrent_gated_delta_rule"):
    setattr(rule, name, getattr(gd, name)); setattr(fla, name, getattr(gd, name))
fla.ops, ops.gated_delta_rule = ops, rule
sys.modules.update({"fla": fla, "fla.ops": ops, "fla.ops.gated_delta_rule": rule})
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as wrapped
x = torch.nn.functional.normalize(torch.randn(1, 90, 2, 32), dim=-1)
g, beta = -torch.rand(1, 90, 2), torch.rand(1, 90, 2)
offsets = torch.tensor([0, 30, 90])
got = wrapped(x, x, x, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=offsets,
              some_argument_of_the_model=1)
want = gd.chunk_gated_delta_rule(x, x, x, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True,
                                 cu_seqlens=offsets)
print(all(torch.equal(a, b) for a, b in zip(got, want)))
"""


def test_transformers_own_lookup_keeps_our_arguments(run_python):
    """Its wrapper drops every keyword that the implementation does not name; cu_seqlens must get through."""
    try:
        from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback  # noqa: F401
    except ImportError:
        pytest.skip("this transformers has no such lookup")
    assert run_python("-c", AS_FLA).stdout.strip() == "True"

"""flash-linear-attention's tests of the gated delta rule, and of the convolution, norm, layer and model around it, all
given to GateDelta by gatedelta.fla."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable

from . import Rule, Suite

SUITES = (
    Suite(
        name="fla",
        repository="flash-linear-attention",
        files=("tests/ops/test_gdn.py",),
        packages=("fla", "einops"),
        foreign=(
            Rule(
                "a kernel of FLA's own, which no public function is",
                ("*::test_gate[*", "*::test_prepare_wy_repr_bwd_no_g[*", "*_blackwell_triton_guard"),
            ),
            Rule("which calls FLA hands to FlashQLA", ("*::test_flash_qla_verifier_*", "*::test_flash_qla_sm120_*")),
        ),
        heavy=(
            Rule(
                "the gradients of FLA's own reference take more than 8 GB",
                (
                    "*::test_flash_qla_chunk[B1-T4096-*",
                    "*::test_flash_qla_chunk[B2-T2048-*",
                    "*::test_flash_qla_chunk_varlen[H8-*",
                    "*::test_flash_qla_chunk_varlen[H16-*",
                ),
                ("cpu",),
            ),
        ),
    ),
    Suite(
        name="fla_layers",
        repository="flash-linear-attention",
        files=(
            "tests/modules/test_conv.py",
            "tests/modules/test_layernorm_gated.py",
            "tests/layers/test_gated_deltanet.py",
            "tests/models/test_modeling_gated_deltanet.py",
        ),
        packages=("fla", "einops"),
        foreign=(
            Rule("LayerNorm: GateDelta has RMSNorm", ("*::test_layernorm_gated[*", "*gate_linear[*rmsFalse*")),
            Rule("the rest of FLA's model is Triton, which a CPU does not run", ("test_modeling_gated*::*",), ("cpu",)),
        ),
        differences=(
            Rule(
                "two ways to one gradient, compared bit for bit: torch's bf16 product on a CPU depends on strides",
                ("*::test_gated_deltanet_fused_qkv_conv_matches_fallback[*bfloat16]",),
                ("cpu",),
            ),
            Rule(
                "FLA's models have heads with V = 512: up to 256 is taken, and FLA's own kernels run instead",
                ("test_modeling_gated*::*",),
                ("cuda",),
            ),
            Rule(
                "gated norm: D is a multiple of 16 up to 512",
                ("*::test_rmsnorm_gated[*_D1200_*", "*::test_rmsnorm_gated[*_D50_*", "*gate_linear[*_D1024_*"),
            ),
        ),
    ),
)


def install(device: str) -> None:
    import fla.utils
    import gatedelta.fla
    import torch

    if device == "cpu":
        fla.utils.device = torch.device("cpu")  # a name would be "cuda", or make some tests skip
        fla.utils.device_torch_lib = torch.cpu
        fla.utils.IS_NVIDIA_HOPPER = True
    gatedelta.fla.register()
    _refuse_what_is_not_taken()
    _stand_in_for_flash_qla()
    # Its tests skip grouped heads unless FLA's dispatch is off. FLA has read this by now, and dispatch stays on.
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"


def _refuse_what_is_not_taken() -> None:
    """Where GateDelta refuses a call, FLA would go on with its own kernels. Such a test is to fail."""
    from fla import backends
    from fla.modules.causal_conv1d import ops as conv
    from fla.modules.norm import fused_norm_gate as norm
    from gatedelta.fla import modules, rule

    class Refusal(backends.BaseBackend):
        backend_type = "refusal"
        priority = 100

    def refuser(reason_of: Callable[..., str | None]) -> Callable[..., None]:
        def refuse(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"gatedelta refuses: {reason_of(*args, **kwargs)}")

        return refuse

    @backends.register("gated_delta_rule")
    class RuleRefusal(Refusal):
        chunk_gated_delta_rule = staticmethod(refuser(rule.chunk_refusal))

    for function, reason_of in (
        (conv.causal_conv1d_fwd, modules.conv_refusal),
        (conv.causal_conv1d_bwd, modules.conv_bwd_refusal),
        (conv.causal_conv1d_update, modules.conv_update_refusal),
        (norm.layer_norm_gated_fwd, modules.norm_refusal),
        (norm.layer_norm_gated_bwd, modules.norm_bwd_refusal),
    ):
        backends.register(function, backend=Refusal)(refuser(reason_of))

    ours = rule.recurrent

    def recurrent(*args: object, **kwargs: object) -> object:
        results = ours(*args, **kwargs)
        if isinstance(results, str):
            raise NotImplementedError(f"gatedelta refuses: {results}")
        return results

    rule.recurrent = recurrent


def _stand_in_for_flash_qla() -> None:
    """Some tests want FLA's FlashQLA backend to be the one that runs, and set its switch. GateDelta has FlashQLA's
    functions, too: it then runs as the package of that name."""
    from importlib.machinery import ModuleSpec

    from fla.ops.gated_delta_rule.backends import flash_qla as theirs
    from gatedelta import fla as ours
    from gatedelta.flash_qla import chunk_gated_delta_rule

    module = types.ModuleType("flash_qla")
    module.__spec__ = ModuleSpec("flash_qla", None)
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    sys.modules["flash_qla"] = module
    theirs.IS_NVIDIA_HOPPER = True
    theirs.FlashQLABackend.is_available = classmethod(lambda cls: os.environ.get("FLA_FLASH_QLA") == "1")
    enabled = ours._is_available
    ours._is_available = lambda: enabled() and os.environ.get("FLA_FLASH_QLA") != "1"

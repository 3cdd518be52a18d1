"""flash-linear-attention's tests of the gated delta rule, its functions given to GateDelta by gatedelta.fla."""

from __future__ import annotations

import os
import sys
import types

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
        differences=(
            Rule("float32 on CUDA: the chunked kernels take bf16 and fp16", ("*::test_chunk*float32*",), ("cuda",)),
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
    from gatedelta import _fla_rule

    @backends.register("gated_delta_rule")
    class Refusal(backends.BaseBackend):
        backend_type = "refusal"
        priority = 100

        def chunk_gated_delta_rule(self, *args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"gatedelta refuses: {_fla_rule.chunk_refusal(*args, **kwargs)}")

    ours = _fla_rule.recurrent

    def recurrent(*args: object, **kwargs: object) -> object:
        results = ours(*args, **kwargs)
        if isinstance(results, str):
            raise NotImplementedError(f"gatedelta refuses: {results}")
        return results

    _fla_rule.recurrent = recurrent


def _stand_in_for_flash_qla() -> None:
    """Some tests want FLA's FlashQLA backend to be the one that runs, and set its switch. GateDelta has FlashQLA's
    functions, too: it then runs as the package of that name."""
    from importlib.machinery import ModuleSpec

    from fla.ops.gated_delta_rule.backends import flash_qla as theirs
    from gatedelta import chunk_gated_delta_rule
    from gatedelta import fla as ours

    module = types.ModuleType("flash_qla")
    module.__spec__ = ModuleSpec("flash_qla", None)
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    sys.modules["flash_qla"] = module
    theirs.IS_NVIDIA_HOPPER = True
    theirs.FlashQLABackend.is_available = classmethod(lambda cls: os.environ.get("FLA_FLASH_QLA") == "1")
    enabled = ours._is_available
    ours._is_available = lambda: enabled() and os.environ.get("FLA_FLASH_QLA") != "1"

"""FlashQLA's tests, its functions replaced by those of gatedelta.flash_qla.

FlashQLA and tilelang need not be installed: of FlashQLA the utilities of the checkout are used, which are plain torch,
and of tilelang the few names they ask for.
"""

from __future__ import annotations

import os
import sys

from . import Rule, Suite, stand_in

SUITES = (
    Suite(
        name="flash_qla",
        repository="FlashQLA",
        files=(
            "tests/test_gdr_unit.py",
            "tests/test_sm120_backward_disabled.py",
            "tests/test_function_signature.py",
        ),
        packages=(),
        foreign=(
            Rule("the text of FlashQLA's own function", ("test_function_signature.py::*",)),
            Rule(
                "too large for a CPU: from 16384 tokens on, or a thousand times the same call",
                (
                    "*[dev-*",
                    "*[varlen-B7-*",
                    "*[varlen-B3-*",
                    "*[varlen-B5-*",
                    "*[prod-mixed-large]",
                    "*_auto_cp[*",
                    "*_cp_cache[*",
                    "*::test_mixed_cp_control[*",
                    "*_deterministic[*",
                ),
                ("cpu",),
            ),
        ),
        environment={"TORCHDYNAMO_DISABLE": "1"},  # FlashQLA compiles its l2norm: eager is as good here
    ),
)


def install(device: str) -> None:
    import gatedelta.flash_qla as ours

    if device == "cpu":
        from . import cuda_on_cpu

        cuda_on_cpu.install()
    stand_in("tilelang", cdiv=lambda a, b: -(-a // b))
    stand_in("tilelang.contrib")
    stand_in("tilelang.contrib.nvcc", get_target_compute_version=lambda: "9.0")
    functions = {name: getattr(ours, name) for name in ours.__all__ if name.startswith("chunk_")}
    package = stand_in("flash_qla", **functions)
    checkout = sys.argv[sys.argv.index("--rootdir") + 1]
    package.__path__ = [os.path.join(checkout, "flash_qla")]

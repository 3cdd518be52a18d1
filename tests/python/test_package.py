"""The package itself: what importing it costs, what it finds, what it says when something is missing."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import gatedelta
import pytest
from gatedelta import _lib

BLOCK_HEAVY = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocked())
"""


def test_import_is_light(run_python):
    code = "import sys, gatedelta; print(sorted(sys.modules.keys() & {'torch', 'numpy', 'ctypes', 'gatedelta._lib'}))"
    assert run_python("-c", code).stdout.strip() == "[]"


def test_works_without_torch_and_numpy(run_python):
    code = BLOCK_HEAVY + "import gatedelta; print(gatedelta.info()['version'])"
    assert run_python("-c", code).stdout.strip() == gatedelta.__version__
    code = BLOCK_HEAVY + "from gatedelta import chunk_gated_delta_rule"
    result = run_python("-c", code, check=False)
    assert result.returncode != 0 and "torch is blocked" in result.stderr


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("from gatedelta import chunk_gated_delta_rule", "torch"),
        ("import gatedelta.torch", "torch"),
        ("import gatedelta; gatedelta.context_parallel", "torch"),
        ("import gatedelta.flash_qla", "torch"),
        ("import gatedelta.flashinfer", "torch"),
        ("import gatedelta.numpy", "numpy"),
    ],
)
def test_a_missing_package_is_explained(run_python, code, extra):
    result = run_python("-c", BLOCK_HEAVY + code, check=False)
    assert result.returncode != 0
    assert (
        f"needs {extra}, which is not installed: gatedelta[{extra}] brings it (pip install '.[{extra}]' in a clone"
        in (result.stderr)
    )


def test_numpy_path_needs_no_torch(run_python):
    pytest.importorskip("numpy")
    code = BLOCK_HEAVY.replace('("torch", "numpy")', '("torch",)') + (
        "import numpy as np, gatedelta.numpy as gd\n"
        "x = np.ones((1, 3, 1, 16), np.float32); g = np.zeros((1, 3, 1), np.float32)\n"
        "print(gd.forward(x, x, x, g, g).o.shape, 'torch' in sys.modules)"
    )
    assert run_python("-c", code).stdout.strip() == "(1, 3, 1, 16) False"


def test_names():
    with pytest.raises(AttributeError, match="no attribute 'chunk_gated_delta'"):
        _ = gatedelta.chunk_gated_delta
    assert {"chunk_gated_delta_rule", "numpy", "torch", "info"} <= set(dir(gatedelta))


def test_version_is_the_same_everywhere(root):
    versions = {
        "package": gatedelta.__version__,
        "library": gatedelta.info()["version"],
        "CMake": re.search(r"project\(gatedelta VERSION ([\d.]+)", (root / "CMakeLists.txt").read_text())[1],
    }
    header = (root / "include" / "gatedelta" / "gatedelta.h").read_text()
    versions["header"] = ".".join(
        re.search(rf"GD_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH")
    )
    assert len(set(versions.values())) == 1, versions


def test_info():
    info = gatedelta.info()
    assert info["cpu_isa_best"] in info["cpu_isa_usable"]
    assert set(info["cpu_isa_usable"]) <= set(info["cpu_isa_compiled"])
    assert "generic" in info["cpu_isa_usable"]
    assert info["cpu_count"] >= 1
    assert Path(info["library"]).is_file()


def test_structs_are_those_of_the_header(root):
    """Field by field: a ctypes mirror that drifted from the header would be refused, or worse, not be."""
    header = (root / "include" / "gatedelta" / "gatedelta.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    mirrors = {
        "gd_tensor": _lib.Tensor,
        "gd_exec": _lib.Exec,
        "gd_tuning": _lib.Tuning,
        "gd_inputs": _lib.Inputs,
        "gd_saved_call": _lib.SavedCallStruct,
        "gd_forward_args": _lib.ForwardArgs,
        "gd_backward_args": _lib.BackwardArgs,
        "gd_recurrent_args": _lib.RecurrentArgs,
        "gd_summary_args": _lib.SummaryArgs,
        "gd_backward_summary_args": _lib.BackwardSummaryArgs,
        "gd_merge_args": _lib.MergeArgs,
        "gd_conv1d_inputs": _lib.Conv1dInputs,
        "gd_conv1d_args": _lib.Conv1dArgs,
        "gd_layer_step_args": _lib.LayerStepArgs,
        "gd_info": _lib.Info,
    }
    for name, mirror in mirrors.items():
        body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", header, flags=re.S)[1]
        fields = []
        for statement in filter(None, (line.strip() for line in body.split(";"))):
            declared = re.sub(r"\[[^]]*\]", "", re.sub(r"^(const )?\w+\s*\*?", "", statement))
            fields += [field.strip(" *") for field in declared.split(",")]
        renamed = {"in": "inputs", "do_": "do"}  # keywords of Python and of C
        assert [renamed.get(field, field) for field in fields] == [field[0] for field in mirror._fields_], name


def test_missing_library_is_explained(run_python, tmp_path):
    result = run_python(
        "-c", "import gatedelta; gatedelta.info()", env={"GATEDELTA_LIBRARY_DIR": str(tmp_path)}, check=False
    )
    assert "ImportError" in result.stderr and str(tmp_path) in result.stderr and "pip install" in result.stderr


def test_forced_isa(run_python):
    code = "import gatedelta; print(gatedelta.info()['cpu_isa_forced'])"
    assert run_python("-c", code, env={"GATEDELTA_ISA": "generic"}).stdout.strip() == "generic"
    assert run_python("-c", code, env={"GATEDELTA_ISA": ""}).stdout.strip() == "None"
    result = run_python("-c", code, env={"GATEDELTA_ISA": "sse9"}, check=False)
    assert "GATEDELTA_ISA is 'sse9'" in result.stderr and "generic" in result.stderr


FORCED = """
import torch, {module} as gd
torch.manual_seed(0)
x = torch.nn.functional.normalize(torch.randn(1, 100, 2, 64), dim=-1).bfloat16()
g = torch.rand(1, 100, 2)
print(gd.chunk_gated_delta_rule(x, x, x, -g, g)[0].double().norm().item())
"""


def test_forced_isa_reaches_the_torch_binding(run_python):
    pytest.importorskip("torch")
    code = FORCED.format(module="gatedelta.torch")
    norms = {
        isa: float(run_python("-c", code, env={"GATEDELTA_ISA": isa}).stdout)
        for isa in gatedelta.info()["cpu_isa_usable"]
    }
    assert max(norms.values()) == pytest.approx(min(norms.values()), rel=3e-3)
    result = run_python("-c", code, env={"GATEDELTA_ISA": "sse9"}, check=False)
    assert "GATEDELTA_ISA is 'sse9'" in result.stderr
    unusable = {"avx2", "neon"} - set(gatedelta.info()["cpu_isa_usable"])
    result = run_python("-c", code, env={"GATEDELTA_ISA": unusable.pop()}, check=False)
    assert "UnsupportedError: GATEDELTA_ISA is " in result.stderr


def test_command_line(run_python):
    assert "cpu_isa_best" in run_python("-m", "gatedelta", "info").stdout
    info = gatedelta.info()
    *lines, total = run_python("-m", "gatedelta", "selftest").stdout.splitlines()
    passed = [line for line in lines if line.startswith("ok ")]
    unchecked = [line for line in lines if line.startswith("not checked ")]
    has_torch = importlib.util.find_spec("torch") is not None
    assert len(passed) == 6 * len(info["cpu_isa_usable"]) + has_torch
    assert len(unchecked) == len(info["cpu_isa_compiled"]) - len(info["cpu_isa_usable"]) + (not has_torch) + 1
    assert any("CUDA" in line for line in unchecked)
    assert len(passed) + len(unchecked) == len(lines)
    assert total == f"{len(passed)} ok, 0 failed, {len(unchecked)} not checked"
    assert run_python("-m", "gatedelta", "no-such-command", check=False).returncode == 2


def test_selftest_says_what_it_did_not_check(run_python):
    code = (
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
        "sys.argv = ['gatedelta', 'selftest']; runpy.run_module('gatedelta', run_name='__main__')"
    )
    lines = run_python("-c", code).stdout.splitlines()
    assert [line for line in lines if "torch" in line] == ["not checked torch binding: torch is not installed"]


@pytest.mark.skipif(os.name != "posix", reason="ELF only")
def test_the_c_library_needs_nothing_but_the_c_runtime():
    import shutil
    import subprocess

    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf")
    command = [readelf, "-d", str(gatedelta.library_path())]
    dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].split(".so")[0] for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc", "libm", "libstdc++", "libgcc_s", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}

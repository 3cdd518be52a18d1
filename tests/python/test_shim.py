"""The binding's own declarations of libtorch functions, against the headers and the library of the torch installed."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from pathlib import Path  # noqa: E402

from gatedelta import _lib  # noqa: E402


def test_declarations_agree_with_torchs_headers(root, tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    include = Path(torch.__file__).parent / "include"
    shim = root / "bindings" / "torch" / "shim.h"

    def compiles(text: str) -> subprocess.CompletedProcess:
        source = tmp_path / "both.cpp"
        source.write_text(f'#include <torch/csrc/stable/c/shim.h>\n#include "{source.with_name("ours.h")}"\n')
        source.with_name("ours.h").write_text(text)
        command = [compiler, "-std=c++20", "-fsyntax-only", "-DUSE_CUDA", f"-I{include}", str(source)]
        return subprocess.run(command, capture_output=True, text=True)

    # A C function declared twice with different types does not compile; so this check can fail.
    result = compiles(shim.read_text())
    assert result.returncode == 0, result.stderr
    for right, wrong in (
        ("int64_t grain_size,", "int32_t grain_size,"),
        ("int32_t device_index, void**", "int32_t device_index, int**"),
    ):
        text = shim.read_text().replace(right, wrong)
        assert text != shim.read_text() and compiles(text).returncode != 0


def test_dlpack_declarations_agree_with_torchs_headers(root, tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    text = (root / "bindings" / "torch" / "python_shim.h").read_text()
    structs = text[text.index("struct DLDevice") : text.rindex('}  // extern "C"')]
    fields = ("data", "device", "ndim", "dtype", "shape", "strides", "byte_offset")
    same = [f"offsetof(ours::DLTensor, {x}) == offsetof(DLTensor, {x})" for x in fields]
    same += [f"ours::{x} == ::{x}" for x in ("kDLCPU", "kDLCUDA", "kDLInt", "kDLFloat", "kDLBfloat")]
    for x in ("dltensor_from_py_object_no_sync", "current_work_stream"):
        same.append(f"offsetof(ours::DLPackExchangeAPI, {x}) == offsetof(DLPackExchangeAPI, {x})")
    same += [f"sizeof(ours::{x}) == sizeof({x})" for x in ("DLDevice", "DLDataType", "DLTensor", "DLPackExchangeAPI")]
    source = tmp_path / "both.cpp"
    asserts = "\n".join(f"static_assert({condition});" for condition in same)
    source.write_text(f"#include <ATen/dlpack.h>\n#include <cstddef>\nnamespace ours {{\n{structs}}}\n{asserts}\n")
    include = Path(torch.__file__).parent / "include"
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{include}", str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_python_function_exists(root):
    text = (root / "bindings" / "torch" / "python_shim.h").read_text()
    names = re.findall(r"gnu::weak.*?(Py\w+)\(", text)
    assert len(names) > 10
    for name in names:
        assert getattr(ctypes.pythonapi, name)


def test_every_symbol_resolves(run_python):
    run_python("-c", "import gatedelta.torch", env={"LD_BIND_NOW": "1"})


def test_needs_nothing_but_torch_and_the_c_runtime():
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf")
    path = str(_lib.library_path("gatedelta_torch"))
    dynamic = subprocess.run([readelf, "-d", path], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].split("]")[0] for line in dynamic.splitlines() if "(NEEDED)" in line}
    system = {name for name in needed if name.startswith(("libc.", "libm.", "libstdc++.", "libgcc_s.", "ld-linux"))}
    assert needed - system == {"libtorch_cpu.so", "libgatedelta.so.0"}
    paths = [line.split("[")[1].split("]")[0] for line in dynamic.splitlines() if "PATH)" in line]
    assert paths == ["$ORIGIN"]


def test_torch_abi_audit_calls_it_stable():
    pytest.importorskip("torch_abi_audit")
    tool = Path(sys.executable).with_name("torch-abi-audit")
    command = [tool, "--check", "torch", _lib.library_path("gatedelta_torch")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "min-torch=2.10.0" in result.stdout

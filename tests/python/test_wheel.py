"""The wheel: built without torch, one per platform, small, complete, and usable from Python and C once unpacked.

GATEDELTA_WHEEL=<file> tests a wheel that is there already; otherwise one is built.
"""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory) -> Path:
    given = os.environ.get("GATEDELTA_WHEEL")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("wheel")
    # A torch or numpy that gets imported during the build is an error.
    blocked = tmp_path_factory.mktemp("blocked")
    for name in ("torch", "numpy"):
        (blocked / f"{name}.py").write_text(f"raise ImportError('the build must not need {name}')\n")
    command = [sys.executable, "-m", "pip", "wheel", str(root), "--no-deps", "-w", str(folder)]
    if importlib.util.find_spec("scikit_build_core"):
        command.append("--no-build-isolation")
    environment = {**os.environ, "PYTHONPATH": str(blocked)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel unpacked into a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def environment(installed) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GATEDELTA_")}
    return {**clean, "PYTHONPATH": str(installed)}


def readelf(path: Path) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    return subprocess.run(["readelf", "-d", "-W", str(path)], capture_output=True, text=True, check=True).stdout


def test_tag_is_for_any_python_on_this_platform(wheel):
    name, _, python, abi, platform = wheel.stem.split("-")
    assert (name, python, abi) == ("gatedelta", "py3", "none") and platform != "any"


def test_contents(wheel, root):
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: info for info in archive.infolist()}
    sources = {
        f"gatedelta/{path.relative_to(root / 'python' / 'gatedelta').as_posix()}"
        for path in (root / "python" / "gatedelta").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    native = {
        "gatedelta/lib/libgatedelta.so.0",
        "gatedelta/lib/libgatedelta_torch.so",
        "gatedelta/include/gatedelta/gatedelta.h",
        "gatedelta/include/gatedelta/gatedelta.hpp",
    }
    package = {name for name in files if ".dist-info/" not in name}
    assert package == sources | native
    assert not any(stat.S_ISLNK(info.external_attr >> 16) for info in files.values())
    # Eleven operations; those for compute capability 8.0 and later with machine code for two architectures, the chunked
    # forward and backward and the kernels of fp32 for four, and PTX; compressed (by nvcc from CUDA 13 on).
    assert wheel.stat().st_size < 10_000_000


def test_metadata_requires_nothing(installed):
    (path,) = installed.glob("*.dist-info/METADATA")
    metadata = email.message_from_string(path.read_text())
    required = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert required == []
    assert metadata["License-Expression"] == "MIT"
    plugins = {"transformers", "fla", "flash-qla", "flashinfer", "vllm", "sglang"}
    assert set(metadata.get_all("Provides-Extra")) == {"torch", "numpy", *plugins}


def test_libraries_need_nothing_but_torch_and_the_c_runtime(installed):
    system = re.compile(r"^(libc|libm|libstdc\+\+|libgcc_s|libpthread|ld-linux.*)\.so")
    torch_needs = {"libtorch_cpu.so", "libgatedelta.so.0"}
    for name, own in (("libgatedelta.so.0", set()), ("libgatedelta_torch.so", torch_needs)):
        dynamic = readelf(installed / "gatedelta" / "lib" / name)
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
        assert {each for each in needed if not system.match(each)} == own
        assert re.findall(r"PATH\).*\[(.*)\]", dynamic) in ([], ["$ORIGIN"])


def test_libraries_are_stripped_and_tell_no_paths(installed, root):
    for path in (installed / "gatedelta" / "lib").iterdir():
        contents = path.read_bytes()
        assert b".debug_info" not in contents
        assert str(root).encode() not in contents


def test_only_the_c_abi_is_exported(installed):
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    header = (installed / "gatedelta" / "include" / "gatedelta" / "gatedelta.h").read_text()
    declared = set(re.findall(r"GD_API [\w *]+?\**(gd_\w+)\(", header))
    direct = {"gatedelta_make_direct_recurrent"}  # what gatedelta.torch._direct looks up
    for name, expected in (("libgatedelta.so.0", declared), ("libgatedelta_torch.so", direct)):
        command = ["nm", "-D", "--defined-only", str(installed / "gatedelta" / "lib" / name)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        # Weak symbols are instantiations of the C++ library's templates.
        exported = {line.split()[-1] for line in lines if line.split()[-2] in "TDBR"}
        assert exported == expected


def test_torch_abi_is_stable(installed):
    tool = Path(sys.executable).with_name("torch-abi-audit")
    if not tool.exists():
        pytest.skip("torch-abi-audit is not installed")
    result = subprocess.run([tool, "--check", "torch", installed / "gatedelta"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2.10.0" in result.stdout and "STABLE" in result.stdout


def test_unpacked_wheel_works(environment, tmp_path):
    command = [sys.executable, "-m", "gatedelta", "selftest"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAILED" not in result.stdout and "ok          backward " in result.stdout


def test_c_program_builds_against_the_unpacked_wheel(installed, environment, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    code = "import gatedelta; print(gatedelta.include_directory(), gatedelta.library_path())"
    command = [sys.executable, "-c", code]
    include, library = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=True
    ).stdout.split()
    (tmp_path / "main.c").write_text(
        "#include <gatedelta/gatedelta.h>\n#include <stdio.h>\n"
        "int main(void) {\n  gd_info info = GD_INFO_INIT;\n  if (gd_get_info(&info) != GD_OK) return 1;\n"
        '  printf("%d\\n", info.abi_version);\n  return 0;\n}\n'
    )
    program = tmp_path / "main"
    subprocess.run(
        [compiler, "-std=c99", str(tmp_path / "main.c"), f"-I{include}", library,
         f"-Wl,-rpath,{Path(library).parent}", "-o", str(program)],
        check=True,
    )  # fmt: skip
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout == "1\n"

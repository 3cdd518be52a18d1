"""The gates must be able to fail: each is shown something good and something bad."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent
sys.path.insert(0, str(TOOLS))


def run(tool: str, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, TOOLS / tool, *map(str, arguments)], capture_output=True, text=True)


def report(path: Path, cases: str) -> Path:
    path.write_text(f"<testsuite>{cases}</testsuite>")
    return path


PASSED = '<testcase name="a" classname="a" status="run"/>'
SKIPPED = """<testcase name="b" classname="b" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
<system-out>x.cpp:4: Skipped
no GPU
[  SKIPPED ] b</system-out></testcase>"""
FAILED = '<testcase name="c" classname="m"><failure message="x"/></testcase>'


def test_total_counts_and_names(tmp_path):
    result = run("test_total.py", f"C++={report(tmp_path / 'r.xml', PASSED + SKIPPED)}")
    assert result.returncode == 0
    assert "skipped, no GPU:\n  b\n" in result.stdout
    assert result.stdout.splitlines()[-1] == "total  1 passed, 0 failed, 1 skipped"


@pytest.mark.parametrize("cases", [PASSED + FAILED, ""])
def test_total_fails_on_failure_and_on_emptiness(tmp_path, cases):
    assert run("test_total.py", f"C++={report(tmp_path / 'r.xml', cases)}").returncode == 1


def test_total_fails_without_a_report(tmp_path):
    assert run("test_total.py", f"C++={tmp_path / 'none.xml'}").returncode == 1


SHARED = "template <class T> __attribute__((noinline)) T twice(T x) { return x + x; }\n"
OWN = "namespace gatedelta::cpu::avx2 { struct S { int v; S operator+(S o) const { return {v + o.v}; } }; %s }\n"


@pytest.mark.parametrize(
    "source, good",
    [
        (OWN % "int f(int x) { return x; }", True),
        (SHARED + OWN % "int f(int x) { return twice(S{x}).v; }", True),  # instantiated with a type of its own
        (SHARED + OWN % "int f(int x) { return twice(x); }", False),  # the linker could keep this copy for everybody
        ("int f(int x) { return x; }", False),
    ],
)
def test_isa_symbols(tmp_path, source, good):
    folder = tmp_path / "src/cpu/isa"
    folder.mkdir(parents=True)
    (tmp_path / "avx2.cpp").write_text(source)
    subprocess.run(["c++", "-std=c++20", "-O2", "-c", tmp_path / "avx2.cpp", "-o", folder / "avx2.cpp.o"], check=True)
    assert (run("check_isa_symbols.py", tmp_path).returncode == 0) == good


def test_isa_symbols_fails_without_objects(tmp_path):
    assert run("check_isa_symbols.py", tmp_path).returncode == 1


@pytest.mark.parametrize(
    "name, text, good",
    [
        ("a.md", "See [b](b.md).\n", False),
        ("a.md", "See [us](README.md).\n", True),
        ("a.py", "path = '/" + "home/me/x'\n", False),
        ("a.py", "x = 1 \n", False),
        ("a.py", "x = 1", False),
        ("a.cpp", "// " + "x" * 120 + "\n", False),
        ("a.cpp", "int x;\n", True),
    ],
)
def test_texts(name, text, good):
    import check_texts

    assert (not list(check_texts.problems_of(Path(name), text))) == good


KERNEL = """ptxas info    : Function properties for _Z1kv
    %s bytes stack frame, %s bytes spill stores, %s bytes spill loads
"""


@pytest.mark.parametrize(
    "text, problems",
    [
        (KERNEL % (0, 0, 0), []),
        (KERNEL % (0, 0, 0) + KERNEL % (8, 4, 12), ["_Z1kv: 8 bytes stack frame"]),
        (KERNEL % (16, 0, 0), ["_Z1kv: 16 bytes stack frame"]),
        (KERNEL % (0, 0, 4), ["_Z1kv: 0 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads"]),
        ("ptxas info    : (C7510) Potential Performance Loss: wgmma serialized\n" + KERNEL % (0, 0, 0), ["(C7510)"]),
        ("ptxas info    : (C7514) something new\n" + KERNEL % (0, 0, 0), ["(C7514)"]),
        ("ptxas info    : 0 bytes gmem\n", ["nothing was checked"]),
        ("", ["nothing was checked"]),
    ],
)
def test_nvcc_output(text, problems):
    import nvcc_checked

    found = nvcc_checked.problems_of(text)
    assert len(found) == len(problems) and all(part in line for part, line in zip(problems, found))


@pytest.mark.parametrize("spilled, good", [(0, True), (4, False)])
def test_nvcc_failure_leaves_no_object(tmp_path, spilled, good):
    text = KERNEL % (0, spilled, spilled)
    compiler = tmp_path / "nvcc"
    compiler.write_text(f"#!/bin/sh\ntouch {tmp_path}/k.o\nprintf '%s' '{text}a warning\n' >&2\n")
    compiler.chmod(0o755)
    result = run("nvcc_checked.py", compiler, "-c", "k.cu", "-o", tmp_path / "k.o")
    assert (result.returncode == 0) == good and (tmp_path / "k.o").exists() == good
    assert "a warning" in result.stdout and ("spill" in result.stdout) != good


def test_nvcc_error_is_passed_on():
    assert run("nvcc_checked.py", "false", "-o", "k.o").returncode == 1

"""The build's own checks: what CI, tools/require and CMake say of a machine that is not as it should be."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = """
good:
	@echo it is well
bad:
	@echo it is not; false
"""


@pytest.fixture
def ci(root, tmp_path):
    """Runs .ci/run in a folder whose Makefile has the parts good and bad."""
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / ".ci").mkdir()
    shutil.copy(root / ".ci/run", tmp_path / ".ci/run")
    script(tmp_path / "tools/require", "exit 1\n")
    shutil.copy(root / "tools/use_ccache", tmp_path / "tools")

    def run(*parts: str, seconds: str = "100") -> subprocess.CompletedProcess:
        environment = {**os.environ, "CI_SECONDS": seconds}
        return subprocess.run([tmp_path / ".ci/run", *parts], env=environment, capture_output=True, text=True)

    return run


def test_ci_passes_where_every_part_passed(ci):
    result = ci("good", "good")
    assert result.returncode == 0 and "ci: 2 of 2 parts ran" in result.stdout


@pytest.mark.parametrize("parts", [["bad"], ["good", "bad"], ["bad", "good"], ["no_such_part"]])
def test_ci_fails_where_a_part_failed(ci, parts):
    result = ci(*parts)
    assert result.returncode == 1 and f"{len(parts)} of {len(parts)} parts ran" in result.stdout
    assert "1 failed" in result.stdout


def test_ci_fails_where_a_part_was_left_out(ci):
    result = ci("good", "bad", seconds="-1")
    assert result.returncode == 1 and "ci: 0 of 2 parts ran" in result.stdout
    assert result.stdout.splitlines()[-1] == "ci: FAILED, left out for lack of time: good bad"


def test_ci_refuses_a_budget_that_is_no_number(ci):
    result = ci("good", seconds="soon")
    assert result.returncode == 2 and "CI_SECONDS is 'soon'" in result.stdout


@pytest.fixture
def run_programs(root, tmp_path):
    """tools/run_programs.py on a build whose programs are scripts, then tools/sum_reports.py on its report."""

    def run(programs: dict[str, str], *options: str) -> subprocess.CompletedProcess:
        for name, text in programs.items():
            script(tmp_path / "tests/cpp" / name, text)
        report = tmp_path / "report.xml"
        command = [sys.executable, root / "tools/run_programs.py", tmp_path, report, "--jobs", "2", *options]
        ran = subprocess.run(command, capture_output=True, text=True)
        if report.exists():
            command = [sys.executable, root / "tools/sum_reports.py", f"all={report}"]
            total = subprocess.run(command, capture_output=True, text=True)
            assert total.returncode == ran.returncode
            ran.stdout += total.stdout
        return ran

    return run


GTEST = """echo '<testsuite><testcase name="A" classname="S"/><testcase name="B" classname="S"/></testsuite>' \\
  >${GTEST_OUTPUT#xml:}
echo "filter $GTEST_FILTER"
"""


def test_programs_that_pass(run_programs):
    result = run_programs({"gtest": GTEST, "plain": "true\n"})
    assert result.returncode == 0 and result.stdout.splitlines()[-1] == "total  3 passed, 0 failed, 0 skipped"


@pytest.mark.parametrize(
    "program, failed",
    [
        ("echo it is not well; exit 3\n", "it is not well"),
        ("kill -ILL $$\n", "exit status -4"),
        (GTEST + "echo a leak; exit 23\n", "a leak"),  # every case passed
        (
            GTEST.replace("/>", "><failure/></testcase>", 1) + "exit 1\n",
            "S::A",
        ),
    ],
)
def test_programs_that_fail(run_programs, program, failed):
    result = run_programs({"good": "true\n", "bad": program})
    assert result.returncode == 1 and failed in result.stdout
    assert " 1 failed, 0 skipped" in result.stdout.splitlines()[-1]


def test_programs_leave_out_slow_cases_alone(run_programs):
    names = ("numerics_forward", "cli_tests", "api_test")
    result = run_programs(dict.fromkeys(names, GTEST + "exit 1\n"), "--without", "Gates", "Run")
    filters = [line.removeprefix("filter ") for line in result.stdout.splitlines() if line.startswith("filter ")]
    assert set(filters) == {"-*.Gates:*.Run", "-Cli.Gates:Cli.Run", "*"}


def test_programs_run_under_an_emulator(run_programs, tmp_path):
    emulator = script(tmp_path / "emulator", 'echo "as $1"; shift; "$@"; exit 1\n')
    assert "as old" in run_programs({"plain": "true\n"}, "--under", f"{emulator} old").stdout


def test_no_program_is_an_error(run_programs):
    assert "no program in" in run_programs({}).stderr


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


@pytest.fixture
def make(root, tmp_path):
    """Runs a target of the Makefile, with scripts in place of all that it calls."""
    if not shutil.which("make"):
        pytest.skip("no make")
    (tmp_path / "Makefile").write_text((root / "Makefile").read_text())

    def run(target: str, **scripts: str) -> subprocess.CompletedProcess:
        for name, text in {"tools/require": "exit 0", "bin/cmake": "exit 0", **scripts}.items():
            script(tmp_path / name, text + "\n")
        outer = {
            "MAKEFLAGS",
            "MAKELEVEL",
            "MFLAGS",
            "CMAKE_C_COMPILER_LAUNCHER",
            "CMAKE_CXX_COMPILER_LAUNCHER",
            "CCACHE_DIR",
        }  # of the make that runs the tests
        env = {name: value for name, value in os.environ.items() if name not in outer}
        env["PATH"] = os.pathsep.join([str(tmp_path / "bin"), env["PATH"]])
        return subprocess.run(["make", target], cwd=tmp_path, env=env, capture_output=True, text=True)

    return run


@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_make_run_needs_no_matplotlib(make, tmp_path, has_matplotlib):
    result = make("run", **{
        "tools/require": f'case "$*" in *matplotlib*) exit {0 if has_matplotlib else 1};; esac',
        "build/release/cli/gatedelta": "echo ran $*",
        ".venv/bin/python": "echo drew $*",
    })  # fmt: skip
    assert result.returncode == 0, result.stderr
    ran, *drew = result.stdout.splitlines()
    assert ran == "ran run --json build/run/run.json"
    if has_matplotlib:
        picture = tmp_path / "build" / "run" / "timings.png"
        assert drew == ["drew -m bench.plots cpu build/run/run.json build/run/timings.png", f"picture: {picture}"]
    else:
        assert drew == ["picture: left out, because there is no matplotlib"]


WRITES_REPORT = """while [ $# -gt 1 ]; do
  case $1 in --output-junit | --junitxml) echo '<testsuite><testcase name="a"/></testsuite>' >$2 ;; esac
  shift
done
exit %d"""


@pytest.mark.parametrize("ctest, pytest_, good", [(0, 0, True), (8, 0, False), (0, 1, False)])
def test_make_test_fails_where_a_program_fails(root, make, tmp_path, ctest, pytest_, good):
    """Whatever its report says."""
    (tmp_path / "tools").mkdir()
    for name in ("sum_reports.py", "use_ccache"):
        shutil.copy(root / "tools" / name, tmp_path / "tools")
    result = make("test", **{"bin/ctest": WRITES_REPORT % ctest, ".venv/bin/python": WRITES_REPORT % pytest_})
    assert result.stdout.splitlines()[-1] == "total   2 passed, 0 failed, 0 skipped"
    assert (result.returncode == 0) == good, result.stderr


def test_make_test_compiles_through_ccache(root, make, tmp_path):
    """What the wheel and the tests share; a ccache that cannot be had is no failure."""
    (tmp_path / "tools").mkdir()
    shutil.copy(root / "tools/use_ccache", tmp_path / "tools")
    says = {"bin/cmake": "echo compiled by ${CMAKE_CXX_COMPILER_LAUNCHER-the compiler} $CCACHE_DIR >&2; exit 1"}
    assert f"compiled by ccache {tmp_path}/build/ccache" in make("test", **says).stderr
    says["tools/require"] = 'case "$*" in ccache) exit 1 ;; esac'
    assert "compiled by the compiler" in make("test", **says).stderr


def test_make_help_lists_every_target(root, make):
    text = (root / "Makefile").read_text()
    targets = {name for line in re.findall(r"^([a-z][a-z -]*):", text, re.MULTILINE) for name in line.split()}
    assert {line.split()[0] for line in make("help").stdout.splitlines()} == targets


def test_sanitized_gpu_tests_are_there(root):
    """A filter of GoogleTest that finds nothing passes."""
    text = (root / "tools/sanitize_gpu").read_text()
    programs = re.findall(r"^  gpu_(\w+):(\S+)$", text, re.MULTILINE)
    sources = {op: "".join(path.read_text() for path in (root / "tests/cpp").glob(f"[go]p[us]/{op}_test.cpp"))
               for op, _ in programs}  # fmt: skip
    assert len(programs) == text.count("  gpu_")
    for op, names in programs:
        for name in names.split(":"):
            suite, case = name.split(".")
            assert re.search(rf"TEST_F\({suite}, {case.rstrip('*')}", sources[op]), name


def test_gpu_tests_are_built_as_one_target(root):
    """`make cuda` builds this target, and selects by label."""
    text = (root / "tests/cpp/gpu/CMakeLists.txt").read_text()
    assert "add_dependencies(gpu_tests ${name})" in text and "LABEL gpu)" in text
    assert not re.search(r"gd_add_test\((?!\$\{name\})", text)


@pytest.fixture
def configure(root, tmp_path):
    """Configures the library alone, as `make` does: what it prints at the log level of the Makefile."""

    def run(*options: str, **environment: str) -> subprocess.CompletedProcess:
        (level,) = set(re.findall(r"--log-level=(\w+)", (root / "Makefile").read_text()))
        return subprocess.run(
            ["cmake", "-S", root, "-B", tmp_path / "build", f"--log-level={level}", *options],
            env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return run


def test_old_compiler_is_refused_when_configured(configure, tmp_path):
    """A GCC 11 as far as this library can tell."""
    old = script(tmp_path / "g++-11", 'exec c++ -U__GNUC__ -D__GNUC__=11 -D__builtin_shufflevector=unknown "$@"\n')
    result = configure(f"-DCMAKE_CXX_COMPILER={old}", "-DGD_CUDA=OFF")
    assert result.returncode != 0
    said = " ".join(result.stderr.split())  # CMake wraps its errors
    assert "GCC 12, Clang 14 or later" in said and f"{old} is " in said


REFUSAL = "host_config.h:129:2: error: #error -- unsupported GNU version! gcc versions later than 15 are not supported!"


@pytest.fixture
def nvcc(tmp_path):
    """A CUDA toolkit whose nvcc accepts no host compiler."""
    (tmp_path / "cuda/include").mkdir(parents=True)
    (tmp_path / "cuda/include/cuda_runtime.h").touch()
    (tmp_path / "cuda/lib64").mkdir()
    (tmp_path / "cuda/lib64/libcudart_static.a").touch()
    version = "echo 'Cuda compilation tools, release 13.0, V13.0.88'"
    refuse = f'echo "{REFUSAL}" >&2; exit 1'
    return script(tmp_path / "cuda/bin/nvcc", f"case $1 in --version) {version} ;; -v) ;; *) {refuse} ;; esac\n")


def test_nvcc_that_rejects_the_host_compiler_turns_cuda_off(configure, nvcc):
    result = configure(CUDACXX=str(nvcc))
    assert result.returncode == 0, result.stderr
    assert f"CUDA backend: off, {nvcc} does not work with " in result.stderr and REFUSAL in result.stderr


def test_nvcc_that_rejects_the_host_compiler_is_an_error_with_cuda_on(configure, nvcc):
    result = configure("-DGD_CUDA=ON", CUDACXX=str(nvcc))
    assert result.returncode != 0 and "GD_CUDA is ON, but" in result.stderr
    assert "unsupported GNU version!" in " ".join(result.stderr.split())


@pytest.mark.parametrize("version, name, chosen", [
    ("14.0.6", "clang-tidy-14", "clang-tidy-14"), ("14.0.6", "clang-tidy", "clang-tidy"),
    ("18.1.3", "clang-tidy", None), ("18.1.3", "clang-tidy-14", None), ("14.0.6", "other", None),
])  # fmt: skip
def test_lint_refuses_other_versions(root, monkeypatch, tmp_path, version, name, chosen):
    import lint

    script(tmp_path / name, f"echo Debian LLVM version {version}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}")
    if chosen:
        assert lint.llvm_tool("clang-tidy") == chosen
        return
    with pytest.raises(SystemExit, match=f"needs clang-tidy 14, found {'none' if name == 'other' else version}"):
        lint.llvm_tool("clang-tidy")


@pytest.mark.parametrize("version, name, missing", [
    ("14.0.6", "clang-tidy-14", False), ("14.0.6", "clang-tidy", False), ("18.1.3", "clang-tidy", True),
])  # fmt: skip
def test_require_installs_the_version_lint_needs(root, monkeypatch, tmp_path, version, name, missing):
    """With a PATH that holds what the script itself calls, and neither apt-get nor another clang-tidy."""
    for program in ("bash", "dirname", "env", "grep"):
        (tmp_path / program).symlink_to(shutil.which(program))
    script(tmp_path / name, f"echo Debian LLVM version {version}\n")
    command = [root / "tools/require", "clang-tidy-14"]
    result = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (result.returncode != 0) == missing and ("missing: clang-tidy-14" in result.stderr) == missing

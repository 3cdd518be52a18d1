"""The Rust crates: their declarations are what bindgen makes of the header as it is, and their tests pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from tools import dev_paths

FOLDER = dev_paths.ROOT / "examples" / "rust"
BINDINGS = FOLDER / "gatedelta-sys" / "src" / "bindings.rs"


def names(text: str) -> set[str]:
    return set(re.findall(r"\b(?:gd|GD)_\w+", text))


def test_declarations_cover_the_header():
    """Without bindgen: every function, type and constant of the header is there, and nothing else."""
    header = (dev_paths.ROOT / "include" / "gatedelta" / "gatedelta.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    macros = {"GD_API", "GD_INITIAL", "gd_initial"} | set(re.findall(r"\bGD_\w+_(?:INIT|H)\b", header))
    assert names(header) - macros == names(BINDINGS.read_text())


def test_declarations_are_what_bindgen_makes_of_the_header():
    for tool in ("bindgen", "rustfmt"):
        if not shutil.which(tool):
            pytest.skip(f"no {tool}")
    made = subprocess.run([FOLDER / "bindgen.sh"], check=True, capture_output=True, text=True).stdout
    recorded = BINDINGS.read_text()
    if made.splitlines()[0] != recorded.splitlines()[0]:  # another version of bindgen, which may write them otherwise
        assert names(made) == names(recorded)
    else:
        assert made == recorded


def test_crates(tmp_path):
    import gatedelta

    cargo = shutil.which("cargo")
    if not cargo:
        pytest.skip("no cargo")
    folder = gatedelta.library_path().parent
    if not (folder / "libgatedelta.so").exists():
        pytest.skip("the library has no name a linker would find")
    environment = {
        **os.environ, "CARGO_TARGET_DIR": str(tmp_path), "GATEDELTA_LIB_DIR": str(folder), "RUSTFLAGS": "-D warnings",
    }  # fmt: skip
    result = subprocess.run(
        [cargo, "test", "--offline", "--locked"], cwd=FOLDER, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "test forward_is_the_recurrence ... ok" in result.stdout
    if shutil.which("rustfmt"):
        subprocess.run([cargo, "fmt", "--check"], cwd=FOLDER, check=True)

#!/usr/bin/env python3
"""Builds the wheel into dist/ and uses it as a stranger would: in a fresh virtual environment, without torch.

The package must import without torch and its forward must match the recurrence. What is inside the wheel is tested by
tests/python/test_wheel.py.

usage: check_wheel.py [--werror]   (warnings of the compilers are errors)
"""

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
FRESH = ROOT / "build/wheel-venv"

# The recurrence by hand, in the installed package's own Python.
SMOKE_TEST = """
import sys
import numpy as np
import gatedelta

assert "torch" not in sys.modules, "import gatedelta pulled torch in"
rng = np.random.default_rng(0)
B, T, H, K, V = 1, 70, 2, 16, 32
q, k = (rng.standard_normal((B, T, H, K), dtype=np.float32) for _ in range(2))
k /= np.linalg.norm(k, axis=-1, keepdims=True)
v = rng.standard_normal((B, T, H, V), dtype=np.float32)
g = -rng.random((B, T, H), dtype=np.float32)
beta = rng.random((B, T, H), dtype=np.float32)
o, final_state, _ = gatedelta.numpy.forward(q, k, v, g, beta, output_final_state=True)
S = np.zeros((B, H, K, V))
expected = np.zeros((B, T, H, V))
for t in range(T):
    S *= np.exp(g[:, t, :, None, None].astype(np.float64))
    e = v[:, t] - np.einsum("bhkv,bhk->bhv", S, k[:, t])
    S += beta[:, t, :, None, None] * k[:, t, :, :, None] * e[:, :, None, :]
    expected[:, t] = np.einsum("bhkv,bhk->bhv", S, q[:, t]) * K**-0.5
error = np.linalg.norm(o - expected) / np.linalg.norm(expected)
state_error = np.linalg.norm(final_state - S) / np.linalg.norm(S)
assert error < 1e-5 and state_error < 1e-5, (error, state_error)
print(f"gatedelta {gatedelta.__version__}: forward right to {error:.1e}, state to {state_error:.1e}")
"""


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], check=True, text=True, **options)


def build_wheel(werror: bool) -> Path:
    for old in DIST.glob("*.whl"):
        old.unlink()
    options = ["--config-settings", "cmake.define.GD_WERROR=ON"] if werror else []
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", DIST, *options, ROOT)
    (wheel,) = DIST.glob("*.whl")
    return wheel


def check_fresh_install(wheel: Path) -> None:
    venv.create(FRESH, clear=True, with_pip=True)
    python = FRESH / "bin/python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, "numpy")
    run(python, "-I", "-c", SMOKE_TEST, cwd="/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--werror", action="store_true", help="warnings of the compilers are errors")
    wheel = build_wheel(parser.parse_args().werror)
    print(f"built {wheel.relative_to(ROOT)}")
    check_fresh_install(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())

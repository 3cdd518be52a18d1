"""The Python examples run and keep their promises (each asserts its own)."""

from __future__ import annotations

import pytest


def run(run_python, root, name, *arguments):
    return run_python(str(root / "examples" / "python" / name), *arguments).stdout


def test_numpy_forward(run_python, root):
    pytest.importorskip("numpy")
    assert "as the recurrence says" in run(run_python, root, "numpy_forward.py")


def test_decode_pool(run_python, root):
    pytest.importorskip("torch")
    assert "bit for bit" in run(run_python, root, "decode_pool.py")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_train_layer(run_python, root, compiled):
    pytest.importorskip("torch")
    assert "loss" in run(run_python, root, "train_layer.py", *(["--compile"] if compiled else []))


def test_all_are_tested(root):
    names = {path.name for path in (root / "examples" / "python").glob("*.py")}
    assert names == {"numpy_forward.py", "decode_pool.py", "train_layer.py"}

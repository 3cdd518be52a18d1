"""The C and C++ samples of docs/api.md compile without a warning and compute what gatedelta.numpy computes."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import pytest

from tools import dev_paths

np = pytest.importorskip("numpy")

B, T, HK, HV, K, V = SIZES = (1, 70, 2, 4, 32, 16)
COMPILERS = {"c": "cc", "cpp": "c++"}
# Gives the C++ function, which throws, the name and result of the C function.
CPP_DOOR = """
extern "C" int door(float* q, float* k, float* v, float* g, float* beta, float* o, std::int64_t B, std::int64_t T,
                    std::int64_t Hk, std::int64_t Hv, std::int64_t K, std::int64_t V) try {
  layer_forward(q, k, v, g, beta, o, B, T, Hk, Hv, K, V);
  return GD_OK;
} catch (const gatedelta::Error& error) {
  return error.status();
}
"""


def sample(language: str) -> str:
    text = (dev_paths.ROOT / "docs" / "api.md").read_text()
    (section,) = re.findall(r"^## In C and C\+\+\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return code


def built(folder, language: str, standard: str):
    """The sample's function, from a shared library."""
    import gatedelta

    compiler = shutil.which(COMPILERS[language])
    if not compiler:
        pytest.skip(f"no {COMPILERS[language]}")
    source, target, library = folder / f"sample.{language}", folder / "sample.so", gatedelta.library_path()
    source.write_text(sample(language) + (CPP_DOOR if language == "cpp" else ""))
    warnings = ["-Wall", "-Wextra", "-pedantic", "-Werror"]
    subprocess.run(
        [compiler, f"-std={standard}", *warnings, "-shared", "-fPIC", f"-I{dev_paths.ROOT / 'include'}", source,
         "-o", target, library, f"-Wl,-rpath,{library.parent}"],
        check=True,
    )  # fmt: skip
    return getattr(ctypes.CDLL(str(target)), "door" if language == "cpp" else "layer_forward")


@pytest.mark.parametrize("language, standard", [("c", "c99"), ("c", "c11"), ("cpp", "c++20")])
def test_sample(tmp_path, language, standard):
    import gatedelta.numpy

    layer_forward = built(tmp_path, language, standard)
    random = np.random.default_rng(0)

    def normal(*shape: int):
        return random.standard_normal(shape).astype(np.float32)

    q, k, v, gates = normal(B, T, HK, K), normal(B, T, HK, K), normal(B, T, HV, V), np.abs(normal(2, B, T, HV))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g, beta = -gates[0], np.minimum(gates[1], 1)
    o = np.full((B, T, HV, V), np.nan, np.float32)

    def call(*sizes: int) -> int:
        return layer_forward(*(x.ctypes.data_as(ctypes.c_void_p) for x in (q, k, v, g, beta, o)),
                             *map(ctypes.c_int64, sizes))  # fmt: skip

    assert call(*SIZES) == 0
    assert np.array_equal(o, gatedelta.numpy.forward(q, k, v, g, beta).o)
    assert call(B, T, HK, HV, K + 1, V) != 0  # refused

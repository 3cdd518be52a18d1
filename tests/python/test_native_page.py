"""The blocks of docs/integrations/native.md: C and C++ compile without a warning and compute what they say; the Rust
one is the example of the crate, which its own tests compile."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import pytest

from tools import dev_paths

np = pytest.importorskip("numpy")

PAGE = dev_paths.ROOT / "docs" / "integrations" / "native.md"
WARNINGS = ["-Wall", "-Wextra", "-pedantic", "-Werror"]
# What the page's code names of ggml's own header.
GGML = """
#include <stddef.h>
#include <stdint.h>
struct ggml_tensor {
  int64_t ne[4];
  size_t nb[4];
  int32_t op_params[16];
  struct ggml_tensor* src[10];
  void* data;
};
"""


def block(section: str, language: str) -> str:
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## )", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return code


def compile_shared(folder, compiler: str, standard: str, *sources):
    import gatedelta

    if not shutil.which(compiler):
        pytest.skip(f"no {compiler}")
    library, target = gatedelta.library_path(), folder / "page.so"
    subprocess.run(
        [compiler, f"-std={standard}", *WARNINGS, "-shared", "-fPIC", f"-I{dev_paths.ROOT / 'include'}", f"-I{folder}",
         f"-I{dev_paths.ROOT / 'examples' / 'c'}", *sources, "-o", target, library, f"-Wl,-rpath,{library.parent}"],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(target))


def test_c(tmp_path):
    import gatedelta.numpy

    source = tmp_path / "page.c"
    source.write_text(block("C", "c"))
    step = compile_shared(tmp_path, "cc", "c99", source).decode_step
    N, slots, HK, HV, K, V = sizes = (3, 5, 2, 4, 32, 16)
    random = np.random.default_rng(0)
    shapes = {"q": (N, HK, K), "k": (N, HK, K), "v": (N, HV, V), "a": (N, HV), "b": (N, HV), "A_log": (HV,),
              "dt_bias": (HV,), "pool": (slots, HV, V, K)}  # fmt: skip
    x = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    index, o = np.array([4, 0, 2], np.int32), np.full((N, HV, V), np.nan, np.float32)
    before = x["pool"].copy()

    size = ctypes.c_size_t()

    def call(workspace=None) -> int:
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (*x.values(), index, o)]
        return step(*pointers, *map(ctypes.c_int64, sizes), ctypes.c_void_p(workspace), ctypes.byref(size))

    assert call() == 0
    memory = np.empty(size.value + 64, np.uint8)
    aligned = memory.ctypes.data + -memory.ctypes.data % 64
    assert call(aligned) == 0
    q, k, v, a, b = (x[name][:, None] for name in ("q", "k", "v", "a", "b"))
    expected = gatedelta.numpy.recurrent(
        q, k, v, a, b, A_log=x["A_log"], dt_bias=x["dt_bias"], initial_state=before, initial_state_indices=index,
        final_state=before, final_state_indices=index, state_v_first=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True,
    ).o  # fmt: skip
    assert np.array_equal(o, expected[:, 0])
    assert np.array_equal(x["pool"], before)
    index[1] = 7
    assert call(aligned) != 0  # no such slot


def test_cpp(tmp_path):
    door = """
extern "C" int door() {
  static float q[32] = {1}, v[16] = {2}, g[1] = {0}, o[16], pool[2 * 32 * 16];
  std::int32_t slot[1] = {1};
  gd_inputs in{};
  in.q = gatedelta::tensor(q, {1, 1, 1, 32});
  in.k = in.q;
  in.v = gatedelta::tensor(v, {1, 1, 1, 16});
  in.g = gatedelta::tensor(g, {1, 1, 1});
  in.beta = in.g;
  in.initial_state = gatedelta::tensor(pool, {2, 1, 32, 16});
  in.initial_state_indices = gatedelta::tensor(slot, {1});
  Decoder decoder;
  decoder.step(in, gatedelta::tensor(o, {1, 1, 1, 16}));
  slot[0] = 2;
  try {
    decoder.step(in, gatedelta::tensor(o, {1, 1, 1, 16}));
  } catch (const gatedelta::Error&) {
    return 42;
  }
  return 0;
}
"""
    source = tmp_path / "page.cpp"
    source.write_text(block("C++", "cpp") + door)
    assert compile_shared(tmp_path, "c++", "c++20", source).door() == 42


def test_ggml(tmp_path):
    (tmp_path / "ggml.h").write_text(GGML)
    source = tmp_path / "page.c"
    source.write_text(block("ggml", "c"))
    library = compile_shared(tmp_path, "cc", "c99", source, dev_paths.ROOT / "examples" / "c" / "ggml_op.c")
    assert library.gated_delta_net


def test_rust_is_the_example_of_the_crate():
    text = (dev_paths.ROOT / "examples" / "rust" / "gatedelta" / "src" / "lib.rs").read_text()
    (example,) = re.findall(r"^//! ```no_run\n(.*?)^//! ```", text, re.DOTALL | re.MULTILINE)
    lines = [line.removeprefix("//!").removeprefix(" ") for line in example.splitlines()]
    assert block("Rust", "rust").splitlines() == [line for line in lines if not line.startswith("# ")]

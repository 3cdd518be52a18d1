"""examples/c/ggml_op.c computes what ggml's operator computes: outputs, then snapshots of the states, newest first."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from ctypes import POINTER, c_char_p, c_int64, c_size_t, c_void_p

import pytest

from tools import dev_paths

np = pytest.importorskip("numpy")

NAMES = ("q", "k", "v", "g", "beta", "state")


class OpTensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("ne", c_int64 * 4), ("nb", c_size_t * 4)]

    def __init__(self, array):
        """numpy's axes are ggml's in reverse."""
        super().__init__(array.ctypes.data, tuple(reversed(array.shape)), tuple(reversed(array.strides)))


class Op(ctypes.Structure):
    _fields_ = [*((name, OpTensor) for name in NAMES), ("snapshots", c_int64), ("result", c_void_p)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    import gatedelta

    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no cc")
    target, path = tmp_path_factory.mktemp("ggml") / "ggml_op.so", gatedelta.library_path()
    subprocess.run(
        [compiler, "-std=c99", "-O1", "-Wall", "-Wextra", "-pedantic", "-Werror", "-shared", "-fPIC",
         f"-I{dev_paths.ROOT / 'include'}", dev_paths.ROOT / "examples/c/ggml_op.c", "-o", target, path,
         f"-Wl,-rpath,{path.parent}"],
        check=True,
    )  # fmt: skip
    library = ctypes.CDLL(str(target))
    library.ggml_op_work_size.restype = library.ggml_op_run.restype = c_char_p
    library.ggml_op_work_size.argtypes = [POINTER(Op), c_void_p, POINTER(c_size_t)]
    library.ggml_op_run.argtypes = [POINTER(Op), c_void_p, c_void_p, c_size_t]
    return library


def run(library, arrays: dict, snapshots: int, short: int = 0, threads=None):
    N, T, H, S = arrays["v"].shape
    result = np.full(N * T * H * S + snapshots * N * H * S * S, np.nan, np.float32)
    op = Op(*(OpTensor(arrays[name]) for name in NAMES), snapshots, result.ctypes.data)
    size = c_size_t()
    wrong = library.ggml_op_work_size(op, threads, size)
    if not wrong:
        work = np.empty(size.value - short, np.uint8)
        wrong = library.ggml_op_run(op, threads, work.ctypes.data, work.size)
    if wrong:
        raise ValueError(wrong.decode())
    return result[: N * T * H * S].reshape(N, T, H, S), result[N * T * H * S :].reshape(snapshots, N, H, S, S)


def recurrence(q, k, v, g, beta, state):
    """Outputs, and the states after every token, in double."""
    _, T, H, S = v.shape
    heads = np.arange(H) % q.shape[2]
    M, out, states = state.astype(np.float64), np.empty(v.shape), []
    for t in range(T):
        key, query = k[:, t, heads].astype(np.float64), q[:, t, heads].astype(np.float64)
        M = M * np.exp(g[:, t, :, 0].astype(np.float64))[..., None, None]
        write = (v[:, t] - np.einsum("nhvk,nhk->nhv", M, key)) * beta[:, t]
        M = M + np.einsum("nhv,nhk->nhvk", write, key)
        out[:, t] = np.einsum("nhvk,nhk->nhv", M, query) / np.sqrt(S)
        states.append(M)
    return out, states


def make(N=2, T=4, Hk=2, H=6, S=32, strided=False) -> dict:
    random = np.random.default_rng(T)

    def normal(*shape):
        array = random.standard_normal(shape).astype(np.float32)
        if not strided or len(shape) != 4:
            return array
        wide = np.full((shape[0], shape[1] + 3, shape[2] + 1, shape[3] + 5), np.nan, np.float32)
        view = wide[:, : shape[1], : shape[2], : shape[3]]
        view[:] = array
        return view

    q, k, v = normal(N, T, Hk, S), normal(N, T, Hk, S), normal(N, T, H, S)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = (random.random((N, T, H, 1)).astype(np.float32) for _ in range(2))
    state = random.standard_normal((N, H, S, S)).astype(np.float32)
    return {"q": q, "k": k, "v": v, "g": -g, "beta": beta, "state": state}


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("tokens, snapshots", [(1, 1), (4, 1), (150, 1), (4, 4), (2, 4), (66, 3), (67, 3), (150, 5)])
def test_operator(library, tokens, snapshots, strided):
    arrays = make(T=tokens, strided=strided)
    before = arrays["state"].copy()
    out, states = run(library, arrays, snapshots)
    truth, true_states = recurrence(**arrays)
    assert np.linalg.norm(out - truth) < 1e-5 * np.linalg.norm(truth)
    for age in range(min(tokens, snapshots)):
        assert np.linalg.norm(states[age] - true_states[-1 - age]) < 1e-5 * np.linalg.norm(true_states[-1 - age])
    assert np.isnan(states[tokens:]).all()  # older than the first token
    assert np.array_equal(arrays["state"], before)


@pytest.mark.parametrize("tokens, snapshots", [(3, 3), (150, 1), (150, 5)])
def test_threads_change_no_bit(library, tokens, snapshots):
    import gatedelta.numpy

    arrays = make(T=tokens)
    results = [run(library, arrays, snapshots, threads=threads) for threads in (None, gatedelta._lib.thread_pool(3, 0))]
    assert np.array_equal(results[0][0], results[1][0])
    assert np.array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("heads", [(1, 4), (3, 3)])
def test_orders_agree_where_there_is_one(library, heads):
    arrays = make(T=70, Hk=heads[0], H=heads[1])
    out, _ = run(library, arrays, 2)
    truth, _ = recurrence(**arrays)
    assert np.linalg.norm(out - truth) < 1e-5 * np.linalg.norm(truth)


def test_refusals(library):
    arrays = make()
    N, T, H, S = arrays["v"].shape
    for change, snapshots, message in [
        ({}, 0, "K must be at least 1"),
        ({"g": np.zeros((N, T, H, S), np.float32)}, 1, "g has a decay for each channel"),
        ({"beta": np.zeros((N, T, H, 2), np.float32)}, 1, "beta must have one number for each head"),
        ({"q": arrays["q"][..., :16]}, 1, "q, k and v must have heads of one size"),
        ({"k": arrays["k"][:1]}, 1, "all inputs must have as many tokens and sequences as v"),
        ({"state": arrays["state"][:, :, :, :16]}, 1, "state must be [S, S, H, N]"),
        ({"state": arrays["state"].transpose(0, 1, 3, 2)}, 1, "state must be contiguous"),
        ({"v": arrays["v"][:, :, :5], "g": arrays["g"][:, :, :5], "beta": arrays["beta"][:, :, :5],
          "state": arrays["state"][:1, :5].repeat(2, 0)}, 1, "v has Hv = 5 heads, must be a multiple of Hk = 2"),
    ]:  # fmt: skip
        with pytest.raises(ValueError) as refusal:
            run(library, {**arrays, **change}, snapshots)
        assert message in str(refusal.value)
    with pytest.raises(ValueError, match="the work memory is smaller"):
        run(library, arrays, 1, short=1)

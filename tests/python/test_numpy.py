"""The numpy path: the C ABI through ctypes, on arrays of any strides, against the fp64 recurrence."""

from __future__ import annotations

import ctypes
import inspect
import threading

import numpy as np
import pytest

pytest.importorskip("ml_dtypes")

import gatedelta.numpy as gd
from gatedelta import _lib
from gatedelta.numpy import rule

from testing.truth import Case

CASES = [
    "B=2 T=130 Hk=2 Hv=4 K=64 V=32 dtype=fp32",
    "T=200 Hk=1 Hv=2 K=128 V=128 dtype=bf16 layout=vk",
    "B=2 T=70 Hk=2 Hv=4 K=64 V=32 dtype=fp16",
    "lengths=3x64+0+130+1 pad=37 Hk=2 Hv=4 K=64 V=64 dtype=fp32 gate=raw beta=logit2 l2norm=1",
    "lengths=5+60+65 Hk=2 Hv=2 K=64 V=64 dtype=fp32 strided=1 gate=raw beta=logit l2norm=1 i64=1",
    "B=2 T=70 Hk=1 Hv=2 K=32 V=64 dtype=fp32 h0=0 scale=0",
]


@pytest.mark.parametrize("threads", [None, 1], ids=["threads", "one_thread"])
@pytest.mark.parametrize("spec", CASES)
def test_forward_and_backward(spec, threads):
    case = Case(spec, numpy=True)
    inputs = (case.q, case.k, case.v, case.g, case.beta)
    common = {**case.options, "initial_state": case.initial_state, "num_threads": threads}
    result = gd.forward(*inputs, output_final_state=True, save=True, **common)
    truth = case.forward_truth()
    assert result.o.dtype == case.q.dtype
    case.check("o", result.o, truth["o"])
    case.check("final_state", result.final_state, truth["final_state"])
    truth = case.backward_truth()
    for saved in (result.saved, None):
        gradients = gd.backward(*inputs, case.do, case.dht, saved=saved, **common)
        for name, gradient in gradients._asdict().items():
            if name in truth:
                case.check(name, gradient, truth[name])
            else:
                assert gradient is None
    assert case.damage() == ""


@pytest.mark.parametrize("spec", CASES)
def test_recurrent(spec):
    case = Case(spec, numpy=True)
    result = gd.recurrent(
        case.q, case.k, case.v, case.g, case.beta, initial_state=case.initial_state, output_final_state=True,
        **case.options,
    )  # fmt: skip
    truth = case.recurrent_truth()
    case.check("o", result.o, truth["o"])
    case.check("final_state", result.final_state, truth["final_state"])


def test_buffers_and_pools():
    case = Case("lengths=64+130+0+1+70 pad=9 Hk=1 Hv=2 K=64 V=32 dtype=bf16 pool=1 inplace=1 every=64", numpy=True)
    truth = case.forward_truth()
    b = case.buffers(
        case.forward_args, "out", "final_state", "final_state_indices", "checkpoints", "checkpoint_indices"
    )
    result = gd.forward(
        case.q, case.k, case.v, case.g, case.beta, initial_state=case.initial_state, out=b["out"],
        initial_state_indices=case.initial_state_indices, final_state=b["final_state"],
        final_state_indices=b["final_state_indices"], checkpoints=b["checkpoints"],
        checkpoint_indices=b["checkpoint_indices"], checkpoint_every=64, **case.options,
    )  # fmt: skip
    assert result.o is b["out"] and result.saved is None
    case.check("o", result.o, truth["o"])
    stored = b["final_state_indices"] >= 0
    case.check("final_state", result.final_state[b["final_state_indices"][stored]], truth["final_state"][stored])
    assert case.damage() == ""

    case = Case("B=3 T=4 Hk=1 Hv=2 K=64 V=32 dtype=fp32 steps=dense accept=1", numpy=True)
    truth = case.recurrent_truth()
    b = case.buffers(case.recurrent_args, "final_state", "accept_lengths", "step_states")
    result = gd.recurrent(
        case.q, case.k, case.v, case.g, case.beta, initial_state=case.initial_state, **b, **case.options
    )
    case.check("o", result.o, truth["o"])
    case.check("final_state", result.final_state, truth["final_state"])
    case.check("step_states", b["step_states"], truth["step_states"])
    assert case.damage() == ""


def make(T=70):
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((1, T, 2, 32), dtype=np.float32) * 0.2 for _ in range(3)]
    return [*x, -rng.random((1, T, 2), dtype=np.float32), rng.random((1, T, 2), dtype=np.float32)]


def test_results_do_not_depend_on_threads_or_history():
    tensors = make(T=300)
    first = gd.forward(*tensors, output_final_state=True, num_threads=1)
    for threads in (1, 2, 3, None):
        again = gd.forward(*tensors, output_final_state=True, num_threads=threads)
        assert np.array_equal(first.o, again.o) and np.array_equal(first.final_state, again.final_state)


def test_calls_from_several_threads():
    tensors = make(T=200)
    want = gd.forward(*tensors).o
    results = []
    workers = [threading.Thread(target=lambda: results.extend(gd.forward(*tensors).o for _ in range(20)))
               for _ in range(3)]  # fmt: skip
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 60 and all(np.array_equal(want, o) for o in results)


def read_only(array):
    array.flags.writeable = False
    return array


REFUSALS = {
    "dtype": (
        {"q": np.zeros((1, 70, 2, 32))},
        ValueError,
        "q has dtype float64; it must be float32, bfloat16 or float16 in native byte order",
    ),
    "byte order": ({"q": np.zeros((1, 70, 2, 32), ">f4")}, ValueError, "native byte order"),
    "no array": ({"q": [1.0]}, TypeError, "q must be a numpy array, not list"),
    "rank": ({"q": np.zeros((70, 2, 32), np.float32)}, ValueError, "q: rank is 3"),
    "too high a rank": ({"q": np.zeros((1,) * 6, np.float32)}, ValueError, "rank 6"),
    "gaps inside rows": ({"q": np.zeros((1, 70, 2, 64), np.float32)[..., ::2]}, ValueError, r"\bq\b.*stride"),
    "odd strides": (
        {"q": np.lib.stride_tricks.as_strided(np.zeros(10**5, np.float32), (1, 70, 2, 32), (2, 258, 130, 4))},
        ValueError,
        "no multiple",
    ),
    "negative eigenvalues": ({"allow_neg_eigval": True}, ValueError, "use_beta_sigmoid_in_kernel"),
    "read-only": ({"out": read_only(np.zeros((1, 70, 2, 32), np.float32))}, ValueError, "read-only"),
    "threads": ({"num_threads": 0}, ValueError, "num_threads is 0"),
    "too many threads": ({"num_threads": 2**40}, ValueError, f"num_threads is {2**40}; it must be from 1 to 1024"),
    "more threads than a call may have": ({"num_threads": 1025}, ValueError, "num_threads is 1025; .* from 1 to 1024"),
    "checkpoint interval of 65 bits": (
        {"checkpoints": np.zeros((1, 2, 32, 32), np.float32), "checkpoint_every": 2**64 + 64},
        ValueError,
        "checkpoint_every is 18446744073709551680, must be a positive multiple of 64",
    ),
    "offsets of floats": (
        {"cu_seqlens": np.array([0.0, 70.0])},
        ValueError,
        "cu_seqlens has dtype .* int32 or int64 in",
    ),
    "slots": (
        {"final_state": np.zeros((4, 2, 32, 32), np.float32), "final_state_indices": np.array([4])},
        ValueError,
        r"^final_state_indices\[0\] is 4, but final_state has 4 slots$",
    ),
    "gate": (
        {"A_log": np.zeros(2, np.float32)},
        ValueError,
        r"^A_log is given, but it acts only on a raw g \(use_gate_in_kernel\)",
    ),
    "shape of out": ({"out": np.zeros((1, 70, 2, 16), np.float32)}, ValueError, "^out: shape is"),
    "no such keyword": ({"seq_idx": None}, TypeError, "seq_idx"),
    "gate of raw values that are absent": ({"g": None, "use_gate_in_kernel": True}, ValueError, "but g is None"),
    "logits that are absent": ({"beta": None, "use_beta_sigmoid_in_kernel": True}, ValueError, "but beta is None"),
    "offsets": ({"cu_seqlens": np.array([0, 71])}, ValueError, "cu_seqlens ends at 71"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    changes, kind, message = REFUSALS[name]
    arguments = dict(zip(("q", "k", "v", "g", "beta"), make(), strict=True))
    with pytest.raises(kind, match=message):
        gd.forward(**{**arguments, **changes})


def test_wrong_saved_is_refused():
    tensors = make()
    do = np.ones_like(tensors[2])
    saved = gd.forward(*tensors, save=True).saved
    with pytest.raises(ValueError, match=r"^saved has \d+ bytes, needs \d+$"):
        gd.backward(*tensors, do, saved=saved._replace(data=saved.data[:-64]))
    for other in (do, saved.data, saved._replace(data=do), (saved.data, saved.call)):
        with pytest.raises(ValueError, match=r"^saved is not what forward\(\.\.\., save=True\) returned$"):
            gd.backward(*tensors, do, saved=other)


def test_thread_limit_is_the_librarys():
    with pytest.raises(ValueError, match=f"num_threads is 1025, must be from 0 to {_lib.MAX_THREADS}$"):
        _lib.check(_lib.library().gd_thread_pool_create(_lib.MAX_THREADS + 1, ctypes.byref(ctypes.c_void_p())))


@pytest.mark.parametrize("B, T", [(0, 70), (1, 0), (2, 0), (0, 0)])
def test_empty_batches_and_sequences(B, T):
    """numpy gives empty arrays strides of 0, which must not look like broadcast rows."""
    q = np.zeros((B, T, 2, 32), np.float32)
    g = np.zeros((B, T, 2), np.float32)
    state = np.random.default_rng(0).random((B, 2, 32, 32), np.float32)
    result = gd.forward(q, q, q, g, g, initial_state=state, output_final_state=True, save=True)
    assert result.o.shape == q.shape and np.array_equal(result.final_state, state)
    gradients = gd.backward(q, q, q, g, g, q, state, initial_state=state, saved=result.saved)
    assert gradients.dq.shape == q.shape and np.array_equal(gradients.d_initial_state, state)
    result = gd.recurrent(q, q, q, g, g, initial_state=state, output_final_state=True)
    assert result.o.shape == q.shape and np.array_equal(result.final_state, state)


def test_empty_packs():
    q, g = np.zeros((1, 0, 2, 32), np.float32), np.zeros((1, 0, 2), np.float32)
    for offsets, count in (([0], 0), ([0, 0, 0], 2)):
        result = gd.forward(q, q, q, g, g, cu_seqlens=np.array(offsets), output_final_state=True)
        assert result.o.shape == q.shape and result.final_state.shape == (count, 2, 32, 32)
        assert not result.final_state.any()


@pytest.mark.parametrize("absent", [("g",), ("beta",), ("g", "beta")], ids="-".join)
def test_absent_gates_are_zeros_and_ones(absent):
    q, k, v, g, beta = make()
    results = []
    for explicit in ({"g": np.zeros_like(g), "beta": np.ones_like(beta)}, {"g": None, "beta": None}):
        gates = {"g": g, "beta": beta, **{name: explicit[name] for name in absent}}
        forward = gd.forward(q, k, v, **gates, output_final_state=True, save=True)
        gradients = gd.backward(q, k, v, **gates, do=v, saved=forward.saved)
        recurrent = gd.recurrent(q, k, v, **gates, output_final_state=True)
        results.append(
            {**forward._asdict(), **gradients._asdict(), "r_o": recurrent.o, "r_state": recurrent.final_state}
            | {"saved": forward.saved.data}
        )
    want, got = results
    for name in want:
        if name in {f"d{name}" for name in absent}:
            assert got[name] is None
        else:
            assert np.array_equal(got[name], want[name]), name


def test_layer_lists_every_common_keyword():
    """The TypedDict of the signatures, against the function that takes the keywords and passes options on."""
    parameters = inspect.signature(rule._set_inputs).parameters.values()
    tensors = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    options = set(inspect.signature(_lib.RuleOptions).parameters)
    assert set(rule.Layer.__annotations__) == tensors | options and not tensors & options

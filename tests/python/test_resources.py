"""Threads and memory: the same bits for any thread count, torch's thread setting obeyed, nothing leaked, big pools."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gatedelta import torch as gd  # noqa: E402
from test_torch_calls import make  # noqa: E402


def training_step(dtype, packed):
    tensors = make(B=1, T=700, H=2, HV=4, K=64, V=64, dtype=dtype, N=3 if packed else 1)
    leaves = [x.requires_grad_() for x in tensors]
    o, state = gd.chunk_gated_delta_rule(
        *leaves[:5], initial_state=leaves[5], output_final_state=True,
        cu_seqlens=torch.tensor([0, 65, 300, 700]) if packed else None,
    )  # fmt: skip
    gradients = torch.autograd.grad(o.float().square().sum() + state.square().sum(), leaves)
    return [o.detach(), state.detach(), *gradients]


@pytest.fixture
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_for_any_thread_count_and_every_run(dtype, packed, keep_threads):
    torch.set_num_threads(1)
    want = training_step(dtype, packed)
    for threads in (1, 2, 3, 5, 16):
        torch.set_num_threads(threads)
        for _ in range(3):
            got = training_step(dtype, packed)
            assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)), f"{threads} threads"


COUNT_THREADS = """
import os, sys, torch
import gatedelta.torch as gd
torch.set_num_threads(1)
x = torch.ones(1, 2048, 8, 64).bfloat16() / 8
g = torch.zeros(1, 2048, 8)
torch.set_num_threads(int(sys.argv[1]))
before = len(os.listdir("/proc/self/task"))
gd.chunk_gated_delta_rule(x, x, x, g, g)
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("threads", [1, 3])
def test_torch_set_num_threads_holds(run_python, threads):
    """Torch starts its workers at the first parallel region of a process, and none with one thread."""
    assert int(run_python("-c", COUNT_THREADS, str(threads)).stdout) == threads - 1


def test_calls_from_several_threads():
    tensors = make(T=300)
    want, _ = gd.chunk_gated_delta_rule(*tensors[:5])
    results = []

    def work():
        results.extend(gd.chunk_gated_delta_rule(*tensors[:5])[0] for _ in range(20))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 80 and all(torch.equal(want, o) for o in results)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_does_not_grow():
    tensors = [x.requires_grad_() for x in make(T=256, HV=4, K=64, V=64)]
    pool = torch.zeros(4, 4, 64, 64)
    slots = torch.tensor([1])

    def work():
        o, _ = gd.chunk_gated_delta_rule(*tensors[:5], initial_state=tensors[5])
        o.sum().backward()
        with torch.no_grad():
            gd.fused_recurrent_gated_delta_rule(
                *tensors[:4], beta=tensors[4], initial_state=pool, final_state=pool, initial_state_indices=slots,
                final_state_indices=slots,
            )  # fmt: skip
            with pytest.raises(ValueError):
                gd.chunk_gated_delta_rule(*tensors[:5], initial_state=pool, scale=0.5, initial_state_indices=slots + 9)

    for _ in range(30):
        work()
    before = resident_bytes()
    for _ in range(400):
        work()
    # A leak of one tensor handle, optional or workspace per call would be 400 of at least 100 kB or so; heap noise is
    # not.
    assert resident_bytes() - before < 8 << 20


def test_handles_are_given_back():
    """A tensor handed to the binding is released again, whether the call succeeds or fails."""
    tensors = make(T=3)
    h0 = tensors[5]
    before = [x._use_count() for x in tensors]
    for _ in range(10):
        gd.fused_recurrent_gated_delta_rule(*tensors[:4], beta=tensors[4], initial_state=h0, output_final_state=True)
        with torch.no_grad():
            gd.chunk_gated_delta_rule(*tensors[:5], initial_state=h0, final_state=h0)
        with pytest.raises(ValueError):
            gd.chunk_gated_delta_rule(*tensors[:5], initial_state=h0, A_log=tensors[0])
    assert [x._use_count() for x in tensors] == before


def test_pool_of_more_than_two_to_the_31_elements():
    q, k, v, g, beta, _ = make(B=2, T=2, H=1, HV=16, K=128, V=128, dtype=torch.bfloat16)
    slots = 2**31 // (16 * 128 * 128) + 8
    try:
        pool = torch.empty(slots, 16, 128, 128, dtype=torch.bfloat16)  # touched only where it is used
    except RuntimeError:
        pytest.skip("no room for a pool of 4 GiB in this machine's address space")
    assert pool.numel() > 2**31
    indices = torch.tensor([slots - 1, 0])
    pool[indices] = torch.randn(2, 16, 128, 128).bfloat16()
    want = pool[indices].clone()
    options = {"initial_state_indices": indices, "final_state_indices": indices}
    got, _ = gd.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=pool, final_state=pool, **options)
    expected, _ = gd.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=want, final_state=want)
    assert torch.equal(got, expected) and torch.equal(pool[indices], want)
    got, _ = gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=pool, final_state=pool, **options)
    expected, _ = gd.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=want, final_state=want)
    assert torch.equal(got, expected) and torch.equal(pool[indices], want)


def _numpy_in_child(tensors, queue):
    import gatedelta.numpy as gdn

    queue.put(gdn.forward(*tensors).o)


def test_numpy_thread_pool_survives_a_fork():
    np = pytest.importorskip("numpy")
    import gatedelta.numpy as gdn

    tensors = [x.numpy() for x in make(T=200)[:5]]
    want = gdn.forward(*tensors).o
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_numpy_in_child, args=(tensors, queue))
    child.start()
    got = queue.get(timeout=60)
    child.join(timeout=60)
    assert child.exitcode == 0 and np.array_equal(got, want)

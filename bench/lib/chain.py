"""Times calls on a GPU as an engine makes them: one after the other in a CUDA graph, each on states of its own.

A state is then cold when its turn comes, as between the layers of a model. A kernel that only waits runs in front of
each replay, so that the host has launched the graph before the first event: without it, microseconds of the launch
would be between the events.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

WAIT_CYCLES = 1_000_000  # about half a millisecond: longer than the host takes to launch a graph of 256 calls
INDEX_STRIDE = 16  # int32 indices in 64 bytes
WARM_UP = 3  # replays
COPY_BYTES = 2 << 30
EAGER_CALLS = 20  # between two synchronisations; too few to fill the launch queue, which would block the host


def index_rows(nodes: int, count: int, device: str, multiple: int = INDEX_STRIDE) -> torch.Tensor:
    """The slots of every call: row i begins with those of call i. Rows are a multiple of so many indices long: at
    INDEX_STRIDE, no two calls share what a read of the memory brings into the L2."""
    rows = torch.zeros(nodes, -(-count // multiple) * multiple, dtype=torch.int32, device=device)
    rows[:, :count] = torch.arange(nodes * count, device=device).view(nodes, count)
    return rows


def replays_ms(work: Callable[[], object], stream: torch.cuda.Stream, repeats: int) -> float:
    """Median time of what `work` puts into the stream."""
    times = []
    for i in range(WARM_UP + repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(WAIT_CYCLES)
        begin.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        if i >= WARM_UP:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def chain_ms(call: Callable[[int], object], nodes: int, repeats: int) -> float:
    """Time of one call in ms. `call(i)` works on the i-th set of slots. What the calls return is kept: memory that was
    freed and given to the next call would stay in the L2."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            call(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [call(i) for i in range(nodes)]
        ms = replays_ms(graph.replay, stream, repeats) / nodes
        del kept
    return ms


def copy_bytes_per_s(repeats: int) -> float:
    """Bytes read and written by a large copy, the most that a kernel can hope for."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms = replays_ms(lambda: target.copy_(source), torch.cuda.current_stream(), repeats)
    return 2 * COPY_BYTES / (ms * 1e-3)


def host_us(call: Callable[[], object], batches: int, synchronize: Callable[[], None]) -> float:
    """Host time of one call, whatever the device does. Median of the batches after the first two."""
    times = []
    for _ in range(2 + batches):
        synchronize()
        start = time.perf_counter()
        for _ in range(EAGER_CALLS):
            call()
        times.append((time.perf_counter() - start) * 1e6 / EAGER_CALLS)
    synchronize()
    return statistics.median(times[2:])

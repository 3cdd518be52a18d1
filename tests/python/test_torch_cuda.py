"""CUDA tensors: the forward against the fp64 recurrence, streams, graphs, and what is refused for now."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")

import gatedelta  # noqa: E402
from gatedelta import torch as gd  # noqa: E402
from tree import ROOT  # noqa: E402
from truth import Case  # noqa: E402

sys.path.insert(0, str(ROOT / "bench"))
import gpu  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or gatedelta.info()["cuda_devices"] == 0, reason="no GPU, or none that is supported"
)

CASES = [
    "B=2 T=300 Hk=2 Hv=4 K=128 V=128 dtype=bf16",
    "B=2 T=130 Hk=1 Hv=2 K=128 V=128 dtype=bf16 layout=vk h0=0",
    "T=200 Hk=2 Hv=8 K=128 V=128 dtype=bf16 gate=raw beta=logit l2norm=1",
    "lengths=3x64+0+130+1 pad=37 Hk=2 Hv=4 K=128 V=128 dtype=bf16",
    "lengths=0+17+0+200+64 pad=5 Hk=1 Hv=2 K=128 V=128 dtype=bf16 i64=1 layout=vk",
]


def on_gpu(case: Case) -> dict:
    names = ("q", "k", "v", "g", "beta", "initial_state")
    tensors = {name: getattr(case, name) for name in names} | case.options
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in tensors.items()}


def check(case: Case, o: torch.Tensor, final_state: torch.Tensor) -> None:
    truth = case.forward_truth()
    case.check("o", o, truth["o"])
    case.check("final_state", final_state, truth["final_state"])


@pytest.mark.parametrize("spec", CASES)
def test_forward(spec):
    case = Case(spec)
    o, final_state = gd.chunk_gated_delta_rule(**on_gpu(case), output_final_state=True)
    assert o.is_cuda and final_state.is_cuda and final_state.dtype == torch.float32
    check(case, o, final_state)


@pytest.mark.parametrize(("decaying", "bar_o", "bar_state"), [(False, 4.08e-3, 2.48e-3), (True, 3.44e-3, 2.50e-3)])
def test_as_accurate_as_the_best_peer(decaying, bar_o, bar_state):
    """On the inputs the peers' errors were measured on: all heads together, with and without heads that never decay."""
    row = {"hk": 4, "hv": 8, "lengths": [1000, 3000, 64, 32]}
    inputs = gpu.make_inputs(row)
    if decaying:
        g = inputs["g"]
        g[:, :, ::4] = g[:, :, 1::4]
    o, final_state = gd.chunk_gated_delta_rule(**inputs, output_final_state=True)
    true_o, true_state = gpu.recurrence(row, inputs, range(row["hv"]))
    assert gpu.distance(o[0], true_o) <= bar_o
    assert gpu.distance(final_state, true_state) <= bar_state


def test_buffers_and_pool_in_place():
    case = Case("B=3 T=150 Hk=2 Hv=4 K=128 V=128 dtype=bf16")
    tensors = on_gpu(case)
    pool = torch.full((7, *tensors["initial_state"].shape[1:]), float("nan"), device="cuda")
    slots = torch.tensor([5, 0, 3], device="cuda")
    pool[slots] = tensors.pop("initial_state")
    out = torch.empty_like(tensors["v"])
    o, final_state = gd.chunk_gated_delta_rule(
        **tensors, out=out, initial_state=pool, initial_state_indices=slots, final_state=pool, final_state_indices=slots
    )
    assert o is out and final_state is pool
    check(case, out, pool[slots])
    assert pool[[1, 2, 4, 6]].isnan().all()


def test_runs_on_the_current_stream():
    case = Case(CASES[0])
    tensors = on_gpu(case)
    q = tensors["q"].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tensors["q"].zero_()
        torch.cuda._sleep(50_000_000)
        tensors["q"].add_(q)  # a call on another stream would come before this
        o, final_state = gd.chunk_gated_delta_rule(**tensors, output_final_state=True)
    stream.synchronize()
    check(case, o, final_state)


def test_graph_reads_new_contents():
    first, second = (Case(f"lengths={n} Hk=2 Hv=4 K=128 V=128 dtype=bf16 seed={n[:2]}") for n in ("70+130", "10+190"))
    tensors = on_gpu(first)
    gd.chunk_gated_delta_rule(**tensors, output_final_state=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, final_state = gd.chunk_gated_delta_rule(**tensors, output_final_state=True)
    for case in (first, second):
        for name, x in on_gpu(case).items():
            if isinstance(x, torch.Tensor):
                tensors[name].copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        check(case, o, final_state)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_refused_at_the_forward(recompute):
    tensors = on_gpu(Case(CASES[0]))
    tensors["v"].requires_grad_()
    with pytest.raises(NotImplementedError, match="no backward on CUDA yet"):
        gd.chunk_gated_delta_rule(**tensors, recompute=recompute)
    with torch.no_grad():
        gd.chunk_gated_delta_rule(**tensors)


def test_what_is_missing_is_refused():
    tensors = on_gpu(Case(CASES[0]))
    with pytest.raises(RuntimeError, match="gd_forward only for now"):
        gd.fused_recurrent_gated_delta_rule(**tensors)
    inputs = [tensors[name] for name in ("q", "k", "v", "g", "beta")]
    with pytest.raises(RuntimeError, match="no backward on CUDA yet"):
        gd.chunk_gated_delta_rule_fwd(*inputs)
    with pytest.raises(RuntimeError, match="gd_forward only for now"):
        gd.chunk_gated_delta_rule_bwd(*inputs, None, tensors["v"])
    with pytest.raises(RuntimeError, match="q, k and v are float32, must be bfloat16 or float16 on CUDA"):
        gd.chunk_gated_delta_rule(*(x.float() for x in inputs))
    with pytest.raises(RuntimeError, match="g is not on the device q is on"):
        gd.chunk_gated_delta_rule(*inputs[:3], inputs[3].cpu(), inputs[4])

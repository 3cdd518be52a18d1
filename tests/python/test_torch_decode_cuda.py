"""Recurrent steps on CUDA tensors: against the fp64 recurrence, over pools, with gradients, compiled, in graphs."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

import gatedelta  # noqa: E402
from gatedelta import _lib  # noqa: E402
from gatedelta import torch as gd  # noqa: E402
from gatedelta.torch import _direct  # noqa: E402
from torch.utils._triton import has_triton  # noqa: E402

from testing.truth import Case, compare, describe, tolerance  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or not gatedelta.info()["cuda_compiled"]
    or torch.cuda.get_device_capability() < (8, 0),
    reason="no GPU of compute capability 8.0 or later, or no CUDA backend",
)
needs_hopper = pytest.mark.skipif(
    gatedelta.info()["cuda_devices"] == 0, reason="no GPU that the chunked backward runs on"
)

CASES = [
    "B=5 T=1 Hk=2 Hv=4 K=128 V=128 dtype=bf16 layout=vk",
    "B=5 T=1 Hk=2 Hv=4 K=128 V=128 dtype=bf16",
    "B=3 T=4 Hk=2 Hv=8 K=128 V=128 dtype=bf16 layout=vk gate=raw beta=logit l2norm=1",
    "B=2 T=7 Hk=1 Hv=2 K=64 V=32 dtype=fp32 gate=raw dt_bias=0 beta=logit2",
    "lengths=3+0+1+8 pad=3 Hk=2 Hv=4 K=96 V=144 dtype=fp16 i64=1",
    "lengths=1+4+0+3 pad=2 Hk=1 Hv=2 K=128 V=128 dtype=bf16 layout=vk h0=0",
    "B=2 T=3 Hk=1 Hv=2 K=256 V=16 dtype=bf16 state=bf16",
    "B=3 T=1 Hk=2 Hv=6 tiled K=128 V=128 dtype=bf16 layout=vk",
]
POOLS = [
    "B=10 T=1 Hk=2 Hv=4 K=128 V=128 dtype=bf16 layout=vk pool=1 inplace=1 l2norm=1 gate=raw beta=logit",
    "B=10 T=1 Hk=2 Hv=4 K=128 V=128 dtype=bf16 state=bf16 layout=vk pool=1 inplace=1 i64=1",
    "B=10 T=4 Hk=1 Hv=2 K=64 V=32 dtype=bf16 pool=1 accept=1 steps=dense",
    "B=5 T=4 Hk=1 Hv=2 K=128 V=128 dtype=fp16 state=fp16 layout=vk pool=1 inplace=1 accept=1 steps=pool",
    "lengths=1+4+0+3+2 pad=2 Hk=1 Hv=2 K=64 V=32 dtype=fp32 pool=1 inplace=1 accept=1",
]


def cuda(x):
    return x.cuda() if isinstance(x, torch.Tensor) else x


def on_gpu(case: Case) -> dict:
    names = ("q", "k", "v", "g", "beta", "initial_state")
    return {name: cuda(x) for name, x in ({name: getattr(case, name) for name in names} | case.options).items()}


def check(case: Case, quantity: str, got: torch.Tensor, truth) -> None:
    """Recurrent steps compute in fp32 on every device: the bounds of fp32 inputs hold for all."""
    assert got.is_cuda and tuple(got.shape) == truth.shape
    got = got.cpu()
    bounds = tolerance(quantity, _lib.DTYPE_F32, describe(got).dtype, case.spec)
    result = compare(quantity, got, truth, *bounds)
    assert result.ok, f"{quantity} of '{case.spec}': error {result.error:.3g}, {result.margin:.2f} of its bound"


@pytest.mark.parametrize("spec", CASES)
def test_recurrent(spec):
    case = Case(spec)
    o, final_state = gd.fused_recurrent_gated_delta_rule(**on_gpu(case), output_final_state=True)
    assert final_state.dtype == torch.float32
    truth = case.recurrent_truth()
    check(case, "o", o, truth["o"])
    check(case, "final_state", final_state, truth["final_state"])
    o_alone, nothing = gd.fused_recurrent_gated_delta_rule(**on_gpu(case))
    assert nothing is None and torch.equal(o_alone, o)


def call_with_buffers(case: Case) -> dict:
    """Runs a case of a pool on the GPU; returns its buffers there."""
    inputs = on_gpu(case)
    names = ("out", "final_state", "final_state_indices", "accept_lengths", "step_states", "step_indices")
    buffers = {name: cuda(x) for name, x in case.buffers(case.recurrent_args, *names).items()}
    if case.buffers(case.recurrent_args, "final_state")["final_state"] is case.initial_state:
        buffers["final_state"] = inputs["initial_state"]
    gd.fused_recurrent_gated_delta_rule(
        **inputs, initial_state_indices=cuda(case.initial_state_indices), out=buffers["out"],
        final_state=buffers["final_state"], final_state_indices=buffers["final_state_indices"],
        accept_lengths=buffers["accept_lengths"], step_states=buffers["step_states"],
        step_indices=buffers["step_indices"],
    )  # fmt: skip
    return buffers


@pytest.mark.parametrize("spec", POOLS)
def test_pools(spec):
    case = Case(spec)
    before = case.initial_state.clone()
    truth = case.recurrent_truth()
    b = call_with_buffers(case)
    check(case, "o", b["out"], truth["o"])
    written = b["final_state_indices"].long()
    stored = written >= 0
    check(case, "final_state", b["final_state"][written[stored]], truth["final_state"][stored.cpu().numpy()])
    if "inplace" in spec:  # what no index names is as it was, to the bit
        others = torch.ones(len(before), dtype=torch.bool)
        others[written[stored].cpu()] = False
        got, want = (x[others].view(torch.uint8) for x in (b["final_state"].cpu(), before))
        assert torch.equal(got, want)
    steps, indices = b["step_states"], b["step_indices"]
    if steps is not None:
        padded = (case.initial_state_indices < 0) & (b["final_state_indices"].cpu() < 0)
        wanted = ~padded[:, None].expand(steps.shape[:2] if indices is None else indices.shape)
        if indices is not None:
            wanted = wanted & (indices.cpu() >= 0)
        got = steps[wanted.cuda()] if indices is None else steps[indices[wanted.cuda()].long()]
        check(case, "step_states", got.unsqueeze(0), truth["step_states"][wanted.numpy()][None])


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float16])
def test_slices_of_a_packed_projection_and_padded_slots(state):
    """What engines pass: q, k and v as slices of one row, and a pool whose slots have gaps."""
    torch.manual_seed(1)
    N, HK, HV, D, SLOTS = 6, 2, 4, 128, 9
    mixed = torch.randn(N, 1, (2 * HK + HV) * D, dtype=torch.bfloat16, device="cuda")
    q, k, v = (x.unflatten(-1, (-1, D)) for x in mixed.split([HK * D, HK * D, HV * D], dim=-1))
    a, b = torch.randn(N, 1, 2 * HV, dtype=torch.bfloat16, device="cuda").split(HV, dim=-1)
    options = {
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "A_log": torch.randn(HV, device="cuda"), "dt_bias": torch.randn(HV, device="cuda"),
    }  # fmt: skip
    memory = torch.randn(SLOTS, HV * D * D + 64, device="cuda").to(state)
    pool = memory[:, : HV * D * D].view(SLOTS, HV, D, D)
    start = memory.clone()
    slots = torch.tensor([4, -1, 7, 0, 2, 8], device="cuda")
    decode = functools.partial(gd.fused_recurrent_gated_delta_rule, state_v_first=True, **options)
    o, _ = decode(q, k, v, a, beta=b, initial_state=pool, final_state=pool, initial_state_indices=slots,
                  final_state_indices=slots)  # fmt: skip
    live = slots >= 0
    dense = start[slots[live], : HV * D * D].view(-1, HV, D, D).clone()
    want, states = decode(q[live].contiguous(), k[live].contiguous(), v[live].contiguous(), a[live].contiguous(),
                          beta=b[live].contiguous(), initial_state=dense, final_state=dense)  # fmt: skip
    assert torch.equal(o[live], want) and not o[~live].any()
    assert torch.equal(pool[slots[live]], states)
    start[slots[live], : HV * D * D] = memory[slots[live], : HV * D * D]
    assert torch.equal(memory, start)


def test_one_call_has_the_bits_of_many():
    case = Case("B=4 T=6 Hk=2 Hv=4 K=128 V=128 dtype=bf16 layout=vk l2norm=1 gate=raw beta=logit")
    inputs = on_gpu(case)
    whole, states = gd.fused_recurrent_gated_delta_rule(**inputs, output_final_state=True, batch_invariant=True)
    state, rows = inputs.pop("initial_state"), []
    for t in range(6):
        one = {name: x[:, t : t + 1] if name in ("q", "k", "v", "g", "beta") else x for name, x in inputs.items()}
        o, state = gd.fused_recurrent_gated_delta_rule(**one, initial_state=state, output_final_state=True)
        rows.append(o)
    assert torch.equal(torch.cat(rows, 1), whole) and torch.equal(state, states)


def test_commit_moves_the_states_without_o():
    case = Case("B=3 T=4 Hk=1 Hv=2 K=64 V=32 dtype=fp32 accept=1")
    lengths = case.buffers(case.recurrent_args, "accept_lengths")["accept_lengths"].cuda()
    o, final_state = gd.fused_recurrent_gated_delta_rule(
        **on_gpu(case), output_final_state=True, accept_lengths=lengths, output_o=False
    )
    assert o is None
    check(case, "final_state", final_state, case.recurrent_truth()["final_state"])


@needs_hopper
@pytest.mark.parametrize("l2norm", [False, True])
def test_gradients_are_those_of_the_chunked_backward(l2norm):
    case = Case("B=2 T=70 Hk=1 Hv=2 K=128 V=128 dtype=bf16")
    names = ("q", "k", "v", "g", "beta", "initial_state")
    inputs = {name: x.requires_grad_() if name in names else x for name, x in on_gpu(case).items()}
    inputs["use_qk_l2norm_in_kernel"] = l2norm
    gradients = []
    for function in (gd.fused_recurrent_gated_delta_rule, gd.chunk_gated_delta_rule):
        more = {"recompute": True} if function is gd.chunk_gated_delta_rule else {}
        o, state = function(**inputs, **more, output_final_state=True)
        outputs, weights = [o, state], [case.do.cuda(), case.dht.cuda()]
        gradients.append(torch.autograd.grad(outputs, [inputs[name] for name in names], weights))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


GRADIENTS = {
    "q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta", "A_log": "dA_log", "dt_bias": "d_dt_bias",
    "initial_state": "d_initial_state",
}  # fmt: skip


@pytest.mark.parametrize("spec", [
    "B=2 T=3 Hk=1 Hv=2 K=64 V=64 dtype=fp32",
    "lengths=1+4+0+3 pad=2 Hk=1 Hv=3 K=48 V=80 dtype=fp32 gate=raw beta=logit l2norm=1 layout=vk",
])  # fmt: skip
def test_float32_gradients(spec):
    """By the chunked backward's kernels for fp32, which need no Hopper."""
    case = Case(spec)
    inputs = on_gpu(case)
    leaves = {name: inputs[name].requires_grad_() for name in GRADIENTS if inputs.get(name) is not None}
    outputs = gd.fused_recurrent_gated_delta_rule(**inputs, output_final_state=True)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), [case.do.cuda(), case.dht.cuda()])
    truth = case.backward_truth()
    for name, gradient in zip(leaves, gradients, strict=True):
        check(case, GRADIENTS[name], gradient, truth[GRADIENTS[name]])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gradients_the_backward_lacks_are_refused(dtype):
    """Recurrent steps take tiled key heads, the backward does not."""
    inputs = on_gpu(Case(f"B=3 T=1 Hk=2 Hv=6 tiled K=128 V=128 dtype={dtype} layout=vk"))
    inputs["q"] = inputs["q"].requires_grad_()
    o, _ = gd.fused_recurrent_gated_delta_rule(**inputs)
    with pytest.raises(
        NotImplementedError, match="key_head_order is tiled with Hk = 2 and Hv = 6, must be grouped on CUDA"
    ):
        o.sum().backward()


@pytest.mark.skipif(not has_triton(), reason="torch.compile needs Triton on CUDA")
@pytest.mark.parametrize("T", [1, 4])
def test_compiled_decode_over_a_pool(T):
    case = Case(f"B=10 T={T} Hk=1 Hv=2 K=128 V=128 dtype=bf16 layout=vk")
    inputs = on_gpu(case)
    start = torch.randn(12, 2, 128, 128, device="cuda")
    slots = torch.randperm(12, device="cuda")[:10]
    del inputs["initial_state"]

    def decode(pool):
        o, _ = gd.fused_recurrent_gated_delta_rule(
            **inputs, initial_state=pool, final_state=pool, initial_state_indices=slots, final_state_indices=slots
        )
        return o * 2

    pools = [start.clone(), start.clone()]
    want = decode(pools[0])
    got = torch.compile(decode, fullgraph=True)(pools[1])
    assert torch.equal(got, want) and torch.equal(*pools) and not torch.equal(pools[0], start)


def test_graph_reads_slots_and_tokens_anew():
    case = Case("B=4 T=1 Hk=1 Hv=2 K=128 V=128 dtype=bf16 layout=vk")
    inputs = on_gpu(case)
    del inputs["initial_state"]
    start = torch.randn(9, 2, 128, 128, device="cuda")
    pool, slots = start.clone(), torch.tensor([3, 1, -1, 0], dtype=torch.int32, device="cuda")
    out = torch.empty_like(inputs["v"])

    def decode():
        gd.fused_recurrent_gated_delta_rule(
            **inputs, initial_state=pool, final_state=pool, initial_state_indices=slots, final_state_indices=slots,
            out=out,
        )  # fmt: skip

    decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    slots.copy_(torch.tensor([8, -1, 5, 2], dtype=torch.int32))
    inputs["q"].mul_(0.5)
    pool.copy_(start)
    decode()
    want, want_pool = out.clone(), pool.clone()
    pool.copy_(start)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, want) and torch.equal(pool, want_pool) and not out[1].any()


@pytest.mark.parametrize("side_stream", [False, True])
def test_the_operator_and_the_way_past_it_agree(side_stream, monkeypatch):
    inputs = on_gpu(Case("B=4 T=1 Hk=1 Hv=2 K=128 V=128 dtype=bf16 layout=vk gate=raw beta=logit l2norm=1"))
    slots = torch.tensor([3, 1, -1, 0], device="cuda")
    calls, past_it = [], _direct.recurrent

    def counting(*arguments):
        calls.append(past_it(*arguments))
        return calls[-1]

    def decode():
        pool = torch.full((9, 2, 128, 128), 0.25, device="cuda")
        o, _ = gd.fused_recurrent_gated_delta_rule(
            **{n: x for n, x in inputs.items() if n != "initial_state"}, initial_state=pool, final_state=pool,
            initial_state_indices=slots, final_state_indices=slots,
        )  # fmt: skip
        return o, pool, *gd.fused_recurrent_gated_delta_rule(**inputs, output_final_state=True)

    monkeypatch.setattr(_direct, "recurrent", None)
    want = decode()
    torch.cuda.synchronize()
    monkeypatch.setattr(_direct, "recurrent", counting)
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        if side_stream:
            torch.cuda._sleep(20_000_000)  # a step on another stream would run before its inputs are there
        got = decode()
    torch.cuda.synchronize()
    assert len(calls) == 2 and None not in calls
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_refusals():
    tensors = on_gpu(Case(CASES[0]))
    with pytest.raises(ValueError, match="K is 24, must be a multiple of 16 from 16 to 256"):
        gd.fused_recurrent_gated_delta_rule(**{**tensors, "q": tensors["q"][..., :24], "k": tensors["k"][..., :24]})
    with pytest.raises(ValueError, match="g is not on the device q is on"):
        gd.fused_recurrent_gated_delta_rule(**{**tensors, "g": tensors["g"].cpu()})
    with pytest.raises(
        NotImplementedError, match="key_head_order is tiled with Hk = 2 and Hv = 4, must be grouped on CUDA"
    ):
        gd.chunk_gated_delta_rule(**{**tensors, "key_head_order": "tiled"})

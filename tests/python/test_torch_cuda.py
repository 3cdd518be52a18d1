"""CUDA tensors: forward and gradients against the fp64 recurrence, streams, graphs, the compiler, refusals."""

from __future__ import annotations

import functools
import os
import random

import pytest

torch = pytest.importorskip("torch")

import gatedelta  # noqa: E402
import train  # noqa: E402
from gatedelta import torch as gd  # noqa: E402
from gatedelta._operators import ops  # noqa: E402
from torch.utils._triton import has_triton  # noqa: E402

from bench.gpu import chunked as gpu  # noqa: E402
from testing.truth import Case  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or gatedelta.info()["cuda_devices"] == 0, reason="no GPU, or none that is supported"
)

CASES = [
    "B=2 T=300 Hk=2 Hv=4 K=128 V=128 dtype=bf16",
    "B=2 T=130 Hk=1 Hv=2 K=128 V=128 dtype=bf16 layout=vk h0=0",
    "T=200 Hk=2 Hv=8 K=128 V=128 dtype=bf16 gate=raw beta=logit l2norm=1",
    "lengths=3x64+0+130+1 pad=37 Hk=2 Hv=4 K=128 V=128 dtype=bf16",
    "lengths=0+17+0+200+64 pad=5 Hk=1 Hv=2 K=128 V=128 dtype=bf16 i64=1 layout=vk",
    "lengths=70+0+65 pad=3 Hk=1 Hv=2 K=64 V=96 dtype=bf16 gate=raw l2norm=1",  # by the portable kernels
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


GRADIENTS = {
    "q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta", "A_log": "dA_log", "dt_bias": "d_dt_bias",
    "initial_state": "d_initial_state",
}  # fmt: skip


def leaves_of(tensors: dict) -> dict:
    """What of a case's tensors has a gradient, asking for it."""
    return {name: tensors[name].requires_grad_() for name in GRADIENTS if tensors.get(name) is not None}


def check_gradients(case: Case, leaves: dict, gradients) -> None:
    truth = case.backward_truth()
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        assert gradient.is_cuda and gradient.dtype == leaf.dtype
        case.check(GRADIENTS[name], gradient, truth[GRADIENTS[name]])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("spec", [*CASES, CASES[0].replace("bf16", "fp16"), CASES[2].replace("bf16", "fp16")])
def test_gradients(spec, recompute):
    case = Case(spec)
    tensors = on_gpu(case)
    leaves = leaves_of(tensors)
    outputs = gd.chunk_gated_delta_rule(**tensors, output_final_state=True, recompute=recompute)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), [case.do.cuda(), case.dht.cuda()])
    check_gradients(case, leaves, gradients)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("spec", [
    "B=2 T=150 Hk=2 Hv=4 K=128 V=128 dtype=fp32",
    "lengths=0+17+0+100+64 pad=5 Hk=1 Hv=3 K=48 V=80 dtype=fp32 gate=raw beta=logit l2norm=1 layout=vk",
])  # fmt: skip
def test_float32(spec, recompute):
    """By kernels of its own, for all head sizes, within the bounds of fp32."""
    case = Case(spec)
    tensors = on_gpu(case)
    leaves = leaves_of(tensors)
    outputs = gd.chunk_gated_delta_rule(**tensors, output_final_state=True, recompute=recompute)
    check(case, *outputs)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), [case.do.cuda(), case.dht.cuda()])
    check_gradients(case, leaves, gradients)


def test_one_gradient_alone():
    """The others cost nothing and change nothing; dv is where the kernels keep what they need, wanted or not."""
    case = Case("B=2 T=130 Hk=1 Hv=2 K=128 V=128 dtype=bf16 dht=0")
    truth = case.backward_truth()
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        tensors = on_gpu(case)
        o, _ = gd.chunk_gated_delta_rule(**tensors | {name: tensors[name].requires_grad_()})
        (gradient,) = torch.autograd.grad(o, tensors[name], case.do.cuda())
        case.check(GRADIENTS[name], gradient, truth[GRADIENTS[name]])


def test_gradients_of_views_of_one_projection():
    """As in a model: q, k and v are parts of one tensor, and the gradient of o is what broadcasting left."""
    case = Case("B=2 T=150 Hk=2 Hv=4 K=128 V=128 dtype=bf16 h0=0 dht=0")
    projection = torch.cat([x.flatten(2) for x in (case.q, case.k, case.v)], dim=2).cuda().requires_grad_()
    q, k, v = (
        part.unflatten(2, x.shape[2:])
        for part, x in zip(projection.split([x[0, 0].numel() for x in (case.q, case.k, case.v)], dim=2),
                           (case.q, case.k, case.v), strict=True)
    )  # fmt: skip
    g, beta = case.g.cuda(), case.beta.cuda()
    o, _ = gd.chunk_gated_delta_rule(q, k, v, g, beta)
    (got,) = torch.autograd.grad(o.sum(), projection)
    dense = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    o, _ = gd.chunk_gated_delta_rule(*dense, g, beta)
    want = torch.autograd.grad(o, dense, torch.ones_like(o))
    assert torch.equal(got, torch.cat([x.flatten(2) for x in want], dim=2))


@pytest.mark.parametrize("more", [{}, {"recompute": True}, {"small_workspace": True}, {"auto_cp": False}], ids=str)
def test_gradients_repeat_bit_for_bit(more):
    inputs = gpu.with_leaves(gpu.make_inputs({"hk": 2, "hv": 4, "lengths": [3000, 0, 70, 5000, 129, 1]}))
    gradients = list(gpu.make_gradients(inputs).values())
    leaves = [inputs[name] for name in gpu.LEAVES]
    outputs = gd.chunk_gated_delta_rule(**inputs, output_final_state=True, **more)
    first = torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        again = torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)
        for x, y in zip(again, first, strict=True):
            differences += (x != y).sum()
    assert differences == 0


@pytest.mark.parametrize(
    "spec",
    [
        "B=2 T=4500 Hk=2 Hv=4 K=128 V=128 dtype=bf16",
        "lengths=2100+0+65+3000+64+1+40 pad=37 Hk=1 Hv=4 K=128 V=128 dtype=bf16 gate=raw beta=logit l2norm=1",
        "lengths=70x64 Hk=2 Hv=4 K=128 V=128 dtype=fp16 layout=vk",  # too many to be gone through in slices
    ],
)
@pytest.mark.parametrize("auto_cp", [False, True])
def test_small_workspace_changes_no_bit(spec, auto_cp):
    tensors = on_gpu(Case(spec))
    leaves = leaves_of(tensors)

    def run(small_workspace: bool) -> tuple[torch.Tensor, ...]:
        outputs = gd.chunk_gated_delta_rule(
            **tensors, output_final_state=True, auto_cp=auto_cp, small_workspace=small_workspace
        )
        return torch.autograd.grad(outputs, list(leaves.values()), [torch.ones_like(x) for x in outputs])

    assert all(torch.equal(x, y) for x, y in zip(run(True), run(False), strict=True))


def test_small_workspace_is_smaller():
    row = {"hk": 4, "hv": 8, "lengths": [16384]}
    inputs = gpu.with_leaves(gpu.make_inputs(row))
    gradients = gpu.make_gradients(inputs)

    def peak(**more: bool) -> int:
        function = functools.partial(gd.chunk_gated_delta_rule, **more)
        return gpu.peak_bytes(lambda: gpu.train(inputs, gradients, function))

    assert peak(small_workspace=True) < 0.75 * peak()


class Pack:
    """A random ragged pack, its gradients and options: a function of its number."""

    def __init__(self, number: int) -> None:
        dice = random.Random(number)
        row = {
            "hk": dice.randint(1, 4),
            "lengths": [self.length(dice) for _ in range(dice.choice([1, 2, 3, 8, 24, 70]))],
        }
        row["hv"] = row["hk"] * dice.choice([1, 2, 3, 4])
        self.name = f"pack {number}: {row}"
        self.inputs = gpu.with_leaves(gpu.make_inputs(row, 2 * number))
        self.gradients = gpu.make_gradients(self.inputs, 2 * number + 1)
        self.options = {"use_qk_l2norm_in_kernel": dice.random() < 0.5}
        if dice.random() < 0.5:  # the very tensors, read as what gates and betas are made of
            heads = torch.zeros(row["hv"], device="cuda")
            self.options |= {"use_gate_in_kernel": True, "A_log": heads, "use_beta_sigmoid_in_kernel": True}

    @staticmethod
    def length(dice: random.Random) -> int:
        return dice.choice([0, 1, 63, 64, 65, 1024, dice.randint(0, 300), dice.randint(0, 5000)])

    def run(self, **more: bool) -> tuple[torch.Tensor, ...]:
        function = functools.partial(gd.chunk_gated_delta_rule, **self.options, **more)
        return gpu.train(self.inputs, self.gradients, function)


def test_random_packs():
    """Two at a time on two streams, again in slices, and uncut: bits, or results but for rounding."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for number in range(0, int(os.environ.get("GATEDELTA_PACKS", "100")), 2):
        packs = [Pack(number), Pack(number + 1)]
        torch.cuda.synchronize()
        found = []
        for turn in (0, 1):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    found.append(packs[i ^ turn].run())
        torch.cuda.synchronize()
        for i, pack in enumerate(packs):
            first, on_other, in_slices = found[i], found[3 - i], pack.run(small_workspace=True)
            uncut = pack.run(auto_cp=False, recompute=True)
            for name, x, *same, other in zip(gpu.GRADIENTS, first, on_other, in_slices, uncut, strict=True):
                assert all(torch.equal(x, y) for y in same), f"{name} of {pack.name}"
                assert gpu.distance(x, other.double()) < 3e-2 or not other.any(), f"{name} of {pack.name}"


def test_low_level():
    case = Case(CASES[0])
    tensors = on_gpu(case)
    inputs, initial = [tensors[name] for name in ("q", "k", "v", "g", "beta")], tensors["initial_state"]
    o, final_state, saved = gd.chunk_gated_delta_rule_fwd(*inputs, initial_state=initial)
    check(case, o, final_state)
    assert saved.data.is_cuda and saved.data.numel() > 0
    truth = case.backward_truth()
    for kept in (saved, None):
        results = gd.chunk_gated_delta_rule_bwd(*inputs, kept, case.do.cuda(), case.dht.cuda(), initial_state=initial)
        for name, gradient in zip(("dq", "dk", "dv", "dbeta", "dg", "d_initial_state"), results, strict=True):
            case.check(name, gradient, truth[name])


def test_backward_runs_on_the_current_stream():
    case = Case(CASES[0])
    tensors = on_gpu(case)
    leaves = leaves_of(tensors)
    d_o, d_state = case.do.cuda(), case.dht.cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = gd.chunk_gated_delta_rule(**tensors, output_final_state=True)
        late = torch.zeros_like(d_o)
        torch.cuda._sleep(50_000_000)
        late.add_(d_o)  # a backward on another stream would come before this
        gradients = torch.autograd.grad(outputs, list(leaves.values()), [late, d_state])
    stream.synchronize()
    check_gradients(case, leaves, gradients)


def test_graph_of_a_backward_reads_new_contents():
    first, second = (Case(f"lengths={n} Hk=2 Hv=4 K=128 V=128 dtype=bf16 seed={n[:2]}") for n in ("70+130", "10+190"))
    names = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state")

    def contents(case: Case) -> list[torch.Tensor]:
        return [*(on_gpu(case)[name] for name in names), case.do.cuda(), case.dht.cuda()]

    held = contents(first)

    def backward():
        q, k, v, g, beta, offsets, initial, d_o, d_state = held
        return gd.chunk_gated_delta_rule_bwd(q, k, v, g, beta, None, d_o, d_state, None, initial, offsets)

    backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = backward()
    for case in (first, second):
        for place, x in zip(held, contents(case), strict=True):
            place.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        truth = case.backward_truth()
        for name, gradient in zip(("dq", "dk", "dv", "dbeta", "dg", "d_initial_state"), results, strict=True):
            case.check(name, gradient, truth[name])


def test_opcheck():
    case = Case(CASES[2])
    tensors = on_gpu(case)
    inputs = [tensors[name] for name in ("q", "k", "v", "g", "beta")]
    more = [tensors["cu_seqlens"], tensors["initial_state"], None, tensors["A_log"], tensors["dt_bias"], None]
    options = ops.GATE_RAW | ops.BETA_LOGIT | ops.L2NORM
    torch.library.opcheck(ops.chunk_fwd.__wrapped__, (*inputs, options | ops.FINAL_STATE, *more))
    # Parts of `saved` are never written: the bytes of two calls may differ, so they are not compared.
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(
        ops.chunk_fwd_save.__wrapped__, (*inputs, options | ops.FINAL_STATE, *more), test_utils=checks
    )
    saved = ops.chunk_fwd_save(*inputs, options, *more)[2]
    gradients = (case.do.cuda(), case.dht.cuda())
    torch.library.opcheck(ops.chunk_bwd.__wrapped__, (*inputs, options, *more, *gradients, saved, 0b11111111))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_training_step_compiles_in_one_graph(backend, dynamic):
    if backend == "inductor" and not has_triton():
        pytest.skip("inductor has no triton here")
    torch._dynamo.reset()
    case = Case(CASES[2])
    tensors = on_gpu(case)
    leaves = leaves_of(tensors)
    options = {name: x for name, x in tensors.items() if name not in leaves}

    def loss(**leaves):
        o, state = gd.chunk_gated_delta_rule(**leaves, **options, output_final_state=True)
        return o.float().square().sum() + (state * 0.5).sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend, dynamic=dynamic)
    want = torch.autograd.grad(loss(**leaves), list(leaves.values()))
    got = torch.autograd.grad(compiled(**leaves), list(leaves.values()))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2 * y.abs().max().item())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_follows_the_reference(dtype):
    """200 steps of examples/train, against fp32 torch on the same GPU. tests/python/test_examples.py has the distances
    on a CPU; tensor cores round more operands, for which there is room. A wrong gradient is off by whole steps."""
    ours, reference = (train.train(backend, "cuda", dtype, 200, seed=0) for backend in ("gatedelta", "reference"))
    assert max(abs(x - y) for x, y in zip(ours, reference, strict=True)) < 3e-2
    assert ours[0] > 2.7 and sum(ours[-10:]) / 10 < 0.1


@pytest.mark.parametrize("absent", [("g",), ("beta",), ("g", "beta")], ids="-".join)
def test_absent_gates_are_zeros_and_ones(absent):
    """Bit for bit: o, the final state and every gradient."""
    tensors = on_gpu(Case("lengths=17+200+64 Hk=2 Hv=4 K=128 V=128 dtype=bf16"))
    explicit = {"g": torch.zeros_like(tensors["g"]), "beta": torch.ones_like(tensors["beta"])}
    results = []
    for gates in (explicit, dict.fromkeys(explicit)):
        arguments = {**tensors, **{name: gates[name] for name in absent}}
        names = [n for n in ("q", "k", "v", "g", "beta", "initial_state") if n not in absent]
        leaves = {name: arguments[name].clone().requires_grad_() for name in names}
        o, state = gd.chunk_gated_delta_rule(**{**arguments, **leaves}, output_final_state=True)
        gradients = torch.autograd.grad(o.float().square().sum() + state.sum(), list(leaves.values()))
        results.append([o, state, *gradients])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_recompute_gives_the_same_bits_where_nothing_is_cut():
    tensors = on_gpu(Case("lengths=17+2000+64 Hk=2 Hv=4 K=128 V=128 dtype=bf16"))
    results = []
    for recompute in (False, True):
        leaves = {name: tensors[name].clone().requires_grad_() for name in ("q", "k", "v", "g", "beta")}
        o, _ = gd.chunk_gated_delta_rule(**{**tensors, **leaves}, recompute=recompute, auto_cp=False)
        results.append(torch.autograd.grad(o.float().square().sum(), list(leaves.values())))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_small_workspace_needs_what_the_forward_saves():
    tensors = on_gpu(Case("T=64 Hk=1 Hv=1 K=128 V=128 dtype=bf16"))
    inputs = [tensors[name] for name in ("q", "k", "v", "g", "beta")]
    with pytest.raises(ValueError, match="small_workspace needs what the forward saves, but saved is None"):
        gd.chunk_gated_delta_rule_bwd(*inputs, None, inputs[2], small_workspace=True)


def test_out_of_memory_shows_torchs_text():
    q = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16, device="cuda").expand(1, 2**30, 1, 128)  # o takes 256 GiB
    gates = torch.zeros(1, 1, 1, device="cuda").expand(1, 2**30, 1)
    with pytest.raises(RuntimeError, match="out of memory" if torch.__version__ >= (2, 13) else "torch failed in"):
        gd.chunk_gated_delta_rule(q, q, q, gates, gates)


def test_buffers_on_another_device_are_refused():
    tensors = on_gpu(Case("T=64 Hk=1 Hv=1 K=128 V=128 dtype=bf16"))
    for name, buffer in {"out": tensors["v"].cpu(), "final_state": tensors["initial_state"].cpu()}.items():
        with pytest.raises(ValueError, match=f"gatedelta: {name} is not on the device q is on"):
            gd.chunk_gated_delta_rule(**tensors, **{name: buffer})


@pytest.mark.parametrize("raw", [False, True])
def test_a_nan_gate_is_not_a_reset(raw):
    """It spoils the rows from its token on and the final state of its head, and no other head."""
    case = Case("T=200 Hk=1 Hv=2 K=128 V=128 dtype=bf16" + " gate=raw" * raw)
    inputs = on_gpu(case)
    inputs["g"] = inputs["g"].clone()
    inputs["g"][0, 100, 1] = float("nan")
    o, final_state = gd.chunk_gated_delta_rule(**inputs, output_final_state=True)
    assert o[0, 100:, 1].isnan().all() and final_state[0, 1].isnan().all()
    assert o[0, :64, 1].isfinite().all() and o[0, :, 0].isfinite().all() and final_state[0, 0].isfinite().all()


def test_what_is_missing_is_refused():
    tensors = on_gpu(Case(CASES[0]))
    inputs = [tensors[name] for name in ("q", "k", "v", "g", "beta")]
    d_o = torch.zeros_like(tensors["v"])
    message = "gatedelta: unsupported: do: dtype is float16, must be bfloat16 as that of q on CUDA"
    with pytest.raises(NotImplementedError, match=message):
        gd.chunk_gated_delta_rule_bwd(*inputs, None, d_o.half())
    saved = gd.chunk_gated_delta_rule_fwd(*inputs)[-1]
    with pytest.raises(ValueError, match="saved has 64 bytes, needs"):
        gd.chunk_gated_delta_rule_bwd(*inputs, saved._replace(data=saved.data[:64]), d_o)
    with pytest.raises(ValueError, match="g is not on the device q is on"):
        gd.chunk_gated_delta_rule(*inputs[:3], inputs[3].cpu(), inputs[4])

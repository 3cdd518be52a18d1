"""The stages of context parallelism on a GPU, against the fp64 truth and against the CPU in fp32."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import gatedelta  # noqa: E402
from gatedelta import _lib  # noqa: E402
from gatedelta import context_parallel as cp  # noqa: E402
from gatedelta._operators import stages  # noqa: E402

from testing import truth  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not gatedelta.info()["cuda_devices"], reason="no GPU, or none that is supported"
)


@pytest.fixture(params=["auto", "portable"], autouse=True)
def kernels(request, monkeypatch):
    """Those made for the device, and those of every device."""
    monkeypatch.setattr(_lib, "forced_kernels", lambda: _lib.KERNELS[request.param])


SHAPE = "Hk=2 Hv=4 K=128 V=128 h0=0 ht=0 dht=0"
SHAPES = [SHAPE, "Hk=1 Hv=3 K=48 V=80 h0=0 ht=0 dht=0", "Hk=1 Hv=2 K=256 V=64 h0=0 ht=0 dht=0"]
PACKS = ["lengths=700", "lengths=64", "lengths=1+0+130+500+64 pad=9", "lengths=2000"]
KINDS = [
    "dtype=bf16 gate=mixed", "dtype=bf16 gate=raw l2norm beta=logit", "dtype=fp16 gate=zero layout=vk",
    "dtype=bf16 gate=strong", "dtype=bf16 gate=weak keys=correlated layout=vk",
]  # fmt: skip
NAMES = ("q", "k", "v", "g", "beta", "do")


def options_of(case: truth.Case, device: str, cu_seqlens=None) -> stages.Options:
    options = dict(case.options, cu_seqlens=case.cu_seqlens if cu_seqlens is None else cu_seqlens)
    options = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    return stages.Options(**options)


def bound(case: truth.Case, quantity: str) -> float:
    return truth.tolerance(quantity, case.forward_args.inputs.q.dtype, truth._lib.DTYPE_F32, case.spec, True)[0]


def error(got: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    got, expected = got.double().cpu(), expected.double().cpu()
    return float((got - expected).norm() / expected.norm().clamp_min(max(least, 1e-30)))


def on_cpu(case: truth.Case) -> dict[str, torch.Tensor]:
    """The same numbers in fp32."""
    return {name: getattr(case, name).float() for name in NAMES}


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [True, False])
def test_summaries(pack, shape, kind, exact):
    case = truth.Case(f"{pack} {shape} {kind}")
    cpu, gpu = on_cpu(case), {name: getattr(case, name).cuda() for name in NAMES}
    here, there = options_of(case, "cpu"), options_of(case, "cuda")
    expected = stages.summary(cpu["k"], cpu["v"], cpu["g"], cpu["beta"], here, exact=exact)
    got = stages.summary(gpu["k"], gpu["v"], gpu["g"], gpu["beta"], there, exact=exact)
    assert error(got.local_state, expected.local_state) < bound(case, "final_state")
    # M holds what is left of the identity, with the roundings of every chunk and nothing written since.
    small = 1e-3 * got.transition.numel() ** 0.5
    assert error(got.transition, expected.transition, small) < bound(case, "transition")
    finite = torch.isfinite(expected.fade) & torch.isfinite(got.fade.cpu())
    torch.testing.assert_close(got.fade.cpu()[finite], expected.fade[finite], rtol=2e-2, atol=0.5)
    if exact:
        assert torch.isfinite(got.fade).all()
    again = stages.summary(gpu["k"], gpu["v"], gpu["g"], gpu["beta"], there, exact=exact)
    assert all(torch.equal(a, b) for a, b in zip(got, again))
    # A range, and one that shares what is prepared with a forward.
    n = max(range(case.sequence_count), key=lambda i: int(case.cu_seqlens[i + 1] - case.cu_seqlens[i]))
    saved = stages.empty_saved(*(gpu[x] for x in NAMES[:5]), there)
    one = stages.summary(gpu["k"], gpu["v"], gpu["g"], gpu["beta"], there, n, 1, exact=exact, q=gpu["q"], saved=saved)
    assert all(torch.equal(a[0], b[n]) for a, b in zip(one, got))
    o, saved = stages.forward(*(gpu[x] for x in NAMES[:5]), there, saved=saved, prepared=True)
    plain, kept = stages.forward(*(gpu[x] for x in NAMES[:5]), there)
    assert torch.equal(o, plain)
    expected = stages.backward_summary(cpu["q"], cpu["k"], cpu["g"], cpu["beta"], cpu["do"], here, exact=exact)
    for given in (None, saved, kept):
        got = stages.backward_summary(
            gpu["q"], gpu["k"], gpu["g"], gpu["beta"], gpu["do"], there, exact=exact, saved=given
        )
        assert error(got, expected) < bound(case, "d_initial_state")
        one = stages.backward_summary(
            gpu["q"], gpu["k"], gpu["g"], gpu["beta"], gpu["do"], there, n, 1, exact=exact, saved=given
        )
        assert torch.equal(one[0], got[n])


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (48, 80), (256, 256), (144, 16)])
def test_merge(state_v_first, transposed, K, V):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5, 3, *((V, K) if state_v_first else (K, V)), generator=generator)
    transitions = torch.randn(5, 3, K, K, generator=generator) / K**0.5
    first, count = torch.tensor([0, 2, 4, 3]), torch.tensor([5, 2, 1, 0])
    call = {"transposed": transposed, "state_v_first": state_v_first}
    got = stages.merge(values.cuda(), transitions.cuda(), first.cuda(), count.cuda(), **call)
    expected = torch.zeros(4, 3, K, V, dtype=torch.float64)
    matrices = transitions.double().mT if transposed else transitions.double()
    parts = values.double().mT if state_v_first else values.double()
    for r in range(4):
        segments = range(first[r], first[r] + count[r])
        for i in reversed(segments) if transposed else segments:
            expected[r] = matrices[i] @ expected[r] + parts[i]
    assert error(got.mT if state_v_first else got, expected) < 1e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [True, False])
def test_segments_are_the_sequence(shape, kind, exact):
    case = truth.Case(f"lengths=1500 {shape} {kind}")
    cuts = torch.tensor([0, 128, 512, 512, 1100, 1500])
    parts = len(cuts) - 1
    gpu = {name: getattr(case, name).cuda() for name in NAMES}
    options = options_of(case, "cuda", cuts)
    rule = [gpu[x] for x in NAMES[:5]]
    saved = stages.empty_saved(*rule, options)
    summary = stages.summary(*rule[1:], options, exact=exact, q=gpu["q"], saved=saved)
    indices = torch.arange(parts, dtype=torch.int32, device="cuda")
    layout = {"state_v_first": options.state_v_first}
    entering = cp.merge(summary.local_state, summary.transition, torch.zeros_like(indices), indices, **layout)
    o, saved = stages.forward(*rule, options, entering, saved=saved, prepared=True)
    case.check("o", o, case.forward_truth()["o"])
    local = stages.backward_summary(
        gpu["q"], *(gpu[x] for x in ("k", "g", "beta", "do")), options, exact=exact, saved=saved
    )
    leaving = cp.merge(local, summary.transition, indices + 1, parts - 1 - indices, transposed=True, **layout)
    # Rows by index: in another order.
    order = torch.tensor([3, 0, 4, 1, 2], device="cuda")
    shuffled = torch.empty_like(leaving)
    shuffled[order] = leaving
    gradients = stages.backward(*rule, gpu["do"], options, entering, None, shuffled, order.to(torch.int32), saved=saved)
    expected = case.backward_truth()
    for name, x in zip(stages.Gradients._fields, gradients):
        if x is not None:
            case.check(name, x, expected[name])


def test_rows_of_gradients_by_index():
    """Those of some sequences alone have the bits of dense ones; an empty sequence passes its row on."""
    case = truth.Case("lengths=70+0+130+0+64 Hk=1 Hv=2 K=128 V=128 h0=0 ht=0 dht=0 dtype=bf16 gate=weak")
    options = options_of(case, "cuda")
    gpu = {name: getattr(case, name).cuda() for name in NAMES}
    dht = torch.randn(2, 2, 128, 128, generator=torch.Generator().manual_seed(2)).cuda()
    into = torch.tensor([1, -1, 0, 1, -1], dtype=torch.int32, device="cuda")
    dense = torch.where(into.view(-1, 1, 1, 1) < 0, 0.0, dht[into.clamp_min(0)])
    out_of = torch.tensor([-1, 2, 0, 1, -1], dtype=torch.int32, device="cuda")

    def run(final, final_rows, initial, initial_rows):
        args = _lib.BackwardArgs()
        stages._set_inputs(args, options, **{name: gpu[name] for name in NAMES[:5]})
        for name, x in (
            ("do", gpu["do"]), ("dht", final), ("dht_indices", final_rows), ("d_initial_state", initial),
            ("d_initial_state_indices", initial_rows),
        ):  # fmt: skip
            setattr(args, name, stages._tensor(x, name))
        stages._run("gd_backward", args, gpu["q"])
        return initial

    everything = run(dense, None, torch.empty(5, 2, 128, 128, device="cuda"), None)
    some = run(dht, into, torch.full((4, 2, 128, 128), float("nan"), device="cuda"), out_of)
    for n, row in enumerate(out_of.tolist()):
        if row >= 0:
            assert torch.equal(some[row], everything[n]), n
    assert some[3].isnan().all()


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """One rank of NCCL: it may hold several pieces, in any order."""
    import torch.distributed as dist

    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    meeting = tmp_path_factory.mktemp("nccl") / "meet"
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield None
    dist.destroy_process_group()


@pytest.mark.parametrize("scheme", ["gather", "scatter", "neighbour"])
@pytest.mark.parametrize("kind", KINDS[:4])
def test_one_rank_of_nccl(group, scheme, kind):
    case = truth.Case(f"lengths=300+900 {SHAPE} {kind}")
    ranges = [[(500, 1200), (0, 200), (200, 500)]]
    context = cp.build_context(case.cu_seqlens, group, ranges, scheme=scheme)
    tokens = [t for start, stop in ranges[0] for t in range(start, stop)]
    inputs = {name: getattr(case, name)[:, tokens].cuda().requires_grad_() for name in NAMES[:5]}
    parameters = {name: None if (x := getattr(case, name)) is None else x.cuda().requires_grad_()
                  for name in ("A_log", "dt_bias")}  # fmt: skip
    options = {k: v for k, v in case.options.items() if k not in ("A_log", "dt_bias", "cu_seqlens", "key_head_order")}
    o, _ = gatedelta.chunk_gated_delta_rule(**inputs, **parameters, **options, cp_context=context)
    o.backward(case.do[:, tokens].cuda())
    back = torch.argsort(torch.tensor(tokens, device="cuda"))
    case.check("o", o.detach()[:, back], case.forward_truth()["o"])
    expected = case.backward_truth()
    for name, x in zip(stages.Gradients._fields, (*inputs.values(), *parameters.values())):
        if x is not None and x.dim() > 1:
            case.check(name, x.grad[:, back], expected[name])
        elif x is not None:
            assert error(x.grad, torch.from_numpy(expected[name])) < 2 * bound(case, name)


def test_stages_in_a_graph():
    case = truth.Case(f"lengths=700 {SHAPE} dtype=bf16 gate=mixed")
    gpu = {name: getattr(case, name).cuda() for name in NAMES}
    options = options_of(case, "cuda")
    first, count = (torch.tensor([i], dtype=torch.int32, device="cuda") for i in (0, 1))

    def work():
        summary = stages.summary(gpu["k"], gpu["v"], gpu["g"], gpu["beta"], options)
        return stages.merge(summary.local_state, summary.transition, first, count)

    expected = work()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = work()
    for _ in range(2):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, expected)

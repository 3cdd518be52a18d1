"""One rank of the context-parallel tests: runs every case of its world size and says what was wrong.

    python context_parallel_ranks.py <rank> <ranks> <rendezvous file> <report file>

Results of all ranks come together on rank 0, which compares them with the fp64 truth of the whole pack.
"""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import gatedelta
import numpy as np
import torch
import torch.distributed as dist
from gatedelta import _lib
from gatedelta import context_parallel as cp
from gatedelta.context_parallel import agreement, schemes
from gatedelta.context_parallel import layout as layouts

from testing import truth

TOKENS = 384  # divisible by 2 W for every world size here
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "d_dt_bias")


def packs(ranks: int) -> dict[str, str]:
    return {
        "one sequence": "384",
        "boundaries on the cuts": "+".join([str(TOKENS // ranks)] * ranks),
        "inside a rank": "30+50+304",
        "over all ranks": "10+364+10",
        "many short": "16x24",
        "empty ones": "0+100+0+0+284+0",
    }


def uneven(ranks: int) -> list[list[tuple[int, int]]]:
    """Ranges of any length, in any order: short ones, one of a single token, a rank with nothing but one of these."""
    if ranks == 2:
        return [[(0, 2), (3, 100)], [(2, 3), (100, 384)]]
    if ranks == 3:
        return [[(200, 384)], [(0, 1), (1, 2), (2, 199)], [(199, 200)]]
    return [[(0, 90)], [], [(90, 91), (92, 93), (300, 384)], [(93, 300), (91, 92)]]


def cases(ranks: int) -> list[dict]:
    kinds = [
        "dtype=fp32 gate=mixed", "dtype=bf16 gate=mixed l2norm", "dtype=bf16 gate=raw l2norm beta=logit",
        "dtype=fp32 gate=raw beta=logit2 layout=vk", "dtype=fp32 gate=zero keys=correlated", "dtype=bf16 gate=spiky",
    ]  # fmt: skip
    heads = ["Hk=1 Hv=3 K=32 V=16", "Hk=2 Hv=4 K=16 V=32"]
    result = []
    combinations = itertools.product(packs(ranks).items(), ("contiguous", "zigzag"), ("gather", "scatter"))
    for i, ((name, lengths), layout, scheme) in enumerate(combinations):
        spec = f"lengths={lengths} {heads[i // 2 % 2]} {kinds[(i + ranks) % len(kinds)]} h0=0 ht=0 dht=0 seed={i + 1}"
        result.append({"name": name, "spec": spec, "layout": layout, "scheme": scheme, "exact": i % 3 == 0})
    base = "Hk=1 Hv=3 K=16 V=16 h0=0 ht=0 dht=0"
    for scheme in ("gather", "scatter", "neighbour"):
        for layout in ("contiguous", "zigzag", uneven(ranks)):
            for gate in ("gate=strong", "gate=mixed"):  # all heads fade in a few tokens; some never do
                spec = f"lengths=384 {base} {gate} dtype=fp32"
                result.append({"name": "schemes", "spec": spec, "layout": layout, "scheme": scheme, "exact": False})
    return result


def run_rule(case: truth.Case, context: cp.Context, tokens: list[int], through: object) -> dict[str, torch.Tensor]:
    """o and gradients of this rank's tokens, by the public function."""
    inputs = {name: getattr(case, name)[:, tokens].contiguous() for name in ("q", "k", "v", "g", "beta")}
    parameters = {name: None if (x := getattr(case, name)) is None else x.clone() for name in ("A_log", "dt_bias")}
    for x in (*inputs.values(), *parameters.values()):
        if x is not None:
            x.requires_grad_()
    options = {k: v for k, v in case.options.items() if k not in ("A_log", "dt_bias", "cu_seqlens")}
    o, _ = gatedelta.chunk_gated_delta_rule(**inputs, **parameters, **options, cp_context=through)
    o.backward(case.do[:, tokens].to(o.dtype))
    result = {"o": o.detach()}
    for name, x in zip(GRADIENTS, (*inputs.values(), *parameters.values())):
        if x is None:
            continue
        result[name] = x.grad
        if name in ("dA_log", "d_dt_bias"):
            dist.all_reduce(x.grad)
    return result


def collect(local: dict[str, torch.Tensor], tokens: list[int], rank: int, ranks: int) -> dict[str, torch.Tensor] | None:
    """All tokens' results, on rank 0."""
    everything: list | None = [None] * ranks if rank == 0 else None
    dist.gather_object((tokens, local), everything)
    if rank != 0:
        return None
    whole = {}
    for name, x in local.items():
        if name in ("dA_log", "d_dt_bias"):
            whole[name] = x
            continue
        whole[name] = torch.full((1, TOKENS, *x.shape[2:]), float("nan"), dtype=x.dtype)
        for places, results in everything:
            whole[name][:, places] = results[name]
    return whole


def my_tokens(context: cp.Context, offsets: list[int], layout, ranks: int) -> list[int]:
    ranges = layouts.token_ranges(layout, offsets[-1], ranks) if isinstance(layout, str) else layout
    return [t for start, stop in ranges[context.rank] for t in range(start, stop)]


def fla_context(context: cp.Context, offsets: list[int], layout: str) -> SimpleNamespace:
    """The fields of fla.ops.cp.FLACPContext (fla-core 0.6.0)."""
    pieces = context.mine
    local = torch.tensor(context.offsets, dtype=torch.int32)
    theirs = SimpleNamespace(
        group=None, cu_seqlens=local, cu_seqlens_cpu=local, layout=layout, pre_num_ranks=pieces[0].before,
        post_num_ranks=pieces[-1].after, pre_num_conv_tokens=min(3, pieces[0].position), conv1d_kernel_size=4,
    )  # fmt: skip
    if layout == "zigzag":
        theirs.part_len, theirs.front_num_seqs = pieces[0].length, len(pieces[0].offsets) - 1
        theirs.pre_num_ranks_by_part = [p.before for p in pieces]
        theirs.post_num_ranks_by_part = [p.after for p in pieces]
        theirs.pre_num_conv_tokens_by_part = [min(3, p.position) for p in pieces]
    return theirs


def check_case(case: dict, rank: int, ranks: int, twice: bool, theirs: bool) -> None:
    problem = truth.Case(case["spec"])
    offsets = problem.cu_seqlens.tolist()
    context = cp.build_context(offsets, layout=case["layout"], scheme=case["scheme"], exact=case["exact"])
    tokens = my_tokens(context, offsets, case["layout"], ranks)
    local = run_rule(problem, context, tokens, context)
    if twice:
        again = run_rule(problem, context, tokens, context)
        for name, x in local.items():
            assert torch.equal(x, again[name]), f"{name} differs from run to run"
    if theirs:
        through = fla_context(context, offsets, case["layout"])
        for name, x in run_rule(problem, context, tokens, through).items():
            if case["scheme"] == "gather" and not case["exact"]:
                assert torch.equal(x, local[name]), f"{name} differs with FLA's context"
            else:
                torch.testing.assert_close(x, local[name], rtol=2e-2, atol=2e-3)
    whole = collect(local, tokens, rank, ranks)
    if rank != 0:
        return
    expected = {"o": problem.forward_truth()["o"], **problem.backward_truth()}
    for name, x in whole.items():
        if name not in ("dA_log", "d_dt_bias"):
            problem.check(name, x, expected[name])
            continue
        # One number a head, a sum that may cancel, of one process as of several: heads count together.
        relative, absolute = truth.tolerance(name, problem.forward_args.inputs.q.dtype, _lib.DTYPE_F32, case["spec"])
        error = np.linalg.norm(x.double().numpy() - expected[name])
        bound = relative * np.linalg.norm(expected[name]) + absolute * len(x) ** 0.5
        assert error <= bound, f"{name}: {error} of {bound}"


def check_convolution(rank: int, ranks: int, layout, lengths: str, dtype: torch.dtype) -> None:
    offsets = [0]
    for length in map(int, lengths.split("+")):
        offsets.append(offsets[-1] + length)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1, TOKENS, 6, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(6, 4, generator=generator).requires_grad_()
    bias = torch.randn(6, generator=generator).requires_grad_()
    dy = torch.randn(1, TOKENS, 6, generator=generator).to(dtype)
    y, _ = gatedelta.causal_conv1d(x, weight, bias, "silu", cu_seqlens=torch.tensor(offsets))
    expected = [y, *torch.autograd.grad(y, (x, weight, bias), dy)]
    for theirs in (False, True) if isinstance(layout, str) else (False,):
        context = cp.build_context(offsets, layout=layout)
        tokens = my_tokens(context, offsets, layout, ranks)
        mine = x.detach()[:, tokens].clone().requires_grad_()
        through = fla_context(context, offsets, layout) if theirs else context
        y, _ = cp.causal_conv1d(mine, weight, bias, "silu", cp_context=through)
        dx, dweight, dbias = torch.autograd.grad(y, (mine, weight, bias), dy[:, tokens])
        for total in (dweight, dbias):
            dist.all_reduce(total)
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
        assert torch.equal(y, expected[0][:, tokens])
        torch.testing.assert_close(dx, expected[1][:, tokens], **close)
        torch.testing.assert_close(dweight, expected[2], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dbias, expected[3], rtol=1e-4, atol=1e-4)


def check_bytes(rank: int, ranks: int) -> None:
    """What travels is what is said, and after the first call nothing besides: counted at the collectives."""
    received = 0
    kept = dist.all_gather_into_tensor, dist.all_to_all_single, dist.batch_isend_irecv

    def gather(result, x, group=None):
        nonlocal received
        received += (result.numel() - x.numel()) * x.element_size()
        return kept[0](result, x, group=group)

    def exchange(result, x, output_splits, input_splits, group=None):
        nonlocal received
        received += (result.numel() - output_splits[rank]) * x.element_size()
        return kept[1](result, x, output_splits, input_splits, group=group)

    def pairs(operations):
        nonlocal received
        received += sum(p.tensor.numel() * p.tensor.element_size() for p in operations if p.op is dist.irecv)
        return kept[2](operations)

    dist.all_gather_into_tensor, dist.all_to_all_single, dist.batch_isend_irecv = gather, exchange, pairs
    try:
        heads, K, V = 12, 32, 16  # divisible by 2, 3 and 4
        case = truth.Case(f"lengths=384 Hk=1 Hv={heads} K={K} V={V} gate=strong h0=0 ht=0 dht=0")
        record = (ranks - 1) * agreement.RECORD_BYTES  # of the first call of each function with a context
        for scheme, layout in itertools.product(("gather", "scatter", "neighbour"), ("contiguous", "zigzag")):
            received = 0
            context = cp.build_context([0, TOKENS], layout=layout, scheme=scheme)
            assert received == record
            slots = context.layout.slots
            tokens = my_tokens(context, [0, TOKENS], layout, ranks)
            q, k, v, g, beta = (
                getattr(case, name)[:, tokens].contiguous().requires_grad_() for name in ("q", "k", "v", "g", "beta")
            )
            for first in (record, 0, 0):
                received = 0
                o, _ = gatedelta.chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)
                forward, received = received, 0
                o.sum().backward()
                for back, count in ((False, forward), (True, received)):
                    bound = first + schemes.bytes_received(scheme, ranks, slots, heads, K, V, back)
                    if scheme == "neighbour":
                        assert first <= count <= bound, (scheme, layout, back, count, bound)
                    else:
                        assert count == bound, (scheme, layout, back, count, bound)
            x, weight = torch.ones(1, len(tokens), 6, requires_grad=True), torch.ones(6, 4)
            for first in (record, 0, 0):
                received = 0
                y, _ = cp.causal_conv1d(x, weight, cp_context=context)
                forward, received = received, 0
                y.sum().backward()
                assert forward == received == first + (ranks - 1) * slots * 3 * 6 * 4
    finally:
        dist.all_gather_into_tensor, dist.all_to_all_single, dist.batch_isend_irecv = kept


def check_stages(rank: int, ranks: int) -> None:
    """The four functions and the merge, with collectives of the caller's: what a framework would write."""
    case = truth.Case("lengths=384 Hk=1 Hv=2 K=16 V=16 gate=weak h0=0 ht=0 dht=0 dtype=fp32")
    length = TOKENS // ranks
    tokens = list(range(rank * length, (rank + 1) * length))
    q, k, v, g, beta, do = (getattr(case, name)[:, tokens].contiguous() for name in ("q", "k", "v", "g", "beta", "do"))
    saved = cp.empty_saved(q, k, v, g, beta)
    summary = cp.forward_prepare(k, v, g, beta, q=q, saved=saved)
    values, transitions = (
        [torch.empty_like(x) for _ in range(ranks)] for x in (summary.local_state, summary.transition)
    )
    dist.all_gather(values, summary.local_state)
    dist.all_gather(transitions, summary.transition)
    first, count = torch.tensor([0]), torch.tensor([rank])
    entering = cp.merge(torch.cat(values), torch.cat(transitions), first, count)
    o, saved = cp.forward_apply(q, k, v, g, beta, entering, saved=saved, prepared=True)
    local = cp.backward_prepare(q, k, g, beta, do, saved=saved)
    gradients = [torch.empty_like(local) for _ in range(ranks)]
    dist.all_gather(gradients, local)
    first, count = torch.tensor([rank + 1]), torch.tensor([ranks - 1 - rank])
    leaving = cp.merge(torch.cat(gradients), torch.cat(transitions), first, count, transposed=True)
    results = cp.backward_apply(q, k, v, g, beta, do, entering, leaving=leaving, saved=saved)
    local = {"o": o, **{name: x for name, x in zip(GRADIENTS, results) if x is not None}}
    whole = collect(local, tokens, rank, ranks)
    if rank == 0:
        expected = {"o": case.forward_truth()["o"], **case.backward_truth()}
        for name, x in whole.items():
            case.check(name, x, expected[name])


def check_training(rank: int, ranks: int) -> None:
    """examples/train over ranks has one rank's losses."""
    import train

    alone = train.train("gatedelta", "cpu", "float32", 3, 0)
    together = train.train("gatedelta", "cpu", "float32", 3, 0, ranks=ranks)
    for a, b in zip(alone, together):
        assert abs(a - b) < 2e-5 * abs(a), (alone, together)


def main() -> None:
    rank, ranks, rendezvous, report = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    problems: list[str] = []
    ran = 0

    def attempt(name: str, check, *args) -> None:
        nonlocal ran
        ran += 1
        try:
            check(*args)
            mine = ""
        except Exception:
            mine = f"{name}: rank {rank}: {traceback.format_exc(limit=-3)}"
        everybody: list = [None] * ranks
        dist.all_gather_object(everybody, mine)  # also keeps ranks together after a failure
        problems.extend(x for x in everybody if x)

    for i, case in enumerate(cases(ranks)):
        theirs = isinstance(case["layout"], str) and i % 4 < 2
        attempt(str(case), check_case, case, rank, ranks, i % 8 == 0, theirs)
    for layout in ("contiguous", "zigzag", uneven(ranks)):
        for lengths, dtype in (("384", torch.float32), ("5+1+2+180+196", torch.bfloat16)):
            attempt(f"convolution {layout} {lengths}", check_convolution, rank, ranks, layout, lengths, dtype)
    attempt("bytes", check_bytes, rank, ranks)
    attempt("stages", check_stages, rank, ranks)
    if ranks == 2:
        attempt("training", check_training, rank, ranks)
    if rank == 0:
        report.write_text(json.dumps({"ran": ran, "problems": problems}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

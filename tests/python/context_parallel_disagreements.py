"""One rank of the tests of ranks that disagree: runs the cases of one kind and reports how each call ended.

    python context_parallel_disagreements.py <rank> <ranks> <rendezvous file> <report file> <kind>

Kinds: "mistakes", where every call ends with an error on every rank and the group lives on, and those of ``ENDS``,
where a rank leaves the others alone.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path

import gatedelta
import torch
import torch.distributed as dist
from gatedelta import context_parallel as cp

TOKENS = 96
SHORT = 4  # seconds: the group's timeout where a rank leaves the others alone


def inputs(tokens: int, Hk=2, Hv=4, K=32, V=32, dtype=torch.float32, grad=True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int, dtype=torch.float32) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, generator=generator).to(dtype).requires_grad_(grad)

    q, k, v = (random(H, D, dtype=dtype) for H, D in ((Hk, K), (Hk, K), (Hv, V)))
    g = (-random(Hv).detach().abs()).requires_grad_(grad)
    return {"q": q, "k": k, "v": v, "g": g, "beta": random(Hv).detach().sigmoid().requires_grad_(grad)}


def rule(context: cp.Context, sizes: dict | None = None, more: dict | None = None) -> torch.Tensor:
    given = inputs(context.tokens, **(sizes or {})) | (more or {})
    return gatedelta.chunk_gated_delta_rule(**given, cp_context=context)[0]


def convolution(context: cp.Context, D=6, W=4, dtype=torch.float32, bias=False, activation="silu", grad=True):
    x = torch.ones(1, context.tokens, D, dtype=dtype, requires_grad=grad)
    return cp.causal_conv1d(x, torch.ones(D, W), torch.ones(D) if bias else None, activation, cp_context=context)[0]


def backward(context: cp.Context, function=rule) -> None:
    """The backward of one of two functions that all ranks have called."""
    results = {call: call(context) for call in (rule, convolution)}
    results[function].sum().backward()


def build(pack=(0, TOKENS), layout="contiguous", **more) -> cp.Context:
    return cp.build_context(pack, layout=layout, **more)


# (name, what all ranks do but rank 1, what rank 1 does, words of the ranks' messages, of rank 1's or None: the same).
# Each gets a context that all ranks have built alike.
MISTAKES = [
    *(
        (f"build_context {name}", lambda _: build(), lambda _, change=change: build(**change), message, own)
        for name, change, message, own in [
            ("cu_seqlens", {"pack": (0, 50, TOKENS)}, "cu_seqlens is [0, 96] on ranks 0 and 2, [0, 50, 96] on rank 1",
             None),
            ("tokens", {"pack": (0, 192)}, "the number of tokens is 96 on ranks 0 and 2, 192 on rank 1", None),
            ("layout", {"layout": "zigzag"},
             "layout is [[(0, 32)], [(32, 64)], [(64, 96)]] on ranks 0 and 2, [[(0, 16), (80", None),
            ("scheme", {"scheme": "neighbour"}, "scheme is auto on ranks 0 and 2, neighbour on rank 1", None),
            ("exact", {"exact": True}, "exact is False on ranks 0 and 2, True on rank 1", None),
            ("refused layout", {"layout": "ring"}, "rank 1 refused its call: layout is 'ring'", "layout is 'ring'"),
            ("refused pack", {"pack": (0, 97)}, "rank 1 refused its call: 97 tokens", "97 tokens cannot be shared"),
            ("refused scheme", {"scheme": "ring"}, "rank 1 refused its call: scheme is 'ring'", "scheme is 'ring'"),
        ]
    ),
    *(
        (f"rule {name}", rule, lambda context, change=change: rule(context, *change), message, own)
        for name, change, message, own in [
            ("Hv", ({"Hv": 2},), "Hv is 4 on ranks 0 and 2, 2 on rank 1", None),
            ("Hk", ({"Hk": 1},), "Hk is 2 on ranks 0 and 2, 1 on rank 1", None),
            ("K", ({"K": 48},), "K is 32 on ranks 0 and 2, 48 on rank 1", None),
            ("V", ({"V": 16},), "V is 32 on ranks 0 and 2, 16 on rank 1", None),
            ("dtype", ({"dtype": torch.bfloat16},), "dtype of q is float32 on ranks 0 and 2, bfloat16 on rank 1", None),
            ("no gradient", ({"grad": False},), "inputs that need a gradient", None),
            ("g", ({}, {"g": None}), "dtype of g is float32 on ranks 0 and 2, None on rank 1", None),
            ("scale", ({}, {"scale": 2.0}), "scale is 0.1767766952966369 on ranks 0 and 2, 2.0 on rank 1", None),
            *(
                (flag, ({}, {flag: True}), f"{flag} is False on ranks 0 and 2, True on rank 1", None)
                for flag in ("state_v_first", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "recompute")
            ),
            ("A_log", ({}, {"use_gate_in_kernel": True, "A_log": torch.zeros(4)}),
             "use_gate_in_kernel is False on ranks 0 and 2, True on rank 1; the dtype of A_log is None", None),
            ("key_head_order", ({}, {"key_head_order": "tiled"}),
             "key_head_order is grouped on ranks 0 and 2, tiled on rank 1", None),
            ("refused tokens", ({}, inputs(31)), "rank 1 refused its call: q is [1, 31, 2, 32]", "q is [1, 31, 2, 32]"),
            ("refused shape", ({}, {"g": torch.zeros(1, 32, 3)}), "rank 1 refused its call: ", "g"),
            ("refused size", ({"K": 17},), "rank 1 refused its call: ", "17"),
            ("refused option", ({}, {"allow_neg_eigval": True}), "rank 1 refused its call: allow_neg_eigval",
             "allow_neg_eigval"),
            ("refused kind", ({}, {"q": [1]}), "rank 1 refused its call: q must be a torch.Tensor", "q must be"),
            ("refused chunk_size", ({}, {"chunk_size": 32}), "rank 1 refused its call: chunk_size is 32", "chunk_size"),
            ("refused state", ({}, {"output_final_state": True}), "rank 1 refused its call: output_final_state",
             "output_final_state is given with cp_context"),
            ("refused cu_seqlens", ({}, {"cu_seqlens": torch.tensor([0, 32])}), "rank 1 refused its call: cu_seqlens",
             "cu_seqlens is given with cp_context"),
        ]
    ),
    *(
        (f"convolution {name}", convolution, lambda context, change=change: convolution(context, **change), message,
         own)
        for name, change, message, own in [
            ("D", {"D": 8}, "D is 6 on ranks 0 and 2, 8 on rank 1", None),
            ("W", {"W": 3}, "W is 4 on ranks 0 and 2, 3 on rank 1", None),
            ("dtype", {"dtype": torch.bfloat16}, "dtype of x is float32 on ranks 0 and 2, bfloat16 on rank 1", None),
            ("bias", {"bias": True}, "dtype of bias is None on ranks 0 and 2, float32 on rank 1", None),
            ("activation", {"activation": None}, "activation is silu on ranks 0 and 2, None on rank 1", None),
            ("no gradient", {"grad": False}, "need a gradient is ['x'] on ranks 0 and 2, [] on rank 1", None),
            ("refused width", {"W": 9}, "rank 1 refused its call: ", "weight"),
            ("refused activation", {"activation": "relu"}, "rank 1 refused its call: activation is 'relu'",
             "activation is 'relu'"),
        ]
    ),
    ("another function", rule, convolution, "the ranks of the group are in different calls: ranks 0 and 2 in "
     "chunk_gated_delta_rule; rank 1 in causal_conv1d", None),
    ("another backward", backward, lambda context: backward(context, convolution),
     "ranks 0 and 2 in the backward of chunk_gated_delta_rule; rank 1 in the backward of causal_conv1d", None),
    ("another context", rule, lambda context: rule(build_alone(context, (0, 50, TOKENS))), "cp_context is 96 tokens",
     None),
]  # fmt: skip


def build_alone(context: cp.Context, pack: tuple[int, ...]) -> cp.Context:
    """Another context, without the other ranks."""
    from gatedelta.context_parallel import layout as layouts

    layout = layouts.make_layout(list(pack), layouts.token_ranges("contiguous", pack[-1], context.size))
    return cp.Context(layout, context.group, context.rank, context.size)


# What other ranks and rank 1 do: the same in other words.
ALIKE = [
    (lambda _: build(), lambda _: build(torch.tensor([0, TOKENS]), [[(0, 32)], [(32, 64)], [(64, TOKENS)]])),
    (lambda context: rule(context, {"K": 64}),
     lambda context: rule(context, {"K": 64}, {"scale": torch.tensor(0.125), "state_v_first": 0, "recompute": None})),
    (convolution, lambda context: convolution(context, activation="swish")),
]  # fmt: skip


def ends(call, *args) -> str:
    """How a call ends on this rank."""
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def mistakes(rank: int) -> list[str]:
    problems = []
    for name, others, mine, expected, own in MISTAKES:
        context = build()
        outcome = ends(mine if rank == 1 else others, context)
        wanted = own if rank == 1 and own else expected
        if outcome == "no error" or wanted not in outcome:
            problems.append(f"{name}: rank {rank} ended with {outcome!r}, not {wanted!r}")
        if not name.startswith("build_context") and (outcome := ends(others, context)) != "no error":
            problems.append(f"{name}: rank {rank} ended with {outcome!r} where all ranks call alike")
    for others, mine in ALIKE:
        if (outcome := ends(mine if rank == 1 else others, build())) != "no error":
            problems.append(f"rank {rank} ended with {outcome!r} where all ranks mean the same")
    return problems


def leave_before_the_forward(rank: int, context: cp.Context) -> str:
    if rank == 1:
        os._exit(0)
    return ends(rule, context)


def no_backward(rank: int, context: cp.Context) -> str:
    o = rule(context)
    if rank == 1:
        time.sleep(2 * SHORT)
        return "no error"
    return ends(o.sum().backward)


def leave_between_forwards(rank: int, context: cp.Context) -> str:
    rule(context)
    if rank == 1:
        os._exit(0)
    return ends(rule, context)


def refuse_alone(rank: int, context: cp.Context) -> str:
    if rank != 1:
        time.sleep(2 * SHORT)
        return "no error"
    return ends(lambda: rule(context, {}, inputs(31)))


ENDS = {f.__name__: f for f in (leave_before_the_forward, leave_between_forwards, no_backward, refuse_alone)}


def main() -> None:
    rank, ranks, rendezvous, report, kind = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        Path(sys.argv[4]),
        sys.argv[5],
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    if kind == "mistakes":
        outcome = mistakes(rank)
    else:
        dist.barrier()  # ranks start at different times
        outcome = ENDS[kind](rank, build(group=dist.new_group(timeout=datetime.timedelta(seconds=SHORT))))
    report.with_suffix(f".{rank}").write_text(json.dumps(outcome))
    os._exit(0)  # a group that has lost a rank may not be torn down


if __name__ == "__main__":
    main()

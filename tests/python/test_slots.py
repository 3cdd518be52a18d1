"""What engines ask of states beyond one slot per sequence: null slots, columns and rows of block tables, the
slot of the last token kept of a draft, one checkpoint per sequence. numpy and torch against the fp64 recurrence."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

import gatedelta.numpy as gn  # noqa: E402
from gatedelta import torch as gt  # noqa: E402
from gatedelta.torch import _functional  # noqa: E402

from testing.truth import Case  # noqa: E402

RECURRENT = [
    "B=11 T=1 Hk=2 Hv=4 K=64 V=64 dtype=bf16 pool inplace first_slot=1 layout=vk",
    "B=11 T=4 Hk=1 Hv=2 K=64 V=32 dtype=fp32 pool first_slot=2 strided accept",
    "B=7 T=3 Hk=1 Hv=2 K=32 V=32 dtype=fp32 pool picked=4 first_slot=1 inplace steps=pool",
    "lengths=3+0+1+8+2+5+4 pad=2 Hk=1 Hv=2 K=32 V=16 dtype=bf16 pool picked=3 strided i64 ht=0 steps=rows",
    "lengths=3+0+1+8+2 pad=2 Hk=1 Hv=2 K=32 V=16 dtype=fp32 pool first_slot=3 steps=rows layout=vk",
]
CHUNKED = [
    "lengths=64+130+0+1+70+200 pad=9 Hk=1 Hv=2 K=64 V=32 dtype=fp32 pool inplace first_slot=1 layout=vk offsets",
    "lengths=64+130+300+1+70 Hk=2 Hv=2 K=32 V=64 dtype=bf16 pool first_slot=2 every=128 strided",
    "B=5 T=200 Hk=1 Hv=2 K=64 V=64 dtype=fp32 offsets i64",
]
NAMES = ("final_state", "final_state_indices", "checkpoints", "checkpoint_indices", "checkpoint_offsets")
STEP_NAMES = (
    "final_state",
    "final_state_indices",
    "accept_lengths",
    "step_states",
    "step_indices",
    "previous_accept_lengths",
)


def arguments_of(case: Case, args, names) -> dict:
    """The keywords of the Python functions."""
    b = case.buffers(args, "out", *names)
    b["initial_state"] = case.initial_state
    b["initial_state_indices"] = case._view(args.inputs.initial_state_indices)
    return b | {"null_index": args.inputs.first_slot - 1} | case.options


def check_stored(case: Case, quantity: str, pool, slots, truth, first_slot: int) -> None:
    """`slots` has the shape of the truth's first dimensions; those below first_slot are not stored."""
    slots = np.asarray(slots)
    stored = slots >= first_slot
    case.check(quantity, pool[slots[stored].astype(np.int64)], truth[stored])


def check_recurrent(case: Case, o, b: dict, truth: dict) -> None:
    first_slot = b["null_index"] + 1
    case.check("o", o, truth["o"])
    if b["final_state"] is not None:
        check_stored(case, "final_state", b["final_state"], b["final_state_indices"], truth["final_state"], first_slot)
    if b["step_indices"] is not None:
        slots, wanted = np.asarray(b["step_indices"]), truth["step_states"]
        if slots.shape != wanted.shape[:2]:  # a row for each sequence
            offsets = np.asarray(case.cu_seqlens)
            slots = np.concatenate([slots[n, : offsets[n + 1] - offsets[n]] for n in range(len(offsets) - 1)])
            slots, wanted = slots[np.newaxis], wanted[:, : offsets[-1]]
        padded = np.isnan(np.asarray(b["step_states"], dtype=np.float32)).any((1, 2, 3))
        stored = (slots >= first_slot) & ~padded[np.where(slots >= first_slot, slots, 0)]
        got = b["step_states"][slots[stored].astype(np.int64)]
        case.check("step_states", got[None], wanted[stored][np.newaxis])
    assert case.damage() == ""


@pytest.mark.parametrize("path", ["direct", "operator", "numpy"])
@pytest.mark.parametrize("spec", RECURRENT)
def test_recurrent(spec, path, monkeypatch):
    case = Case(spec, numpy=path == "numpy")
    b = arguments_of(case, case.recurrent_args, STEP_NAMES)
    if path == "operator":
        monkeypatch.setattr(_functional._direct, "recurrent", None)
    function = gn.recurrent if path == "numpy" else gt.fused_recurrent_gated_delta_rule
    inputs = {"q": case.q, "k": case.k, "v": case.v, "g": case.g, "beta": case.beta}
    truth = case.recurrent_truth()  # before a pool changes in place
    check_recurrent(case, function(**inputs, **b)[0], b, truth)


@pytest.mark.parametrize("path", ["torch", "numpy"])
@pytest.mark.parametrize("spec", CHUNKED)
def test_chunked(spec, path):
    case = Case(spec, numpy=path == "numpy")
    b = arguments_of(case, case.forward_args, NAMES)
    function = gn.forward if path == "numpy" else gt.chunk_gated_delta_rule
    every = case.forward_args.checkpoint_every
    truth, first_slot = case.forward_truth(), b["null_index"] + 1
    o = function(case.q, case.k, case.v, case.g, case.beta, checkpoint_every=every, **b)[0]
    case.check("o", o, truth["o"])
    count = case.sequence_count
    finals = b["final_state_indices"] if b["final_state_indices"] is not None else np.arange(count)
    check_stored(case, "final_state", b["final_state"], finals, truth["final_state"], first_slot)
    if b["checkpoint_offsets"] is not None:
        places = np.asarray(b["checkpoint_indices"] if b["checkpoint_indices"] is not None else np.arange(count))
        padded = np.zeros(count, bool)
        if b["initial_state_indices"] is not None:
            padded = (np.asarray(b["initial_state_indices"]) < first_slot) & (np.asarray(finals) < first_slot)
        places = np.where((np.asarray(b["checkpoint_offsets"]) > 0) & ~padded, places, -1)
        check_stored(case, "checkpoints", b["checkpoints"], places, truth["checkpoints"], max(first_slot, 0))
    assert case.damage() == ""


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_drafts_compile(backend):
    """A block table's rows, under torch.compile: one graph, and the states of the eager call."""

    @torch.no_grad()
    def verify(q, k, v, g, beta, pool, table, kept, cu_seqlens):
        return gt.fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=pool, initial_state_indices=table, step_states=pool,
            step_indices=table, previous_accept_lengths=kept, cu_seqlens=cu_seqlens, null_index=0,
        )[0]  # fmt: skip

    case = Case("lengths=3+1+2 Hk=1 Hv=2 K=32 V=16 dtype=fp32")
    pools = [torch.randn(10, 2, 32, 16, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    table = torch.arange(1, 10, dtype=torch.int32).view(3, 3)
    rest = (table, torch.tensor([2, 1, 3]), case.cu_seqlens)
    inputs = (case.q, case.k, case.v, case.g, case.beta)
    wanted = verify(*inputs, pools[0], *rest)
    found = torch.compile(verify, fullgraph=True, backend=backend)(*inputs, pools[1], *rest)
    assert torch.equal(wanted, found) and torch.equal(*pools)


def make(T=3, N=2):
    x = torch.randn(N, T, 2, 16, generator=torch.Generator().manual_seed(3))
    return x, x / 4, x / 2, -x[..., 0].abs(), x[..., 1].sigmoid()


POOL = torch.zeros(5, 2, 16, 16)
ONE, TWO = torch.tensor([1, 2]), torch.tensor([[1, 2], [3, 4]])


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        ({"null_index": 0}, ValueError, "^null_index is 0, but the call has no indices$"),
        ({"null_index": -2}, ValueError, "^null_index is -2, must be from -1 to "),
        ({"null_index": 1 << 70}, ValueError, "^null_index is 1180591620717411303424, must be from -1 to "),
        ({"initial_state": POOL, "initial_state_indices": TWO}, ValueError,
         r"initial_state_indices: rank is 2, must be 1: \[N\]; rows of slots \[N, S\] need previous_accept_lengths"),
        ({"initial_state": POOL, "initial_state_indices": ONE, "previous_accept_lengths": ONE}, ValueError,
         "previous_accept_lengths is given, but initial_state_indices has rank 1"),
        ({"initial_state": POOL, "initial_state_indices": TWO, "previous_accept_lengths": ONE.float()}, ValueError,
         "previous_accept_lengths: dtype is float32, must be int32 or int64"),
        ({"initial_state": POOL, "initial_state_indices": TWO, "previous_accept_lengths": [1, 2]}, TypeError,
         "^previous_accept_lengths must be a torch.Tensor, not builtins.list$"),
    ],
)  # fmt: skip
def test_recurrent_refuses(arguments, kind, message):
    q, k, v, g, beta = make()
    with pytest.raises(kind, match=message):
        gt.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **arguments)
    if kind is not TypeError and "previous_accept_lengths" not in arguments:
        arrays = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        with pytest.raises(ValueError, match=message.removeprefix("^")):
            gn.recurrent(*(x.numpy() for x in (q, k, v, g, beta)), **arrays)


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        ({"null_index": 3}, ValueError, "^null_index is 3, but the call has no indices$"),
        ({"checkpoint_offsets": ONE}, ValueError, "checkpoint_offsets is given without checkpoints"),
        ({"checkpoint_offsets": ONE, "checkpoints": POOL[:2]}, ValueError,
         r"checkpoint_offsets\[0\] is 1, must be a multiple of 64"),
        ({"checkpoint_offsets": ONE, "checkpoints": POOL[:2], "checkpoint_every": 64}, ValueError,
         "checkpoint_every is 64, but checkpoint_offsets says where checkpoints are"),
        ({"checkpoint_offsets": ONE.double(), "checkpoints": POOL[:2]}, ValueError,
         "checkpoint_offsets: dtype is float64, must be int32 or int64"),
    ],
)  # fmt: skip
def test_chunked_refuses(arguments, kind, message):
    with pytest.raises(kind, match=message):
        gt.chunk_gated_delta_rule(*make(), **arguments)


def test_drafts_have_no_gradient():
    q, k, v, g, beta = make()
    with pytest.raises(ValueError, match=r"^previous_accept_lengths picks states of a pool, which has no gradient"):
        gt.fused_recurrent_gated_delta_rule(
            q.requires_grad_(), k, v, g, beta=beta, initial_state=POOL, initial_state_indices=TWO,
            previous_accept_lengths=ONE,
        )  # fmt: skip


def test_training_from_a_pool_whose_first_slot_is_null():
    inputs = [x.requires_grad_() for x in (y.detach() for y in make(T=70))]
    pool = torch.randn(5, 2, 16, 16, generator=torch.Generator().manual_seed(4))
    results = []
    for slots, null_index in ((torch.tensor([0, 3]), 0), (torch.tensor([-1, 3]), -1)):
        o, _ = gt.chunk_gated_delta_rule(
            *inputs, initial_state=pool, initial_state_indices=slots, null_index=null_index
        )
        results.append((o, *torch.autograd.grad(o.sum(), inputs)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_expanded_indices_of_written_slots_are_copied():
    """The library takes no slots to write that are one entry; a null slot may well be expanded."""
    q, k, v, g, beta = make()
    pool = POOL.clone()
    null = torch.tensor(-1).expand(2)
    o, _ = gt.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, final_state=pool, final_state_indices=null)
    assert torch.equal(pool, POOL) and torch.isfinite(o).all()


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@needs_cuda
@pytest.mark.parametrize("state_v_first", [True, False])
@torch.no_grad()
def test_drafts_over_one_pool_on_cuda(state_v_first):
    """Two windows of drafts over rows of a block table, against the same calls on the CPU."""
    case = Case("lengths=3+0+4+1+2 pad=6 Hk=2 Hv=4 K=128 V=128 dtype=bf16 l2norm gate=raw beta=logit h0=0")
    pool = torch.randn(21, 4, 128, 128, generator=torch.Generator().manual_seed(2))
    table = torch.zeros(5, 6, dtype=torch.int32)
    table[:, 1:5] = 1 + torch.randperm(20, generator=torch.Generator().manual_seed(3)).view(5, 4)
    table[4, 1] = 0  # null: the last sequence's first state is not stored

    def verify(device, pool, kept):
        inputs = {name: getattr(case, name).to(device) for name in ("q", "k", "v", "g", "beta")}
        options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in case.options.items()}
        rows = table.to(device)[:, 1:5]
        return gt.fused_recurrent_gated_delta_rule(
            **inputs, **options | {"state_v_first": state_v_first}, initial_state=pool, initial_state_indices=rows,
            step_states=pool, step_indices=rows, previous_accept_lengths=kept.to(device), null_index=0,
        )[0]  # fmt: skip

    here, there = pool.clone(), pool.cuda()
    for kept in (torch.tensor([1, 3, 2, 4, 1]), torch.tensor([3, 3, 0, 1, 2])):
        wanted, found = verify("cpu", here, kept), verify("cuda", there, kept)
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-4)


@needs_cuda
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the forward needs Hopper"
)
def test_checkpoint_offsets_on_cuda():
    case = Case("lengths=64+130+0+300+70+200 pad=9 Hk=1 Hv=2 K=128 V=128 dtype=bf16 h0=0 ht=0 offsets")
    truth = case.forward_truth()
    b = case.buffers(case.forward_args, "checkpoints", "checkpoint_offsets")
    checkpoints = torch.full_like(b["checkpoints"], 7).cuda()
    offsets = torch.stack([b["checkpoint_offsets"]] * 2, 1).cuda()[:, 1]
    inputs = [x.cuda() for x in (case.q, case.k, case.v, case.g, case.beta)]
    o, _ = gt.chunk_gated_delta_rule(
        *inputs, cu_seqlens=case.cu_seqlens.cuda(), checkpoints=checkpoints, checkpoint_offsets=offsets
    )
    stored = (b["checkpoint_offsets"] > 0).numpy()
    case.check("o", o, truth["o"])
    case.check("checkpoints", checkpoints[torch.from_numpy(stored).cuda()], truth["checkpoints"][stored])
    assert (checkpoints[torch.from_numpy(~stored).cuda()] == 7).all()

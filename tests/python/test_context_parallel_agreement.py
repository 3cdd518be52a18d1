"""Ranks that are called with different arguments: all of them raise, with the name of what differs. Ranks that are left
alone are told what to do."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)
import gatedelta  # noqa: E402
from gatedelta.context_parallel import agreement  # noqa: E402

SCRIPT = Path(__file__).with_name("context_parallel_disagreements.py")
RANKS = 3


@pytest.fixture
def outcomes(run_ranks):
    """What each rank has reported; None for one that has ended before."""

    def run(kind: str) -> list:
        report, outputs = run_ranks(SCRIPT, RANKS, kind, seconds=200)
        reports = [report.with_suffix(f".{rank}") for rank in range(RANKS)]
        assert any(path.exists() for path in reports), outputs
        return [json.loads(path.read_text()) if path.exists() else None for path in reports]

    return run


def test_every_mistake_of_a_rank_ends_on_all_of_them(outcomes):
    assert outcomes("mistakes") == [[]] * RANKS


@pytest.mark.parametrize("kind", ["leave_before_the_forward", "leave_between_forwards", "no_backward"])
def test_a_rank_that_waits_in_vain_is_told_what_to_do(outcomes, kind):
    ends = outcomes(kind)
    for rank in (0, 2):
        assert ends[rank].startswith("RuntimeError: context parallelism: this rank waited for the others"), ends
        assert "init_process_group(timeout=...)" in ends[rank]
    assert ends[1] == ("no error" if kind == "no_backward" else None)


def test_a_refusal_that_nobody_waits_for_is_raised_after_the_timeout(outcomes):
    ends = outcomes("refuse_alone")
    assert ends[1].startswith("ValueError: q is [1, 31, 2, 32], but with this cp_context rank 1 holds 32 tokens")
    assert ends[0] == ends[2] == "no error"


def record(**fields) -> dict:
    return {"function": "f", "fields": fields}


def refusal(text: str, function: str = "f") -> dict:
    return {"function": function, "refusal": text}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([record(a="1", b="2")], None),
        ([record(a="1"), record(a="2")], "f: the ranks of the group must agree, but a is 1 on rank 0, 2 on rank 1"),
        (
            [record(a="1", b="0"), record(a="2", b="0"), record(a="1", b="1")],
            "f: the ranks of the group must agree, but a is 1 on ranks 0 and 2, 2 on rank 1; "
            "b is 0 on ranks 0 and 1, 1 on rank 2",
        ),
        ([record(), record(a="2")], "f: the ranks of the group must agree, but a is missing on rank 0, 2 on rank 1"),
        ([record(), refusal("no")], "f: rank 1 refused its call: no"),
        ([refusal("no"), refusal("no"), refusal("not")],
         "f: ranks 0 and 1 refused their call: no; rank 2 refused its call: not"),
        ([record(), refusal("no", "g")], "f, g: rank 1 refused its call: no"),
        (
            [record(), {"function": "g", "fields": {}}],
            "the ranks of the group are in different calls: rank 0 in f; rank 1 in g",
        ),
    ],
)  # fmt: skip
def test_messages(records, message):
    assert agreement._disagreement(records) == message


def test_long_values_differ_where_they_end():
    a, b = (agreement._text([*range(1000), last]) for last in (1, 2))
    assert a != b and a.startswith("[0, 1, 2, ") and len(a) < 100
    assert agreement._text([1, 2]) == "[1, 2]"


class Group:
    """A group of two, whose other rank sends what this one does, or `other`."""

    def __init__(self, monkeypatch, other: dict | None = None):
        self.sent, self._other = [], other
        monkeypatch.setattr(agreement, "all_gather", self.gather)
        monkeypatch.setattr(agreement, "_device_of", lambda group: torch.device("cpu"))

    def gather(self, rows, group):
        self.sent.append(json.loads(bytes(rows[0].tolist())))
        assert rows.shape == (1, agreement.RECORD_BYTES)
        if self._other is None:
            return rows.repeat(2, 1)
        other = json.dumps(self._other).encode().ljust(agreement.RECORD_BYTES)
        return torch.stack([rows[0], torch.frombuffer(bytearray(other), dtype=torch.uint8)])


def test_only_the_first_call_of_each_function_exchanges_anything(monkeypatch):
    group, ranks = Group(monkeypatch), agreement.Agreement(None, 2)
    for _ in range(3):
        for function in ("f", "g"):
            with ranks.call(function) as call:
                call.fields = {"a": len(group.sent)}
    assert [record["function"] for record in group.sent] == ["f", "g"]
    with pytest.raises(KeyError), ranks.call("f"):
        raise KeyError("later refusals are this rank's alone")
    assert len(group.sent) == 2


def test_a_first_call_that_has_failed_is_not_the_first_one(monkeypatch):
    """The ranks compare again, after a refusal as after a difference."""
    ranks = agreement.Agreement(None, 2)
    group = Group(monkeypatch, {"function": "f", "fields": {"a": "2"}})
    for _ in range(2):
        with pytest.raises(ValueError, match="a is 1 on rank 0, 2 on rank 1"), ranks.call("f") as call:
            call.fields = {"a": 1}
        with pytest.raises(TypeError, match="mine"), ranks.call("f") as call:
            raise TypeError("mine")
    assert [record.get("refusal") for record in group.sent] == [None, "mine"] * 2


def test_a_slow_comparison_is_logged(monkeypatch, caplog):
    group, ranks = Group(monkeypatch), agreement.Agreement(None, 2)
    monkeypatch.setattr(agreement, "_SECONDS_OF_SILENCE", 0)
    monkeypatch.setattr(agreement, "all_gather", lambda rows, _: time.sleep(0.5) or group.gather(rows, _))
    with pytest.raises(ValueError), ranks.call("f"):
        raise ValueError("the reason")
    assert "f: this rank has waited 0 s for the others of its group, to tell them" in caplog.text
    assert "that it refused its call: the reason" in caplog.text


def test_one_rank_asks_nobody(monkeypatch):
    group = Group(monkeypatch)
    with agreement.Agreement(None, 1).call("f") as call:
        assert call.is_first  # it checks its own arguments all the same
        call.fields = {"a": 1}
    assert group.sent == []


def test_records_hold_the_longest_refusals_and_values(monkeypatch):
    group, ranks = Group(monkeypatch), agreement.Agreement(None, 2)
    with pytest.raises(ValueError), ranks.call("f"):
        raise ValueError('"\\\x00é' * 5000)
    assert len(group.sent[0]["refusal"]) < 1000
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    tensors = dict.fromkeys(("q", "k", "v", "g", "beta", "A_log", "dt_bias"), x)
    flags = gatedelta.context_parallel.rule._FLAGS
    with ranks.call("the backward of chunk_gated_delta_rule") as call:
        call.fields = {
            **dict.fromkeys(
                ("cp_context", "Hk", "Hv", "K", "V", "scale", "recompute", "key_head_order", *flags), 10**60
            ),
            **agreement.tensor_fields(torch.device("cuda"), **tensors),
        }
    assert group.sent[1]["fields"]["the list of inputs that need a gradient"].startswith("['q', 'k', 'v', 'g', ")


@pytest.mark.parametrize(
    ("given", "theirs", "message"),
    [
        ([0, 4, 8], [0, 4, 8], None),
        ([0, 8], [0, 4, 8], "cu_seqlens has 2 offsets, but cp_context has 3 for this rank"),
        ([0, 5, 8], [0, 4, 8], "cu_seqlens differs from the offsets that cp_context has"),
    ],
)
@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_cpu"])
def test_offsets_beside_a_context_of_fla(name, given, theirs, message):
    check = gatedelta.context_parallel.rule._check_offsets
    context = SimpleNamespace(**{name: torch.tensor(theirs, dtype=torch.int32)})
    check(None, context, False)
    check(getattr(context, name), context, False)
    if message is None:
        check(torch.tensor(given), context, False)
        return
    with pytest.raises(ValueError, match=message):
        check(torch.tensor(given), context, False)


def test_a_rank_outside_the_group_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: -1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: -1)
    with pytest.raises(ValueError, match="group does not hold this rank"):
        gatedelta.context_parallel.build_context([0, 8], object())


@pytest.mark.parametrize(
    ("backends", "bound", "device"),
    [
        ("cpu:gloo,cuda:gloo", None, "cpu"),
        ("cpu:gloo,cuda:nccl", torch.device("cuda", 3), "cpu"),
        ("cuda:nccl", None, "cuda"),  # the current one
        ("cuda:nccl", torch.device("cuda", 3), "cuda:3"),
    ],
)
def test_records_are_where_the_group_takes_tensors(monkeypatch, backends, bound, device):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backends)
    assert agreement._device_of(SimpleNamespace(bound_device_id=bound)) == torch.device(device)

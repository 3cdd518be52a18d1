"""Context parallelism over gloo processes, against the fp64 truth of the whole pack; layouts and schemes as such."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import dev_paths

torch = pytest.importorskip("torch")
import gatedelta  # noqa: E402
from gatedelta.context_parallel import layout as layouts  # noqa: E402
from gatedelta.context_parallel import schemes  # noqa: E402

MIB = 1 << 20
RANKS_SCRIPT = Path(__file__).with_name("context_parallel_ranks.py")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_of_gloo_are_one_process(ranks, run_ranks):
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    report, outputs = run_ranks(RANKS_SCRIPT, ranks)
    assert report.exists(), outputs
    result = json.loads(report.read_text())
    assert not result["problems"], "\n".join(result["problems"][:5])
    assert result["ran"] > 45


def test_layouts_by_hand():
    layout = layouts.make_layout([0, 10, 34, 48], layouts.token_ranges("contiguous", 48, 4))
    assert [(p.before, p.after, p.position, p.offsets) for (p,) in layout.pieces] == [
        (0, 2, 0, (0, 10, 12)), (1, 1, 2, (0, 12)), (2, 1, 14, (0, 10, 12)), (1, 0, 2, (0, 12)),
    ]  # fmt: skip
    layout = layouts.make_layout([0, 10, 34, 48], layouts.token_ranges("zigzag", 48, 2))
    assert [[p.number for p in row] for row in layout.pieces] == [[0, 3], [1, 2]]
    assert layout.order == [0, 2, 3, 1]
    assert layouts.local_offsets(layout.pieces[0]) == [0, 10, 12, 24]
    assert layouts.border_sequences(layout.pieces[0]) == ([0, 2], [1, 2])


def test_layouts_against_tokens():
    """before, after and position by looking at each token."""
    generator = random.Random(5)
    for _ in range(200):
        lengths = [generator.choice([0, 0, 1, 2, 5, 17]) for _ in range(generator.randint(1, 8))]
        offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        cuts = sorted({0, offsets[-1], *(generator.randint(0, offsets[-1]) for _ in range(generator.randint(0, 6)))})
        ranks = generator.randint(1, 4)
        ranges = [[] for _ in range(ranks)]
        for cut in itertools.pairwise(cuts):
            ranges[generator.randrange(ranks)].append(cut)
        for row in ranges:
            generator.shuffle(row)
        layout = layouts.make_layout(offsets, ranges)
        sequence_of = [n for n, length in enumerate(lengths) for _ in range(length)]
        pieces = list(itertools.pairwise(cuts))
        for row, held in zip(layout.pieces, ranges):
            for piece, (start, stop) in zip(row, held):
                assert pieces[piece.number] == (start, stop) and piece.length == stop - start
                holding = [i for i, (a, b) in enumerate(pieces) if sequence_of[start] in sequence_of[a:b]]
                assert piece.before == piece.number - holding[0]
                holding = [i for i, (a, b) in enumerate(pieces) if sequence_of[stop - 1] in sequence_of[a:b]]
                assert piece.after == holding[-1] - piece.number
                assert piece.position == start - offsets[sequence_of[start]]
                assert len(piece.offsets) - 1 == len(set(sequence_of[start:stop]))


@pytest.mark.parametrize(
    ("offsets", "ranges", "message"),
    [
        ([0, 8], [[(0, 4)], [(5, 8)]], "must cover tokens"),
        ([0, 8], [[(0, 4)], [(3, 8)]], "must cover tokens"),
        ([0, 8], [[(0, 4)], [(4, 7)]], "end at token 7"),
        ([1, 8], [[(0, 8)]], "begin with 0"),
        ([0, 8, 7], [[(0, 7)]], "never decrease"),
    ],
)
def test_layouts_that_are_refused(offsets, ranges, message):
    with pytest.raises(ValueError, match=message):
        layouts.make_layout(offsets, ranges)


def test_packs_that_do_not_divide():
    with pytest.raises(ValueError, match="cannot be shared out evenly to 6 pieces"):
        layouts.token_ranges("zigzag", 46, 3)
    with pytest.raises(ValueError, match="layout is 'ring'"):
        layouts.token_ranges("ring", 48, 3)


def test_bytes_of_the_schemes():
    """Eight ranks, 64 heads of 128 x 128, one piece each."""
    of = {
        (scheme, back): schemes.bytes_received(scheme, 8, 1, 64, 128, 128, back) / MIB
        for scheme in ("gather", "scatter", "neighbour")
        for back in (False, True)
    }
    assert of == {
        ("gather", False): 56, ("gather", True): 28, ("scatter", False): 10.5, ("scatter", True): 7,
        ("neighbour", False): 4, ("neighbour", True): 4,
    }  # fmt: skip
    assert schemes.choose("auto", 8, 1, 64, 128, 128) == "scatter"
    assert schemes.choose("auto", 2, 1, 16, 128, 128) == "gather"
    assert schemes.choose("gather", 8, 1, 64, 128, 128) == "gather"


def test_contexts_of_fla(monkeypatch):
    """What FLA's own code says about packs (recorded) is what ours says about the same rank."""
    for recorded in json.loads(RANKS_SCRIPT.with_name("fla_contexts.json").read_text())["contexts"]:
        fields = {"pre_num_ranks": None, **recorded["context"], "group": None}
        fields["cu_seqlens_cpu"] = torch.tensor(fields["cu_seqlens_cpu"])
        theirs = SimpleNamespace(**fields)
        ranks, rank, pack = recorded["ranks"], recorded["rank"], recorded["pack"]
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None, ranks=ranks: ranks)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None, rank=rank: rank)
        ours = gatedelta.context_parallel.as_context(theirs)
        ranges = layouts.token_ranges(theirs.layout, pack[-1], ranks)
        assert ours.mine == layouts.make_layout(pack, ranges).pieces[rank]
        assert ours.scheme_for(64, 128, 128) == "gather"  # it knows its own rank alone
        assert gatedelta.context_parallel.as_context(theirs) is ours


def test_a_context_of_fla_that_changes(monkeypatch):
    """What is cached on a context is made again where any of its fields has changed."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    theirs = SimpleNamespace(
        group=None, layout="contiguous", cu_seqlens_cpu=torch.tensor([0, 12]), pre_num_ranks=1, post_num_ranks=2,
        pre_num_conv_tokens=3,
    )  # fmt: skip
    piece = {"number": 1, "offsets": (0, 12), "before": 1, "after": 2, "position": 3}
    for field, value, ours in [
        ("pre_num_ranks", 0, {"before": 0}),
        ("post_num_ranks", 1, {"after": 1}),
        ("pre_num_conv_tokens", 0, {"position": 0}),
        ("cu_seqlens_cpu", torch.tensor([0, 5, 12]), {"offsets": (0, 5, 12)}),
    ]:
        before = gatedelta.context_parallel.as_context(theirs)
        assert before.mine == (layouts.Piece(**piece),)
        setattr(theirs, field, value)
        piece.update(ours)
        after = gatedelta.context_parallel.as_context(theirs)
        assert after is not before and after.mine == (layouts.Piece(**piece),)
        assert gatedelta.context_parallel.as_context(theirs) is after


def test_arguments_that_a_context_refuses():
    rows = torch.zeros(1, 4, 1, 16)
    for more in ({"initial_state": torch.zeros(1, 1, 16, 16)}, {"output_final_state": True}, {"out": rows}):
        with pytest.raises(NotImplementedError, match=f"{next(iter(more))} is given with cp_context"):
            gatedelta.chunk_gated_delta_rule(rows, rows, rows, None, None, cp_context=object(), **more)
    with pytest.raises(TypeError, match="fields of FLA's build_cp_context"):
        gatedelta.chunk_gated_delta_rule(rows, rows, rows, None, None, cp_context=object())


def test_the_rank_script_is_found():
    assert RANKS_SCRIPT.is_file() and dev_paths.ROOT in RANKS_SCRIPT.parents


def test_a_context_shows_what_it_is():
    from gatedelta.context_parallel.context import Context

    def shown(name, size, rank, scheme="auto"):
        layout = layouts.make_layout([0, 10, 48], layouts.token_ranges(name, 48, size))
        return repr(Context(layout, None, rank, size, scheme))

    assert shown("zigzag", 2, 1, "gather") == (
        "<Context: rank 1 of 2 has 24 of 48 tokens, [(12, 24), (24, 36)], all ranks "
        "[[(0, 12), (36, 48)], [(12, 24), (24, 36)]], scheme='gather', exact=False>"
    )
    assert "has 3 of 48 tokens, [(21, 24)], all ranks [[(0, 3)]," in shown("contiguous", 16, 7)
    assert len(shown("contiguous", 16, 7)) < 200
    own = layouts.make_layout([0, 12], [[(0, 12)]]).pieces[0]
    assert "rank 0 of 1 has 12 tokens, what others have is unknown" in repr(
        Context(layouts.Layout((own,), False), None, 0, 1)
    )

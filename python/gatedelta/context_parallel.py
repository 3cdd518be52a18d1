"""Context parallelism: one pack of sequences over the ranks of a torch.distributed group, exactly.

    context = gatedelta.context_parallel.build_context(cu_seqlens, group)          # once per pack
    x, _ = gatedelta.context_parallel.causal_conv1d(x, weight, activation="silu", cp_context=context)
    o, _ = gatedelta.chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)  # gradients as usual

Each rank passes its own tokens, ``[1, T / ranks, ...]``, and gets theirs. Between ranks travel one state and one
``[K, K]`` matrix a head and piece, whatever the length; gradients of parameters (A_log, dt_bias, convolution weights)
are a rank's share, to be summed over the group as those of all other parameters. Groups are NCCL's on GPUs and gloo's
on CPUs. ``forward_prepare``, ``forward_apply``, ``backward_prepare`` and ``backward_apply`` are the same without a
group, for frameworks that have their own (docs/context_parallel.md).
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import _cp_layout
from ._cp_exchange import SCHEMES, Exchange, all_gather, choose
from ._cp_layout import Layout, Piece
from .torch import _arguments, _conv1d, _stages
from .torch._stages import Gradients, Summary, fold

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Context",
    "Gradients",
    "Summary",
    "as_context",
    "backward_apply",
    "backward_prepare",
    "build_context",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "empty_saved",
    "fold",
    "forward_apply",
    "forward_prepare",
]


class Context:
    """Which tokens of a pack this rank holds, and how ranks exchange what they need of each other.

    cu_seqlens: offsets of this rank's own sequences, as the functions take them; on the CPU, see ``offsets_on``.
    """

    def __init__(self, layout: Layout, group: Any, rank: int, size: int, scheme: str = "auto", exact: bool = False):
        if scheme not in SCHEMES:
            raise ValueError(f"scheme is {scheme!r}, must be one of {', '.join(map(repr, SCHEMES))}")
        self.layout, self.group, self.rank, self.size = layout, group, rank, size
        self.scheme, self.exact = scheme, exact
        self.mine: tuple[Piece, ...] = layout.pieces[rank]
        self.offsets = _cp_layout.local_offsets(self.mine)
        self.first_sequences, self.last_sequences = _cp_layout.border_sequences(self.mine)
        self._on_device: dict[Any, Tensor] = {}

    @property
    def tokens(self) -> int:
        """How many tokens this rank holds."""
        return self.offsets[-1]

    def device_indices(self, name: Any, values: Sequence[int], device: torch.device) -> Tensor:
        """Small integers on a device, copied there once."""
        key = (name, device)
        if key not in self._on_device:
            self._on_device[key] = torch.tensor(values, dtype=torch.int32, device=device)
        return self._on_device[key]

    def offsets_on(self, device: torch.device) -> Tensor:
        return self.device_indices("offsets", self.offsets, device)

    def entering_rows(self, device: torch.device) -> Tensor:
        """For each own sequence the piece whose entering state it begins with, or -1."""
        rows = [-1] * (len(self.offsets) - 1)
        for i, (n, piece) in enumerate(zip(self.first_sequences, self.mine)):
            rows[n] = i if piece.before else -1
        return self.device_indices("entering", rows, device)

    def leaving_rows(self, device: torch.device) -> Tensor:
        rows = [-1] * (len(self.offsets) - 1)
        for i, (n, piece) in enumerate(zip(self.last_sequences, self.mine)):
            rows[n] = i if piece.after else -1
        return self.device_indices("leaving", rows, device)

    @staticmethod
    def _fold_of(piece: Piece, back: bool) -> tuple[int, int]:
        return (piece.number + 1, piece.after) if back else (piece.number - piece.before, piece.before)

    def folds(self, device: torch.device, back: bool) -> tuple[Tensor, Tensor]:
        """First segment and count of segments for each own piece."""
        folds = [self._fold_of(piece, back) for piece in self.mine]
        return tuple(self.device_indices(("fold", back, i), [f[i] for f in folds], device) for i in range(2))

    def all_folds(self, device: torch.device, back: bool) -> tuple[Tensor, Tensor]:
        """The same for every place of every rank."""
        slots = self.layout.slots
        folds = [(0, 0)] * (slots * self.size)
        for r, row in enumerate(self.layout.pieces):
            for i, piece in enumerate(row):
                folds[r * slots + i] = self._fold_of(piece, back)
        return tuple(self.device_indices(("all", back, i), [f[i] for f in folds], device) for i in range(2))

    def scheme_for(self, heads: int, K: int, V: int) -> str:
        """How states of so many heads travel."""
        scheme = choose(self.scheme, self.size, self.layout.slots, heads, K, V)
        return scheme if self.layout.complete else "gather"


def build_context(
    cu_seqlens: Tensor | Sequence[int],
    group: Any = None,
    layout: str | Sequence[Sequence[tuple[int, int]]] = "contiguous",
    *,
    scheme: str = "auto",
    exact: bool = False,
) -> Context:
    """The context of a pack, the same arguments on every rank.

    cu_seqlens: offsets of the whole pack (all ranks' tokens), on the host. One sequence: ``[0, tokens]``.
    group: of torch.distributed; None means all ranks.
    layout: "contiguous" (rank r of W holds the r-th of W equal pieces), "zigzag" (of 2 W equal pieces it holds r and
        2 W - 1 - r, in this order), or for each rank the ranges ``(start, stop)`` of tokens it holds, in its order.
    scheme: how summaries travel. "gather": everybody gets all of them; "scatter": each rank folds a share of the heads
        for all; "auto": by bytes, one of these two; "neighbour": where all heads of all ranks fade, from one piece to
        the next alone, otherwise as "auto"; ranks agree on it at each call, which costs a wait.
    exact: the transition of every head is computed and used. Otherwise those of heads that have faded are 0, which
        leaves out less than fp32 resolves (docs/context_parallel.md).
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    offsets = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else [int(x) for x in cu_seqlens]
    if not offsets:
        raise ValueError("cu_seqlens is empty, must hold N + 1 offsets")
    if isinstance(layout, str):
        ranges = _cp_layout.token_ranges(layout, offsets[-1], size)
    else:
        ranges = [[(int(a), int(b)) for a, b in row] for row in layout]
        if len(ranges) != size:
            raise ValueError(f"layout has ranges of {len(ranges)} ranks, but the group has {size}")
    return Context(_cp_layout.make_layout(offsets, ranges), group, rank, size, scheme, exact)


# What FLA's contexts say about a rank's pieces, besides the offsets.
_TOLD = (
    "group", "layout", "pre_num_ranks", "post_num_ranks", "pre_num_conv_tokens", "front_num_seqs",
    "pre_num_ranks_by_part", "post_num_ranks_by_part", "pre_num_conv_tokens_by_part",
)  # fmt: skip


def as_context(context: Any) -> Context:
    """A context of ours as it is; FLA's (``fla.ops.cp.build_cp_context``, contiguous or zigzag) and FlashQLA's by their
    fields. They know their own rank alone, so their summaries are gathered."""
    if isinstance(context, Context):
        return context
    group = getattr(context, "group", None)
    offsets = getattr(context, "cu_seqlens_cpu", None)
    if offsets is None:
        offsets = getattr(context, "cu_seqlens", None)
    if offsets is None or not hasattr(context, "pre_num_ranks"):
        raise TypeError(
            f"cp_context is {type(context).__module__}.{type(context).__qualname__}, which is neither of "
            "gatedelta.context_parallel.build_context nor has the fields of FLA's build_cp_context"
        )
    # For the next layer: unless the context is of a graph, and was told another pack.
    told = tuple(getattr(context, name, None) for name in _TOLD)
    kept = getattr(context, "_gatedelta_context", None)
    if kept is not None and kept[0] is offsets and kept[1] == told:
        return kept[2]
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    source, offsets = offsets, [int(x) for x in offsets.tolist()]

    def piece(number: int, local: list[int], before: Any, after: Any, position: Any) -> Piece:
        distinct = [local[0], *(b for a, b in itertools.pairwise(local) if b > a)]
        return Piece(
            number, tuple(x - local[0] for x in distinct), int(before or 0), int(after or 0), int(position or 0)
        )

    if getattr(context, "layout", None) in (None, "contiguous"):
        numbers = [[r] for r in range(size)]
        mine = [
            piece(rank, offsets, context.pre_num_ranks, context.post_num_ranks,
                  getattr(context, "pre_num_conv_tokens", 0))
        ]  # fmt: skip
    elif context.layout == "zigzag":
        numbers = [[r, 2 * size - 1 - r] for r in range(size)]
        count = context.front_num_seqs
        mine = [
            piece(*fields)
            for fields in zip(
                numbers[rank],
                (offsets[: count + 1], offsets[count:]),
                context.pre_num_ranks_by_part,
                context.post_num_ranks_by_part,
                getattr(context, "pre_num_conv_tokens_by_part", (0, 0)),
            )
        ]
    else:
        raise ValueError(f"cp_context.layout is {context.layout!r}, must be 'contiguous' or 'zigzag'")
    unknown = [[Piece(n, (0, 0), 0, 0, 0) for n in row] for row in numbers]
    pieces = tuple(tuple(mine if r == rank else row) for r, row in enumerate(unknown))
    result = Context(Layout(pieces, False), group, rank, size, "gather")
    with contextlib.suppress(AttributeError):
        context._gatedelta_context = source, told, result
    return result


# ---- stages without a group ------------------------------------------------------------------------------------------


def _options(cu_seqlens: Tensor | None, options: dict[str, Any]) -> _stages.Options:
    known = {name: options.pop(name) for name in list(options) if name in _stages.Options._fields}
    if options:
        raise TypeError(f"unknown options: {', '.join(sorted(options))}")
    known["cu_seqlens"] = cu_seqlens
    if known.get("allow_neg_eigval") and not known.get("use_beta_sigmoid_in_kernel"):
        raise ValueError("allow_neg_eigval doubles the sigmoid of beta, so it needs use_beta_sigmoid_in_kernel=True")
    return _stages.Options(**known)


def forward_prepare(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    first_sequence: int = 0,
    sequence_count: int = 0,
    exact: bool = False,
    q: Tensor | None = None,
    saved: Tensor | None = None,
    prepared: bool = False,
    **options: Any,
) -> Summary:
    """What sequences do to the states they begin with: (local_state, transition, fade), to be sent to the ranks that
    hold what follows. A rank summarises the last sequence of each of its pieces, unless it ends there.

    saved: of ``empty_saved``, with q. A GPU leaves there what it prepares: ``forward_apply`` and another summary of the
        same inputs take it with prepared=True.
    options: keywords of ``chunk_gated_delta_rule`` that say how inputs are meant.
    """
    with torch.no_grad():
        return _stages.summary(
            k, v, g, beta, _options(cu_seqlens, options), first_sequence, sequence_count, exact=exact, q=q, saved=saved,
            prepared=prepared,
        )  # fmt: skip


def empty_saved(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens: Tensor | None = None, **options: Any
) -> Tensor:
    """Room for what a forward saves for its backward, and for what a summary prepares for a forward."""
    return _stages.empty_saved(q, k, v, g, beta, _options(cu_seqlens, options))


def forward_apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    entering: Tensor | None,
    entering_indices: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    save: bool = True,
    saved: Tensor | None = None,
    prepared: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """(o, saved) from the states that sequences begin with: ``entering[entering_indices[n]]``, of -1 zero; without
    indices one row for each sequence. ``fold`` makes them of the summaries before."""
    with torch.no_grad():
        return _stages.forward(
            q, k, v, g, beta, _options(cu_seqlens, options), entering, entering_indices, save=save, saved=saved,
            prepared=prepared,
        )  # fmt: skip


def backward_prepare(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    first_sequence: int = 0,
    sequence_count: int = 0,
    exact: bool = False,
    saved: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Gradients of the states that sequences begin with as if nothing followed, to be sent to the ranks that hold what
    precedes: of the first sequence of each piece, unless it begins there. Transitions are those of the forward."""
    with torch.no_grad():
        return _stages.backward_summary(
            q, k, g, beta, do, _options(cu_seqlens, options), first_sequence, sequence_count, exact=exact, saved=saved
        )


def backward_apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor,
    entering: Tensor | None,
    entering_indices: Tensor | None = None,
    leaving: Tensor | None = None,
    leaving_indices: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    saved: Tensor | None = None,
    **options: Any,
) -> Gradients:
    """Gradients of all inputs. leaving: those of the states that sequences end with, ``fold(..., transposed=True)`` of
    what ``backward_prepare`` gave behind them."""
    with torch.no_grad():
        return _stages.backward(
            q, k, v, g, beta, do, _options(cu_seqlens, options), entering, entering_indices, leaving, leaving_indices,
            saved=saved,
        )  # fmt: skip


# ---- the rule over a group -------------------------------------------------------------------------------------------


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, context, options, recompute, q, k, v, g, beta, A_log, dt_bias):
        options = options._replace(A_log=A_log, dt_bias=dt_bias, cu_seqlens=context.offsets_on(q.device))
        heads, K, V = v.shape[2], k.shape[3], v.shape[3]
        exchange = Exchange(context, k, heads, K, V, options.state_v_first, context.scheme_for(heads, K, V))
        needs_grad = any(ctx.needs_input_grad)
        # A GPU prepares the inputs once, for the summaries and for the forward.
        saved = _stages.empty_saved(q, k, v, g, beta, options) if q.is_cuda or (needs_grad and not recompute) else None
        fades = []
        for i, piece in enumerate(context.mine):
            if piece.after:
                row = exchange.rows[i : i + 1]
                summary = _stages.summary(
                    k, v, g, beta, options, context.last_sequences[i], 1, exact=context.exact,
                    local_state=exchange.values_of(row), transition=exchange.maps_of(row), q=q, saved=saved,
                    prepared=bool(fades),
                )  # fmt: skip
                fades.append(summary.fade)
        if context.scheme == "neighbour" and not context.exact and exchange.all_fade(fades):
            exchange.scheme = "neighbour"
        entering = exchange.forward()
        o, saved = _stages.forward(
            q, k, v, g, beta, options, entering if entering.shape[0] else None,
            context.entering_rows(q.device) if entering.shape[0] else None, save=False, saved=saved,
            prepared=bool(fades),
        )  # fmt: skip
        if needs_grad:
            exchange.rows = None
            exchange.keep_maps()
            ctx.context, ctx.options, ctx.exchange = context, options._replace(A_log=None, dt_bias=None), exchange
            ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, entering, None if recompute else saved)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        q, k, v, g, beta, A_log, dt_bias, entering, saved = ctx.saved_tensors
        context, exchange = ctx.context, ctx.exchange
        options = ctx.options._replace(A_log=A_log, dt_bias=dt_bias)
        if do.stride(-1) != 1:
            do = do.contiguous()
        d_local = torch.zeros(
            context.layout.slots, v.shape[2], *_stages.matrix_shape(k.shape[3], v.shape[3], options.state_v_first),
            dtype=torch.float32, device=q.device,
        )  # fmt: skip
        for i, piece in enumerate(context.mine):
            if piece.before:
                _stages.backward_summary(
                    q, k, g, beta, do, options, context.first_sequences[i], 1, exact=context.exact, saved=saved,
                    out=d_local[i : i + 1],
                )  # fmt: skip
        leaving = exchange.backward(d_local)
        has_pieces = entering.shape[0] > 0
        gradients = _stages.backward(
            q, k, v, g, beta, do, options,
            entering if has_pieces else None, context.entering_rows(q.device) if has_pieces else None,
            leaving if has_pieces else None, context.leaving_rows(q.device) if has_pieces else None,
            saved=saved, wanted=ctx.needs_input_grad[3:],
        )  # fmt: skip
        return None, None, None, *gradients


@torch.compiler.disable
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    cp_context: Any,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    recompute: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """o of this rank's tokens, ``[1, T of this rank, Hv, V]``: what ``gatedelta.chunk_gated_delta_rule`` does with
    ``cp_context=``. options: its keywords that say how inputs are meant. cu_seqlens: the context's are used; FLA's
    callers pass those of the same rank, and others would be a mistake. Every rank of the group has to call it."""
    context = as_context(cp_context)
    theirs = getattr(cp_context, "cu_seqlens", None)
    expected = len(context.offsets) if theirs is None else theirs.shape[0]
    if cu_seqlens is not None and cu_seqlens.shape[0] != expected:
        raise ValueError(
            f"cu_seqlens has {cu_seqlens.shape[0]} offsets, but cp_context has {expected} for this rank: leave it out"
        )
    _arguments.check_tensors(("q", "k", "v", "g", "beta", "A_log", "dt_bias"), q, k, v, g, beta, A_log, dt_bias)
    if q.dim() != 4 or q.shape[0] != 1 or q.shape[1] != context.tokens:
        raise ValueError(
            f"q is {list(q.shape)}, but with this cp_context rank {context.rank} holds {context.tokens} tokens: "
            f"[1, {context.tokens}, Hk, K]"
        )
    if g is None or beta is None:
        g, beta = _arguments.with_gates(
            v, g, beta, options.get("use_gate_in_kernel", False), options.get("use_beta_sigmoid_in_kernel", False)
        )
    return _Rule.apply(context, _options(None, options), recompute, q, k, v, g, beta, A_log, dt_bias)


# ---- the convolution -------------------------------------------------------------------------------------------------


class _Halo(torch.autograd.Function):
    """The inputs before each of this rank's pieces, [pieces, taps, D], from whoever holds them."""

    @staticmethod
    def forward(ctx, context, taps, x):
        ctx.context, ctx.taps, ctx.shape = context, taps, x.shape
        tails = x.new_zeros(context.layout.slots, taps, x.shape[2])
        for i, (begin, end) in enumerate(_spans(context)):
            size = min(taps, end - begin)
            tails[i, taps - size :] = x[0, end - size : end]
        rows = all_gather(tails, context.group).flatten(0, 1)
        sources = [source for row in _sources(context, taps)[context.rank] for source in row]
        index = context.device_indices(("halo", taps), [max(0, s) for s in sources], x.device)
        mask = context.device_indices(("halo mask", taps), [int(s >= 0) for s in sources], x.device)
        halo = rows.index_select(0, index) * mask.to(rows.dtype).unsqueeze(1)
        return halo.unflatten(0, (len(context.mine), taps))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_halo):
        context, taps = ctx.context, ctx.taps
        padded = d_halo.new_zeros(context.layout.slots, *d_halo.shape[1:])
        mine = _sources(context, taps)[context.rank]
        for i, sources in enumerate(mine):
            reached = sum(source >= 0 for source in sources)
            padded[i, taps - reached :] = d_halo[i, taps - reached :]
        rows = all_gather(padded, context.group).flatten(0, 1)
        dx = d_halo.new_zeros(ctx.shape)
        # Who used each of this rank's tails, always in the same order.
        users: dict[int, list[int]] = {}
        slots = context.layout.slots
        for r, row in enumerate(_sources(context, taps)):
            for i, sources in enumerate(row):
                for j, source in enumerate(sources):
                    users.setdefault(source, []).append((r * slots + i) * taps + j)
        for i, (begin, end) in enumerate(_spans(context)):
            for age in range(min(taps, end - begin)):
                for user in users.get((context.rank * slots + i) * taps + taps - 1 - age, ()):
                    dx[0, end - 1 - age] += rows[user]
        return None, None, dx


def _spans(context: Context) -> list[tuple[int, int]]:
    """Where each piece is among a rank's own tokens."""
    spans, begin = [], 0
    for piece in context.mine:
        spans.append((begin, begin + piece.length))
        begin += piece.length
    return spans


def _sources(context: Context, taps: int) -> list[list[list[int]]]:
    if context.layout.complete:
        return _cp_layout.halo_sources(context.layout, taps)
    # FLA's contexts know their own rank alone, but all pieces are as long as its own, and others send 0 back for what
    # they have not used.
    length = context.mine[0].length
    if length < taps:
        raise ValueError(f"pieces of {length} tokens are shorter than the convolution reaches back, {taps}")
    pieces = [
        [
            piece if r == context.rank else Piece(piece.number, (0, length), 0, 0, taps if piece.number else 0)
            for piece in row
        ]
        for r, row in enumerate(context.layout.pieces)
    ]
    return _cp_layout.halo_sources(Layout(tuple(map(tuple, pieces)), True), taps)


@torch.compiler.disable
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    cp_context: Any,
) -> tuple[Tensor, None]:
    """``gatedelta.causal_conv1d`` of this rank's tokens, x ``[1, T of this rank, D]``: the W - 1 inputs before each
    piece come from the ranks that hold them, and their gradients go back. Returns (y, None)."""
    context = as_context(cp_context)
    if x.dim() != 3 or x.shape[0] != 1 or x.shape[1] != context.tokens:
        raise ValueError(
            f"x is {list(x.shape)}, but with this cp_context rank {context.rank} holds {context.tokens} tokens"
        )
    halo = _Halo.apply(context, weight.shape[-1] - 1, x)
    rows = context.entering_rows(x.device)
    # One more row, of zeros, for the sequences that begin here.
    states = torch.cat([halo.mT, halo.new_zeros(1, x.shape[2], halo.shape[1])])
    states = states[torch.where(rows < 0, halo.shape[0], rows)]
    return _conv1d.causal_conv1d(
        x, weight, bias, activation, cu_seqlens=context.offsets_on(x.device), initial_state=states
    )

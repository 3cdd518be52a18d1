"""The exchange of summaries between ranks: collectives of torch.distributed, and the merge of the gathered rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .._operators import stages
from .collectives import all_gather, waiting
from .context import Context


class Exchange:
    """One layer's exchange: forwards, then backwards with the transitions that the forward left where they are needed.

    Summaries of a rank's pieces are rows ``[slots, values | transitions]`` of one buffer, so that one collective moves
    them and the merge reads them where they arrive.
    """

    def __init__(self, context: Context, like: Tensor, heads: int, K: int, V: int, state_v_first: bool, scheme: str):
        self.context, self.heads, self.K, self.V, self.state_v_first = context, heads, K, V, state_v_first
        self.scheme = scheme
        self.transitions: Tensor | None = None  # in the order of time, for the backward
        self.rows = like.new_zeros(context.layout.slots, heads * K * (V + K), dtype=torch.float32)

    def values_of(self, rows: Tensor, heads: int | None = None) -> Tensor:
        """Values in rows of the buffer, [..., Hv, K, V], as a view."""
        heads = self.heads if heads is None else heads
        matrix = stages.matrix_shape(self.K, self.V, self.state_v_first)
        return rows[..., : heads * self.K * self.V].unflatten(-1, (heads, *matrix))

    def transitions_of(self, rows: Tensor, heads: int | None = None) -> Tensor:
        heads = self.heads if heads is None else heads
        return rows[..., heads * self.K * self.V :].unflatten(-1, (heads, self.K, self.K))

    def all_fade(self, fades: list[Tensor]) -> bool:
        """Whether every head of every piece of every rank has faded. One small collective, and the host waits."""
        flag = torch.ones((), dtype=torch.int32, device=self.rows.device)
        for fade in fades:
            flag = flag * torch.isneginf(fade).all()
        flag = flag.to(torch.int32)
        with waiting:
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.context.group)
        return bool(flag.item())

    def forward(self) -> Tensor:
        """The states that enter this rank's pieces, [pieces, Hv, K, V], from the summaries in ``rows``."""
        if self.scheme == "neighbour":
            return self._neighbour(self.values_of(self.rows), back=False)
        if self.scheme == "gather":
            rows = self._in_time(all_gather(self.rows, self.context.group))
            self.transitions = self.transitions_of(rows)
            return self._merge(
                self.values_of(rows), self.transitions, *self.context.merges(self.rows.device, back=False)
            )
        heads = self._shares()
        mine = heads[self.context.rank]
        rows = self._in_time(self._share_out(self.rows, self.K * (self.V + self.K)))
        self.transitions = self.transitions_of(rows, mine)
        first, count = self.context.all_merges(self.rows.device, back=False)
        return self._hand_back(self._merge(self.values_of(rows, mine), self.transitions, first, count))

    def backward(self, d_local: Tensor) -> Tensor:
        """The gradients of the states that leave this rank's pieces, from those of the states that enter them,
        [slots, Hv, K, V]."""
        if self.scheme == "neighbour":
            return self._neighbour(d_local, back=True)
        flat = d_local.flatten(1)
        if self.scheme == "gather":
            values = self.values_of(self._in_time(all_gather(flat, self.context.group)))
            return self._merge(values, self.transitions, *self.context.merges(flat.device, back=True), back=True)
        mine = self._shares()[self.context.rank]
        values = self.values_of(self._in_time(self._share_out(flat, self.K * self.V)), mine)
        first, count = self.context.all_merges(flat.device, back=True)
        return self._hand_back(self._merge(values, self.transitions, first, count, back=True))

    def keep_transitions(self) -> None:
        """For a backward: the transitions alone, without the values they came with."""
        if self.transitions is not None:
            self.transitions = self.transitions.contiguous()

    def _merge(self, values: Tensor, transitions: Tensor, first: Tensor, count: Tensor, back: bool = False) -> Tensor:
        if values.shape[1] == 0:  # more ranks than heads
            return values.new_empty(first.shape[0], *values.shape[1:])
        return stages.merge(values, transitions, first, count, transposed=back, state_v_first=self.state_v_first)

    def _in_time(self, rows: Tensor) -> Tensor:
        """Rows of all slots of all ranks in the order of tokens, without empty slots."""
        order = self.context.layout.order
        if order == list(range(rows.shape[0])):
            return rows
        return rows.index_select(0, self.context.device_indices("order", order, rows.device))

    # ---- heads shared out ------------------------------------------------------------------------------------------

    def _shares(self) -> list[int]:
        size = self.context.size
        return [self.heads * (r + 1) // size - self.heads * r // size for r in range(size)]

    def _share_out(self, rows: Tensor, per_head: int) -> Tensor:
        """From each rank's rows of all heads to all ranks' rows of this rank's heads: values, then transitions."""
        heads, slots = self._shares(), rows.shape[0]
        mine, sizes = heads[self.context.rank], (self.K * self.V, per_head - self.K * self.V)
        parts, begin = [], 0
        for share in heads:
            for at, size in ((0, sizes[0]), (self.heads * self.K * self.V, sizes[1])):
                parts.append(rows[:, at + begin * size : at + (begin + share) * size])
            begin += share
        # By destination, then by slot: rows of values and transitions.
        outbox = torch.cat([torch.cat(pair, dim=1).flatten() for pair in zip(parts[::2], parts[1::2])])
        inbox = rows.new_empty(self.context.size * slots * mine * per_head)
        self._all_to_all(
            inbox, outbox, [slots * mine * per_head] * self.context.size, [slots * share * per_head for share in heads]
        )
        return inbox.view(self.context.size * slots, mine * per_head)

    def _hand_back(self, states: Tensor) -> Tensor:
        """From the states of all places and this rank's heads to those of this rank's pieces and all heads."""
        heads, slots, size = self._shares(), self.context.layout.slots, self.K * self.V
        mine = heads[self.context.rank]
        inbox = states.new_empty(slots * self.heads * size)
        self._all_to_all(
            inbox,
            states.flatten(),
            [slots * share * size for share in heads],
            [slots * mine * size] * self.context.size,
        )
        parts = inbox.split([slots * share * size for share in heads])
        matrix = states.shape[2:]
        joined = torch.cat([part.view(slots, share, *matrix) for part, share in zip(parts, heads)], dim=1)
        return joined[: len(self.context.mine)]

    def _all_to_all(self, inbox: Tensor, outbox: Tensor, received: list[int], sent: list[int]) -> None:
        with waiting:
            dist.all_to_all_single(inbox, outbox, received, sent, group=self.context.group)

    # ---- neighbours ------------------------------------------------------------------------------------------------

    def _neighbour(self, values: Tensor, back: bool) -> Tensor:
        """Where all heads fade, the state that enters a piece is the one that its neighbour leaves."""
        context = self.context
        step = -1 if back else 1
        owners = {p.number: (r, i) for r, row in enumerate(context.layout.pieces) for i, p in enumerate(row)}
        entering = torch.zeros(len(context.mine), *values.shape[1:], dtype=torch.float32, device=values.device)
        operations, sent = [], []
        pairs = []  # (from piece, to piece), in the same order on every rank
        for row in context.layout.pieces:
            pairs += [(p.number, p.number + step) for p in row if (p.before if back else p.after) > 0]
        for source, target in sorted(pairs):
            (from_rank, i), (to_rank, j) = owners[source], owners[target]
            if from_rank == to_rank == context.rank:
                entering[j] = values[i]
            elif from_rank == context.rank:
                sent.append(values[i].contiguous())
                peer = dist.get_global_rank(context.group, to_rank) if context.group is not None else to_rank
                operations.append(dist.P2POp(dist.isend, sent[-1], peer, context.group))
            elif to_rank == context.rank:
                peer = dist.get_global_rank(context.group, from_rank) if context.group is not None else from_rank
                operations.append(dist.P2POp(dist.irecv, entering[j], peer, context.group))
        with waiting:
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        return entering

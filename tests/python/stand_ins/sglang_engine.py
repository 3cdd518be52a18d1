"""Steps of an engine as SGLang 0.5.23 schedules them, on the backend of gatedelta.sglang, compared with the oracle.

A slot is cleared when a request gets it; slot 0 and index -1 are padding. Drafts leave their states in buffers, from
which the accepted one is committed to the pools; windows of the convolution may overlap in theirs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from oracle import Request, Shape, Weights, close, outputs

SLOTS, ROWS = 40, 8


class Pool:
    """Both states of a slot in one page, and the buffers of drafts."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str, drafts: int, overlap: bool) -> None:
        size = shape.value_heads * shape.V * shape.K
        page = torch.full((SLOTS, size + 16), torch.nan, device=device)
        state = page[:, :size].unflatten(1, (shape.value_heads, shape.V, shape.K))
        conv = torch.full((SLOTS, shape.channels + 8, shape.taps - 1), torch.nan, dtype=dtype, device=device)
        conv = conv[:, : shape.channels]
        windows = steps = None
        if drafts:
            steps = torch.full((ROWS, drafts + 1, *state.shape[1:]), torch.nan, device=device)[:, :drafts]
            windows = torch.full((ROWS, drafts, shape.channels, shape.taps - 1), torch.nan, dtype=dtype, device=device)
            if overlap:
                row = torch.full((ROWS, shape.channels, drafts + shape.taps - 2), torch.nan, dtype=dtype, device=device)
                windows = row.as_strided(windows.shape, (row.stride(0), 1, row.stride(1), 1))
        self.cache = SimpleNamespace(
            conv=[conv], temporal=state, intermediate_ssm=steps, intermediate_conv_window=[windows], replayssm_d=None,
            replayssm_k=None, replayssm_g=None, replayssm_rawv=None,
        )  # fmt: skip
        self.size, self.mamba_pool = ROWS, SimpleNamespace(mamba_cache=self.cache)

    def mamba2_layer_cache(self, layer_id: int) -> Any:
        return self.cache


def layer_of(weights: Weights) -> Any:
    shape = weights.shape
    key, value = shape.key_heads * shape.K, shape.value_heads * shape.V
    return SimpleNamespace(
        layer_id=3, num_q_heads=shape.key_heads, num_k_heads=shape.key_heads, num_v_heads=shape.value_heads,
        head_q_dim=shape.K, head_k_dim=shape.K, head_v_dim=shape.V, q_dim=key, k_dim=key, v_dim=value,
        conv_weights=weights.conv, bias=None, activation="silu", A_log=weights.A_log, dt_bias=weights.dt_bias,
    )  # fmt: skip


class Engine:
    def __init__(self, backend: Any, tree: Any, weights: Weights, pool: Pool, drafts: int = 0) -> None:
        self.backend, self.tree, self.weights, self.pool, self.drafts_count = backend, tree, weights, pool, drafts
        self.layer, self.dtype, self.device = layer_of(weights), weights.dtype, str(weights.conv.device)
        self.generator, self.free = torch.Generator().manual_seed(1), list(range(SLOTS - 1, 0, -1))

    def request(self) -> Request:
        slot = self.free.pop()
        self.pool.cache.temporal[slot] = 0
        self.pool.cache.conv[0][slot] = 0
        return Request([slot])

    def int32(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def tokens(self, count: int) -> list[torch.Tensor]:
        shape = self.weights.shape

        def randn(*size):
            return torch.randn(count, *size, generator=self.generator).to(self.device, self.dtype)

        return [randn(shape.channels), randn(shape.value_heads), randn(shape.value_heads)]

    def batch(self, mode: str, count: int, **fields: Any) -> Any:
        modes = {f"is_{name}": (lambda is_it=name == mode: is_it) for name in ("target_verify", "decode", "extend")}
        return SimpleNamespace(
            batch_size=count, forward_mode=SimpleNamespace(**modes), mamba_track_mask=None, req_pool_indices=None,
            spec_info=SimpleNamespace(draft_token_num=self.drafts_count), **fields,
        )  # fmt: skip

    def offsets(self, lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(self.device, torch.int32)

    def extend(self, entries: list[tuple], padding: int = 0) -> None:
        """entries: (request, tokens) or (request, tokens, tokens up to the tracked state, its slot)."""
        requests, lengths = [entry[0] for entry in entries], [entry[1] for entry in entries]
        x, a, b = rows = self.tokens(sum(lengths))
        prefix = self.int32([7 * (request.state is not None) for request in requests] + [0] * padding)
        metadata = self.tree.ForwardMetadata(
            query_start_loc=self.offsets(lengths + [0] * padding),
            mamba_cache_indices=self.int32([request.slots[0] for request in requests] + [0] * padding),
        )
        tracked = [i for i, entry in enumerate(entries) if len(entry) > 2]
        if tracked:
            self.track(metadata, entries, lengths, tracked, len(entries) + padding)
        self.backend.forward_metadata = metadata
        out = torch.full((1, sum(lengths) + 2, *self.shape()), torch.nan, dtype=self.dtype, device=self.device)
        batch = self.batch(
            "extend", len(requests), extend_prefix_lens=prefix, extend_seq_lens_cpu=lengths + [0] * padding
        )
        o = self.backend.forward_extend(self.layer, batch, x, a, b, linear_attn_output=out[:, :-2] if padding else None)
        if padding:
            assert o.data_ptr() == out.data_ptr() and out[:, -2:].isnan().all()
        forks = self.compare(requests, lengths, rows, o[0], entries)
        for fork in forks:  # another request goes on from the tracked state
            self.decode([fork])

    def shape(self) -> tuple[int, int]:
        return self.weights.shape.value_heads, self.weights.shape.V

    def track(self, metadata: Any, entries: list[tuple], lengths: list[int], tracked: list[int], count: int) -> None:
        chunks, slots = [-1] * count, self.int32([entries[i][3] for i in tracked]).long()
        starts = self.offsets(lengths)
        columns = torch.arange(self.weights.shape.taps - 1, device=self.device)
        for i in tracked:
            chunks[i] = entries[i][2] // 64
        ends = torch.stack([starts[i] + entries[i][2] for i in tracked])
        metadata.has_mamba_track_mask, metadata.conv_states_mask_indices = True, slots
        metadata.track_conv_indices = ends[:, None] - columns.numel() + columns
        metadata.track_chunk_idx, metadata.track_ssm_h_dst = self.int32(chunks), slots
        metadata.track_ssm_h_src = metadata.track_ssm_h_batch_src = self.int32(tracked).long()
        metadata.track_ssm_final_src = metadata.track_ssm_final_dst = slots[:0]

    def decode(self, requests: list[Request], padding: tuple[int, ...] = ()) -> None:
        x, a, b = rows = self.tokens(len(requests) + len(padding))
        self.backend.forward_metadata = self.tree.ForwardMetadata(
            query_start_loc=self.offsets([1] * x.shape[0]),
            mamba_cache_indices=self.int32([request.slots[0] for request in requests] + list(padding)),
        )
        o = self.run_decode(x, a, b)
        assert o.shape == (1, x.shape[0], *self.shape()) and not o[0, len(requests) :].any()
        self.compare(requests, [1] * len(requests), rows, o[0, : len(requests)])

    def run_decode(self, x, a, b) -> torch.Tensor:
        return self.backend.forward_decode(self.layer, self.batch("decode", x.shape[0]), x, a, b)

    def verify(self, entries: list[tuple[Request, int]], padding: int = 0) -> None:
        """entries: (request, how many of the drafts are kept)."""
        count, drafts, cache = len(entries), self.drafts_count, self.pool.cache
        x, a, b = rows = self.tokens((count + padding) * drafts)
        before = cache.temporal.clone(), cache.conv[0].clone()
        slots = self.int32([request.slots[0] for request, _ in entries] + [-1] * padding)
        self.backend.forward_metadata = self.tree.ForwardMetadata(
            query_start_loc=self.offsets([drafts] * (count + padding)), mamba_cache_indices=slots
        )
        o = self.backend.forward_extend(self.layer, self.batch("target_verify", count + padding), x, a, b)
        assert o.shape == (1, x.shape[0], *self.shape())
        for pool, old in zip((cache.temporal, cache.conv[0]), before):
            assert torch.equal(pool.nan_to_num(9), old.nan_to_num(9)), "verification writes no pool"
        for i, (request, keep) in enumerate(entries):
            new = [t[i * drafts : (i + 1) * drafts] for t in rows]
            expected, _, states = outputs(self.weights, request, *new, None)
            close(o[0, i * drafts : (i + 1) * drafts], expected, self.dtype)
            close(cache.intermediate_ssm[i], states, self.dtype)
            request.keep(new[0], states, keep)
            cache.temporal[request.slots[0]] = cache.intermediate_ssm[i, keep - 1]
            cache.conv[0][request.slots[0]] = cache.intermediate_conv_window[0][i, keep - 1]

    def compare(self, requests, lengths, rows, out, entries=()) -> list[Request]:
        state, conv = self.pool.cache.temporal, self.pool.cache.conv[0]
        start, forks = 0, []
        for i, (request, length) in enumerate(zip(requests, lengths)):
            new = [t[start : start + length] for t in rows]
            expected, _, states = outputs(self.weights, request, *new, None)
            close(out[start : start + length], expected, self.dtype)
            close(state[request.slots], states[-1:], self.dtype)
            if entries and len(entries[i]) > 2:
                tokens, slot = entries[i][2] // 64 * 64, entries[i][3]
                fork = Request([slot], request.state, request.tail)
                if tokens:
                    fork.keep(new[0], states, tokens)
                close(state[[slot]], fork.state[None], self.dtype)
                if tokens == entries[i][2]:
                    forks.append(fork)
            request.keep(new[0], states, length)
            start += length
        assert state[[0, *self.free]].isnan().all() and conv[[0, *self.free]].isnan().all()
        return forks

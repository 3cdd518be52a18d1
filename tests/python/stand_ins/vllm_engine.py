"""Steps of an engine as vLLM 0.32 schedules them, on a layer of gatedelta.vllm, each compared with the oracle.

A step's metadata are what vLLM's builder makes of it: decodes before prefills, slot 0 the null slot, block tables with
a column for each token of a window, the index tensors of batches with drafts and other requests. The pools are pages
that hold both states of a slot.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from oracle import Request, Shape, Weights, close, hardness, outputs

SLOTS = 64


def vllm_config(dtype: torch.dtype = torch.float32, asked: bool = True) -> Any:
    return SimpleNamespace(
        additional_config={"gdn_prefill_backend": "gatedelta"} if asked else {},
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(use_replayssm=False),
    )


def layer_config(shape: Shape, **changes: Any) -> Any:
    fields = {
        "linear_num_key_heads": shape.key_heads, "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": shape.K, "linear_value_head_dim": shape.V, "linear_conv_kernel_dim": shape.taps,
        "hidden_act": "silu", "rms_norm_eps": 1e-6,
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def load(layer: Any, weights: Weights) -> None:
    for parameter, value in (
        (layer.conv1d.weight, weights.conv[:, None]), (layer.A_log, weights.A_log), (layer.dt_bias, weights.dt_bias),
        (layer.norm.weight, weights.norm),
    ):  # fmt: skip
        parameter.data = value.clone().to(parameter.dtype)


def pages(shape: Shape, dtype: torch.dtype, device: str, drafts: int, dim_first: bool) -> list[torch.Tensor]:
    """The pools of both states, in pages of one buffer, all NaN: a slot is read after it has been written only."""
    columns = shape.taps - 1 + drafts
    conv_bytes = -(-columns * shape.channels * dtype.itemsize // 256) * 256
    state_bytes = shape.value_heads * shape.V * shape.K * 4
    raw = torch.empty(SLOTS, conv_bytes + state_bytes + 512, dtype=torch.uint8, device=device)
    state = raw[:, conv_bytes : conv_bytes + state_bytes].view(torch.float32)
    conv = raw[:, : columns * shape.channels * dtype.itemsize].view(dtype)
    conv = conv.unflatten(1, (shape.channels, columns) if dim_first else (columns, shape.channels))
    state = state.unflatten(1, (shape.value_heads, shape.V, shape.K))
    conv.fill_(torch.nan)
    state.fill_(torch.nan)
    assert not state.is_contiguous() and not conv.is_contiguous()
    return [conv, state]


class Engine:
    def __init__(self, layer: Any, tree: Any, weights: Weights, drafts: int = 0, normed: bool = True) -> None:
        self.layer, self.tree, self.weights, self.normed = layer, tree, weights, normed
        self.dtype, self.device, self.width = weights.dtype, str(weights.conv.device), drafts + 1
        self.generator = torch.Generator().manual_seed(1)
        layer.kv_cache = pages(weights.shape, self.dtype, self.device, drafts, tree.is_conv_state_dim_first())
        self.free = list(range(SLOTS - 1, 0, -1))

    def request(self) -> Request:
        return Request([self.free.pop() for _ in range(self.width)])

    def int32(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def offsets(self, lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(self.device, torch.int32)

    def tokens(self, count: int) -> list[torch.Tensor]:
        shape = self.weights.shape

        def randn(*size):
            return torch.randn(count, *size, generator=self.generator).to(self.device, self.dtype)

        hv = shape.value_heads
        return [randn(shape.channels), randn(hv), randn(hv), randn(hv, shape.V)]

    def column(self, slots: list[int]) -> torch.Tensor:
        """As vLLM passes slots: a column of a block table."""
        table = self.int32([[slot, -7, 9] for slot in slots])
        return table[:, 0]

    def metadata(self, **fields: Any) -> Any:
        counts = dict.fromkeys(
            ("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens", "num_spec_decodes",
             "num_spec_decode_tokens", "num_actual_tokens"), 0,
        )  # fmt: skip
        return self.tree.GDNAttentionMetadata(**(counts | fields))

    def call(self, metadata: Any, rows: list[torch.Tensor]) -> torch.Tensor:
        """Runs the layer on these tokens, with more rows behind them that belong to no request."""
        shape = self.weights.shape
        x, a, b, z = (torch.cat([t, torch.full_like(t[:1], torch.nan).expand(3, *t.shape[1:])]) for t in rows)
        wide = torch.full((x.shape[0], shape.channels + 64), torch.nan, dtype=x.dtype, device=x.device)
        wide[:, : shape.channels] = x  # a part of the projection's rows
        out = x.new_zeros(x.shape[0], shape.value_heads, shape.V)
        self.tree.forward_context.attn_metadata = {self.layer.prefix: metadata}
        if self.normed:
            self.layer._forward_core_fused_norm(wide[:, : shape.channels], b, a, z, out)
        else:
            self.layer._forward_core(wide[:, : shape.channels], b, a, out)
        assert not out[rows[0].shape[0] :].any()
        return out[: rows[0].shape[0]]

    def plain(self, decodes: list[Request], prefills: list[tuple], padding: int = 0) -> None:
        """prefills: (request, tokens) or (request, tokens, checkpoint's offset, checkpoint's slot)."""
        lengths = [1] * len(decodes) + [entry[1] for entry in prefills]
        requests = decodes + [entry[0] for entry in prefills]
        rows = self.tokens(sum(lengths) + (padding if not prefills else 0))
        slots = self.column([request.slots[0] for request in requests] + [0] * padding)
        fields = {"non_spec_state_indices_tensor": slots, "num_actual_tokens": rows[0].shape[0]}
        if prefills:
            count = len(decodes)
            offsets = self.offsets(lengths + [0] * padding)
            started = torch.tensor([r.state is not None for r in requests] + [False] * padding, device=self.device)
            fields |= {
                "prefill_query_start_loc": offsets[count:] - count, "prefill_state_indices": slots[count:],
                "prefill_has_initial_state": started[count:], "checkpoint": self.checkpoint(count, prefills, padding),
            }  # fmt: skip
        metadata = self.metadata(num_decodes=len(decodes), num_prefills=len(prefills), **fields)
        forks = self.compare(requests, lengths, rows, self.call(metadata, rows), checkpoints=prefills)
        for fork in forks:  # another request goes on from the checkpoint
            self.plain([fork], [])

    def checkpoint(self, decodes: int, prefills: list[tuple], padding: int) -> Any:
        if not any(len(entry) > 2 for entry in prefills):
            return None
        entries = [(0, 0)] * decodes + [entry[2:] or (0, 0) for entry in prefills] + [(0, 0)] * padding
        return SimpleNamespace(
            checkpoint_offsets=self.int32([offset for offset, _ in entries]),
            state_indices=self.int32([slot for _, slot in entries]),
        )

    def drafts(self, windows: list[tuple], prefills: list[tuple] = (), padding: int = 0) -> None:
        """windows: (request, tokens, how many of them are kept); with prefills their tokens are interleaved."""
        lengths = [tokens for _, tokens, _ in windows] + [tokens for _, tokens in prefills]
        requests = [entry[0] for entry in windows] + [entry[0] for entry in prefills]
        rows, spec = self.tokens(sum(lengths)), len(windows)
        count = sum(lengths[:spec])
        table = self.int32([request.slots for request in requests[:spec]] + [[0] * self.width] * padding)
        fields = {
            "num_spec_decodes": spec + padding, "num_spec_decode_tokens": count, "num_actual_tokens": sum(lengths),
            "spec_state_indices_tensor": table, "spec_query_start_loc": self.offsets(lengths[:spec] + [0] * padding),
            "num_accepted_tokens": self.int32([r.accepted for r in requests[:spec]] + [1] * padding),
            "spec_sequence_masks": torch.ones(spec + padding, dtype=torch.bool, device=self.device),
        }  # fmt: skip
        order = torch.arange(sum(lengths), device=self.device)
        if prefills:  # the batch's order is prefills first; the index tensors undo it
            order = torch.cat([order[sum(lengths) - count :], order[: sum(lengths) - count]])
            fields |= {
                "num_prefills": len(prefills), "spec_token_indx": order[:count], "non_spec_token_indx": order[count:],
                "non_spec_state_indices_tensor": self.column([r.slots[0] for r in requests[spec:]]),
                "prefill_state_indices": self.column([r.slots[0] for r in requests[spec:]]),
                "prefill_query_start_loc": self.offsets(lengths[spec:]),
                "prefill_has_initial_state": self.int32([r.state is not None for r in requests[spec:]]).bool(),
            }  # fmt: skip
        batch = [torch.empty_like(t).index_copy_(0, order, t) for t in rows]
        out = self.call(self.metadata(**fields), batch)[order]
        self.compare(requests, lengths, rows, out, kept=[entry[2] for entry in windows])

    def compare(self, requests, lengths, rows, out, kept=(), checkpoints=()) -> list[Request]:
        """Outputs and states of the step; then the requests keep what they keep. Returns requests at checkpoints."""
        conv, pool = self.layer.kv_cache
        start, forks = 0, []
        for i, (request, length) in enumerate(zip(requests, lengths)):
            new = [t[start : start + length] for t in rows]
            o, normed, states = outputs(self.weights, request, *new, activation=self.layer.norm.activation)
            if self.normed:
                close(out[start : start + length], normed, self.dtype, hardness(o, states))
            else:
                close(out[start : start + length], o, self.dtype)
            expected = states if i < len(kept) else states[-1:]
            close(pool[request.slots[: expected.shape[0]]], expected, self.dtype)
            entry = checkpoints[i - len(requests)] if i - len(requests) >= -len(checkpoints) else ()
            if len(entry) > 2 and entry[2]:
                fork = Request([entry[3], *(self.free.pop() for _ in range(self.width - 1))], tail=request.tail)
                fork.keep(new[0], states, entry[2])
                fork.accepted = 1
                close(pool[fork.slots[:1]], fork.state[None], self.dtype)
                forks.append(fork)
            request.keep(new[0], states, kept[i] if i < len(kept) else length)
            if i >= len(kept):
                request.accepted = 1
            start += length
        assert pool[0].isnan().all() and conv[0].isnan().all(), "slot 0 is the null slot"
        assert pool[self.free].isnan().all() and conv[self.free].isnan().all()
        return forks

"""What vLLM's GDN layer does between its projections, on vLLM's pools and metadata.

Tokens come in vLLM's order: decodes, then prefills; or drafts alone; or drafts and the rest, with an index for each.
Slots are vLLM's block ids, 0 is the null slot. A request with drafts has a row of slots: the state after token t goes
to column t, and its next window starts from the column of the last token it accepted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch import (
    causal_conv1d,
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    gated_delta_layer_step,
    rms_norm_gated,
)

_NULL_INDEX = 0


def forward_core(
    layer: Any, module: Any, metadata: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, z: Tensor | None, out: Tensor
) -> None:
    """out ``[T, Hv, V]`` of mixed_qkv ``[T, D]``, b and a ``[T, Hv]``; with z ``[T, Hv, V]`` the gated norm, too."""
    core = _Core(layer, module, metadata)
    count = metadata.num_actual_tokens
    rows = (mixed_qkv[:count], b[:count], a[:count], None if z is None else z[:count], out[:count])
    if metadata.spec_sequence_masks is None:
        core.requests(*rows)
    elif not metadata.num_prefills and not metadata.num_decodes:
        core.drafts(*rows)
    else:
        for part, index in ((core.drafts, metadata.spec_token_indx), (core.requests, metadata.non_spec_token_indx)):
            piece = out.new_empty(index.numel(), *out.shape[1:])
            part(*(None if x is None else x[index] for x in rows[:4]), piece)
            out.index_copy_(0, index, piece)


def profile(layer: Any, mixed_qkv: Tensor) -> None:
    """A prefill of as many tokens as vLLM measures its memory with: the workspace is part of what it measures."""
    heads = layer.num_v_heads // layer.tp_size
    mixed_qkv = torch.zeros_like(mixed_qkv[:, : layer.conv_dim // layer.tp_size])
    gates = mixed_qkv.new_zeros(1, mixed_qkv.shape[0], heads)
    x, _ = causal_conv1d(mixed_qkv[None], conv_weight(layer), layer.conv1d.bias, layer.activation)
    chunk_gated_delta_rule(*split(layer, x), gates, gates, **rule_options(layer))


def conv_weight(layer: Any) -> Tensor:
    """``[D, 1, W]`` or ``[D, W]``. vLLM packs the weight for its own kernels on some CPUs, and keeps the plain one."""
    plain = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
    return layer.conv1d.weight if plain is None else plain


def split(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v ``[..., H, D]`` of the convolution's output, as views."""
    key, value = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    q, k, v = x.split([key, key, value], -1)
    return (
        q.unflatten(-1, (-1, layer.head_k_dim)),
        k.unflatten(-1, (-1, layer.head_k_dim)),
        v.unflatten(-1, (-1, layer.head_v_dim)),
    )


def rule_options(layer: Any) -> dict[str, Any]:
    return {
        "A_log": layer.A_log, "dt_bias": layer.dt_bias, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "use_qk_l2norm_in_kernel": True, "state_v_first": True,
    }  # fmt: skip


class _Core:
    """One layer in one step."""

    def __init__(self, layer: Any, module: Any, metadata: Any) -> None:
        self.layer, self.metadata = layer, metadata
        conv, self.state = layer.kv_cache[0], layer.kv_cache[1]
        self.conv = conv if module.is_conv_state_dim_first() else conv.transpose(-1, -2)  # [slots, D, columns]
        self.taps = {"weight": conv_weight(layer), "bias": layer.conv1d.bias, "activation": layer.activation}
        # Where drafts are configured a slot has more columns; outside of a window the state is in the first ones.
        self.conv_tail = self.conv[..., : layer.conv_kernel_size - 1]
        self.batch_invariant = bool(getattr(module.envs, "VLLM_BATCH_INVARIANT", False))

    def requests(self, x: Tensor, b: Tensor, a: Tensor, z: Tensor | None, out: Tensor) -> None:
        """Decodes, then prefills. (Beside drafts vLLM counts decodes among the prefills.)"""
        metadata = self.metadata
        if not metadata.num_prefills:
            # In a padded batch tokens and slots go on past the requests; these slots are null.
            self.decode(metadata.non_spec_state_indices_tensor[: x.shape[0]], x, b, a, z, out)
            return
        count = metadata.num_decodes
        if count:
            rows = (t if t is None else t[:count] for t in (x, b, a, z, out))
            self.decode(metadata.non_spec_state_indices_tensor[:count], *rows)
        self.prefill(*(t if t is None else t[count:] for t in (x, b, a, z, out)))

    def decode(self, slots: Tensor, x: Tensor, b: Tensor, a: Tensor, z: Tensor | None, out: Tensor) -> None:
        x, b, a, out = x.unsqueeze(1), b.unsqueeze(1), a.unsqueeze(1), out.unsqueeze(1)
        if z is not None and not self.batch_invariant:
            self.step(x, b, a, z.unsqueeze(1), out, conv_state=self.conv_tail, state_indices=slots)
            return
        in_place = {"initial_state_indices": slots, "final_state_indices": slots, "null_index": _NULL_INDEX}
        x, _ = causal_conv1d(x, **self.taps, initial_state=self.conv_tail, final_state=self.conv_tail, **in_place)
        o = out if z is None else torch.empty_like(out)
        self.recur(x, b, a, o, final_state=self.state, **in_place)
        if z is not None:
            self.norm(o, z.unsqueeze(1), out)

    def drafts(self, x: Tensor, b: Tensor, a: Tensor, z: Tensor | None, out: Tensor) -> None:
        metadata = self.metadata
        count = metadata.num_spec_decodes
        slots = metadata.spec_state_indices_tensor[:count]
        windows = {
            "cu_seqlens": metadata.spec_query_start_loc[: count + 1],
            "previous_accept_lengths": metadata.num_accepted_tokens[:count],
        }
        x, b, a, out = x.unsqueeze(0), b.unsqueeze(0), a.unsqueeze(0), out.unsqueeze(0)
        if z is not None and not self.batch_invariant:
            z = z.unsqueeze(0)
            self.step(x, b, a, z, out, conv_state=self.conv, state_indices=slots, step_indices=slots, **windows)
            return
        first = slots[:, 0]
        x, _ = causal_conv1d(
            x, **self.taps, initial_state=self.conv, final_state=self.conv, initial_state_indices=first,
            final_state_indices=first, null_index=_NULL_INDEX, **windows,
        )  # fmt: skip
        states = {"initial_state_indices": slots, "step_states": self.state, "step_indices": slots}
        o = out if z is None else torch.empty_like(out)
        self.recur(x, b, a, o, null_index=_NULL_INDEX, **states, **windows)
        if z is not None:
            self.norm(o, z.unsqueeze(0), out)

    def prefill(self, x: Tensor, b: Tensor, a: Tensor, z: Tensor | None, out: Tensor) -> None:
        metadata = self.metadata
        plan = getattr(metadata, "gatedelta_plan", None)
        if plan is None:  # the first layer of the step
            plan = metadata.gatedelta_plan = _Plan(metadata)
        offsets = metadata.prefill_query_start_loc
        x, b, a, out = x.unsqueeze(0), b.unsqueeze(0), a.unsqueeze(0), out.unsqueeze(0)
        in_place = {
            "cu_seqlens": offsets, "initial_state_indices": plan.read, "null_index": _NULL_INDEX,
            "final_state_indices": metadata.prefill_state_indices,
        }  # fmt: skip
        y, _ = causal_conv1d(x, **self.taps, initial_state=self.conv_tail, final_state=self.conv_tail, **in_place)
        checkpoints = {}
        if plan.checkpoint_slots is not None:
            causal_conv1d(
                x, **self.taps, output_y=False, cu_seqlens=plan.conv_offsets, final_state=self.conv_tail,
                final_state_indices=plan.conv_slots, null_index=_NULL_INDEX,
            )  # fmt: skip
            checkpoints = {
                "checkpoints": self.state, "checkpoint_indices": plan.checkpoint_slots,
                "checkpoint_offsets": plan.checkpoint_offsets,
            }  # fmt: skip
        o = out if z is None else torch.empty_like(out)
        chunk_gated_delta_rule(
            *split(self.layer, y), a, b, out=o, initial_state=self.state, final_state=self.state,
            batch_invariant=self.batch_invariant, **in_place, **checkpoints, **rule_options(self.layer),
        )  # fmt: skip
        if z is not None:
            self.norm(o, z.unsqueeze(0), out)

    def recur(self, x: Tensor, b: Tensor, a: Tensor, out: Tensor, **states: Any) -> None:
        q, k, v = split(self.layer, x)
        fused_recurrent_gated_delta_rule(
            q, k, v, a, beta=b, out=out, initial_state=self.state, batch_invariant=self.batch_invariant, **states,
            **rule_options(self.layer),
        )  # fmt: skip

    def step(self, x: Tensor, b: Tensor, a: Tensor, z: Tensor, out: Tensor, **states: Any) -> None:
        """Convolution, rule and norm in one call."""
        layer = self.layer
        weight = self.taps["weight"]
        gated_delta_layer_step(
            x, z, a, b, key_heads=layer.num_k_heads // layer.tp_size,
            conv_weight=weight.squeeze(1) if weight.dim() == 3 else weight, conv_bias=self.taps["bias"],
            conv_activation=layer.activation, A_log=layer.A_log, dt_bias=layer.dt_bias, state=self.state,
            state_v_first=True, null_index=_NULL_INDEX, norm_weight=layer.norm.weight,
            norm_activation=layer.norm.activation, norm_eps=layer.norm.eps, out=out, **states,
        )  # fmt: skip

    def norm(self, o: Tensor, z: Tensor, out: Tensor) -> None:
        norm = self.layer.norm
        rms_norm_gated(o, z, norm.weight, norm.eps, norm.activation, out=out)


class _Plan:
    """Index tensors of a step's prefills that vLLM does not have: made once, kept on the step's metadata."""

    def __init__(self, metadata: Any) -> None:
        slots, offsets = metadata.prefill_state_indices, metadata.prefill_query_start_loc
        self.read = torch.where(metadata.prefill_has_initial_state, slots, _NULL_INDEX)
        self.checkpoint_slots = None
        checkpoint = metadata.checkpoint
        if checkpoint is None:
            return
        # One entry for each request of the step; decodes come first and have none.
        first = checkpoint.state_indices.shape[0] - slots.shape[0]
        self.checkpoint_slots = checkpoint.state_indices[first:]
        self.checkpoint_offsets = checkpoint.checkpoint_offsets[first:]
        # The convolution's state there: of each sequence up to the checkpoint; the rest goes to the null slot.
        starts = offsets[:-1]
        bounds = torch.stack([starts, starts + self.checkpoint_offsets], 1).flatten()
        self.conv_offsets = torch.cat([bounds, offsets[-1:]])
        self.conv_slots = torch.stack([self.checkpoint_slots, torch.zeros_like(self.checkpoint_slots)], 1).flatten()

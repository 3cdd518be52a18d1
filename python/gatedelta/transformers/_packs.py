"""Where the sequences of a packed batch begin, from whatever a trainer or a collator says about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from .._plugins.replace import Places


def offsets_of(kwargs: Mapping[str, Any]) -> Tensor | None:
    """Offsets ``[N + 1]`` from a layer's keyword arguments; None where the batch is not packed.

    As in FlashAttention's path of transformers, they count the tokens of all rows, one row after the other.
    """
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if kwargs.get(name) is not None:
            return kwargs[name]
    ids = kwargs.get("seq_idx")
    return None if ids is None else _offsets(ids[:, 1:] != ids[:, :-1])


# Whose layers use the boundaries, and for which models they are looked for.
_watchers: dict[str, Callable[[nn.Module], bool]] = {}
_places = Places("transformers")


def watch(owner: str, classes: Iterable[type[nn.Module]], uses_gatedelta: Callable[[nn.Module], bool]) -> None:
    """From now on text models of these classes find their boundaries, if their layers run on this library."""
    if not _watchers:
        for kind in classes:
            _places.set(kind, "forward", _with_offsets(kind.forward))
    _watchers[owner] = uses_gatedelta


def unwatch(owner: str) -> None:
    _watchers.pop(owner, None)
    if not _watchers:
        _places.restore()


def _with_offsets(forward: Callable) -> Callable:
    """A text model's forward that finds the boundaries once, for all of its layers.

    transformers does not pass ``position_ids`` to its linear layers: state and convolution would run on from one
    sequence of a pack into the next.
    """
    names = tuple(signature(forward).parameters)[1:]

    @wraps(forward)
    def wrapped(self, *args, **kwargs):
        kwargs.update(zip(names, args))
        packed = any(kwargs.get(name) is not None for name in ("cu_seqlens", "cu_seq_lens_q"))
        if not packed and not exporting() and any(uses(self) for uses in _watchers.values()):
            if kwargs.get("seq_idx") is not None:
                kwargs["cu_seq_lens_q"] = offsets_of(kwargs)
            elif kwargs.get("position_ids") is not None and not _continues(kwargs.get("past_key_values")):
                offsets = _offsets_from_positions(kwargs)
                if offsets is not None:
                    kwargs["cu_seq_lens_q"] = offsets
        return forward(self, **kwargs)

    return wrapped


def exporting() -> bool:
    """Whether torch.export or torch.jit reads the model: both take transformers' torch code."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def _continues(cache: Any) -> bool:
    """Whether the cache holds states already: then the rows go on with their sequences. Reads no tensor."""
    layers = getattr(cache, "layers", ())
    return any(any(getattr(layer, "has_previous_state", {}).values()) for layer in layers)


def _offsets_from_positions(kwargs: Mapping[str, Any]) -> Tensor | None:
    rows = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    positions = kwargs["position_ids"]
    if rows is None or rows.shape[1] < 2 or positions.dim() < 2 or positions.shape[-1] != rows.shape[1]:
        return None  # one token a row, or nothing that transformers would take
    breaks = _breaks(positions).expand(rows.shape[0], -1)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Mapping):
        mask = mask.get("linear_attention")
    if isinstance(mask, Tensor) and mask.shape == rows.shape[:2]:
        real = mask != 0  # positions of padding count nothing
        breaks = breaks & real[:, 1:] & real[:, :-1]
    if torch.compiler.is_compiling():
        torch._assert_async(~breaks.any(), _COMPILED)
        return None
    return _offsets(breaks) if bool(breaks.any()) else None


_COMPILED = (
    "position_ids hold more than one sequence per row: a compiled model cannot find where they begin, pass "
    "cu_seq_lens_q, or call the model uncompiled"
)


def _breaks(positions: Tensor) -> Tensor:
    """``[B, T - 1]``, whether each token but the first starts a sequence."""
    if positions.dim() == 3 and positions.shape[0] == 3:
        # Time, height and width. Tokens of an image share a time; a sequence starts at 0 in all three.
        return (positions[:, :, 1:] == 0).all(0) | (positions[0, :, 1:] < positions[0, :, :-1])
    if positions.dim() == 3:
        positions = positions[0]  # of text, before the three
    return positions[:, 1:] != positions[:, :-1] + 1


def _offsets(breaks: Tensor) -> Tensor:
    starts = nn.functional.pad(breaks, (1, 0), value=True)
    places = starts.flatten().nonzero().flatten()
    return nn.functional.pad(places, (0, 1), value=starts.numel()).to(torch.int32)

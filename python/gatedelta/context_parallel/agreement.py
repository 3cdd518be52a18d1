"""The ranks of a group compare what they are called with, before any data moves.

The first call of a function with a context gathers one record of fixed size from every rank: what the ranks must agree
on, or why a rank refuses its call. All ranks read the same records, so that all of them raise, or none. Later calls of
the function with this context exchange nothing: whether a call is the first one has to be the same on every rank, and
nothing but the number of calls is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._operators import arguments
from .collectives import all_gather

RECORD_BYTES = 2048
_VALUE_CHARACTERS = 48
_REFUSAL_CHARACTERS = 800
_SECONDS_OF_SILENCE = 30  # until a rank that waits for the others says so
_log = logging.getLogger("gatedelta.context_parallel")


class Agreement:
    """What the ranks of a group have agreed on: the functions whose first call with a context is done."""

    def __init__(self, group: Any, size: int):
        self.group, self.size = group, size
        self._agreed: set[str] = set()

    def call(self, function: str) -> Call:
        """``with agreement.call("f") as call``: this rank's checks, then ``call.fields = {...}`` in the first call."""
        return Call(self, function, function not in self._agreed)

    def compare(self, function: str, fields: dict[str, Any]) -> None:
        if self.size > 1:
            records = self._gather({"function": function, "fields": {name: _text(x) for name, x in fields.items()}})
            if message := _disagreement(records):
                raise ValueError(message)
        self._agreed.add(function)

    def tell(self, function: str, error: Exception) -> None:
        """The other ranks raise this rank's refusal. Where they cannot be reached, they are on their own."""
        if self.size == 1:
            return
        with contextlib.suppress(Exception):
            self._gather({"function": function, "refusal": _words(f"{error}" or type(error).__name__)})

    def _gather(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """The records of all ranks, or this one alone where all are the same."""
        data = json.dumps(record).encode()
        assert len(data) <= RECORD_BYTES, len(data)
        mine = torch.frombuffer(bytearray(data.ljust(RECORD_BYTES)), dtype=torch.uint8)
        silence = threading.Timer(_SECONDS_OF_SILENCE, _log.warning, (_waits(record),))
        silence.daemon = True
        silence.start()
        try:
            rows = all_gather(mine.unsqueeze(0).to(_device_of(self.group)), self.group).cpu()
        finally:
            silence.cancel()
        if (rows == rows[0]).all():
            rows = rows[:1]
        return [json.loads(bytes(row)) for row in rows.tolist()]


class Call:
    """This rank's part in a call of all ranks: its refusal or, in the first call, what the ranks must agree on."""

    __slots__ = ("_agreement", "_function", "fields", "is_first")

    def __init__(self, agreement: Agreement, function: str, is_first: bool):
        self._agreement, self._function, self.is_first = agreement, function, is_first
        self.fields: dict[str, Any] | None = None

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if not self.is_first:
            return
        if isinstance(error, Exception):
            self._agreement.tell(self._function, error)
        elif error is None and self.fields is not None:
            self._agreement.compare(self._function, self.fields)


def tensor_fields(device: torch.device, **tensors: Tensor | None) -> dict[str, Any]:
    """What ranks must agree on of the tensors of a call, besides their shapes."""
    needed = [name for name, x in tensors.items() if x is not None and x.requires_grad]
    return {
        "the kind of device": device.type,
        **{f"the dtype of {name}": "None" if x is None else _short(x.dtype) for name, x in tensors.items()},
        "the list of inputs that need a gradient": needed if arguments.needs_graph(*tensors.values()) else [],
    }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(value: Any) -> str:
    """A value as messages show it. A long one is cut and has its hash, so that texts differ where values do."""
    text = str(value)
    if len(text) <= _VALUE_CHARACTERS:
        return text
    return f"{text[:_VALUE_CHARACTERS]}... (hash {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"


def _words(message: str) -> str:
    """One line of ASCII that fits into a record however JSON writes it."""
    text = "".join(c if " " <= c <= "~" else "?" for c in " ".join(message.split()))
    return text if len(text) <= _REFUSAL_CHARACTERS else f"{text[:_REFUSAL_CHARACTERS]}..."


def _device_of(group: Any) -> torch.device:
    """Where the group's collectives take tensors: the CPU if it can, as gloo, otherwise this rank's GPU, as NCCL."""
    kinds = str(dist.get_backend_config(group))  # such as "cpu:gloo,cuda:nccl"
    if "cpu:" in kinds:
        return torch.device("cpu")
    bound = getattr(dist.group.WORLD if group is None else group, "bound_device_id", None)
    return bound or torch.device(kinds.partition(":")[0])  # without an index: the current one


def _waits(record: dict[str, Any]) -> str:
    refusal = f", to tell them that it refused its call: {record['refusal']}" if "refusal" in record else ""
    return f"{record['function']}: this rank has waited {_SECONDS_OF_SILENCE} s for the others of its group{refusal}"


def _disagreement(records: list[dict[str, Any]]) -> str | None:
    """What the ranks do not agree on, in words; None where they do."""
    functions = _ranks_by([record["function"] for record in records])
    refusals = _ranks_by([record.get("refusal") for record in records])
    refusals.pop(None, None)
    if refusals:
        function = ", ".join(functions)
        return f"{function}: " + "; ".join(f"{_join(r)} refused {_its(r)} call: {text}" for text, r in refusals.items())
    if len(functions) > 1:
        calls = "; ".join(f"{_join(ranks)} in {function}" for function, ranks in functions.items())
        return f"the ranks of the group are in different calls: {calls}"
    differing = []
    for name in dict.fromkeys(name for record in records for name in record["fields"]):
        values = _ranks_by([record["fields"].get(name, "missing") for record in records])
        if len(values) > 1:
            differing.append(f"{name} is " + ", ".join(f"{value} on {_join(ranks)}" for value, ranks in values.items()))
    if not differing:
        return None
    return f"{next(iter(functions))}: the ranks of the group must agree, but {'; '.join(differing)}"


def _ranks_by(values: list[Any]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def _join(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _its(ranks: list[int]) -> str:
    return "its" if len(ranks) == 1 else "their"

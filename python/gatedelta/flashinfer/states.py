"""States as FlashInfer's callers hold them, and checks of arguments that its functions share."""

from __future__ import annotations

import torch
from torch import Tensor

_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class States:
    """Initial and final states as the library takes them. Of tensors whose matrices are not contiguous, the rows in use
    are copied, and ``store`` writes them back."""

    def __init__(
        self, initial_state: Tensor | None, read: Tensor | None, final_state: Tensor | None, write: Tensor | None
    ) -> None:
        self._target, self._write = final_state, write
        self._rows = None
        in_place = final_state is not None and final_state is initial_state
        if initial_state is not None and not has_whole_matrices(initial_state):
            initial_state, read = _gather(initial_state, read)
        if final_state is not None and not has_whole_matrices(final_state):
            in_place = False
            final_state, write = self._rows, _ = _gather(final_state, write)
        self.arguments = {
            "initial_state": final_state if in_place else initial_state,
            "initial_state_indices": read,
            "final_state": final_state,
            "final_state_indices": write,
        }

    def store(self) -> None:
        if self._rows is None:
            return
        if self._write is None:
            self._target.copy_(self._rows)
        elif self._write.numel():
            # Padded rows repeat what the first other one writes: no wait for the number of those, and no race.
            stored = self._write >= 0
            rows = torch.where(stored, _range(stored), stored.int().argmax())
            self._target[self._write[rows].clamp_min(0)] = self._rows[rows]


def _gather(states: Tensor, slots: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if slots is None:
        return states.contiguous(), None
    return states[slots.clamp_min(0)].contiguous(), torch.where(slots < 0, -1, _range(slots))


def _range(like: Tensor) -> Tensor:
    return torch.arange(like.shape[0], device=like.device)


def has_whole_matrices(states: Tensor) -> bool:
    rows, columns = states.shape[-2:]
    return (states.stride(-1) == 1 or columns == 1) and (states.stride(-2) == columns or rows == 1)


def check_given(**tensors: Tensor) -> None:
    """Those a call cannot do without."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {'None' if tensor is None else type(tensor).__name__}")


def check_states(**states: Tensor | None) -> None:
    for name, tensor in states.items():
        if tensor is None or tensor.dtype in _STATE_DTYPES:
            continue
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            raise NotImplementedError(
                f"{name} is {tensor.dtype}: states of 8 bits are not supported, only float32, bfloat16 and float16"
            )
        raise ValueError(f"{name} must have dtype float32, bfloat16 or float16, not {tensor.dtype}")


def check_backend(backend: str, ours: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    if backend in theirs:
        raise NotImplementedError(f"backend {backend!r} names kernels of FlashInfer's own: pass 'auto'")
    if backend not in ours:
        raise ValueError(f"backend {backend!r} is unknown: pass 'auto'")

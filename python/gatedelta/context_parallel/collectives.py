"""What all collectives here share: a gather of rows, and words for the rank whose peers do not come."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


class _Waiting:
    """``with waiting:`` around a collective says what to do where it fails."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, RuntimeError):
            raise RuntimeError(
                "context parallelism: this rank waited for the others of its group in vain. Most often one of them "
                "has ended, has raised an error, or makes other calls: look for the first error of any rank. How long "
                "a rank waits is the group's timeout, init_process_group(timeout=...). torch.distributed says: "
                f"{error}"
            ) from error


waiting = _Waiting()


def all_gather(x: Tensor, group) -> Tensor:
    """[W * x.shape[0], ...]: concatenated, because gloo refuses a stack."""
    result = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    x = x.contiguous()
    with waiting:
        dist.all_gather_into_tensor(result, x, group=group)
    return result

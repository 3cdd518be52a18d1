"""A layer's input projections: a product each, or one product where their weights lie side by side in memory.

Nothing but the weights' addresses says which. What moves a weight (``model.to()``, ``load_state_dict(assign=True)``)
thereby ends the one product, and leaves no mark behind that says otherwise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Names of a layer's projections. What those of a group give is used as one tensor.
Groups = tuple[tuple[str, ...], ...]

# Up to so many tokens, which is decode, products are bound by launches and by reading the weights. With more of them
# each product fills a GPU by itself, and the rows that convolution, rule and norm read would lie apart for nothing.
FEW_TOKENS = 64
_ROWS = 8  # a group begins at a multiple of so many rows, thus of 16 bytes, in the weights and in what they give


def project(layer: nn.Module, hidden: Tensor, groups: Groups) -> list[Tensor]:
    """The results of each group's projections, side by side."""
    # A traced model has no addresses.
    if not torch.compiler.is_compiling() and hidden.shape[:-1].numel() <= FEW_TOKENS:
        whole, sizes = _whole(layer, groups)
        # Where autocast casts weights, that takes longer than one product saves.
        if whole is not None and whole.dtype == product_dtype(hidden) and not _records(layer, hidden, groups):
            parts = F.linear(hidden, whole).split([_filled_up(size) for size in sizes], -1)
            return [part if part.shape[-1] == size else part[..., :size] for part, size in zip(parts, sizes)]
    products = [[getattr(layer, name)(hidden) for name in group] for group in groups]
    return [group[0] if len(group) == 1 else torch.cat(group, -1) for group in products]


def product_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of a linear module's product: autocast's, where it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


@torch.inference_mode(False)  # a tensor that is made in that mode can never be trained
@torch.no_grad()
def fuse(layer: nn.Module, groups: Groups) -> bool:
    """Moves the weights into one tensor, if they can be moved and are not there already."""
    weights = [[_weight(layer, name) for name in group] for group in groups]
    every = [weight for group in weights for weight in group]
    if _whole(layer, groups)[0] is not None or not _can_move(every):
        return False
    rows = sum(_filled_up(sum(len(weight) for weight in group)) for group in weights)
    whole = every[0].new_zeros(rows, every[0].shape[1])
    begin = 0
    for group in weights:
        for weight in group:
            end = begin + len(weight)
            weight.data = whole[begin:end].copy_(weight)
            begin = end
        begin = _filled_up(begin)
    return True


@torch.inference_mode(False)
@torch.no_grad()
def unfuse(layer: nn.Module, groups: Groups) -> bool:
    """Gives weights that fuse() moved tensors of their own."""
    whole, _ = _whole(layer, groups)
    if whole is None or whole.untyped_storage().nbytes() != whole.nbytes:
        return False
    for group in groups:
        for name in group:
            weight = _weight(layer, name)
            weight.data = weight.clone()
    return True


def _filled_up(rows: int) -> int:
    return -(-rows // _ROWS) * _ROWS


def _weight(layer: nn.Module, name: str) -> nn.Parameter | None:
    """The weight of a projection that is a product with it and nothing more; None where one is wrapped or quantised,
    or has a bias, a hook or a forward of its own. Reads the modules' dictionaries: their attributes take longer than
    the rest.
    """
    linear = layer._modules.get(name)
    if type(linear) is not nn.Linear or linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear):
        return None
    weight = linear._parameters.get("weight")
    return weight if type(weight) is nn.Parameter and linear._parameters.get("bias") is None else None


def _whole(layer: nn.Module, groups: Groups) -> tuple[Tensor | None, list[int]]:
    """The weights as one matrix, and each group's rows; None where they do not lie side by side in one storage."""
    nothing = None, []
    first = _weight(layer, groups[0][0])
    if first is None or first.dim() != 2:
        return nothing
    begin, width = first.data_ptr(), first.shape[1]
    row_bytes, rows, sizes = width * first.element_size(), 0, []
    for group in groups:
        sizes.append(0)
        for name in group:
            weight = _weight(layer, name)
            if weight is None or weight.data_ptr() != begin + (rows + sizes[-1]) * row_bytes:
                return nothing
            if weight.dtype != first.dtype or weight.shape[1:] != first.shape[1:] or not weight.is_contiguous():
                return nothing
            sizes[-1] += weight.shape[0]
        rows += _filled_up(sizes[-1])
    storage = first.untyped_storage()
    if begin + rows * row_bytes > storage.data_ptr() + storage.nbytes():
        return nothing
    return first.as_strided((rows, width), (width, 1)), sizes


def _can_move(weights: list[nn.Parameter | None]) -> bool:
    """Whether the weights can be rows of one matrix. One that has a storage with others, such as a trainer's flat
    buffer, must stay there."""
    if any(weight is None or weight.is_meta or weight.dim() != 2 for weight in weights):
        return False
    alone = all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights)
    kinds = {(weight.dtype, weight.device, weight.shape[1]) for weight in weights}
    return alone and len(kinds) == 1 and len({weight.data_ptr() for weight in weights}) == len(weights)


def _records(layer: nn.Module, hidden: Tensor, groups: Groups) -> bool:
    """Whether autograd records the products."""
    if not torch.is_grad_enabled():
        return False
    return hidden.requires_grad or any(_weight(layer, name).requires_grad for group in groups for name in group)

"""Serving with a state pool: prefill, decode in place, and a draft of several tokens verified at once.

Every request owns one slot of the pool. The kernels read and write the slots themselves; nothing is gathered or copied.

Usage: python examples/python/decode_pool.py
"""

from __future__ import annotations

import torch
from gatedelta import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from torch import Tensor
from torch.nn import functional as F

KEY_HEADS, VALUE_HEADS, K, V = 2, 4, 64, 64


def random_tokens(rows: int, tokens: int, seed: int) -> dict[str, Tensor]:
    """What a layer's projections would give for these tokens."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, *shape, generator=generator)

    return {
        "q": F.normalize(randn(KEY_HEADS, K), dim=-1).bfloat16(),
        "k": F.normalize(randn(KEY_HEADS, K), dim=-1).bfloat16(),
        "v": randn(VALUE_HEADS, V).bfloat16(),
        "g": F.logsigmoid(randn(VALUE_HEADS)) / 16,
        "beta": randn(VALUE_HEADS).sigmoid(),
    }


@torch.inference_mode()
def main() -> None:
    pool = torch.zeros(8, VALUE_HEADS, V, K)  # [slots, heads, V, K]
    layout = {"state_v_first": True}

    # Prefill: three prompts of different lengths, packed into one row, into slots 5, 0 and 2.
    lengths = [100, 17, 64]
    prompt = random_tokens(1, sum(lengths), seed=1)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    slots = torch.tensor([5, 0, 2], dtype=torch.int32)
    fresh = torch.full_like(slots, -1)  # a negative slot to read from: start from zero
    chunk_gated_delta_rule(
        **prompt, cu_seqlens=offsets, initial_state=pool, initial_state_indices=fresh, final_state=pool,
        final_state_indices=slots, **layout,
    )  # fmt: skip

    # Decode: a batch with a padded row, whose slots are both negative: the call skips it.
    padded = torch.tensor([5, 0, 2, -1], dtype=torch.int32)
    in_place = {"initial_state": pool, "final_state": pool, **layout}
    for step in range(4):
        token = random_tokens(4, 1, seed=10 + step)
        o, _ = fused_recurrent_gated_delta_rule(
            **token, **in_place, initial_state_indices=padded, final_state_indices=padded
        )
        assert (o[3] == 0).all()

    # Draft verification: all four draft tokens are evaluated, then the sampler accepts some of each, and the states
    # advance by exactly those.
    draft = random_tokens(3, 4, seed=20)
    before = pool.clone()
    o, _ = fused_recurrent_gated_delta_rule(
        **draft, initial_state=pool, initial_state_indices=slots, output_final_state=False, **layout
    )
    assert torch.equal(pool, before)  # looking does not move a state
    accepted = torch.tensor([4, 0, 2])
    fused_recurrent_gated_delta_rule(
        **draft, **in_place, initial_state_indices=slots, final_state_indices=slots, accept_lengths=accepted,
        output_o=False,
    )  # fmt: skip

    # The same, request by request and token by token.
    check = before.clone()
    for row, slot in enumerate(slots.tolist()):
        for t in range(int(accepted[row])):
            one = {name: x[row : row + 1, t : t + 1] for name, x in draft.items()}
            index = torch.tensor([slot])
            expected, _ = fused_recurrent_gated_delta_rule(
                **one, initial_state=check, final_state=check, initial_state_indices=index, final_state_indices=index,
                **layout,
            )  # fmt: skip
            assert torch.equal(expected[0, 0], o[row, t])
    assert torch.equal(pool, check)
    print(f"prefill of {lengths}, 4 decode steps, drafts accepted {accepted.tolist()}: states agree bit for bit")


if __name__ == "__main__":
    main()

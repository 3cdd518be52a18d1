"""Speculative decoding with one state per request: the commit of the last window is part of the next verification.

A window of drafts is evaluated before it is known how many of them will be accepted, so its states must not be stored
yet. Instead of a state per draft, the engine keeps the accepted tokens (their q, k, v and gates) until the next window,
and puts them in front of it. `accept_lengths` then says after how many tokens the state is to be stored: after the old
ones, before the new ones. Each window reads a state once and writes it once, whatever its length.

Usage: python examples/python/verify_drafts.py [--device cuda]
"""

from __future__ import annotations

import argparse
import random
from itertools import chain, pairwise

import torch
from gatedelta import fused_recurrent_gated_delta_rule
from torch import Tensor

KEY_HEADS, VALUE_HEADS, D, VOCABULARY = 2, 4, 128, 50
REQUESTS, TOKENS, WINDOW = 5, 40, 4


class Model:
    """One layer whose projections are tables: a token's q, k, v, a and b are looked up, and its output gives the scores
    of the next token."""

    def __init__(self, device: str):
        self.device = device
        generator = torch.Generator().manual_seed(0)

        def table(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        heads = {"q": KEY_HEADS, "k": KEY_HEADS, "v": VALUE_HEADS}
        self.tables = {name: table(VOCABULARY, count, D).bfloat16() for name, count in heads.items()}
        self.tables |= {name: table(VOCABULARY, VALUE_HEADS) for name in ("g", "beta")}
        self.options = {
            "A_log": table(VALUE_HEADS), "dt_bias": table(VALUE_HEADS), "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True, "state_v_first": True,
        }  # fmt: skip
        self.scores = table(VALUE_HEADS * D, VOCABULARY)

    def integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def run(self, rows: list[list[int]], pool: Tensor, **more) -> list[list[int]]:
        """Runs tokens of every request on the states in the pool, in place. Returns the best next token after each."""
        ids = torch.tensor([*chain(*rows)], device=self.device)[None]
        lengths = torch.tensor([0, *map(len, rows)])
        slots = self.integers(list(range(len(rows))))
        o, _ = fused_recurrent_gated_delta_rule(
            **{name: table[ids] for name, table in self.tables.items()}, **self.options,
            cu_seqlens=lengths.cumsum(0).int().to(self.device), initial_state=pool, final_state=pool,
            initial_state_indices=slots, final_state_indices=slots, **more,
        )  # fmt: skip
        if o is None:
            return []
        best = (o[0].flatten(1).float() @ self.scores).argmax(-1).tolist()
        ends = lengths.cumsum(0).tolist()
        return [best[begin:end] for begin, end in pairwise(ends)]

    def new_pool(self) -> Tensor:
        return torch.zeros(REQUESTS, VALUE_HEADS, D, D, device=self.device)


def decode(model: Model) -> tuple[list[list[int]], Tensor]:
    """Token by token: what each request generates, and the states before its last token."""
    pool = model.new_pool()
    texts = [[request] for request in range(REQUESTS)]
    for _ in range(TOKENS):
        for text, best in zip(texts, model.run([text[-1:] for text in texts], pool)):
            text += best
    return texts, pool


def guess(truth: list[int], begin: int, generator: random.Random) -> list[int]:
    """In place of a draft model: the next tokens, each of them right four times in five."""
    drafts = truth[begin : begin + WINDOW - 1]
    return [token if generator.random() < 0.8 else (token + 1) % VOCABULARY for token in drafts]


def decode_with_drafts(model: Model, truths: list[list[int]]) -> tuple[list[list[int]], Tensor, list[int]]:
    """The same texts and states in fewer calls. Also returns how many tokens each window added."""
    pool, generator, accepted = model.new_pool(), random.Random(0), []
    texts = [[request] for request in range(REQUESTS)]
    uncommitted: list[list[int]] = [[] for _ in texts]  # accepted by the last window; the pool's state is before them
    while min(map(len, texts)) <= TOKENS:
        windows = [text[-1:] + guess(truth, len(text), generator) for text, truth in zip(texts, truths)]
        rows = [old + window for old, window in zip(uncommitted, windows)]
        commit = model.integers([len(old) for old in uncommitted])
        results = model.run(rows, pool, accept_lengths=commit)
        for i, (window, best) in enumerate(zip(windows, results)):
            best = best[len(uncommitted[i]) :]  # of the new tokens
            right = 0  # drafts
            while right + 1 < len(window) and window[right + 1] == best[right]:
                right += 1
            count = min(right + 1, TOKENS + 1 - len(texts[i]))  # the token after the last right draft comes for free
            texts[i] += best[:count]
            uncommitted[i] = window[:count]
            accepted.append(count)
    # At the end of a request, or before its state is shared, the last window is committed alone.
    model.run(uncommitted, pool, output_o=False)
    return texts, pool, accepted


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    model = Model(parser.parse_args().device)
    texts, pool = decode(model)
    drafted, drafted_pool, accepted = decode_with_drafts(model, texts)
    assert drafted == texts
    # On a GPU a window and single tokens may differ in the last bits: the kernels sum in different orders.
    torch.testing.assert_close(drafted_pool, pool, rtol=0, atol=1e-4 if pool.is_cuda else 0)
    windows = len(accepted) // REQUESTS
    print(f"{TOKENS} tokens of {REQUESTS} requests in {windows} windows: the texts and states of {TOKENS} single steps")


if __name__ == "__main__":
    main()

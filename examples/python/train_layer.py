"""Trains a small Gated DeltaNet layer on a recall task: the loss falls by more than half.

Each sample shows key/value pairs and then asks for the values of the keys in another order. Several samples are packed
into one row; cu_seqlens keeps them apart.

Usage: python examples/python/train_layer.py [--steps 60] [--compile]
"""

from __future__ import annotations

import argparse
import time

import torch
from gatedelta import chunk_gated_delta_rule, cu_seqlens_from_positions
from torch import Tensor, nn
from torch.nn import functional as F

KEYS, VALUES, PAIRS, SAMPLES = 16, 16, 8, 32


class GatedDeltaNet(nn.Module):
    """q, k, v, gate and beta from projections; l2norm, gate and sigmoid happen inside the kernel."""

    def __init__(self, width: int, key_heads: int = 2, value_heads: int = 4, head_dim: int = 32):
        super().__init__()
        self.heads = key_heads, key_heads, value_heads
        self.head_dim = head_dim
        self.in_proj = nn.Linear(width, sum(self.heads) * head_dim + 2 * value_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(value_heads).uniform_(0.01, 1).log())
        self.dt_bias = nn.Parameter(torch.full((value_heads,), -3.0))
        self.norm = nn.RMSNorm(head_dim)
        self.out_proj = nn.Linear(value_heads * head_dim, width, bias=False)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        widths = [heads * self.head_dim for heads in self.heads] + [self.heads[2]] * 2
        *qkv, a, b = self.in_proj(x).split(widths, dim=-1)
        # Views into one projection: the kernel reads them through their strides.
        q, k, v = (part.unflatten(-1, (heads, self.head_dim)) for part, heads in zip(qkv, self.heads))
        o, _ = chunk_gated_delta_rule(
            q, k, v, a, b, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            A_log=self.A_log, dt_bias=self.dt_bias, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        return self.out_proj(self.norm(o).flatten(2))


class Model(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.embed = nn.ModuleList([nn.Embedding(KEYS, width), nn.Embedding(VALUES + 1, width)])
        self.layer = GatedDeltaNet(width)
        self.head = nn.Linear(width, VALUES)

    def forward(self, keys: Tensor, values: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = self.embed[0](keys) + self.embed[1](values)
        return self.head(x + self.layer(x, cu_seqlens))


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values (VALUES = "asked for"), the values a question wants (-100 = no question), positions."""
    keys, values, wanted = [], [], []
    for _ in range(SAMPLES):
        shown = torch.randperm(KEYS, generator=generator)[:PAIRS]
        held = torch.randint(0, VALUES, (PAIRS,), generator=generator)
        order = torch.randperm(PAIRS, generator=generator)
        keys += [shown, shown[order]]
        values += [held, torch.full((PAIRS,), VALUES)]
        wanted += [torch.full((PAIRS,), -100), held[order]]
    return torch.cat(keys), torch.cat(values), torch.cat(wanted), torch.arange(2 * PAIRS).repeat(SAMPLES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--compile", action="store_true", help="train through torch.compile(fullgraph=True)")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model()
    forward = torch.compile(model, fullgraph=True) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    start = time.perf_counter()
    for step in range(options.steps):
        keys, values, wanted, positions = make_batch(generator)
        logits = forward(keys[None], values[None], cu_seqlens_from_positions(positions))
        loss = F.cross_entropy(logits[0], wanted, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:4}  loss {loss.item():.3f}")
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    print(f"{options.steps} steps in {time.perf_counter() - start:.1f} s, loss {first:.2f} -> {last:.2f}")
    assert last < first / 2, "the loss did not fall by half"


if __name__ == "__main__":
    main()

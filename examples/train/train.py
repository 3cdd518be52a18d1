"""Trains a small Gated DeltaNet language model on associative recall, with this library or in plain fp32 torch.

A sample is a list of pairs, "key value key value ...", and then some of these keys once more, in any order, each before
its value; the loss is taken where the model has to name a value. Both backends get the same parameters and the same
data, so that their curves differ by nothing but the arithmetic of the gated delta rule: the rest is fp32 on both sides.

Under torchrun the samples of a batch are one pack of tokens that is shared out to the ranks (context parallelism): the
curve is one process's.

Usage: python examples/train/train.py [--backend gatedelta|reference] [--device cpu|cuda] [--dtype bfloat16]
           [--steps 300] [--seed 0] [--out curve.json]
       torchrun --nproc-per-node 2 examples/train/train.py [--device cpu|cuda] ...
       python examples/train/plot.py reference.json curve.json... --out curves.png
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

import gatedelta
import reference
import torch
import torch.distributed as dist
from gatedelta import context_parallel
from torch import Tensor, nn
from torch.nn import functional as F

KEYS, VALUES, PAIRS, QUESTIONS = 16, 16, 12, 36  # 96 tokens a sample: a whole chunk and half of one
BATCH = 8


class GatedDeltaNet(nn.Module):
    """The layer of Qwen3-Next, small: a short convolution, two value heads to a key head, a gated norm.

    l2norm, the decay from `a`, A_log and dt_bias, and the sigmoid of beta happen inside the kernel, with gradients.
    """

    def __init__(self, width: int, dtype: torch.dtype | None, key_heads: int = 1, value_heads: int = 2, taps: int = 4):
        super().__init__()
        self.heads = key_heads, key_heads, value_heads
        self.dtype = dtype  # of q, k and v in the kernel; None = the reference
        self.head_dim = 128  # what the kernels of a GPU are made for
        channels = sum(self.heads) * self.head_dim
        self.in_proj = nn.Linear(width, channels, bias=False)
        self.convolution = nn.Conv1d(channels, channels, taps, groups=channels, padding=taps - 1, bias=False)
        self.gate_proj = nn.Linear(width, value_heads * self.head_dim, bias=False)
        self.scalar_proj = nn.Linear(width, 2 * value_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(value_heads).uniform_(1, 4).log())
        self.dt_bias = nn.Parameter(torch.full((value_heads,), -6.0))  # remember for hundreds of tokens, at first
        self.norm = nn.RMSNorm(self.head_dim)
        self.out_proj = nn.Linear(value_heads * self.head_dim, width, bias=False)

    def forward(self, x: Tensor, context: context_parallel.Context | None) -> Tensor:
        if context is None:
            mixed = self.convolution(self.in_proj(x).mT)[..., : x.shape[1]]  # causal: what looks ahead is cut off
            mixed = F.silu(mixed).mT
        else:
            mixed, _ = context_parallel.causal_conv1d(
                self.in_proj(x), self.convolution.weight.squeeze(1), activation="silu", cp_context=context
            )
        parts = mixed.split([heads * self.head_dim for heads in self.heads], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        a, b = self.scalar_proj(x).chunk(2, dim=-1)
        gate = F.silu(self.gate_proj(x)).unflatten(-1, (-1, self.head_dim))
        o = self.norm(self.recall(q, k, v, a, b, context)) * gate
        return self.out_proj(o.flatten(2))

    def recall(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, context: context_parallel.Context | None
    ) -> Tensor:
        if self.dtype is None:
            return reference.gated_delta_rule(q, k, v, a, b, self.A_log, self.dt_bias)
        o, _ = gatedelta.chunk_gated_delta_rule(
            *(x.to(self.dtype) for x in (q, k, v)), a, b, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            A_log=self.A_log, dt_bias=self.dt_bias, use_beta_sigmoid_in_kernel=True, cp_context=context,
        )  # fmt: skip
        return o.float()


class Block(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype | None):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.mixer = GatedDeltaNet(width, dtype)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, context: context_parallel.Context | None) -> Tensor:
        x = x + self.mixer(self.norms[0](x), context)
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype | None, width: int = 64, layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(KEYS + VALUES, width)
        self.blocks = nn.ModuleList([Block(width, dtype) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, KEYS + VALUES, bias=False)

    def forward(self, tokens: Tensor, context: context_parallel.Context | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, context)
        return self.head(self.norm(x))


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens, and after each the one that is to be predicted (-100: nothing is)."""
    keys = torch.rand(BATCH, KEYS, generator=generator).argsort(1)[:, :PAIRS]
    values = KEYS + torch.randint(VALUES, (BATCH, PAIRS), generator=generator)
    asked = torch.randint(PAIRS, (BATCH, QUESTIONS), generator=generator)
    tokens = torch.stack(
        [torch.cat([keys, keys.gather(1, asked)], dim=1), torch.cat([values, values.gather(1, asked)], dim=1)], dim=2
    ).flatten(1)
    wanted = torch.full_like(tokens, -100)
    wanted[:, 2 * PAIRS :: 2] = tokens[:, 2 * PAIRS + 1 :: 2]
    return tokens, wanted


def share_of(batch: Tensor, rank: int, ranks: int) -> Tensor:
    """The tokens of a batch as one pack, and of these the ones that a rank holds."""
    return batch.flatten().chunk(ranks)[rank].unsqueeze(0)


def train(
    backend: str, device: str, dtype: str, steps: int, seed: int, log=lambda step, loss: None, ranks: int = 1
) -> list[float]:
    """The loss of every step. With several ranks this is one of them, and has the parameters that all have."""
    torch.backends.cudnn.allow_tf32 = False  # the convolution is fp32 on a GPU, too
    torch.manual_seed(seed)  # parameters are made on the CPU: the same ones for every device
    model = Model(getattr(torch, dtype) if backend == "gatedelta" else None).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20)
    generator = torch.Generator().manual_seed(seed)
    context, rank = None, 0
    if ranks > 1:
        sample = 2 * (PAIRS + QUESTIONS)
        context, rank = context_parallel.build_context(range(0, BATCH * sample + 1, sample)), dist.get_rank()
    losses = []
    for step in range(steps):
        tokens, wanted = (x.to(device) for x in make_batch(generator))
        answers = (wanted >= 0).sum()
        if ranks > 1:
            tokens, wanted = (share_of(x, rank, ranks) for x in (tokens, wanted))
        logits = model(tokens, context)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum") / answers
        optimizer.zero_grad()
        loss.backward()
        if ranks > 1:  # every parameter's gradient is a rank's share
            loss = loss.detach()
            for x in (loss, *(parameter.grad for parameter in model.parameters())):
                dist.all_reduce(x)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        losses.append(loss.item())
        log(step, losses[-1])
    return losses


def describe(options: argparse.Namespace, losses: list[float], seconds: float) -> dict:
    """The curve, and what it is of (results/SCHEMA.md)."""
    on_gpu = options.device.startswith("cuda")
    return {
        "command": "train",
        "backend": options.backend,
        "device": options.device,
        "processor": torch.cuda.get_device_name(options.device) if on_gpu else platform.machine(),
        "isa": None if on_gpu else gatedelta.info()["cpu_isa_best"],
        "dtype": options.dtype if options.backend == "gatedelta" else "float32",
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "versions": {"gatedelta": gatedelta.__version__, "torch": torch.__version__},
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=["gatedelta", "reference"], default="gatedelta")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16",
                        help="of q, k and v in the library's kernels; the reference is fp32")  # fmt: skip
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the curve as JSON (results/SCHEMA.md)")
    options = parser.parse_args()

    def log(step: int, loss: float) -> None:
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:4}  loss {loss:.3f}", flush=True)

    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun's
    if ranks > 1:
        if options.backend != "gatedelta":
            parser.error("the reference runs on one rank alone")
        if options.device == "cuda":
            options.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(options.device)
        dist.init_process_group("nccl" if options.device.startswith("cuda") else "gloo")
        if dist.get_rank() != 0:
            log = lambda step, loss: None  # noqa: E731
    start = time.perf_counter()
    losses = train(options.backend, options.device, options.dtype, options.steps, options.seed, log, ranks)
    if ranks > 1:
        is_first = dist.get_rank() == 0
        dist.destroy_process_group()
        if not is_first:
            return
    seconds = time.perf_counter() - start
    print(f"{options.backend} on {options.device}: {options.steps} steps in {seconds:.1f} s")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(describe(options, losses, seconds), indent=1) + "\n")


if __name__ == "__main__":
    main()

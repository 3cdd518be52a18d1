"""The gated delta rule in plain torch and fp32, differentiated by autograd: what the library is compared with.

Chunks of 64 tokens as in docs/math.md, form B, whose symbols are used here. It is written to be read, not to be fast.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """As chunk_gated_delta_rule with l2norm, gate and sigmoid of beta in the kernel; starts from zero states."""
    tokens, key_dim, group = q.shape[1], q.shape[3], v.shape[2] // q.shape[2]
    padding = -tokens % CHUNK
    q, k = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    beta = b.float().sigmoid()

    def by_head(x: Tensor, repeats: int = 1) -> Tensor:
        """[B, T, H, ...] as [B, value head, chunk, token, ...]; padding tokens are zero and write nothing."""
        x = F.pad(x.float().movedim(1, -1), (0, padding)).movedim(-1, 2)
        return x.repeat_interleave(repeats, dim=1).unflatten(2, (-1, CHUNK))

    q, k, v, g, beta = by_head(q, group), by_head(k, group), by_head(v), by_head(g), by_head(beta)
    gates = g.cumsum(-1)  # b_i
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    difference = gates[..., :, None] - gates[..., None, :]
    decay = difference.masked_fill(~lower, -torch.inf).exp()  # Gamma
    scores = key_dim**-0.5 * decay * (q @ k.mT)  # P
    system = (beta[..., None] * decay * (k @ k.mT)).tril(-1)  # script L
    from_start, to_end = gates.exp()[..., None], (gates[..., -1:] - gates).exp()[..., None]  # gamma, delta

    state = q.new_zeros(*q.shape[:2], key_dim, v.shape[-1])
    outputs = []
    for c in range(q.shape[2]):
        unknown = v[:, :, c] - from_start[:, :, c] * (k[:, :, c] @ state)  # W
        right = beta[:, :, c, :, None] * unknown
        written = torch.linalg.solve_triangular(system[:, :, c], right, upper=False, unitriangular=True)  # U
        read = key_dim**-0.5 * from_start[:, :, c] * (q[:, :, c] @ state)
        outputs.append(read + scores[:, :, c] @ written)
        state = from_start[:, :, c, -1:] * state + k[:, :, c].mT @ (to_end[:, :, c] * written)
    return torch.cat(outputs, dim=2)[:, :, :tokens].transpose(1, 2)

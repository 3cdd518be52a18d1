"""Forward and backward on numpy arrays, without torch, checked against the definition.

Usage: python examples/python/numpy_forward.py
"""

from __future__ import annotations

import gatedelta.numpy as gd
import numpy as np


def recurrence(q, k, v, g, beta):
    """The definition, one head, in double precision: q, k [T, K]; v [T, V]; g, beta [T]."""
    state = np.zeros((k.shape[1], v.shape[1]))
    o = np.empty(v.shape)
    for t in range(len(q)):
        state *= np.exp(g[t])
        state += beta[t] * np.outer(k[t], v[t] - k[t] @ state)
        o[t] = q[t] @ state / np.sqrt(k.shape[1])
    return o, state


def main() -> None:
    rng = np.random.default_rng(0)
    B, T, H, K, V = 1, 200, 2, 64, 32
    # One buffer for q, k and v, as a fused projection leaves it; the views are used as they are.
    qkv = rng.standard_normal((B, T, H, 2 * K + V), dtype=np.float32) * K**-0.5
    q, k, v = np.split(qkv, [K, 2 * K], axis=-1)
    g = -0.1 * rng.random((B, T, H), dtype=np.float32)
    beta = rng.random((B, T, H), dtype=np.float32)

    result = gd.forward(q, k, v, g, beta, output_final_state=True, save=True)
    for head in range(H):
        o, state = recurrence(*(x[0, :, head].astype(np.float64) for x in (q, k, v, g, beta)))
        np.testing.assert_allclose(result.o[0, :, head], o, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result.final_state[0, head], state, rtol=1e-4, atol=1e-5)

    do = np.ones_like(result.o)
    gradients = gd.backward(q, k, v, g, beta, do, saved=result.saved)
    print(f"o {result.o.shape}, final state {result.final_state.shape}: as the recurrence says")
    print("gradient norms:", {name: round(float(np.linalg.norm(x)), 3) for name, x in gradients._asdict().items()
                              if x is not None})  # fmt: skip


if __name__ == "__main__":
    main()

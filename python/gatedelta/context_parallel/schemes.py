"""Schemes of the exchange between ranks, the bytes that each one receives, and the choice of one. Plain arithmetic:
neither torch nor a group."""

from __future__ import annotations

SCHEMES = ("auto", "gather", "scatter", "neighbour")
# "auto" scatters where a rank would gather more than this. Below, the latency of a second collective costs more.
SCATTER_BYTES = 16 << 20


def bytes_received(scheme: str, ranks: int, slots: int, heads: int, K: int, V: int, backward: bool) -> int:
    """Bytes that one rank receives for one layer and direction, in fp32. slots: pieces of a rank. Where ranks do not
    divide heads, the rank that receives most counts. The backward reuses the transitions of the forward."""
    value, both = heads * K * V * 4, heads * K * ((0 if backward else K) + V) * 4
    if scheme == "gather":
        return (ranks - 1) * slots * both
    if scheme == "scatter":
        share = -(-heads // ranks)
        return slots * ((ranks - 1) * share * (both // heads) + (heads - heads // ranks) * (value // heads))
    return slots * value


def choose(scheme: str, ranks: int, slots: int, heads: int, K: int, V: int) -> str:
    if scheme not in ("auto", "neighbour"):
        return scheme
    return "scatter" if bytes_received("gather", ranks, slots, heads, K, V, False) > SCATTER_BYTES else "gather"

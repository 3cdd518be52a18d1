"""Adapters for other implementations, one module each. The library knows nothing of them.

An adapter has

    NAME                      what tables call it
    version() -> str
    chunk(q, k, v, g, beta, initial_state) -> (o, final_state)
    recurrent(q, k, v, g, beta, initial_state) -> (o, final_state)

on torch tensors [B, T, H, D] with g the log decay and beta after its sigmoid, no l2norm, scale K^-1/2, gradients by
autograd through `chunk`.
"""

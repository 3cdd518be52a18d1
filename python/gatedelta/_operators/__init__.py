"""The library on torch tensors, below the public functions: operators with their gradients, checks of arguments, and
the stages of context parallelism. ``gatedelta.torch`` and ``gatedelta.context_parallel`` stand on it."""

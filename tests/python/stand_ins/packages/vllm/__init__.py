"""A stand-in for vLLM: the few names that gatedelta.vllm touches, with the shapes they have in vLLM 0.32."""

__version__ = "0.32.0"

"""The torch code in transformers' Qwen3-Next model: what runs where no kernel package is installed."""

from __future__ import annotations

import inspect

import transformers
from transformers.models.qwen3_next import modeling_qwen3_next as model

NAME = "transformers"

# The functions themselves, without the wrapper that looks for kernel packages.
_chunk = inspect.unwrap(model.torch_chunk_gated_delta_rule)
_recurrent = inspect.unwrap(model.torch_recurrent_gated_delta_rule)


def version() -> str:
    return transformers.__version__


def chunk(q, k, v, g, beta, initial_state):
    return _chunk(q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True)


def recurrent(q, k, v, g, beta, initial_state):
    return _recurrent(q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True)

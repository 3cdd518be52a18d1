"""The gated delta rule on numpy arrays, without torch.

Arrays are float32, float16 or (with the ml_dtypes package) bfloat16, of any strides that are not negative, as long as
the last dimension of q, k, v, the two last of a state, and cu_seqlens are contiguous; nothing is copied. Arguments
mean what they mean in ``gatedelta.torch``; the keywords of ``Layer`` are common to all functions. A refused call raises
TypeError or ValueError, or UnsupportedError where this build or machine lacks something, and has written nothing.
"""

from __future__ import annotations

from .._extras import explain
from .._lib import Saved, UnsupportedError

try:
    from .conv1d import Conv1d, Conv1dGradients, causal_conv1d, causal_conv1d_backward
    from .layer_step import layer_step
    from .norm import NormGradients, rms_norm_gated, rms_norm_gated_backward
    from .rule import Forward, Gradients, Layer, Recurrent, backward, forward, recurrent
except ModuleNotFoundError as error:
    explain(error)

__all__ = [
    "Conv1d", "Conv1dGradients", "Forward", "Gradients", "Layer", "NormGradients", "Recurrent", "Saved",
    "UnsupportedError",
    "backward", "causal_conv1d", "causal_conv1d_backward", "forward", "layer_step", "recurrent", "rms_norm_gated",
    "rms_norm_gated_backward",
]  # fmt: skip

"""RMSNorm of the Gemma kind: the gain is 1 + weight."""

import torch
from torch import Tensor


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x · rsqrt(mean(x²) + eps) · (1 + weight) over the last dimension, in FP32 and left there.

    FP64 stays FP64.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    gain = 1.0 + weight.to(x.dtype)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def rms_norm(
    x_TC: Tensor, weight_C: Tensor, eps: float, residual_TC: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    if residual_TC is None:
        return normalise(x_TC, weight_C, eps).to(x_TC.dtype)
    # The norm reads the sum as it is stored, rounded to the stream's dtype.
    stream_TC = x_TC + residual_TC
    return normalise(stream_TC, weight_C, eps).to(x_TC.dtype), stream_TC

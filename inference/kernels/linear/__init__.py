"""Matrix product of tokens with a weight."""

from typing import NamedTuple

import torch
from torch import Tensor

from inference.kernels.dispatch import use_kernel
from inference.kernels.linear import reference
from inference.kernels.mxfp8 import MXFP8Tensor, tensors_of

__all__ = ["SwiGLU", "linear"]

OP = "linear"


class SwiGLU(NamedTuple):
    """Parameters of `swiglu_oai`."""

    alpha: float
    limit: float
    beta: float = 1.0


def linear(
    x_TX: Tensor,
    weight_YX: Tensor | MXFP8Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    swiglu: SwiGLU | None = None,
) -> Tensor:
    """y = x Wᵀ, summed in FP32; a token's result does not depend on the other tokens.

    Args:
        x_TX: [T, X].
        weight_YX: [Y, X], MXFP8, or of the same dtype unless `out_dtype` is FP32.
        out_dtype: FP32 gives the FP32 product whatever the operands and autocast are; None gives
            their dtype.
        swiglu: weight rows are all gates and then all ups, and the result is
            `swiglu_oai(y, ...)`, y rounded to the output's dtype before.

    Returns:
        [T, Y]; [T, Y / 2] with `swiglu`.
    """
    on_cuda = use_kernel(OP, x_TX, *tensors_of(weight_YX))
    if x_TX.shape[-1] != weight_YX.shape[-1]:
        raise ValueError(
            f"{OP}: x_TX has {x_TX.shape[-1]} columns and weight_YX {weight_YX.shape[-1]}"
        )
    if out_dtype not in (None, torch.float32):
        raise TypeError(f"{OP}: out_dtype is {out_dtype}, needs float32 or None")
    if swiglu is not None and weight_YX.shape[0] % 2:
        raise ValueError(f"{OP}: {weight_YX.shape[0]} rows are not gates and as many ups")
    if not on_cuda:
        return reference.linear(x_TX, weight_YX, out_dtype, swiglu)
    if not isinstance(weight_YX, MXFP8Tensor):
        from inference.kernels.linear import kernel

        return kernel.linear(x_TX, weight_YX, out_dtype, swiglu)
    from inference.kernels.linear import mxfp8_kernel

    return mxfp8_kernel.linear(x_TX, weight_YX, out_dtype, swiglu)

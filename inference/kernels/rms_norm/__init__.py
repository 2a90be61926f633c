"""RMSNorm, alone or fused with the residual addition before it."""

from typing import overload

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel
from inference.kernels.rms_norm import reference


@overload
def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float, residual: None = None) -> Tensor: ...


@overload
def rms_norm(
    x_TC: Tensor, weight_C: Tensor, eps: float, residual: Tensor
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x_TC: Tensor, weight_C: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """x · rsqrt(mean(x²) + eps) · (1 + weight): FP32 inside, one cast to the dtype of `x_TC`.

    The CPU keeps FP64 FP64. Differentiable in `x_TC`, `weight_C` and `residual`: once on CUDA,
    where the same inputs give the same bits. Kept for the backward pass: what was normed (`x_TC`
    or the new stream).

    Args:
        x_TC: [..., C].
        weight_C: [C]; zero is the identity gain.
        residual: the stream before `x_TC`, same shape and dtype.

    Returns:
        The norm; with `residual`, (norm of the new stream, new stream `x_TC + residual`).
    """
    on_gpu = use_kernel("rms_norm", x_TC, weight_C, residual)
    expect_shape("rms_norm", "weight_C", weight_C, tuple(x_TC.shape[-1:]))
    if residual is not None:
        expect_shape("rms_norm", "residual", residual, tuple(x_TC.shape))
        expect_dtype("rms_norm", "residual", residual, x_TC.dtype)
    if on_gpu:
        if torch.is_grad_enabled():
            from inference.kernels.rms_norm.function import RMSNorm

            return RMSNorm.apply(x_TC, weight_C, eps, residual)
        from inference.kernels.rms_norm import kernel

        return kernel.rms_norm(x_TC, weight_C, eps, residual)
    return reference.rms_norm(x_TC, weight_C, eps, residual)

"""Norm and rotate the heads of one kind: the training form of `qk_norm_rope_write`."""

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel
from inference.kernels.qk_norm_rope import reference

OP = "qk_norm_rope"


def qk_norm_rope(x_THD: Tensor, weight_D: Tensor, cos_sin_TX: Tensor, *, eps: float) -> Tensor:
    """Gemma RMSNorm over D, then RoPE of the first X dims in pairs (i, i + X/2).

    FP32 inside (the CPU keeps FP64 FP64), one cast to the dtype of `x_THD`. Differentiable in
    `x_THD` and `weight_D`: once on CUDA, where the same inputs give the same bits. Kept for the
    backward pass: `x_THD`.

    Args:
        x_THD: [T, H, D]; on CUDA the last dim is dense, the others need not be.
        weight_D: [D]; zero is the identity gain.
        cos_sin_TX: [T, X] FP32: cosines of the X/2 angles of each token's position, then their
            sines. It gets no gradient.

    Returns:
        [T, H, D]
    """
    on_gpu = use_kernel(OP, x_THD, weight_D, cos_sin_TX)
    num_tokens, _, head_dim = x_THD.shape
    rotary_dim = cos_sin_TX.shape[-1]
    expect_shape(OP, "weight_D", weight_D, (head_dim,))
    expect_shape(OP, "cos_sin_TX", cos_sin_TX, (num_tokens, rotary_dim))
    expect_dtype(OP, "cos_sin_TX", cos_sin_TX, torch.float32)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"{OP}: X={rotary_dim} must be even, above 0 and at most D={head_dim}")
    if on_gpu:
        from inference.kernels.qk_norm_rope.function import QKNormRope

        return QKNormRope.apply(x_THD, weight_D, cos_sin_TX, eps)
    return reference.qk_norm_rope(x_THD, weight_D, cos_sin_TX.detach(), eps)

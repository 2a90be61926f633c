"""Norm and rotation of heads with their gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from inference.kernels.qk_norm_rope.kernel import qk_norm_rope, qk_norm_rope_backward


class QKNormRope(torch.autograd.Function):
    """`qk_norm_rope` without its checks; needs no CUDA where Triton interprets."""

    @staticmethod
    def forward(
        ctx: Any, x_THD: Tensor, weight_D: Tensor, cos_sin_TX: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x_THD, weight_D, cos_sin_TX)
        ctx.eps = eps
        return qk_norm_rope(x_THD, weight_D, cos_sin_TX, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        x_THD, weight_D, cos_sin_TX = ctx.saved_tensors
        gradients = qk_norm_rope_backward(
            x_THD, weight_D, cos_sin_TX, ctx.eps, grad_THD, ctx.needs_input_grad[1]
        )
        return *gradients, None, None

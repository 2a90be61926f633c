"""RMSNorm with its gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from inference.kernels.rms_norm.backward_kernel import rms_norm_backward
from inference.kernels.rms_norm.kernel import rms_norm


class RMSNorm(torch.autograd.Function):
    """`rms_norm` without its checks; needs no CUDA where Triton interprets."""

    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, weight_C: Tensor, eps: float, residual_TC: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        result = rms_norm(x_TC, weight_C, eps, residual_TC)
        normed_TC = x_TC if residual_TC is None else result[1]
        ctx.save_for_backward(normed_TC, weight_C)
        ctx.eps, ctx.has_residual = eps, residual_TC is not None
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_out_TC: Tensor | None, grad_stream_TC: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        x_TC, weight_C = ctx.saved_tensors
        grad_x_TC, grad_weight_C = grad_stream_TC, None
        if grad_out_TC is not None:
            grad_x_TC, grad_weight_C = rms_norm_backward(
                x_TC, weight_C, ctx.eps, grad_out_TC, grad_stream_TC, ctx.needs_input_grad[1]
            )
        return grad_x_TC, grad_weight_C, None, grad_x_TC if ctx.has_residual else None

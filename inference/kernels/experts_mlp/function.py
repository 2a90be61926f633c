"""Forward and backward pass over rows sorted by expert."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from inference.kernels.experts_mlp import rows_kernel
from inference.kernels.experts_mlp.choices import Choices
from inference.kernels.experts_mlp.products import product, weight_gradient
from inference.kernels.mxfp8 import MXFP8Tensor, tensors_of


class ExpertsMLP(torch.autograd.Function):
    """`experts_mlp` without its checks; needs no CUDA where Triton interprets."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TC: Tensor,
        ids_TA: Tensor,
        weights_TA: Tensor,
        gate_up: Tensor | MXFP8Tensor,
        down: Tensor | MXFP8Tensor,
        alpha: float,
        limit: float,
    ) -> Tensor:
        x_TC, weights_TA = x_TC.contiguous(), weights_TA.contiguous()
        choices = Choices.of(ids_TA, gate_up.shape[0])
        x_XC = rows_kernel.scatter(x_TC, choices)
        gate_up_XN = product(x_XC, gate_up, choices, transposed=True)
        del x_XC
        hidden_XI = rows_kernel.activation(gate_up_XN, weights_TA, choices, alpha, limit)
        needs_gate_up = ctx.needs_input_grad[3]
        ctx.save_for_backward(
            x_TC if needs_gate_up else None, weights_TA, gate_up_XN, *tensors_of(gate_up, down)
        )
        ctx.choices, ctx.alpha, ctx.limit = choices, alpha, limit
        return rows_kernel.combine(product(hidden_XI, down, choices, transposed=True), choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weights_TA, gate_up_XN, *experts = ctx.saved_tensors
        gate_up, down = experts if len(experts) == 2 else _mxfp8(*experts)
        needs_x, _, _, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        choices = ctx.choices
        grad_XC = rows_kernel.scatter(grad_TC.contiguous(), choices)
        hidden_XI = product(grad_XC, down, choices, transposed=False)
        grad_gate_up_XN, grad_weights_TA = rows_kernel.activation_backward(
            hidden_XI, gate_up_XN, weights_TA, choices, ctx.alpha, ctx.limit
        )
        grad_x_TC = grad_gate_up = grad_down = None
        if needs_down:
            grad_down = weight_gradient(grad_XC, hidden_XI, choices)
        del grad_XC, hidden_XI
        if needs_x:
            grad_x_XC = product(grad_gate_up_XN, gate_up, choices, transposed=False)
            grad_x_TC = rows_kernel.combine(grad_x_XC, choices)
            del grad_x_XC
        if needs_gate_up:
            grad_gate_up = weight_gradient(
                grad_gate_up_XN, rows_kernel.scatter(x_TC, choices), choices
            )
        return grad_x_TC, None, grad_weights_TA, grad_gate_up, grad_down, None, None


def _mxfp8(*tensors: Tensor) -> tuple[MXFP8Tensor, MXFP8Tensor]:
    return MXFP8Tensor(*tensors[:2]), MXFP8Tensor(*tensors[2:])

"""SwiGLU with its gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from inference.kernels.swiglu_oai.backward_kernel import swiglu_oai_backward
from inference.kernels.swiglu_oai.kernel import swiglu_oai


class SwiGLU(torch.autograd.Function):
    """`swiglu_oai` without its checks; needs no CUDA where Triton interprets."""

    @staticmethod
    def forward(ctx: Any, gate_up_TX: Tensor, alpha: float, limit: float, beta: float) -> Tensor:
        ctx.save_for_backward(gate_up_TX)
        ctx.parameters = alpha, limit, beta
        return swiglu_oai(gate_up_TX, alpha, limit, beta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None, None]:
        (gate_up_TX,) = ctx.saved_tensors
        return swiglu_oai_backward(gate_up_TX, grad_out, *ctx.parameters), None, None, None

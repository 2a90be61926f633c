"""The gradient of SwiGLU with clamps, a tile of a row per program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.swiglu_oai.kernel import clamped


@triton.jit
def _swiglu_oai_backward_kernel(
    gate_up_ptr,
    grad_out_ptr,
    grad_ptr,
    stride_row,
    width,
    alpha,
    limit,
    beta,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    # [BLOCK]
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < width
    p_gate = gate_up_ptr + i_row * stride_row + o_i
    b_x = tl.load(p_gate, mask=m_i, other=0.0).to(tl.float32)
    b_y = tl.load(p_gate + width, mask=m_i, other=0.0).to(tl.float32)
    b_grad = tl.load(grad_out_ptr + i_row * width + o_i, mask=m_i, other=0.0).to(tl.float32)
    b_gate, b_up = clamped(b_x, b_y, limit)
    b_sigmoid = tl.sigmoid(alpha * b_gate)
    b_slope = b_sigmoid * (1.0 + alpha * b_gate * (1.0 - b_sigmoid))
    b_grad_gate = tl.where(b_x <= limit, b_grad * (b_up + beta) * b_slope, 0.0)
    m_up = (b_y >= -limit) & (b_y <= limit)
    b_grad_up = tl.where(m_up, b_grad * b_gate * b_sigmoid, 0.0)
    p_grad = grad_ptr + i_row * 2 * width + o_i
    dtype: tl.constexpr = grad_ptr.dtype.element_ty
    tl.store(p_grad, b_grad_gate.to(dtype), mask=m_i)
    tl.store(p_grad + width, b_grad_up.to(dtype), mask=m_i)


def swiglu_oai_backward(
    gate_up_TX: Tensor, grad_out_TI: Tensor, alpha: float, limit: float, beta: float
) -> Tensor:
    """The gradient of `gate_up_TX`, whose columns are dense."""
    width = gate_up_TX.shape[-1] // 2
    gate_up = gate_up_TX.reshape(-1, 2 * width)
    grad = torch.empty(gate_up_TX.shape, dtype=gate_up_TX.dtype, device=gate_up_TX.device)
    if grad.numel():
        block = min(1024, triton.next_power_of_2(width))
        _swiglu_oai_backward_kernel[(gate_up.shape[0], triton.cdiv(width, block))](
            gate_up,
            grad_out_TI.contiguous(),
            grad,
            gate_up.stride(0),
            width,
            alpha,
            limit,
            beta,
            BLOCK=block,
            num_warps=4,
        )
    return grad

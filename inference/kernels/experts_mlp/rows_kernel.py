"""What happens to rows between the grouped products; each kernel reads and writes a row once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.experts_mlp.choices import Choices
from inference.kernels.swiglu_oai.kernel import clamped


@triton.jit
def _scatter_kernel(
    x_ptr, ids_ptr, row_ptr, out_ptr, width, NUM_CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    """A piece of a token's row, written to the rows of its choices."""
    i_token = tl.program_id(0).to(tl.int64)
    # [BLOCK]
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + i_token * width + o_c, mask=o_c < width)
    for a in tl.static_range(NUM_CHOICES):
        i_expert = tl.load(ids_ptr + i_token * NUM_CHOICES + a)
        i_row = tl.load(row_ptr + i_token * NUM_CHOICES + a).to(tl.int64)
        m_row = o_c < tl.where(i_expert >= 0, width, 0)
        tl.store(out_ptr + i_row * width + o_c, b_x, mask=m_row)


@triton.jit
def _combine_kernel(
    rows_ptr, ids_ptr, row_ptr, out_ptr, width, NUM_CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    """A piece of the sum of a token's rows, in the order of its choices."""
    i_token = tl.program_id(0).to(tl.int64)
    # [BLOCK]
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for a in tl.static_range(NUM_CHOICES):
        i_expert = tl.load(ids_ptr + i_token * NUM_CHOICES + a)
        i_row = tl.load(row_ptr + i_token * NUM_CHOICES + a).to(tl.int64)
        m_row = o_c < tl.where(i_expert >= 0, width, 0)
        b_sum += tl.load(rows_ptr + i_row * width + o_c, mask=m_row, other=0.0).to(tl.float32)
    p_out = out_ptr + i_token * width + o_c
    tl.store(p_out, b_sum.to(out_ptr.dtype.element_ty), mask=o_c < width)


@triton.jit
def _activation_kernel(
    gate_up_ptr, choice_ptr, weight_ptr, out_ptr, width, alpha, limit, BLOCK: tl.constexpr
):
    """weight · swiglu_oai of a row."""
    i_row = tl.program_id(0).to(tl.int64)
    b_weight = tl.load(weight_ptr + tl.load(choice_ptr + i_row)).to(tl.float32)
    # [BLOCK]
    o_i = tl.arange(0, BLOCK)
    m_i = o_i < width
    p_gate = gate_up_ptr + i_row * 2 * width + o_i
    b_gate = tl.load(p_gate, mask=m_i, other=0.0)
    b_up = tl.load(p_gate + width, mask=m_i, other=0.0)
    b_gate, b_up = clamped(b_gate, b_up, limit)
    b_out = b_gate * tl.sigmoid(alpha * b_gate) * (b_up + 1) * b_weight
    tl.store(out_ptr + i_row * width + o_i, b_out.to(out_ptr.dtype.element_ty), mask=m_i)


@triton.jit
def _activation_backward_kernel(
    gate_up_ptr,
    choice_ptr,
    weight_ptr,
    hidden_ptr,
    grad_gate_up_ptr,
    grad_weight_ptr,
    width,
    alpha,
    limit,
    BLOCK: tl.constexpr,
):
    """Gradients of a row; `hidden_ptr` holds that of its result and gets the result instead."""
    i_row = tl.program_id(0).to(tl.int64)
    i_choice = tl.load(choice_ptr + i_row)
    b_weight = tl.load(weight_ptr + i_choice).to(tl.float32)
    # [BLOCK]
    o_i = tl.arange(0, BLOCK)
    m_i = o_i < width
    p_gate = gate_up_ptr + i_row * 2 * width + o_i
    p_hidden = hidden_ptr + i_row * width + o_i
    b_x = tl.load(p_gate, mask=m_i, other=0.0).to(tl.float32)
    b_y = tl.load(p_gate + width, mask=m_i, other=0.0).to(tl.float32)
    b_grad = tl.load(p_hidden, mask=m_i, other=0.0).to(tl.float32)
    b_gate, b_up = clamped(b_x, b_y, limit)
    b_up += 1
    b_sigmoid = tl.sigmoid(alpha * b_gate)
    b_glu = b_gate * b_sigmoid
    b_out = b_glu * b_up
    tl.store(grad_weight_ptr + i_choice, tl.sum(b_grad * b_out, 0))
    tl.store(p_hidden, (b_out * b_weight).to(hidden_ptr.dtype.element_ty), mask=m_i)
    b_grad *= b_weight
    b_slope = b_sigmoid * (1 + alpha * b_gate * (1 - b_sigmoid))
    b_grad_gate = tl.where(b_x <= limit, b_grad * b_up * b_slope, 0.0)
    b_grad_up = tl.where((b_y >= -limit) & (b_y <= limit), b_grad * b_glu, 0.0)
    p_grad = grad_gate_up_ptr + i_row * 2 * width + o_i
    dtype = grad_gate_up_ptr.dtype.element_ty
    tl.store(p_grad, b_grad_gate.to(dtype), mask=m_i)
    tl.store(p_grad + width, b_grad_up.to(dtype), mask=m_i)


def scatter(x_TC: Tensor, choices: Choices) -> Tensor:
    """The token of each row, [X, C]. `x_TC` is contiguous."""
    num_tokens, width = x_TC.shape
    out_XC = x_TC.new_empty((choices.num_rows, width))
    if out_XC.numel():
        block = _piece(width)
        _scatter_kernel[(num_tokens, triton.cdiv(width, block))](
            x_TC,
            choices.ids_TA,
            choices.row_P,
            out_XC,
            width,
            NUM_CHOICES=choices.ids_TA.shape[1],
            BLOCK=block,
        )
    return out_XC


def combine(rows_XC: Tensor, choices: Choices) -> Tensor:
    """The sum of each token's rows, [T, C]; FP32 inside, zeros where it has none."""
    num_tokens, num_choices = choices.ids_TA.shape
    width = rows_XC.shape[1]
    out_TC = rows_XC.new_empty((num_tokens, width))
    if out_TC.numel():
        block = _piece(width)
        _combine_kernel[(num_tokens, triton.cdiv(width, block))](
            rows_XC,
            choices.ids_TA,
            choices.row_P,
            out_TC,
            width,
            NUM_CHOICES=num_choices,
            BLOCK=block,
        )
    return out_TC


def activation(
    gate_up_XN: Tensor, weights_TA: Tensor, choices: Choices, alpha: float, limit: float
) -> Tensor:
    """Each row's weight · swiglu_oai, [X, I]. `weights_TA` is contiguous."""
    num_rows, width = len(gate_up_XN), gate_up_XN.shape[1] // 2
    out_XI = gate_up_XN.new_empty((num_rows, width))
    if out_XI.numel():
        block = triton.next_power_of_2(width)
        _activation_kernel[(num_rows,)](
            gate_up_XN,
            choices.choice_X,
            weights_TA,
            out_XI,
            width,
            alpha,
            limit,
            BLOCK=block,
            num_warps=_row_warps(block),
        )
    return out_XI


def activation_backward(
    grad_XI: Tensor,
    gate_up_XN: Tensor,
    weights_TA: Tensor,
    choices: Choices,
    alpha: float,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """(gradients of `gate_up_XN`, of `weights_TA`) from that of the result of `activation`.

    `grad_XI` is overwritten by that result.
    """
    grad_gate_up_XN = torch.empty_like(gate_up_XN)
    grad_weights_TA = torch.zeros_like(weights_TA)
    if grad_XI.numel():
        width = grad_XI.shape[1]
        block = triton.next_power_of_2(width)
        _activation_backward_kernel[(len(grad_XI),)](
            gate_up_XN,
            choices.choice_X,
            weights_TA,
            grad_XI,
            grad_gate_up_XN,
            grad_weights_TA,
            width,
            alpha,
            limit,
            BLOCK=block,
            num_warps=_row_warps(block),
        )
    return grad_gate_up_XN, grad_weights_TA


def _piece(width: int) -> int:
    """Columns of a program that moves rows: 32 bytes of BF16 a thread."""
    return min(2048, triton.next_power_of_2(width))


def _row_warps(block: int) -> int:
    """Warps of a program that has a row of the activation: 16 columns a thread."""
    return min(16, max(1, block // 512))

"""Tokens times a weight in MXFP8, which is read as bytes and widened exactly on the way.

A program keeps some rows of the weight as the left side of the tensor cores' product and walks
along them, a tile of tokens on the other side; with few tokens the time is that of the bytes. On
Hopper `mxfp8_hopper_kernel.py` takes its place for up to 32 tokens, the product of
`expert_gemm/mxfp8_gemm_hopper_kernel.py` for more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.expert_gemm.mxfp8_config import dense_config_of
from inference.kernels.hardware import USE_PDL, is_hopper
from inference.kernels.mxfp8 import MXFP8Tensor
from inference.kernels.swiglu_oai.kernel import clamped

MAX_FEW_TOKENS = 32
"""Of a call for which the weight is streamed once."""


@triton.jit
def widened(p_values, p_scale, mask, dtype: tl.constexpr):
    """Weights at pointers to bytes and to their scale bytes, in `dtype`; zeros off the mask.

    The bits of a value shifted into those of FP32 are the value times 2^-120. In BF16 the result
    is exact as long as the scale byte is at most 134.
    """
    b_byte = tl.load(p_values, mask=mask, other=0).to(tl.int32)
    b_bits = ((b_byte & 0x80) << 24) | ((b_byte & 0x7F) << 20)
    b_power = (tl.load(p_scale, mask=mask, other=0).to(tl.int32) + 120) << 23
    b_w = b_bits.to(tl.float32, bitcast=True) * b_power.to(tl.float32, bitcast=True)
    return b_w.to(dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x_ptr,
    values_ptr,
    scale_ptr,
    out_ptr,
    num_tokens,
    stride_x,
    alpha,
    limit,
    beta,
    NUM_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
):
    COLUMNS: tl.constexpr = NUM_ROWS // 2 if IS_SWIGLU else NUM_ROWS
    o_k = tl.arange(0, BLOCK_K)[None, :]
    # [BLOCK_N], [BLOCK_T]
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < COLUMNS
    o_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < num_tokens
    p_x = x_ptr + o_t.to(tl.int64)[:, None] * stride_x + o_k
    o_row = o_n.to(tl.int64)[:, None]
    p_w = values_ptr + o_row * SIZE + o_k
    p_scale = scale_ptr + o_row * (SIZE // 32) + o_k // 32
    # [BLOCK_N, BLOCK_T]
    b_acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    b_up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for k in range(0, SIZE, BLOCK_K):
        m_k = o_k < SIZE - k
        b_x = tl.load(p_x + k, mask=m_t[:, None] & m_k, other=0.0)
        m_w = m_n[:, None] & m_k
        b_w = widened(p_w + k, p_scale + k // 32, m_w, b_x.dtype)
        b_acc = tl.dot(b_w, b_x.T, b_acc, input_precision="ieee")
        if IS_SWIGLU:
            o_up = COLUMNS * SIZE + k
            b_w = widened(p_w + o_up, p_scale + o_up // 32, m_w, b_x.dtype)
            b_up = tl.dot(b_w, b_x.T, b_up, input_precision="ieee")
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    b_out = b_acc.to(dtype)
    if IS_SWIGLU:
        b_gate, b_up = clamped(b_out, b_up.to(dtype), limit)
        b_out = (b_gate * tl.sigmoid(alpha * b_gate) * (b_up + beta)).to(dtype)
    p_out = out_ptr + o_t.to(tl.int64)[None, :] * COLUMNS + o_n[:, None]
    tl.store(p_out, b_out, mask=m_n[:, None] & m_t[None, :])


def linear(
    x_TX: Tensor,
    weight: MXFP8Tensor,
    out_dtype: torch.dtype | None,
    swiglu: tuple[float, float, float] | None,
) -> Tensor:
    """As `linear` with a weight [Y, X] in MXFP8: [T, Y], with `swiglu` [T, Y / 2].

    Scale bytes above 134 leave BF16; whoever loads a weight refuses them.
    """
    num_tokens, size = x_TX.shape
    columns = weight.shape[0] if swiglu is None else weight.shape[0] // 2
    y_TY = torch.empty(num_tokens, columns, dtype=out_dtype or x_TX.dtype, device=x_TX.device)
    if not num_tokens:
        return y_TY
    if x_TX.is_cuda and is_hopper(x_TX.device):
        from inference.kernels.expert_gemm import mxfp8_gemm_hopper_kernel as hopper
        from inference.kernels.expert_gemm.mxfp8_operands_kernel import ordered

        if hopper.fits(x_TX, weight, is_swiglu=swiglu is not None):
            if num_tokens <= MAX_FEW_TOKENS and size > hopper.CHUNK.value:
                from inference.kernels.linear.mxfp8_hopper_kernel import stream

                return stream(x_TX, weight, y_TY, swiglu)
            config = dense_config_of(num_tokens, weight.shape[0], x_TX.device)
            x_TX = ordered(x_TX, use_pdl=USE_PDL)
            return hopper.product(x_TX, weight, y_TY, config, act=swiglu)
    return _linear(x_TX, weight, y_TY, swiglu)


def _linear(
    x_TX: Tensor,
    weight: MXFP8Tensor,
    y_TY: Tensor,
    swiglu: tuple[float, float, float] | None,
) -> Tensor:
    """The kernel of this file, whether or not it is the fastest."""
    num_tokens, size = x_TX.shape
    x_TX = x_TX if x_TX.stride(1) == 1 else x_TX.contiguous()
    alpha, limit, beta = swiglu or (0.0, 0.0, 0.0)
    block_n = 64
    block_t = max(16, min(64, triton.next_power_of_2(num_tokens)))
    _linear_kernel[(triton.cdiv(y_TY.shape[1], block_n), triton.cdiv(num_tokens, block_t))](
        x_TX,
        weight.values.contiguous().view(torch.uint8),
        weight.scale.contiguous(),
        y_TY,
        num_tokens,
        x_TX.stride(0),
        alpha,
        limit,
        beta,
        NUM_ROWS=weight.shape[0],
        SIZE=size,
        BLOCK_N=block_n,
        BLOCK_T=block_t,
        BLOCK_K=64,
        IS_SWIGLU=swiglu is not None,
        num_warps=4,
    )
    return y_TY

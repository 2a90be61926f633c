"""Few tokens times a weight that is read once: the time is that of its bytes.

A program keeps some rows of the weight as the left, 64-row side of the tensor cores' product and
walks along them; the tokens, padded to 16 or more, are the other side. A sum over X never leaves
its program, so nothing is merged afterwards. Enough tiles are in flight per multiprocessor to
cover the memory's latency; that programs are not spread evenly does not matter then, since all of
them draw on the same memory.

On Hopper `hopper_kernel.py` takes its place, with the weights on their way before the kernel in
front has ended.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.swiglu_oai import swiglu_oai
from inference.kernels.swiglu_oai.kernel import clamped

MAX_TOKENS = 32
"""Tokens of one call of a streaming kernel; more go to cuBLAS."""
MIN_BYTES = 1 << 22
"""Smaller weights stay in L2 and go to cuBLAS."""
ROWS, BLOCK_K, NUM_STAGES = 64, 128, 5

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    stride_x,
    stride_weight,
    stride_out,
    alpha,
    limit,
    beta,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
):
    i_block = tl.program_id(0)
    o_token = tl.arange(0, BLOCK_TOKENS)
    o_k = tl.arange(0, BLOCK_K)
    m_token = o_token < num_tokens
    o_place = i_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    m_row = o_place < num_rows
    # Places alternate between a gate and the up that belongs to it.
    o_row = o_place // 2 + (o_place % 2) * (num_rows // 2) if IS_SWIGLU else o_place
    # [BLOCK_ROWS, BLOCK_K], [BLOCK_TOKENS, BLOCK_K]
    p_weight = weight_ptr + o_row.to(tl.int64)[:, None] * stride_weight + o_k[None, :]
    p_x = x_ptr + o_token.to(tl.int64)[:, None] * stride_x + o_k[None, :]
    # [BLOCK_ROWS, BLOCK_TOKENS]
    b_acc = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], dtype=tl.float32)
    for k in range(0, SIZE, BLOCK_K):
        if SIZE % BLOCK_K == 0:
            m_weight, m_x = m_row[:, None], m_token[:, None]
        else:
            m_k = o_k[None, :] < SIZE - k
            m_weight, m_x = m_row[:, None] & m_k, m_token[:, None] & m_k
        b_weight = tl.load(p_weight + k, mask=m_weight, other=0.0, eviction_policy="evict_first")
        b_x = tl.load(p_x + k, mask=m_x, other=0.0)
        b_acc = tl.dot(b_weight, tl.trans(b_x), b_acc, input_precision="ieee")
    b_y = b_acc.to(out_ptr.dtype.element_ty)
    if IS_SWIGLU:
        # [BLOCK_ROWS / 2, BLOCK_TOKENS] each
        pairs = b_y.to(tl.float32).reshape(BLOCK_ROWS // 2, 2, BLOCK_TOKENS).permute(0, 2, 1)
        gate, up = tl.split(pairs)
        gate, up = clamped(gate, up, limit)
        b_out = gate * tl.sigmoid(alpha * gate) * (up + beta)
        o_out = i_block * (BLOCK_ROWS // 2) + tl.arange(0, BLOCK_ROWS // 2)
        m_out = o_out < num_rows // 2
    else:
        b_out, o_out, m_out = b_y, o_place, m_row
    p_out = out_ptr + o_token.to(tl.int64)[None, :] * stride_out + o_out[:, None]
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out[:, None] & m_token[None, :])


def skinny_linear(
    x_TX: Tensor,
    weight_YX: Tensor,
    out_dtype: torch.dtype | None,
    swiglu: tuple[float, float, float] | None,
    *,
    block_k: int = BLOCK_K,
) -> Tensor:
    """The kernel of this file, whether or not it is the fastest; rows of both contiguous."""
    (num_tokens, size), num_rows = x_TX.shape, weight_YX.shape[0]
    width = num_rows if swiglu is None else num_rows // 2
    y_TY = torch.empty(num_tokens, width, dtype=out_dtype or x_TX.dtype, device=x_TX.device)
    alpha, limit, beta = (0.0, 0.0, 0.0) if swiglu is None else swiglu
    _skinny_kernel[(triton.cdiv(num_rows, ROWS),)](
        x_TX,
        weight_YX,
        y_TY,
        num_tokens,
        num_rows,
        x_TX.stride(0),
        weight_YX.stride(0),
        y_TY.stride(0),
        alpha,
        limit,
        beta,
        SIZE=size,
        BLOCK_ROWS=ROWS,
        BLOCK_TOKENS=max(16, triton.next_power_of_2(num_tokens)),
        BLOCK_K=block_k,
        IS_SWIGLU=swiglu is not None,
        num_warps=4,
        num_stages=NUM_STAGES,
    )
    return y_TY


def fits_skinny(x_TX: Tensor, weight_YX: Tensor) -> bool:
    """Whether the streaming kernels take these operands and gain by it."""
    return (
        x_TX.ndim == 2
        and 0 < x_TX.shape[0] <= MAX_TOKENS
        and x_TX.dtype == weight_YX.dtype
        and x_TX.dtype in (torch.bfloat16, torch.float16)
        and weight_YX.shape[1] % 1024 == 0
        and weight_YX.numel() * weight_YX.element_size() >= MIN_BYTES
        and all(
            tensor.stride(1) == 1 and tensor.stride(0) % 8 == 0 and tensor.data_ptr() % 16 == 0
            for tensor in (x_TX, weight_YX)
        )
    )


def linear(
    x_TX: Tensor,
    weight_YX: Tensor,
    out_dtype: torch.dtype | None,
    swiglu: tuple[float, float, float] | None,
) -> Tensor:
    if fits_skinny(x_TX, weight_YX):
        if IS_HOPPER:
            from inference.kernels.linear.hopper_kernel import stream_linear

            return stream_linear(x_TX, weight_YX, out_dtype, swiglu)
        return skinny_linear(x_TX, weight_YX, out_dtype, swiglu)
    if out_dtype == torch.float32:
        y_TY = _linear_fp32(x_TX, weight_YX)
    else:
        y_TY = torch.nn.functional.linear(x_TX, weight_YX)
    if swiglu is None:
        return y_TY
    alpha, limit, beta = swiglu
    return swiglu_oai(y_TY, alpha=alpha, limit=limit, beta=beta)


def _linear_fp32(x_TX: Tensor, weight_YX: Tensor) -> Tensor:
    with torch.autocast(device_type="cuda", enabled=False):
        if x_TX.dtype == weight_YX.dtype and x_TX.dtype != torch.float32:
            # Products of BF16 values are exact in FP32, so this is the FP32 product.
            return torch.mm(x_TX, weight_YX.T, out_dtype=torch.float32)
        return x_TX.float() @ weight_YX.float().T

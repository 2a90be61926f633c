"""Up to 16 tokens times a weight that is read once: the time is that of its bytes.

A program keeps some rows of the weight as the left, 64-row side of the tensor cores' product and
walks along them; the tokens, padded to 16, are the other side. A sum over X never leaves its
program, so nothing is merged afterwards. Enough tiles are in flight per multiprocessor to cover
the memory's latency; that programs are not spread evenly does not matter then, since all of them
draw on the same memory.

Programmatic dependent launch: a program fetches the beginning of its rows into L2 before it waits
for the kernel in front (weights do not depend on it), and lets the kernel behind start while its
own last tiles are on their way.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference.kernels.swiglu_oai import swiglu_oai

MAX_TOKENS = 16
"""Tokens of one call of the skinny kernel; more go to cuBLAS."""
MIN_BYTES = 1 << 22
"""Smaller weights stay in L2 and go to cuBLAS."""


USE_PDL = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


class Config(NamedTuple):
    """How the skinny kernel cuts a weight."""

    rows: int
    """Of the weight, a program."""
    block_k: int
    num_stages: int
    num_warps: int = 4
    prefetch: int = 512
    """Leading elements of each row fetched before the wait for the kernel in front."""
    pdl: bool = True

    @property
    def block_rows(self) -> int:
        return max(64, triton.next_power_of_2(self.rows))


def config_of(num_rows: int, size: int, num_tokens: int) -> Config:
    """For a weight [num_rows, size]."""
    del num_rows, size, num_tokens
    return Config(rows=64, block_k=128, num_stages=5)


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
    ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    LAST_TILES: tl.constexpr,
    NUM_THREADS: tl.constexpr,
):
    i_block = tl.program_id(0)
    o_local = tl.arange(0, BLOCK_ROWS)
    o_token = tl.arange(0, BLOCK_TOKENS)
    o_k = tl.arange(0, BLOCK_K)
    m_token = o_token < num_tokens
    o_place = i_block * ROWS + o_local
    m_row = (o_local < ROWS) & (o_place < num_rows)
    # Places alternate between a gate and the up that belongs to it.
    o_row = o_place // 2 + (o_place % 2) * (num_rows // 2) if IS_SWIGLU else o_place
    # [BLOCK_ROWS, BLOCK_K], [BLOCK_TOKENS, BLOCK_K]
    p_weight = weight_ptr + o_row.to(tl.int64)[:, None] * stride_weight + o_k[None, :]
    p_x = x_ptr + o_token.to(tl.int64)[:, None] * stride_x + o_k[None, :]
    if PDL:
        if PREFETCH > 0:
            # One piece of a row a thread; rows past the end are others again.
            o_lane = tl.arange(0, NUM_THREADS)
            PIECES: tl.constexpr = NUM_THREADS // BLOCK_ROWS
            place = tl.minimum(i_block * ROWS + (o_lane // PIECES) % ROWS, num_rows - 1)
            row = place // 2 + (place % 2) * (num_rows // 2) if IS_SWIGLU else place
            piece = row.to(tl.int64) * stride_weight + (o_lane % PIECES) * (PREFETCH // PIECES)
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                "=r,l,n",
                [(weight_ptr + piece).to(tl.int64), PREFETCH // PIECES * 2],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        gdc_wait()
    # [BLOCK_ROWS, BLOCK_TOKENS]
    b_acc = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], dtype=tl.float32)
    for i_tile in range(tl.cdiv(SIZE, BLOCK_K)):
        k = i_tile * BLOCK_K
        if SIZE % BLOCK_K == 0:
            m_weight, m_x = m_row[:, None], m_token[:, None]
        else:
            m_k = o_k[None, :] < SIZE - k
            m_weight, m_x = m_row[:, None] & m_k, m_token[:, None] & m_k
        b_weight = tl.load(p_weight + k, mask=m_weight, other=0.0, eviction_policy="evict_first")
        b_x = tl.load(p_x + k, mask=m_x, other=0.0)
        b_acc = tl.dot(b_weight, tl.trans(b_x), b_acc, input_precision="ieee")
        if PDL:  # noqa: SIM102 - a constexpr alone keeps the branch out of the program
            if i_tile == max(tl.cdiv(SIZE, BLOCK_K) - LAST_TILES, 0):
                gdc_launch_dependents()
    b_y = b_acc.to(out_ptr.dtype.element_ty)
    if IS_SWIGLU:
        # [BLOCK_ROWS / 2, BLOCK_TOKENS] each
        pairs = b_y.to(tl.float32).reshape(BLOCK_ROWS // 2, 2, BLOCK_TOKENS).permute(0, 2, 1)
        gate, up = tl.split(pairs)
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        b_out = gate * tl.sigmoid(alpha * gate) * (up + beta)
        o_pair = tl.arange(0, BLOCK_ROWS // 2)
        o_out = i_block * (ROWS // 2) + o_pair
        m_out = (o_pair < ROWS // 2) & (o_out < num_rows // 2)
    else:
        b_out, o_out, m_out = b_y, o_place, m_row
    p_out = out_ptr + o_token.to(tl.int64)[None, :] * stride_out + o_out[:, None]
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out[:, None] & m_token[None, :])


def skinny_linear(
    x_TX: Tensor,
    weight_YX: Tensor,
    out_dtype: torch.dtype | None,
    swiglu: tuple[float, float, float] | None,
    config: Config | None = None,
) -> Tensor:
    """The skinny kernel, whether or not it is the fastest; T in 1..16, both rows contiguous."""
    (num_tokens, size), num_rows = x_TX.shape, weight_YX.shape[0]
    config = config_of(num_rows, size, num_tokens) if config is None else config
    assert swiglu is None or config.rows % 2 == 0, "a program holds gates together with their ups"
    width = num_rows if swiglu is None else num_rows // 2
    y_TY = torch.empty(num_tokens, width, dtype=out_dtype or x_TX.dtype, device=x_TX.device)
    alpha, limit, beta = (0.0, 0.0, 0.0) if swiglu is None else swiglu
    is_pdl = config.pdl and USE_PDL
    _skinny_kernel[(triton.cdiv(num_rows, config.rows),)](
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
        ROWS=config.rows,
        BLOCK_ROWS=config.block_rows,
        BLOCK_TOKENS=MAX_TOKENS,
        BLOCK_K=config.block_k,
        IS_SWIGLU=swiglu is not None,
        PREFETCH=min(config.prefetch, size),
        PDL=is_pdl,
        LAST_TILES=config.num_stages,
        NUM_THREADS=32 * config.num_warps,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if is_pdl else {}),
    )
    return y_TY


def fits_skinny(x_TX: Tensor, weight_YX: Tensor) -> bool:
    """Whether the skinny kernel takes these operands and gains by it."""
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

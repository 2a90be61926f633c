"""Dense causal GQA of prefill chunks: a program takes up to BLOCK_M query tokens of one head.

Tiles are laid out on the host, those with most keys first; the heads that share a KV head run next
to each other, so that its pages are read from L2. On Hopper `prefill_hopper_kernel.py` serves the
half-precision shapes of M3; the kernel here serves every other shape and FP8 pages.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.dispatch import send
from inference.kernels.paged_attention.prefill_tiles import prefill_tiles
from inference.kernels.paging import LayerPages, PagedBatch

USE_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
"""Whether the kernel with warpgroup products may be taken."""


@triton.jit
def _load_block(
    pages_ptr,
    p_table,
    i_block,
    i_kv,
    num_keys,
    stride_page,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """[BLOCK_N, BLOCK_D] keys or values of one block, zeros beyond `num_keys` if IS_MASKED."""
    o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_nd = (o_d < D)[None, :]
    if IS_MASKED:
        m_nd = m_nd & (o_n < num_keys)[:, None]
    if PAGE % BLOCK_N == 0:
        # The block lies in one page.
        page = tl.load(p_table + i_block * BLOCK_N // PAGE).to(tl.int64)
        p_block = pages_ptr + page * stride_page + (i_kv * PAGE + i_block * BLOCK_N % PAGE) * D
        p_nd = p_block + (tl.arange(0, BLOCK_N) * D)[:, None] + o_d[None, :]
    else:
        b_page = tl.load(p_table + o_n // PAGE, mask=o_n < num_keys, other=0).to(tl.int64)
        p_n = pages_ptr + b_page * stride_page + (i_kv * PAGE + o_n % PAGE) * D
        p_nd = p_n[:, None] + o_d[None, :]
    if D == BLOCK_D and not IS_MASKED:
        return tl.load(p_nd)
    return tl.load(p_nd, mask=m_nd, other=0.0)


@triton.jit
def _step(
    b_acc,
    b_max,
    b_sum,
    b_q,
    k_pages_ptr,
    v_pages_ptr,
    p_table,
    i_block,
    i_kv,
    num_keys,
    b_last,
    scale_log2,
    stride_k_page,
    stride_v_page,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Take one block of keys and values into the running softmax; logits to base 2."""
    b_k = _load_block(
        k_pages_ptr, p_table, i_block, i_kv, num_keys, stride_k_page,
        D, PAGE, BLOCK_N, BLOCK_D, IS_MASKED,
    ).to(b_q.dtype)  # fmt: skip
    # [BLOCK_M, BLOCK_N]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if IS_MASKED:
        o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
        m_mn = (o_n[None, :] <= b_last[:, None]) & (o_n < num_keys)[None, :]
        b_s = tl.where(m_mn, b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale_log2)
    b_p = tl.exp2(b_s * scale_log2 - b_new[:, None])
    b_alpha = tl.exp2(b_max - b_new)
    b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
    b_v = _load_block(
        v_pages_ptr, p_table, i_block, i_kv, num_keys, stride_v_page,
        D, PAGE, BLOCK_N, BLOCK_D, IS_MASKED,
    ).to(b_q.dtype)  # fmt: skip
    b_acc = tl.dot(b_p.to(b_q.dtype), b_v, b_acc * b_alpha[:, None], input_precision="ieee")
    return b_acc, b_new, b_sum


@triton.jit
def _prefill_kernel(
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    out_ptr,
    tiles_ptr,
    table_ptr,
    scale_log2,
    stride_q,
    stride_out,
    stride_table,
    stride_k_page,
    stride_v_page,
    num_tiles,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    G: tl.constexpr = H // K
    i_program = tl.program_id(0)
    i_kv = i_program // (num_tiles * G)
    i_tile = i_program % (num_tiles * G) // G
    i_head = i_kv * G + i_program % G
    p_tile = tiles_ptr + i_tile * 4
    row = tl.load(p_tile).to(tl.int64)
    token = tl.load(p_tile + 1).to(tl.int64)
    count = tl.load(p_tile + 2)
    position = tl.load(p_tile + 3)
    p_table = table_ptr + row * stride_table
    num_keys = tl.maximum(position + count, 0)

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_md = (o_m < count)[:, None] & (o_d < D)[None, :]
    p_q = q_ptr + token * stride_q + i_head * D + (o_m * stride_q)[:, None] + o_d[None, :]
    # [BLOCK_M, BLOCK_D]
    b_q = tl.load(p_q, mask=m_md, other=0.0).to(DTYPE)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # [BLOCK_M]
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_last = position + o_m

    # Blocks that even the first row sees whole, then those with a mask.
    num_whole = tl.maximum(position + 1, 0) // BLOCK_N
    for i_block in tl.range(0, num_whole):
        b_acc, b_max, b_sum = _step(
            b_acc, b_max, b_sum, b_q, k_pages_ptr, v_pages_ptr, p_table, i_block, i_kv, num_keys,
            b_last, scale_log2, stride_k_page, stride_v_page, D, PAGE, BLOCK_N, BLOCK_D, False,
        )  # fmt: skip
    for i_block in tl.range(num_whole, tl.cdiv(num_keys, BLOCK_N), num_stages=1):
        b_acc, b_max, b_sum = _step(
            b_acc, b_max, b_sum, b_q, k_pages_ptr, v_pages_ptr, p_table, i_block, i_kv, num_keys,
            b_last, scale_log2, stride_k_page, stride_v_page, D, PAGE, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip
    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    p_out = out_ptr + token * stride_out + i_head * D + (o_m * stride_out)[:, None] + o_d[None, :]
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_md)


def paged_attention_prefill(
    q_THD: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    scale: float,
    out_THD: Tensor,
    *,
    block_m: int | None = None,
    block_n: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> None:
    """Fill rows `num_decode_tokens` to T of `out_THD` (rows of no request with zeros).

    Places of the last value page that hold no key yet may be set to zero.
    """
    query_len_R, _ = batch.host_lengths()
    num_tokens = int(query_len_R.sum())
    if num_tokens < len(out_THD):
        out_THD[num_tokens:] = 0
    if num_tokens == batch.num_decode_tokens:
        return
    if USE_HOPPER and block_m is None:
        from inference.kernels.paged_attention import prefill_hopper_kernel as hopper

        if hopper.serves(q_THD, pages, batch):
            hopper.paged_attention_prefill(q_THD, pages, batch, scale, out_THD)
            return
    for name, tensor in (("k_pages", pages.k_pages), ("v_pages", pages.v_pages)):
        if not tensor[0].is_contiguous():
            raise ValueError(f"paged_attention: a page of {name} is not contiguous")
    for name, tensor in (("q_THD", q_THD), ("out_THD", out_THD)):
        if not tensor[0].is_contiguous():
            raise ValueError(f"paged_attention: the heads of a token of {name} are not contiguous")
    _, num_heads, head_dim = q_THD.shape
    num_kv_heads, page_size = pages.k_pages.shape[1:3]
    is_fp32 = q_THD.dtype == torch.float32
    is_fp8 = pages.k_pages.dtype == torch.float8_e4m3fn
    block_m = block_m or (32 if is_fp32 else 128)
    block_n = block_n or (32 if is_fp32 else 64 if is_fp8 else 128)
    block_n = max(16, min(block_n, triton.next_power_of_2(page_size)))
    dtype = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}.get(q_THD.dtype, tl.float16)
    if is_fp8 and not is_fp32:
        # e4m3 widens to FP16 in one instruction, without loss.
        dtype = tl.float16
    tiles_X4 = prefill_tiles(batch, block_m)
    _prefill_kernel[(len(tiles_X4) * num_heads,)](
        q_THD,
        pages.k_pages,
        pages.v_pages,
        out_THD,
        send(tiles_X4, q_THD.device),
        batch.page_table_RN,
        scale * math.log2(math.e),
        q_THD.stride(0),
        out_THD.stride(0),
        batch.page_table_RN.stride(0),
        pages.k_pages.stride(0),
        pages.v_pages.stride(0),
        len(tiles_X4),
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        PAGE=page_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        DTYPE=dtype,
        num_warps=num_warps or 8,
        num_stages=num_stages or (1 if is_fp32 else 2),
    )

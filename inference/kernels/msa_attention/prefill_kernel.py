"""Sparse GQA of prefill chunks: query-major for few tokens, block-major (`block_kernel`) for many.

Query-major: one program for each (token, KV head), or several that share its blocks. It reads every
chosen block once for each query, 16 FLOP a byte, but needs no lists and no second reading.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.merge_kernel import LOG2_E, MIN_MAX, attend_tile
from inference.kernels.msa_attention.block_kernel import (
    BlockMajor,
    attend_blocks,
    checked_strides,
    padded,
    product_type,
)
from inference.kernels.msa_attention.combine_kernel import combine_kernel, natural_lse
from inference.kernels.msa_attention.invert_kernel import request_of
from inference.kernels.paging import LayerPages, PagedBatch

PASS_TOKENS = 8192
"""Tokens times KV heads of a pass of the way for many tokens."""
FEW_TOKENS = 6144
"""Tokens times KV heads up to which the way for few is the faster one."""


class QueryMajor(NamedTuple):
    """Launch of the way for few tokens."""

    split: int = 1
    """Programs that share the blocks of one (token, KV head)."""
    tile: int = 64
    """Keys a step."""
    num_stages: int = 3


def msa_attention_prefill(
    q_THD: Tensor,
    pages: LayerPages,
    blocks_TKB: Tensor,
    batch: PagedBatch,
    scale: float,
    out_THD: Tensor,
    launch: QueryMajor | BlockMajor | None = None,
    lse_TH: Tensor | None = None,
) -> None:
    """Write rows [`batch.num_decode_tokens`, T) of `out_THD`.

    With `lse_TH` ([T, H] FP32, contiguous) also those of it: the natural logarithm of the sum of
    the exponentials of the scaled logits, -inf where nothing is visible.

    Blocks that a request does not have, and blocks without a page, are read as having no keys.
    Not for CUDA graphs: the launch depends on `batch.host_lengths()`.
    """
    first = batch.num_decode_tokens
    q_THD, blocks_TKB, out_THD = q_THD[first:], blocks_TKB[first:], out_THD[first:]
    lse_TH = None if lse_TH is None else lse_TH[first:]
    if q_THD.shape[0] == 0:
        return
    if launch is None:
        launch = choose_launch(q_THD, pages, blocks_TKB, batch)
    run = _attend_queries if isinstance(launch, QueryMajor) else attend_blocks
    run(q_THD, pages, blocks_TKB, batch, scale * LOG2_E, out_THD, launch, lse_TH)


def choose_launch(
    q_THD: Tensor, pages: LayerPages, blocks_TKB: Tensor, batch: PagedBatch
) -> QueryMajor | BlockMajor:
    num_tokens, num_kv_heads, topk = blocks_TKB.shape
    if q_THD.dtype == torch.float32:
        return QueryMajor(tile=32, num_stages=1)
    if num_tokens <= 128:
        split = max(1, min(topk, 256 // (num_tokens * num_kv_heads)))
        return QueryMajor(split=padded(split))
    if num_tokens * num_kv_heads <= FEW_TOKENS:
        return QueryMajor()
    from inference.kernels.msa_attention import block_hopper_kernel

    # A block wants many tokens that chose it, L2 few between two visits of a query, and the parts
    # of a pass take 64 KiB a token and head.
    num_blocks = -(-int(batch.host_lengths()[1].max()) // batch.page_size)
    slab = max(2048, PASS_TOKENS // num_kv_heads, 4 * padded(num_blocks))
    slab = min(slab, PASS_TOKENS)
    return BlockMajor(
        slab=slab,
        heads=PASS_TOKENS // padded(min(slab, num_tokens)),
        on_hopper=block_hopper_kernel.serves(q_THD, pages, batch),
    )


def _attend_queries(
    q_THD: Tensor,
    pages: LayerPages,
    blocks_TKB: Tensor,
    batch: PagedBatch,
    scale: float,
    out_THD: Tensor,
    launch: QueryMajor,
    lse_TH: Tensor | None = None,
) -> None:
    num_tokens, num_kv_heads, topk = blocks_TKB.shape
    page_size, head_dim = pages.k_pages.shape[2:]
    group = q_THD.shape[1] // num_kv_heads
    num_requests = batch.page_table_RN.shape[0] - batch.num_decodes
    split = launch.split
    part, lse = out_THD, out_THD
    if split > 1:
        rows = num_tokens * num_kv_heads * split * group
        part = torch.empty((rows, head_dim), dtype=torch.float32, device=q_THD.device)
        lse = torch.empty((rows,), dtype=torch.float32, device=q_THD.device)
    stride_qt, stride_ot, stride_page, stride_pk = checked_strides(q_THD, pages, out_THD)
    _query_kernel[(num_tokens, num_kv_heads, split)](
        q_THD,
        pages.k_pages,
        pages.v_pages,
        blocks_TKB,
        batch.positions_T,
        batch.query_start_R1,
        batch.page_table_RN,
        part,
        lse,
        out_THD if lse_TH is None else lse_TH,
        scale,
        stride_qt,
        stride_ot,
        stride_page,
        stride_pk,
        blocks_TKB.stride(0),
        blocks_TKB.stride(1),
        batch.page_table_RN.stride(0),
        batch.page_table_RN.shape[1],
        batch.num_decode_tokens,
        batch.num_decodes,
        num_requests,
        num_requests.bit_length(),
        K=num_kv_heads,
        G=group,
        G_PAD=padded(group, 16),
        D=head_dim,
        D_PAD=padded(head_dim, 16),
        B=topk,
        PAGE=page_size,
        TILE=min(launch.tile, padded(page_size, 16)),
        SPLIT=split,
        LSE=lse_TH is not None,
        TYPE=product_type(q_THD),
        num_warps=4,
        num_stages=launch.num_stages,
    )
    if split > 1:
        combine_kernel[(num_tokens, num_kv_heads)](
            part,
            lse,
            part,
            out_THD,
            out_THD if lse_TH is None else lse_TH,
            stride_ot,
            0,
            0,
            0,
            0,
            K=num_kv_heads,
            G=group,
            ROWS=padded(group),
            D=head_dim,
            D_PAD=padded(head_dim),
            PARTS=split,
            PARTS_PAD=padded(split),
            LISTED=False,
            LSE=lse_TH is not None,
            num_warps=4,
        )


@triton.jit(
    do_not_specialize=("table_width", "first_token", "first_request", "num_requests", "steps")
)
def _query_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    blocks_ptr,
    positions_ptr,
    start_ptr,
    table_ptr,
    out_ptr,
    lse_ptr,
    out_lse_ptr,
    scale,
    stride_qt,
    stride_ot,
    stride_page,
    stride_pk,
    stride_bt,
    stride_bk,
    stride_table,
    table_width,
    first_token,
    first_request,
    num_requests,
    steps,
    K: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    B: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    LSE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """One token, one KV head, and `1 / SPLIT` of its tiles of keys."""
    TILES: tl.constexpr = (PAGE + TILE - 1) // TILE
    STEPS: tl.constexpr = (B * TILES + SPLIT - 1) // SPLIT
    i_t, i_k, i_x = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_request = request_of(start_ptr, i_t + first_token, first_request, num_requests, steps)
    p_table = table_ptr + (i_request + first_request).to(tl.int64) * stride_table
    p_blocks = blocks_ptr + i_t.to(tl.int64) * stride_bt + i_k * stride_bk
    position = tl.load(positions_ptr + first_token + i_t)
    o_g, o_d, o_s = tl.arange(0, G_PAD), tl.arange(0, D_PAD), tl.arange(0, TILE)
    m_gd = (o_g < G)[:, None] & (o_d < D)[None, :]
    # [G, D]
    o_gd = (i_k * G + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(q_ptr + i_t.to(tl.int64) * stride_qt + o_gd, mask=m_gd, other=0.0).to(TYPE)
    b_m = tl.full([G_PAD], MIN_MAX, tl.float32)
    b_l = tl.zeros([G_PAD, TILE], tl.float32)
    b_acc = tl.zeros([G_PAD, D_PAD], tl.float32)
    for i in tl.range(i_x * STEPS, (i_x + 1) * STEPS):
        i_block = tl.load(p_blocks + i // TILES, mask=i < B * TILES, other=-1)
        m_block = (i_block >= 0) & (i_block < table_width)
        i_page = tl.load(p_table + i_block, mask=m_block, other=-1).to(tl.int64)
        # [TILE]
        o_key = i % TILES * TILE + o_s
        last = tl.where(i_page >= 0, position - i_block.to(tl.int64) * PAGE, -1)
        m_key = (o_key <= last) & (o_key < PAGE)
        # [TILE, D]
        o_sd = (
            i_page * stride_page + i_k.to(tl.int64) * stride_pk + o_key[:, None] * D + o_d[None, :]
        )
        m_sd = m_key[:, None] & (o_d < D)[None, :]
        b_k = tl.load(k_ptr + o_sd, mask=m_sd, other=0.0)
        b_v = tl.load(v_ptr + o_sd, mask=m_sd, other=0.0)
        b_m, b_l, b_acc = attend_tile(b_q, b_k, b_v, m_key[None, :], b_m, b_l, b_acc, scale, TYPE)
    b_sum = tl.sum(b_l, 1)
    m_some = b_sum > 0
    b_sum = tl.where(m_some, b_sum, 1.0)
    b_o = b_acc / b_sum[:, None]
    if SPLIT == 1:
        p_o = out_ptr + i_t.to(tl.int64) * stride_ot + o_gd
        tl.store(p_o, b_o.to(out_ptr.dtype.element_ty), mask=m_gd)
        if LSE:
            p_lse = out_lse_ptr + (i_t.to(tl.int64) * K + i_k) * G + o_g
            tl.store(p_lse, natural_lse(b_m, tl.sum(b_l, 1)), mask=o_g < G)
    else:
        # [G]
        o_row = ((i_t.to(tl.int64) * K + i_k) * SPLIT + i_x) * G + o_g
        tl.store(out_ptr + o_row[:, None] * D + o_d[None, :], b_o, mask=m_gd)
        b_lse = tl.where(m_some, b_m + tl.log2(b_sum), MIN_MAX)
        tl.store(lse_ptr + o_row, b_lse, mask=o_g < G)

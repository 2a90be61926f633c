"""Sparse GQA of decodes: each (token, KV head) reads the few pages chosen for it.

The chosen pages of one task (token, KV head) are cut into tiles of keys, and `split` programs share
the tiles; a second small kernel merges their parts. The time is that of reading the pages, so what
counts is how many bytes are under way on each multiprocessor, and equal work for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.hardware import USE_PDL, num_multiprocessors
from inference.kernels.merge_kernel import (
    LOG2_E,
    MIN_MAX,
    as_pairs,
    attend_pairs,
    attend_tile,
    begin_dependent,
    begin_last,
    interleaved,
    merge_parts,
    normalised,
    product_type,
)
from inference.kernels.paging import LayerPages, PagedBatch


class Launch(NamedTuple):
    """How the work of one call is cut."""

    split: int
    """Programs a task; 1 needs no merge."""
    tile: int
    """Keys a step."""
    num_warps: int
    num_stages: int


def msa_attention_decode(
    q_THD: Tensor,
    pages: LayerPages,
    blocks_TKB: Tensor,
    batch: PagedBatch,
    scale: float,
    out_THD: Tensor,
    launch: Launch | None = None,
) -> None:
    """Write rows [0, `batch.num_decode_tokens`) of `out_THD`."""
    num_tokens = batch.num_decode_tokens
    num_kv_heads, page_size, head_dim = pages.k_pages.shape[1:]
    num_heads, topk = q_THD.shape[1], blocks_TKB.shape[-1]
    group = num_heads // num_kv_heads
    if launch is None:
        launch = choose_launch(num_tokens * num_kv_heads, topk, pages.k_pages, q_THD)
    split = launch.split
    part_TKXGD, lse_TKXG = out_THD, out_THD
    if split > 1:
        shape = (num_tokens, num_kv_heads, split, group)
        part_TKXGD = torch.empty((*shape, head_dim), dtype=torch.float32, device=q_THD.device)
        lse_TKXG = torch.empty(shape, dtype=torch.float32, device=q_THD.device)
    k_pages, v_pages = as_pairs(q_THD, pages.k_pages), as_pairs(q_THD, pages.v_pages)
    is_pairs = k_pages is not None
    if not is_pairs:
        k_pages, v_pages = pages.k_pages, pages.v_pages
    _attend_chosen[(num_tokens * num_kv_heads, split)](
        q_THD,
        k_pages,
        v_pages,
        blocks_TKB,
        batch.page_table_RN,
        batch.positions_T,
        out_THD,
        part_TKXGD,
        lse_TKXG,
        scale * LOG2_E,
        q_THD.stride(0),
        q_THD.stride(1),
        out_THD.stride(0),
        k_pages.stride(0),
        k_pages.stride(1),
        blocks_TKB.stride(0),
        blocks_TKB.stride(1),
        batch.page_table_RN.stride(0),
        QUERY_LEN=batch.decode_query_len,
        K=num_kv_heads,
        G=group,
        G_PAD=max(16, triton.next_power_of_2(group)),
        D=head_dim,
        D_PAD=max(16, triton.next_power_of_2(head_dim)),
        B=topk,
        B_PAD=triton.next_power_of_2(topk),
        PAGE=page_size,
        TILE=launch.tile,
        SPLIT=split,
        TYPE=product_type(q_THD, pages.k_pages),
        PAIRS=is_pairs,
        PDL=USE_PDL,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        launch_pdl=USE_PDL,
    )
    if split > 1:
        _merge_chosen[(num_tokens * num_heads,)](
            part_TKXGD,
            lse_TKXG,
            out_THD,
            out_THD.stride(0),
            H=num_heads,
            G=group,
            D=head_dim,
            D_PAD=max(16, triton.next_power_of_2(head_dim)),
            SPLIT=split,
            SPLIT_PAD=triton.next_power_of_2(split),
            PDL=USE_PDL,
            num_warps=1,
            launch_pdl=USE_PDL,
        )


def choose_launch(num_tasks: int, topk: int, k_pages: Tensor, q_THD: Tensor) -> Launch:
    """A launch that fills the GPU; only shapes decide, so that a captured call stays valid.

    Measured on an H200 at 16 pages of 128 keys.
    """
    num_sms = 132
    if k_pages.is_cuda:
        num_sms = num_multiprocessors(k_pages.device)
    split = 1
    while 2 * split <= topk and 2 * split * num_tasks <= num_sms:
        split *= 2
    page_size, is_low = k_pages.shape[2], k_pages.element_size() == 1
    tile = min(64, max(16, triton.next_power_of_2(page_size)))
    if q_THD.dtype == torch.float32:
        tile = min(32, tile)
    elif is_low and split == 1 and num_tasks <= num_sms and tile < page_size:
        # One program a multiprocessor must keep as many bytes under way as two.
        return Launch(split, 2 * tile, num_warps=8, num_stages=5)
    is_short = split > (1 if is_low else 4)
    return Launch(split, tile, num_warps=4, num_stages=3 if is_short else 4)


@triton.jit
def _attend_chosen(
    q_ptr,
    k_ptr,
    v_ptr,
    blocks_ptr,
    table_ptr,
    positions_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    scale,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_page,
    stride_head,
    stride_bt,
    stride_bk,
    stride_row,
    QUERY_LEN: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    B: tl.constexpr,
    B_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    TYPE: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    i_task = tl.program_id(0)
    i_split = tl.program_id(1)
    i_t = i_task // K
    i_k = i_task % K
    TILES: tl.constexpr = (PAGE + TILE - 1) // TILE
    # Columns of a page: D values, or D / 2 pairs of FP8 values.
    C: tl.constexpr = D // 2 if PAIRS else D
    C_PAD: tl.constexpr = D_PAD // 2 if PAIRS else D_PAD
    k_ptr += i_k.to(tl.int64) * stride_head
    v_ptr += i_k.to(tl.int64) * stride_head
    p_row = table_ptr + (i_t // QUERY_LEN).to(tl.int64) * stride_row
    begin_dependent(PDL)

    # The chain before the first key: block ids, their pages, keys. [B_PAD]
    o_b = tl.arange(0, B_PAD)
    b_block = tl.load(
        blocks_ptr + i_t.to(tl.int64) * stride_bt + i_k * stride_bk + o_b, mask=o_b < B, other=-1
    )
    position = tl.load(positions_ptr + i_t).to(tl.int32)
    o_g = tl.arange(0, G_PAD)
    o_d = tl.arange(0, D_PAD)
    o_n = tl.arange(0, TILE)
    m_gd = (o_g < G)[:, None] & (o_d < D)[None, :]
    # [G_PAD, D_PAD]
    p_q = q_ptr + i_t.to(tl.int64) * stride_qt + (i_k * G + o_g)[:, None] * stride_qh + o_d[None, :]
    b_q = tl.load(p_q, mask=m_gd, other=0.0)
    b_page = tl.load(p_row + b_block, mask=b_block >= 0, other=-1)
    # How many keys of each block the query sees.
    b_count = tl.where(b_page >= 0, position + 1 - b_block * PAGE, 0)
    num_tiles = tl.max(tl.where(b_block >= 0, o_b + 1, 0), 0) * TILES
    first = i_split * num_tiles // SPLIT
    last = (i_split + 1) * num_tiles // SPLIT
    b_q = b_q.to(TYPE)
    # [TILE, C_PAD]
    o_c = tl.arange(0, C_PAD)
    o_nc = o_n[:, None] * C + o_c[None, :]

    b_m = tl.full([G_PAD], MIN_MAX, tl.float32)
    if PAIRS:
        b_q, b_q1 = tl.split(tl.reshape(b_q, (G_PAD, C_PAD, 2)))
    else:
        b_q1 = b_q
    b_l = tl.zeros([G_PAD, TILE], tl.float32)
    b_acc = tl.zeros([G_PAD, C_PAD], tl.float32)
    b_acc1 = b_acc
    for i in range(first, last):
        is_this = o_b == i // TILES
        page = tl.sum(tl.where(is_this, b_page, 0), 0).to(tl.int64)
        count = tl.sum(tl.where(is_this, b_count, 0), 0)
        offset = (i % TILES) * TILE
        # Places that are not visible may hold anything and are not read. [TILE]
        m_n = offset + o_n < count
        if PAGE % TILE != 0:
            m_n = m_n & (offset + o_n < PAGE)
        m_nc = m_n[:, None]
        if C != C_PAD:
            m_nc = m_nc & (o_c < C)[None, :]
        o_tile = page * stride_page + offset * C
        b_k = tl.load(k_ptr + o_tile + o_nc, mask=m_nc, other=0.0)
        b_v = tl.load(v_ptr + o_tile + o_nc, mask=m_nc, other=0.0)
        m_visible = m_n[None, :]
        if PAIRS:
            b_m, b_l, b_acc, b_acc1 = attend_pairs(
                b_q, b_q1, b_k, b_v, m_visible, b_m, b_l, b_acc, b_acc1, scale
            )
        else:
            b_m, b_l, b_acc = attend_tile(b_q, b_k, b_v, m_visible, b_m, b_l, b_acc, scale, TYPE)
    if PAIRS:
        b_acc = interleaved(b_acc, b_acc1)

    b_o, b_lse = normalised(b_m, b_l, b_acc)
    if SPLIT == 1:
        p_out = out_ptr + i_t.to(tl.int64) * stride_ot
        p_out += ((i_k * G + o_g) * D)[:, None] + o_d[None, :]
        tl.store(p_out, b_o.to(out_ptr.dtype.element_ty), mask=m_gd)
    else:
        o_part = (i_task.to(tl.int64) * SPLIT + i_split) * G + o_g
        p_part = part_ptr + o_part[:, None] * D + o_d[None, :]
        tl.store(p_part, b_o, mask=m_gd)
        tl.store(lse_ptr + o_part, b_lse, mask=o_g < G)


@triton.jit
def _merge_chosen(
    part_ptr,
    lse_ptr,
    out_ptr,
    stride_ot,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (token, query head) a program."""
    i_t = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    o_x = tl.arange(0, SPLIT_PAD)
    o_d = tl.arange(0, D_PAD)
    # [SPLIT_PAD]
    o_part = ((i_t * (H // G) + i_h // G).to(tl.int64) * SPLIT + o_x) * G + i_h % G
    m_x = o_x < SPLIT
    begin_last(PDL)
    b_lse = tl.load(lse_ptr + o_part, mask=m_x, other=float("-inf"))
    m_xd = m_x[:, None] & (o_d < D)[None, :]
    b_o = tl.load(part_ptr + o_part[:, None] * D + o_d[None, :], mask=m_xd, other=0.0)
    b_m = tl.full([], MIN_MAX, tl.float32)
    b_l = tl.full([], 0.0, tl.float32)
    b_acc = tl.zeros([D_PAD], tl.float32)
    b_m, b_l, b_acc = merge_parts(b_o, b_lse, b_m, b_l, b_acc)
    b_acc = b_acc / tl.where(b_l > 0, b_l, 1.0)
    p_out = out_ptr + i_t.to(tl.int64) * stride_ot + i_h * D + o_d
    tl.store(p_out, b_acc.to(out_ptr.dtype.element_ty), mask=o_d < D)

"""Dense GQA of decodes: every page of a request, or of a group of requests, is read once.

`batch.plan.dense` cuts the work. An own unit is a run of pages of one request: its query tokens
times the query heads of one KV head are the rows of the product, and the time is that of reading
the pages. A shared unit is a run of pages that up to 16 requests have in common: with 16 heads each
they make 256 rows, so that reading the pages once leaves the tensor cores busy. Each program writes
its normalised output and log-sum-exp; a last kernel merges what belongs to one query head.

Rows of a product run over (request of the unit, query token, head of the KV head), the last
fastest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.decode_plan import SHARED_ROWS
from inference.kernels.merge_kernel import (
    LOG2_E,
    MIN_MAX,
    as_pairs,
    attend_pairs,
    attend_tile,
    begin_dependent,
    begin_last,
    interleaved,
    launch_options,
    merge_parts,
    normalised,
    product_type,
)
from inference.kernels.paged_attention.shared_kernel import SharedLaunch, attend_shared
from inference.kernels.paging import LayerPages, PagedBatch


class Launch(NamedTuple):
    """How the own units are cut."""

    split: int
    """Programs a unit."""
    tile: int
    """Keys a step."""
    num_warps: int
    num_stages: int


def num_workers(num_sms: int, num_kv_heads: int) -> int:
    """How many own units `DecodePlan.dense` should aim at; the kernel may cut each once more."""
    return max(1, num_sms // num_kv_heads)


def num_shared_workers(num_sms: int, num_kv_heads: int, group: int = 16) -> int:
    """How many shared units it should aim at: each multiprocessor takes 128 rows of one.

    More units would only be more parts to merge. `group` is the query heads a KV head.
    """
    return max(1, num_sms // (num_kv_heads * triton.cdiv(SHARED_ROWS * group, 128)))


def paged_attention_decode(
    q_THD: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    scale: float,
    out_THD: Tensor,
    own: Launch | None = None,
    shared: SharedLaunch | None = None,
) -> None:
    """Write rows [0, `batch.num_decode_tokens`) of `out_THD`.

    Raises:
        ValueError: the batch has decodes but no plan.
    """
    if batch.plan is None:
        raise ValueError("paged_attention: decodes on CUDA need batch.plan (decode_plan.py)")
    units = batch.plan.dense
    num_kv_heads, page_size, head_dim = pages.k_pages.shape[1:]
    num_heads, query_len = q_THD.shape[1], batch.decode_query_len
    group = num_heads // num_kv_heads
    own_rows, shared_rows = query_len * group, SHARED_ROWS * query_len * group
    num_own, num_shared = units.own_U3.shape[0], units.shared_X4.shape[0]
    own = own or choose_own(batch.num_decodes, own_rows, pages.k_pages, q_THD)
    is_cuda, device = q_THD.is_cuda, q_THD.device
    own_shape = (num_own * own.split, num_kv_heads, own_rows)
    shared_shape = (num_shared, num_kv_heads, shared_rows)
    own_part = torch.empty((*own_shape, head_dim), dtype=torch.float32, device=device)
    own_lse = torch.empty(own_shape, dtype=torch.float32, device=device)
    shared_part = torch.empty((*shared_shape, head_dim), dtype=torch.float32, device=device)
    shared_lse = torch.empty(shared_shape, dtype=torch.float32, device=device)
    shapes = {
        "QUERY_LEN": query_len,
        "K": num_kv_heads,
        "G": group,
        "D": head_dim,
        "D_PAD": max(16, triton.next_power_of_2(head_dim)),
        "PAGE": page_size,
        "TYPE": product_type(q_THD, pages.k_pages),
        "PDL": is_cuda,
    }
    k_pages, v_pages = as_pairs(q_THD, pages.k_pages), as_pairs(q_THD, pages.v_pages)
    is_pairs = k_pages is not None
    if not is_pairs:
        k_pages, v_pages = pages.k_pages, pages.v_pages
    _attend_own[(num_own, num_kv_heads, own.split)](
        q_THD,
        k_pages,
        v_pages,
        units.own_U3,
        batch.page_table_RN,
        batch.positions_T,
        batch.seq_len_R,
        own_part,
        own_lse,
        scale * LOG2_E,
        *q_THD.stride()[:2],
        *k_pages.stride()[:2],
        batch.page_table_RN.stride(0),
        ROWS_PAD=max(16, triton.next_power_of_2(own_rows)),
        TILE=own.tile,
        SPLIT=own.split,
        PAIRS=is_pairs,
        **shapes,
        num_warps=own.num_warps,
        num_stages=own.num_stages,
        **launch_options(is_cuda),
    )
    if num_shared:
        attend_shared(q_THD, pages, batch, scale, shared_part, shared_lse, shared)
    _merge_units[(batch.num_decode_tokens * num_heads,)](
        own_part,
        own_lse,
        units.own_start_R1,
        shared_part,
        shared_lse,
        units.shared_R3,
        out_THD,
        out_THD.stride(0),
        QUERY_LEN=query_len,
        H=num_heads,
        G=group,
        D=head_dim,
        D_PAD=shapes["D_PAD"],
        MAX_ROWS=shared_rows,
        SPLIT=own.split,
        HAS_SHARED=num_shared > 0,
        PARTS=32,
        PDL=is_cuda,
        num_warps=1,
        **launch_options(is_cuda),
    )


def choose_own(num_requests: int, num_rows: int, k_pages: Tensor, q_THD: Tensor) -> Launch:
    """One program a multiprocessor, or two where long units pay for more parts to merge."""
    tile = min(64, max(16, triton.next_power_of_2(k_pages.shape[2])))
    if q_THD.dtype == torch.float32:
        tile = min(32, tile)
    split = 2 if num_requests >= 8 else 1
    num_stages = 4 if split == 1 else 3
    if k_pages.element_size() == 1:
        num_stages = 6
    return Launch(split, tile, num_warps=8 if num_rows > 32 else 4, num_stages=num_stages)


@triton.jit
def _attend_own(
    q_ptr,
    k_ptr,
    v_ptr,
    own_ptr,
    table_ptr,
    positions_ptr,
    seq_len_ptr,
    part_ptr,
    lse_ptr,
    scale,
    stride_qt,
    stride_qh,
    stride_page,
    stride_head,
    stride_row,
    QUERY_LEN: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TYPE: tl.constexpr,
    PDL: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    PAIRS: tl.constexpr,
):
    i_u = tl.program_id(0)
    i_k = tl.program_id(1)
    i_split = tl.program_id(2)
    TILES: tl.constexpr = (PAGE + TILE - 1) // TILE
    # Columns of a page: D values, or D / 2 pairs of FP8 values.
    C: tl.constexpr = D // 2 if PAIRS else D
    C_PAD: tl.constexpr = D_PAD // 2 if PAIRS else D_PAD
    k_ptr += i_k.to(tl.int64) * stride_head
    v_ptr += i_k.to(tl.int64) * stride_head
    # The plan and the page table are written before the step: no need to wait for a kernel.
    row = tl.load(own_ptr + i_u * 3)
    first_page = tl.load(own_ptr + i_u * 3 + 1)
    num_tiles = tl.load(own_ptr + i_u * 3 + 2) * TILES
    seq_len = tl.load(seq_len_ptr + row)
    first = i_split * num_tiles // SPLIT
    last = (i_split + 1) * num_tiles // SPLIT
    p_table = table_ptr + row.to(tl.int64) * stride_row + first_page
    # The page of the next tile is looked up while this one is under way.
    page = tl.load(p_table + first // TILES, mask=first < last, other=0)
    begin_dependent(PDL)
    if num_tiles == 0:
        return

    o_m = tl.arange(0, ROWS_PAD)
    o_d = tl.arange(0, D_PAD)
    o_n = tl.arange(0, TILE)
    m_m = o_m < QUERY_LEN * G
    o_t = row * QUERY_LEN + o_m // G
    # How many keys each row sees. [ROWS_PAD]
    b_limit = tl.load(positions_ptr + o_t, mask=m_m, other=-1).to(tl.int32) + 1
    m_md = m_m[:, None] & (o_d < D)[None, :]
    # [ROWS_PAD, D_PAD]
    p_q = q_ptr + o_t.to(tl.int64)[:, None] * stride_qt + o_d[None, :]
    p_q += (i_k * G + o_m % G)[:, None] * stride_qh
    b_q = tl.load(p_q, mask=m_md, other=0.0).to(TYPE)
    # [TILE, C_PAD]
    o_c = tl.arange(0, C_PAD)
    o_nc = o_n[:, None] * C + o_c[None, :]

    b_m = tl.full([ROWS_PAD], MIN_MAX, tl.float32)
    if PAIRS:
        b_q, b_q1 = tl.split(tl.reshape(b_q, (ROWS_PAD, C_PAD, 2)))
    else:
        b_q1 = b_q
    b_l = tl.zeros([ROWS_PAD, TILE], tl.float32)
    b_acc = tl.zeros([ROWS_PAD, C_PAD], tl.float32)
    b_acc1 = b_acc
    for i in range(first, last):
        offset = (i % TILES) * TILE
        o_key = (first_page + i // TILES) * PAGE + offset + o_n
        # Places without a key may hold anything and are not read. [TILE]
        m_n = o_key < seq_len
        if PAGE % TILE != 0:
            m_n = m_n & (offset + o_n < PAGE)
        m_nc = m_n[:, None]
        if C != C_PAD:
            m_nc = m_nc & (o_c < C)[None, :]
        o_tile = page.to(tl.int64) * stride_page + offset * C
        b_k = tl.load(k_ptr + o_tile + o_nc, mask=m_nc, other=0.0)
        b_v = tl.load(v_ptr + o_tile + o_nc, mask=m_nc, other=0.0)
        page = tl.load(p_table + (i + 1) // TILES, mask=i + 1 < last, other=0)
        m_visible = m_n[None, :] & (o_key[None, :] < b_limit[:, None])
        if PAIRS:
            b_m, b_l, b_acc, b_acc1 = attend_pairs(
                b_q, b_q1, b_k, b_v, m_visible, b_m, b_l, b_acc, b_acc1, scale
            )
        else:
            b_m, b_l, b_acc = attend_tile(b_q, b_k, b_v, m_visible, b_m, b_l, b_acc, scale, TYPE)
    if PAIRS:
        b_acc = interleaved(b_acc, b_acc1)

    b_o, b_lse = normalised(b_m, b_l, b_acc)
    o_part = ((i_u * SPLIT + i_split).to(tl.int64) * K + i_k) * (QUERY_LEN * G) + o_m
    p_part = part_ptr + o_part[:, None] * D + o_d[None, :]
    tl.store(p_part, b_o, mask=m_md)
    tl.store(lse_ptr + o_part, b_lse, mask=m_m)


@triton.jit
def _merge_units(
    own_part_ptr,
    own_lse_ptr,
    own_start_ptr,
    shared_part_ptr,
    shared_lse_ptr,
    shared_r3_ptr,
    out_ptr,
    stride_ot,
    QUERY_LEN: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (token, query head) a program, `PARTS` parts at a time."""
    i_t = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    row = i_t // QUERY_LEN
    i_k = i_h // G
    K: tl.constexpr = H // G
    o_x = tl.arange(0, PARTS)
    o_d = tl.arange(0, D_PAD)
    first = tl.load(own_start_ptr + row) * SPLIT
    last = tl.load(own_start_ptr + row + 1) * SPLIT
    begin_last(PDL)
    b_m = tl.full([], MIN_MAX, tl.float32)
    b_l = tl.full([], 0.0, tl.float32)
    b_acc = tl.zeros([D_PAD], tl.float32)
    i_row = (i_t % QUERY_LEN) * G + i_h % G
    for i in range(first, last, PARTS):
        m_x = i + o_x < last
        # [PARTS]
        o_part = ((i + o_x).to(tl.int64) * K + i_k) * (QUERY_LEN * G) + i_row
        b_lse = tl.load(own_lse_ptr + o_part, mask=m_x, other=float("-inf"))
        m_xd = m_x[:, None] & (o_d < D)[None, :]
        b_o = tl.load(own_part_ptr + o_part[:, None] * D + o_d[None, :], mask=m_xd, other=0.0)
        b_m, b_l, b_acc = merge_parts(b_o, b_lse, b_m, b_l, b_acc)
    if HAS_SHARED:
        first = tl.load(shared_r3_ptr + row * 3)
        last = first + tl.load(shared_r3_ptr + row * 3 + 1)
        i_row += tl.load(shared_r3_ptr + row * 3 + 2) * (QUERY_LEN * G)
        for i in range(first, last, PARTS):
            m_x = i + o_x < last
            o_part = ((i + o_x).to(tl.int64) * K + i_k) * MAX_ROWS + i_row
            b_lse = tl.load(shared_lse_ptr + o_part, mask=m_x, other=float("-inf"))
            m_xd = m_x[:, None] & (o_d < D)[None, :]
            p_part = shared_part_ptr + o_part[:, None] * D + o_d[None, :]
            b_o = tl.load(p_part, mask=m_xd, other=0.0)
            b_m, b_l, b_acc = merge_parts(b_o, b_lse, b_m, b_l, b_acc)
    b_acc = b_acc / tl.where(b_l > 0, b_l, 1.0)
    p_out = out_ptr + i_t.to(tl.int64) * stride_ot + i_h * D + o_d
    tl.store(p_out, b_acc.to(out_ptr.dtype.element_ty), mask=o_d < D)

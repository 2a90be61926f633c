"""Dense GQA of decodes: every page of a request, or of a group of requests, is read once.

`batch.plan.dense` cuts the work. An own unit is a run of pages of one request: its query tokens
times the query heads of one KV head are the rows of the product, and the time is that of reading
the pages. A shared unit is a run of pages that up to 16 requests have in common: with 16 heads each
they make 256 rows, so that reading the pages once leaves the tensor cores busy. Shared units go
first and the programs of own units fill the multiprocessors that they leave idle. Each program
writes its normalised output and log-sum-exp, a part; a last kernel merges the parts of each query
head.

Rows of a product run over (request of the unit, query token, head of the KV head), the last
fastest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from inference.kernels.decode_plan import SHARED_ROWS
from inference.kernels.hardware import USE_PDL
from inference.kernels.merge_kernel import (
    LOG2_E,
    MIN_MAX,
    as_pairs,
    attend_pairs,
    attend_tile,
    begin_dependent,
    begin_last,
    interleaved,
    normalised,
    product_type,
    wait_at_end,
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
    num_kv_heads, head_dim = pages.k_pages.shape[1], pages.k_pages.shape[3]
    num_heads, query_len = q_THD.shape[1], batch.decode_query_len
    group = num_heads // num_kv_heads
    own_rows, shared_rows = query_len * group, SHARED_ROWS * query_len * group
    num_own, num_shared = units.own_U3.shape[0], units.shared_X4.shape[0]
    has_shared = num_shared > 0
    own = own or choose_own(batch.num_decodes, own_rows, pages.k_pages, q_THD, has_shared)
    heads, parts = choose_merge(batch.num_decodes, group)
    device = q_THD.device
    # Parts of own units, [unit, split, K, row], then those of shared units, [unit, K, row].
    first_shared = num_own * own.split * num_kv_heads * own_rows
    num_parts = first_shared + num_shared * num_kv_heads * shared_rows
    part_PD = torch.empty((num_parts, head_dim), dtype=torch.float32, device=device)
    lse_P = torch.empty(num_parts, dtype=torch.float32, device=device)
    if has_shared:
        shape = (num_shared, num_kv_heads, shared_rows)
        part_XKMD = part_PD[first_shared:].view(*shape, head_dim)
        lse_XKM = lse_P[first_shared:].view(shape)
        attend_shared(q_THD, pages, batch, scale, part_XKMD, lse_XKM, shared)
    _launch_own(q_THD, pages, batch, scale, part_PD, lse_P, own)
    _merge_units[(batch.num_decode_tokens * num_heads // heads,)](
        part_PD,
        lse_P,
        units.own_start_R1,
        units.shared_R3,
        out_THD,
        out_THD.stride(0),
        first_shared,
        QUERY_LEN=query_len,
        H=num_heads,
        G=group,
        D=head_dim,
        D_PAD=max(16, triton.next_power_of_2(head_dim)),
        MAX_ROWS=shared_rows,
        SPLIT=own.split,
        HAS_SHARED=has_shared,
        HEADS=heads,
        PARTS=parts,
        PDL=USE_PDL,
        num_warps=1,
        launch_pdl=USE_PDL,
    )


def _launch_own(
    q_THD: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    scale: float,
    part_PD: Tensor,
    lse_P: Tensor,
    own: Launch,
) -> None:
    """Fill the first rows of `part_PD` and `lse_P`: [unit, split, K, (query token, head)]."""
    assert batch.plan is not None, "paged_attention_decode checks it"
    units, query_len = batch.plan.dense, batch.decode_query_len
    num_kv_heads, page_size, head_dim = pages.k_pages.shape[1:]
    group = q_THD.shape[1] // num_kv_heads
    k_pages, v_pages = as_pairs(q_THD, pages.k_pages), as_pairs(q_THD, pages.v_pages)
    is_pairs = k_pages is not None
    if not is_pairs:
        k_pages, v_pages = pages.k_pages, pages.v_pages
    _attend_own[(units.own_U3.shape[0], num_kv_heads, own.split)](
        q_THD,
        k_pages,
        v_pages,
        units.own_U3,
        batch.page_table_RN,
        batch.positions_T,
        batch.seq_len_R,
        part_PD,
        lse_P,
        scale * LOG2_E,
        *q_THD.stride()[:2],
        *k_pages.stride()[:2],
        batch.page_table_RN.stride(0),
        QUERY_LEN=query_len,
        K=num_kv_heads,
        G=group,
        D=head_dim,
        D_PAD=max(16, triton.next_power_of_2(head_dim)),
        PAGE=page_size,
        TYPE=product_type(q_THD, pages.k_pages),
        PDL=USE_PDL,
        ROWS_PAD=max(16, triton.next_power_of_2(query_len * group)),
        TILE=own.tile,
        SPLIT=own.split,
        PAIRS=is_pairs,
        AFTER_SHARED=units.shared_X4.shape[0] > 0,
        num_warps=own.num_warps,
        num_stages=own.num_stages,
        launch_pdl=USE_PDL,
    )


def choose_own(
    num_requests: int, num_rows: int, k_pages: Tensor, q_THD: Tensor, has_shared: bool
) -> Launch:
    """One program a multiprocessor, or two where long units pay for more parts to merge.

    Beside shared units, units are short and multiprocessors few: a whole page a step.
    """
    is_low = k_pages.element_size() == 1
    is_wide = has_shared and num_rows <= 32 and not is_low
    tile = min(128 if is_wide else 64, max(16, triton.next_power_of_2(k_pages.shape[2])))
    if q_THD.dtype == torch.float32:
        tile = min(32, tile)
    split = 2 if num_requests >= 8 and not has_shared else 1
    num_stages = 6 if is_low else 2 if is_wide else 3 if has_shared or split == 2 else 4
    return Launch(split, tile, num_warps=8 if num_rows > 32 else 4, num_stages=num_stages)


def choose_merge(num_requests: int, group: int) -> tuple[int, int]:
    """(query heads a program of the merge, parts it adds at a time): few requests have many."""
    heads, parts = (1, 32) if num_requests <= 16 else (2, 8) if num_requests <= 64 else (4, 4)
    return math.gcd(heads, group), parts


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
    AFTER_SHARED: tl.constexpr,
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
    if not AFTER_SHARED:
        begin_dependent(PDL)
    elif PDL:
        # The programs of the shared kernel have waited for what is read here.
        gdc_launch_dependents()
    if num_tiles == 0:
        _end_own(AFTER_SHARED, PDL)
        return

    # Without a wait of its own only L2 is sure to know what was written.
    CACHE: tl.constexpr = ".cg" if AFTER_SHARED else ""
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
    b_q = tl.load(p_q, mask=m_md, other=0.0, cache_modifier=CACHE).to(TYPE)
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
        b_k = tl.load(k_ptr + o_tile + o_nc, mask=m_nc, other=0.0, cache_modifier=CACHE)
        b_v = tl.load(v_ptr + o_tile + o_nc, mask=m_nc, other=0.0, cache_modifier=CACHE)
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
    _end_own(AFTER_SHARED, PDL)


@triton.jit
def _end_own(AFTER_SHARED: tl.constexpr, PDL: tl.constexpr):
    """The last program ends after the shared kernel, so that the merge waits for both."""
    if AFTER_SHARED:
        i_last = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2) - 1
        i_program = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
        if i_program * tl.num_programs(0) + tl.program_id(0) == i_last:
            wait_at_end(PDL)


@triton.jit
def _merge_units(
    part_ptr,
    lse_ptr,
    own_start_ptr,
    shared_r3_ptr,
    out_ptr,
    stride_ot,
    first_shared,
    QUERY_LEN: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`HEADS` query heads of a token a program, `PARTS` parts at a time: own ones, then shared."""
    K: tl.constexpr = H // G
    ROWS: tl.constexpr = QUERY_LEN * G
    i_t = tl.program_id(0) // (H // HEADS)
    i_h = tl.program_id(0) % (H // HEADS) * HEADS
    row = i_t // QUERY_LEN
    i_k = i_h // G
    o_h = tl.arange(0, HEADS)
    o_x = tl.arange(0, PARTS)
    o_d = tl.arange(0, D_PAD)
    first_own = tl.load(own_start_ptr + row) * SPLIT
    num_own = tl.load(own_start_ptr + row + 1) * SPLIT - first_own
    num_parts = num_own
    if HAS_SHARED:
        unit = tl.load(shared_r3_ptr + row * 3)
        num_parts += tl.load(shared_r3_ptr + row * 3 + 1)
        i_place = tl.load(shared_r3_ptr + row * 3 + 2)
    begin_last(PDL)
    # Place of the heads among the rows of a unit. [HEADS]
    o_row = (i_t % QUERY_LEN) * G + i_h % G + o_h
    b_m = tl.full([HEADS], MIN_MAX, tl.float32)
    b_l = tl.zeros([HEADS], tl.float32)
    b_acc = tl.zeros([HEADS, D_PAD], tl.float32)
    for i in range(0, num_parts, PARTS):
        # [PARTS]
        o_part = i + o_x
        o_first = ((first_own + o_part).to(tl.int64) * K + i_k) * ROWS
        if HAS_SHARED:
            o_shared = ((unit + o_part - num_own).to(tl.int64) * K + i_k) * MAX_ROWS
            o_shared += first_shared + i_place * ROWS
            o_first = tl.where(o_part < num_own, o_first, o_shared)
        m_x = o_part < num_parts
        # [PARTS, HEADS]
        o_xh = o_first[:, None] + o_row[None, :]
        b_lse = tl.load(lse_ptr + o_xh, mask=m_x[:, None], other=float("-inf"))
        # [PARTS, HEADS, D_PAD]
        p_part = part_ptr + o_xh[:, :, None] * D + o_d[None, None, :]
        b_o = tl.load(p_part, mask=m_x[:, None, None] & (o_d < D)[None, None, :], other=0.0)
        b_max = tl.maximum(b_m, tl.max(b_lse, 0))
        b_w = tl.exp2(b_lse - b_max[None, :])
        b_decay = tl.exp2(b_m - b_max)
        b_l = b_l * b_decay + tl.sum(b_w, 0)
        b_acc = b_acc * b_decay[:, None] + tl.sum(b_o * b_w[:, :, None], 0)
        b_m = b_max
    b_acc = b_acc / tl.where(b_l > 0, b_l, 1.0)[:, None]
    p_out = out_ptr + i_t.to(tl.int64) * stride_ot + (i_h + o_h)[:, None] * D + o_d[None, :]
    tl.store(p_out, b_acc.to(out_ptr.dtype.element_ty), mask=(o_d < D)[None, :])

"""Dense GQA over the pages that a group of requests has in common, read once for all of them.

Every key is seen by every row, so there are no masks but for padding. Up to 16 requests times their
query tokens times the heads of a KV head are the rows: the tensor cores are the limit, not memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.decode_plan import SHARED_ROWS
from inference.kernels.hardware import USE_PDL
from inference.kernels.merge_kernel import (
    LOG2_E,
    MIN_MAX,
    begin_dependent,
    product_type,
)
from inference.kernels.paging import LayerPages, PagedBatch


class SharedLaunch(NamedTuple):
    """How the shared units are cut."""

    rows: int
    """Rows a program."""
    tile: int
    """Keys a step."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Of a thread; fewer let two programs share a multiprocessor."""


def attend_shared(
    q_THD: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    scale: float,
    part_XKMD: Tensor,
    lse_XKM: Tensor,
    launch: SharedLaunch | None = None,
) -> None:
    """Fill the rows of `part_XKMD` and `lse_XKM` that belong to requests of each shared unit.

    M runs over (place of the request in the unit, query token, head of the KV head). Launched right
    before the kernel of the own units, which may run beside it. Hopper has a kernel of its own for
    16-bit pages of 128 keys; a `launch` asks for this one.
    """
    assert batch.plan is not None, "paged_attention_decode checks it"
    if launch is None and q_THD.is_cuda:
        from inference.kernels.paged_attention import shared_hopper_kernel as hopper

        if hopper.serves(q_THD, pages):
            hopper.attend_shared(q_THD, pages, batch, scale, part_XKMD, lse_XKM)
            return
    units = batch.plan.dense
    num_kv_heads, page_size, head_dim = pages.k_pages.shape[1:]
    group = q_THD.shape[1] // num_kv_heads
    max_rows = SHARED_ROWS * batch.decode_query_len * group
    launch = launch or choose_launch(max_rows, pages.k_pages, q_THD)
    grid = (triton.cdiv(max_rows, launch.rows), num_kv_heads, units.shared_X4.shape[0])
    _attend_shared[grid](
        q_THD,
        pages.k_pages,
        pages.v_pages,
        units.shared_X4,
        batch.page_table_RN,
        part_XKMD,
        lse_XKM,
        scale * LOG2_E,
        *q_THD.stride()[:2],
        *pages.k_pages.stride()[:2],
        batch.page_table_RN.stride(0),
        QUERY_LEN=batch.decode_query_len,
        K=num_kv_heads,
        G=group,
        D=head_dim,
        D_PAD=max(16, triton.next_power_of_2(head_dim)),
        PAGE=page_size,
        TYPE=product_type(q_THD, pages.k_pages),
        ROWS=launch.rows,
        MAX_ROWS=max_rows,
        TILE=launch.tile,
        PDL=USE_PDL,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        maxnreg=launch.max_registers,
        launch_pdl=USE_PDL,
    )


def choose_launch(num_rows: int, k_pages: Tensor, q_THD: Tensor) -> SharedLaunch:
    """128 rows, two programs a multiprocessor: one multiplies while the other exponentiates."""
    num_rows = max(16, triton.next_power_of_2(num_rows))
    if q_THD.dtype == torch.float32:
        return SharedLaunch(rows=min(64, num_rows), tile=16, num_warps=4, num_stages=2)
    rows = min(128, num_rows)
    tile = min(64, max(16, triton.next_power_of_2(k_pages.shape[2])))
    if rows < 128:
        return SharedLaunch(rows, tile, num_warps=4, num_stages=2)
    return SharedLaunch(rows, tile, num_warps=8, num_stages=2, max_registers=128)


@triton.jit
def _attend_shared(
    q_ptr,
    k_ptr,
    v_ptr,
    shared_ptr,
    table_ptr,
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
    ROWS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    i_m = tl.program_id(0)
    i_k = tl.program_id(1)
    i_x = tl.program_id(2)
    TILES: tl.constexpr = (PAGE + TILE - 1) // TILE
    row = tl.load(shared_ptr + i_x * 4)
    num_rows = tl.load(shared_ptr + i_x * 4 + 1) * (QUERY_LEN * G)
    first_page = tl.load(shared_ptr + i_x * 4 + 2)
    num_tiles = tl.load(shared_ptr + i_x * 4 + 3) * TILES
    begin_dependent(PDL)
    if (num_tiles > 0) & (i_m * ROWS < num_rows):
        p_table = table_ptr + row.to(tl.int64) * stride_row + first_page
        o_m = i_m * ROWS + tl.arange(0, ROWS)
        o_d = tl.arange(0, D_PAD)
        o_n = tl.arange(0, TILE)
        m_m = o_m < num_rows
        m_md = m_m[:, None] & (o_d < D)[None, :]
        # [ROWS, D_PAD]
        p_q = q_ptr + (row * QUERY_LEN + o_m // G).to(tl.int64)[:, None] * stride_qt
        p_q += (i_k * G + o_m % G)[:, None] * stride_qh + o_d[None, :]
        b_q = tl.load(p_q, mask=m_md, other=0.0).to(TYPE)
        # [TILE, D_PAD]
        o_nd = o_n[:, None] * D + o_d[None, :]
        k_ptr += i_k.to(tl.int64) * stride_head
        v_ptr += i_k.to(tl.int64) * stride_head

        b_m = tl.full([ROWS], MIN_MAX, tl.float32)
        b_l = tl.zeros([ROWS], tl.float32)
        b_acc = tl.zeros([ROWS, D_PAD], tl.float32)
        page = tl.load(p_table)
        for i in range(0, num_tiles):
            offset = (i % TILES) * TILE
            o_tile = page.to(tl.int64) * stride_page + offset * D
            if PAGE % TILE != 0 or D != D_PAD:
                m_nd = (offset + o_n < PAGE)[:, None] & (o_d < D)[None, :]
                b_k = tl.load(k_ptr + o_tile + o_nd, mask=m_nd, other=0.0)
                b_v = tl.load(v_ptr + o_tile + o_nd, mask=m_nd, other=0.0)
            else:
                b_k = tl.load(k_ptr + o_tile + o_nd)
                b_v = tl.load(v_ptr + o_tile + o_nd)
            page = tl.load(p_table + (i + 1) // TILES, mask=i + 1 < num_tiles, other=0)
            # [ROWS, TILE]
            b_s = tl.dot(b_q, tl.trans(b_k.to(TYPE)), input_precision="ieee")
            if PAGE % TILE != 0:
                b_s = tl.where((offset + o_n < PAGE)[None, :], b_s, float("-inf"))
            b_max = tl.maximum(b_m, tl.max(b_s, 1) * scale)
            b_p = tl.exp2(b_s * scale - b_max[:, None])
            b_decay = tl.exp2(b_m - b_max)
            b_l = b_l * b_decay + tl.sum(b_p, 1)
            b_acc = b_acc * b_decay[:, None]
            b_acc = tl.dot(b_p.to(TYPE), b_v.to(TYPE), acc=b_acc, input_precision="ieee")
            b_m = b_max

        b_o = b_acc / b_l[:, None]
        o_part = (i_x.to(tl.int64) * K + i_k) * MAX_ROWS + o_m
        p_part = part_ptr + o_part[:, None] * D + o_d[None, :]
        tl.store(p_part, b_o, mask=m_md)
        tl.store(lse_ptr + o_part, b_m + tl.log2(b_l), mask=m_m)

"""Block-major sparse GQA: a block of keys is read once for many of the queries that chose it.

A program keeps the keys and values of one block in shared memory and takes tiles of queries from
the block's list. Each tile gives one part of its rows' outputs, not yet divided by their sums of
weights; a second kernel adds the parts of each row. One pass is one KV head and a slab of tokens;
passes alternate between two streams, so that adding (memory) overlaps attending (tensor cores).

Logits are in base 2: `scale` carries log2(e).
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.merge_kernel import MIN_MAX
from inference.kernels.msa_attention.invert_kernel import invert_blocks
from inference.kernels.paging import LayerPages, PagedBatch


class BlockMajor(NamedTuple):
    """Launch of the way for many tokens."""

    slab: int = 8192
    """Query tokens of a pass."""
    unit: int = 64
    """Most queries of one program."""
    rows: int = 64
    """Rows (queries x query heads of a KV head) of a tile."""
    num_warps: int = 4
    max_registers: int | None = 168
    streams: int = 2
    combine_warps: int = 8
    combine_registers: int | None = 80


def checked_strides(q_THD: Tensor, pages: LayerPages, out_THD: Tensor) -> tuple[int, ...]:
    page_strides = pages.k_pages.stride()
    if page_strides != pages.v_pages.stride() or page_strides[2:] != (
        pages.k_pages.shape[3],
        1,
    ):
        raise ValueError("msa_attention: a page of one KV head must be contiguous, K and V alike")
    if q_THD.stride()[1:] != out_THD.stride()[1:] or q_THD.stride(1) != q_THD.shape[2]:
        raise ValueError("msa_attention: the heads of a token must be contiguous")
    return q_THD.stride(0), out_THD.stride(0), *page_strides[:2]


def padded(size: int, least: int = 1) -> int:
    return max(least, triton.next_power_of_2(size))


def product_type(q_THD: Tensor) -> tl.dtype:
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    return types[q_THD.dtype]


def _register_limit(q_THD: Tensor, limit: int | None) -> dict[str, int]:
    return {"maxnreg": limit} if limit and q_THD.is_cuda else {}


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def attend_blocks(
    q_THD: Tensor,
    pages: LayerPages,
    blocks_TKB: Tensor,
    batch: PagedBatch,
    scale: float,
    out_THD: Tensor,
    launch: BlockMajor,
) -> None:
    num_tokens, num_kv_heads, topk = blocks_TKB.shape
    page_size, head_dim = pages.k_pages.shape[2:]
    group = q_THD.shape[1] // num_kv_heads
    tile = max(1, launch.rows // padded(group))
    slab = min(launch.slab, num_tokens)
    lists = invert_blocks(blocks_TKB, batch, slab=slab, tile=tile, unit=launch.unit)
    num_passes, num_rows = lists.tokens_PL.shape
    num_streams = min(launch.streams, num_passes) if q_THD.is_cuda else 1
    part_type = torch.float32 if q_THD.dtype == torch.float32 else q_THD.dtype
    scratch = [
        (
            torch.empty((num_rows, group, head_dim), dtype=part_type, device=q_THD.device),
            torch.empty((num_rows, group, 2), dtype=torch.float32, device=q_THD.device),
        )
        for _ in range(num_streams)
    ]
    streams = [nullcontext()] * num_streams
    if num_streams > 1:
        main, side = torch.cuda.current_stream(), _side_stream(q_THD.device)
        side.wait_stream(main)
        streams = [nullcontext(), torch.cuda.stream(side)]
    strides = checked_strides(q_THD, pages, out_THD)
    for index in range(num_passes):
        with streams[index % num_streams]:
            head, i_slab = divmod(index, triton.cdiv(num_tokens, slab))
            tokens = slice(i_slab * slab, min((i_slab + 1) * slab, num_tokens))
            part, stats = scratch[index % num_streams]
            heads = slice(head * group, (head + 1) * group)
            _block_kernel[(lists.units_PU4.shape[1],)](
                q_THD[:, heads],
                pages.k_pages[:, head],
                pages.v_pages[:, head],
                lists.units_PU4[index],
                lists.num_units_P,
                lists.tokens_PL[index],
                batch.positions_T,
                part,
                stats,
                scale,
                strides[0],
                strides[2],
                index,
                batch.num_decode_tokens,
                G=group,
                G_PAD=padded(group),
                D=head_dim,
                D_PAD=padded(head_dim, 16),
                PAGE=page_size,
                PAGE_PAD=padded(page_size, 16),
                TILE=tile,
                TYPE=product_type(q_THD),
                num_warps=launch.num_warps,
                num_stages=1,
                **_register_limit(q_THD, launch.max_registers),
            )
            combine_kernel[(tokens.stop - tokens.start, 1)](
                part,
                stats,
                lists.row_TKB[tokens, head],
                out_THD[tokens, heads],
                strides[1],
                num_kv_heads * topk,
                0,
                K=1,
                G=group,
                G_PAD=padded(group),
                D=head_dim,
                D_PAD=padded(head_dim),
                PARTS=topk,
                LISTED=True,
                num_warps=launch.combine_warps,
                **_register_limit(q_THD, launch.combine_registers),
            )
    if num_streams > 1:
        main.wait_stream(side)


@triton.jit
def _gather_queries(
    q_ptr,
    b_token,
    m_t,
    stride_qt,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """[TILE * G_PAD, D_PAD]: all query heads of each token; zeros where `m_t` is False."""
    o_g, o_d = tl.arange(0, G_PAD)[None, :, None], tl.arange(0, D_PAD)[None, None, :]
    m_q = m_t[:, None, None]
    if (G != G_PAD) | (D != D_PAD):
        m_q = m_q & (o_g < G) & (o_d < D)
    p_q = (q_ptr + b_token.to(tl.int64) * stride_qt)[:, None, None] + o_g * D + o_d
    return tl.reshape(tl.load(p_q, mask=m_q, other=0.0), [TILE * G_PAD, D_PAD])


@triton.jit(do_not_specialize=("i_pass", "first_token"))
def _block_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    units_ptr,
    num_units_ptr,
    tokens_ptr,
    positions_ptr,
    part_ptr,
    stats_ptr,
    scale,
    stride_qt,
    stride_page,
    i_pass,
    first_token,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_PAD: tl.constexpr,
    TILE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """One unit: a page of one KV head against the queries of (a piece of) its list."""
    M: tl.constexpr = TILE * G_PAD
    i_unit = tl.program_id(0)
    if i_unit >= tl.load(num_units_ptr + i_pass):
        return
    i_page = tl.load(units_ptr + i_unit * 4).to(tl.int64)
    i_row = tl.load(units_ptr + i_unit * 4 + 1)
    packed = tl.load(units_ptr + i_unit * 4 + 2)
    first_key = tl.load(units_ptr + i_unit * 4 + 3)
    num_queries = packed & 0xFFFF
    num_keys = (packed >> 16) & 0x7FFF
    is_masked = packed < 0
    tokens_ptr += i_row

    o_t, o_m = tl.arange(0, TILE), tl.arange(0, M)
    o_d, o_s, o_2 = tl.arange(0, D_PAD), tl.arange(0, PAGE_PAD), tl.arange(0, 2)
    # The queries of the next tile and the tokens of the one after are on their way in registers.
    b_token = tl.load(tokens_ptr + o_t, mask=o_t < num_queries, other=0)
    b_q = _gather_queries(q_ptr, b_token, o_t < num_queries, stride_qt, G, G_PAD, D, D_PAD, TILE)
    b_token = tl.load(tokens_ptr + TILE + o_t, mask=TILE + o_t < num_queries, other=0)
    # [PAGE, D]
    o_sd = i_page * stride_page + o_s[:, None] * D + o_d[None, :]
    m_k = (o_s < PAGE)[:, None] & (o_d < D)[None, :]
    # A weight of zero does not silence a NaN in V.
    m_v = (o_s < num_keys)[:, None] & (o_d < D)[None, :]
    b_k = tl.load(k_ptr + o_sd, mask=m_k, other=0.0).to(TYPE)
    b_v = tl.load(v_ptr + o_sd, mask=m_v, other=0.0).to(TYPE)
    b_kt = tl.trans(b_k)
    for i in tl.range(0, num_queries, TILE, num_stages=1):
        o_next = i + TILE + o_t
        b_q_next = _gather_queries(
            q_ptr, b_token, o_next < num_queries, stride_qt, G, G_PAD, D, D_PAD, TILE
        )
        o_next += TILE
        b_token = tl.load(tokens_ptr + o_next, mask=o_next < num_queries, other=0)
        # [M, PAGE]
        b_s = tl.dot(b_q.to(TYPE), b_kt, input_precision="ieee")
        b_q = b_q_next
        if is_masked | (PAGE != PAGE_PAD):
            o_q = i + o_m // G_PAD
            b_t = tl.load(tokens_ptr + o_q, mask=o_q < num_queries, other=0)
            b_last = tl.load(positions_ptr + first_token + b_t) - first_key
            b_last = tl.minimum(b_last, num_keys - 1).to(tl.int32)
            b_s = tl.where(o_s[None, :] <= b_last[:, None], b_s, float("-inf"))
        # [M]
        b_m = tl.maximum(tl.max(b_s, 1) * scale, MIN_MAX)
        b_p = tl.exp2(b_s * scale - b_m[:, None])
        b_l = tl.sum(b_p, 1)
        b_o = tl.dot(b_p.to(TYPE), b_v, input_precision="ieee")
        if G == G_PAD:
            # Lists are padded to whole tiles: rows beyond the last query are this tile's own.
            o_row = (i_row + i).to(tl.int64) * G
            p_part = part_ptr + o_row * D + (o_m[:, None] * D + o_d[None, :])
            p_stats = stats_ptr + o_row * 2 + (o_m[:, None] * 2 + o_2[None, :])
            if D == D_PAD:
                tl.store(p_part, b_o.to(part_ptr.dtype.element_ty))
            else:
                tl.store(p_part, b_o.to(part_ptr.dtype.element_ty), mask=(o_d < D)[None, :])
            tl.store(p_stats, tl.join(b_m, b_l))
        else:
            o_row = (i_row + i + o_m // G_PAD).to(tl.int64) * G + o_m % G_PAD
            m_row = (o_m % G_PAD < G)[:, None]
            p_part = part_ptr + o_row[:, None] * D + o_d[None, :]
            m_part = m_row & (o_d < D)[None, :]
            tl.store(p_part, b_o.to(part_ptr.dtype.element_ty), mask=m_part)
            tl.store(stats_ptr + o_row[:, None] * 2 + o_2[None, :], tl.join(b_m, b_l), mask=m_row)


@triton.jit
def combine_kernel(
    part_ptr,
    stats_ptr,
    row_ptr,
    out_ptr,
    stride_ot,
    stride_rt,
    stride_rk,
    K: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Add the parts of one token and KV head: rows named at `row_ptr` if LISTED, else in order."""
    i_t, i_k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_g, o_d = tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    m_gd = (o_g < G)[:, None] & (o_d < D)[None, :]
    row_ptr += i_t * stride_rt + i_k * stride_rk
    # [G]
    b_max = tl.full([G_PAD], MIN_MAX, tl.float32)
    for j in tl.static_range(PARTS):
        i_row = tl.load(row_ptr + j).to(tl.int64) if LISTED else (i_t * K + i_k) * PARTS + j
        m_row = o_g < tl.where(i_row >= 0, G, 0)
        b_m = tl.load(stats_ptr + (i_row * G + o_g) * 2, mask=m_row, other=MIN_MAX)
        b_max = tl.maximum(b_max, b_m)
    b_sum = tl.zeros([G_PAD], tl.float32)
    # [G, D]
    b_o = tl.zeros([G_PAD, D_PAD], tl.float32)
    for j in tl.static_range(PARTS):
        i_row = tl.load(row_ptr + j).to(tl.int64) if LISTED else (i_t * K + i_k) * PARTS + j
        p_stats = stats_ptr + (i_row * G + o_g) * 2
        m_row = o_g < tl.where(i_row >= 0, G, 0)
        b_w = tl.exp2(tl.load(p_stats, mask=m_row, other=MIN_MAX) - b_max)
        b_sum += b_w * tl.load(p_stats + 1, mask=m_row, other=0.0)
        p_part = part_ptr + (i_row * G + o_g[:, None]) * D + o_d[None, :]
        b_part = tl.load(
            p_part, mask=m_gd & m_row[:, None], other=0.0, eviction_policy="evict_first"
        )
        b_o += b_w[:, None] * b_part.to(tl.float32)
    b_o = b_o / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    p_o = out_ptr + i_t * stride_ot + (i_k * G + o_g)[:, None] * D + o_d[None, :]
    tl.store(p_o, b_o.to(out_ptr.dtype.element_ty), mask=m_gd)

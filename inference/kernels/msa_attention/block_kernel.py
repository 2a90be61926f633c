"""Block-major sparse GQA: a block of keys is read once for many of the queries that chose it.

A program keeps the keys and values of one block in shared memory and takes tiles of queries from
the block's list. Each tile gives one part of its rows' outputs, and a log-sum-exp that says how
much the part counts; a second kernel adds the parts of each row. A pass is some KV heads and a slab
of tokens; while one is combined (memory) the next is attended (tensor cores) on another stream.

Logits are in base 2: `scale` carries log2(e).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.hardware import num_multiprocessors
from inference.kernels.merge_kernel import MIN_MAX
from inference.kernels.msa_attention.combine_kernel import combine_kernel
from inference.kernels.msa_attention.invert_kernel import BlockLists, invert_blocks
from inference.kernels.paging import LayerPages, PagedBatch

COMBINE_ROWS, COMBINE_WARPS = 16, 8
"""Query heads and warps of a program that combines."""


class BlockMajor(NamedTuple):
    """Launch of the way for many tokens."""

    slab: int = 8192
    """Query tokens of a pass."""
    heads: int = 1
    """KV heads of a pass."""
    unit: int = 64
    """Most queries of a unit."""
    on_hopper: bool = False
    """Whether `block_hopper_kernel` attends. It leaves `spared` multiprocessors to the combining
    of the pass before."""
    spared: int = 24
    rows: int = 64
    """Rows (queries x query heads of a KV head) of a tile; `block_hopper_kernel` wants 64."""


def checked_strides(q_THD: Tensor, pages: LayerPages, out_THD: Tensor) -> tuple[int, ...]:
    page_strides = pages.k_pages.stride()
    if page_strides != pages.v_pages.stride() or page_strides[2:] != (pages.k_pages.shape[3], 1):
        raise ValueError("msa_attention: a page of one KV head must be contiguous, K and V alike")
    if q_THD.stride()[1:] != out_THD.stride()[1:] or q_THD.stride(1) != q_THD.shape[2]:
        raise ValueError("msa_attention: the heads of a token must be contiguous")
    return q_THD.stride(0), out_THD.stride(0), *page_strides[:2]


def padded(size: int, least: int = 1) -> int:
    return max(least, 1 << (size - 1).bit_length())


def product_type(q_THD: Tensor) -> tl.dtype:
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    return types[q_THD.dtype]


@functools.cache
def _attending_stream(device: torch.device) -> torch.cuda.Stream:
    """Its programs go first where they compete with those that combine."""
    return torch.cuda.Stream(device, priority=-1)


def attend_blocks(
    q_THD: Tensor,
    pages: LayerPages,
    blocks_TKB: Tensor,
    batch: PagedBatch,
    scale: float,
    out_THD: Tensor,
    launch: BlockMajor,
    lse_TH: Tensor | None = None,
) -> None:
    num_tokens, num_kv_heads, topk = blocks_TKB.shape
    group, head_dim = q_THD.shape[1] // num_kv_heads, q_THD.shape[2]
    heads = math.gcd(launch.heads, num_kv_heads)
    slab = min(launch.slab, num_tokens)
    num_slabs = -(-num_tokens // slab)
    tile = max(1, launch.rows // padded(group))
    strides = checked_strides(q_THD, pages, out_THD)
    if launch.on_hopper:
        from inference.kernels.msa_attention import block_hopper_kernel

        pages, batch = block_hopper_kernel.prepared(pages, batch, q_THD.dtype)
    lists = invert_blocks(blocks_TKB, batch, slab=slab, heads=heads, tile=tile, unit=launch.unit)
    num_passes, num_rows = lists.tokens_PL.shape
    rows = min(COMBINE_ROWS, padded(group))
    attend = functools.partial(_attend_pass, q_THD, pages, batch, lists, scale, tile, strides)
    programs = num_rows // tile
    if launch.on_hopper:
        attend = block_hopper_kernel.Attend(q_THD, pages, batch, lists, scale)
        programs = min(programs, num_multiprocessors(q_THD.device))

    def new_scratch() -> tuple[Tensor, Tensor]:
        part = torch.empty((num_rows, group, head_dim), dtype=q_THD.dtype, device=q_THD.device)
        return part, torch.empty((num_rows, group), dtype=torch.float32, device=q_THD.device)

    scratch = [new_scratch()]
    with _Turns(q_THD.device, num_passes) as turns:
        # Nothing is combined yet beside the first pass.
        attend(0, *scratch[0], programs)
        for index in range(num_passes):
            if index + 1 < num_passes:
                # Launched before the combining that it runs beside, lest that take every place.
                scratch += [new_scratch()] if index == 0 else []
                with turns.attending(index + 1):
                    attend(index + 1, *scratch[(index + 1) % 2], max(1, programs - launch.spared))
            i_head, i_slab = divmod(index, num_slabs)
            with turns.combining(index):
                combine_kernel[(min(slab, num_tokens - i_slab * slab), heads, -(-group // rows))](
                    *scratch[index % 2],
                    lists.row_TKB,
                    out_THD,
                    out_THD if lse_TH is None else lse_TH,
                    strides[1],
                    num_kv_heads * topk,
                    topk,
                    i_slab * slab,
                    i_head * heads,
                    K=num_kv_heads,
                    G=group,
                    ROWS=rows,
                    D=head_dim,
                    D_PAD=padded(head_dim),
                    PARTS=topk,
                    PARTS_PAD=padded(topk),
                    LISTED=True,
                    LSE=lse_TH is not None,
                    num_warps=COMBINE_WARPS,
                )


class _Turns:
    """Who waits for whom when each pass is attended beside the combining of the one before.

    Two scratches are used in turn: pass i + 2 is attended once pass i is combined. The first pass
    is attended and all are combined on the caller's stream, which on leaving has waited for all
    work, also after an error: what the passes used may be freed there.
    """

    def __init__(self, device: torch.device, num_passes: int) -> None:
        self._is_parallel = device.type == "cuda" and num_passes > 1
        self._attended, self._combined = {}, {}
        if self._is_parallel:
            self._main = torch.cuda.current_stream(device)
            self._side = _attending_stream(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_parallel:
            self._main.wait_stream(self._side)

    @contextmanager
    def attending(self, index: int) -> Iterator[None]:
        """Around the launch of pass `index` > 0."""
        if not self._is_parallel:
            yield
            return
        if index == 1:
            self._side.wait_stream(self._main)
        else:
            self._side.wait_event(self._combined[index - 2])
        with torch.cuda.stream(self._side):
            yield
        self._attended[index] = self._side.record_event()

    @contextmanager
    def combining(self, index: int) -> Iterator[None]:
        if index in self._attended:
            self._main.wait_event(self._attended[index])
        yield
        if self._is_parallel:
            self._combined[index] = self._main.record_event()


def _attend_pass(
    q_THD: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    lists: BlockLists,
    scale: float,
    tile: int,
    strides: tuple[int, ...],
    index: int,
    part: Tensor,
    lse: Tensor,
    _programs: int,
) -> None:
    """Write the parts [rows, group, D] and log-sum-exps [rows, group] of a pass."""
    num_kv_heads, page_size, head_dim = pages.k_pages.shape[1:]
    group = q_THD.shape[1] // num_kv_heads
    _block_kernel[(lists.units_PU4.shape[1],)](
        q_THD,
        pages.k_pages,
        pages.v_pages,
        lists.units_PU4[index],
        lists.num_units_P,
        lists.tokens_PL[index],
        batch.positions_T,
        part,
        lse,
        scale,
        strides[0],
        strides[2],
        strides[3],
        index,
        batch.num_decode_tokens,
        K=num_kv_heads,
        G=group,
        G_PAD=padded(group),
        D=head_dim,
        D_PAD=padded(head_dim, 16),
        PAGE=page_size,
        PAGE_PAD=padded(page_size, 16),
        TILE=tile,
        TYPE=product_type(q_THD),
        num_warps=4,
        num_stages=1,
        # Three programs a multiprocessor; the interpreter knows no such option.
        **({"maxnreg": 168} if q_THD.is_cuda else {}),
    )


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
    lse_ptr,
    scale,
    stride_qt,
    stride_page,
    stride_pk,
    i_pass,
    first_token,
    K: tl.constexpr,
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
    i_place = tl.load(units_ptr + i_unit * 4)
    i_page, i_head = (i_place // K).to(tl.int64), i_place % K
    i_row = tl.load(units_ptr + i_unit * 4 + 1)
    packed = tl.load(units_ptr + i_unit * 4 + 2)
    first_key = tl.load(units_ptr + i_unit * 4 + 3)
    num_queries = packed & 0xFFFF
    num_keys = (packed >> 16) & 0x7FFF
    is_masked = packed < 0
    tokens_ptr += i_row
    q_ptr += i_head * G * D

    o_t, o_m = tl.arange(0, TILE), tl.arange(0, M)
    o_d, o_s = tl.arange(0, D_PAD), tl.arange(0, PAGE_PAD)
    # The queries of the next tile and the tokens of the one after are on their way in registers.
    b_token = tl.load(tokens_ptr + o_t, mask=o_t < num_queries, other=0)
    b_q = _gather_queries(q_ptr, b_token, o_t < num_queries, stride_qt, G, G_PAD, D, D_PAD, TILE)
    b_token = tl.load(tokens_ptr + TILE + o_t, mask=TILE + o_t < num_queries, other=0)
    # [PAGE, D]
    o_sd = i_page * stride_page + i_head.to(tl.int64) * stride_pk
    o_sd += o_s[:, None] * D + o_d[None, :]
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
        m_some = b_l > 0
        b_l = tl.where(m_some, b_l, 1.0)
        b_o = (b_o * (1.0 / b_l)[:, None]).to(part_ptr.dtype.element_ty)
        b_lse = tl.where(m_some, b_m + tl.log2(b_l), MIN_MAX)
        if G == G_PAD:
            # Lists are padded to whole tiles: rows beyond the last query are this tile's own.
            o_row = (i_row + i).to(tl.int64) * G
            p_part = part_ptr + o_row * D + (o_m[:, None] * D + o_d[None, :])
            if D == D_PAD:
                tl.store(p_part, b_o)
            else:
                tl.store(p_part, b_o, mask=(o_d < D)[None, :])
            tl.store(lse_ptr + o_row + o_m, b_lse)
        else:
            o_row = (i_row + i + o_m // G_PAD).to(tl.int64) * G + o_m % G_PAD
            m_row = o_m % G_PAD < G
            p_part = part_ptr + o_row[:, None] * D + o_d[None, :]
            tl.store(p_part, b_o, mask=m_row[:, None] & (o_d < D)[None, :])
            tl.store(lse_ptr + o_row, b_lse, mask=m_row)

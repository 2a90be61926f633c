"""Block-major sparse GQA on Hopper: one warp fetches, three warpgroups attend.

Written in Gluon, Triton's language for explicit layouts. A program stays on its multiprocessor and
takes unit after unit. Keys and values of a page come through the tensor memory accelerator, queries
too, token by token, into a ring of tiles of 64 rows (`TILE` queries x the `G` query heads of a KV
head). The warpgroups take tiles in turn: while one multiplies, the others compute weights or write
outputs. A tile's output leaves through the buffer that its queries came in.

A part is normalised; its log-sum-exp (base 2) says how much it counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from inference.kernels.hardware import is_hopper
from inference.kernels.merge_kernel import MIN_MAX
from inference.kernels.msa_attention.widen_kernel import MAX_BYTES, wide_bytes, widen_pages

if TYPE_CHECKING:
    from inference.kernels.msa_attention.invert_kernel import BlockLists
    from inference.kernels.paging import LayerPages, PagedBatch

ROWS, HEAD_DIM, PAGE_SIZE = 64, 128, 128
"""Rows of a tile; the only head dim and page size served."""
GROUPS = gl.constexpr(3)
"""Warpgroups that attend."""
SLOTS = gl.constexpr(6)
"""Tiles in shared memory: two for each warpgroup."""
STAGES = gl.constexpr(2)
"""Pages in shared memory."""
REGISTERS = (160, 160, 24)
"""Of each thread of the second and third warpgroup and of the warp that fetches."""
MAX_REGISTERS = 128
"""Of a thread on average."""
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""Of queries, keys, values and parts in shared memory."""
NO_LSE = gl.constexpr(MIN_MAX.value)

# Renamed between Triton 3.6 and 3.9.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_Shared = gl.shared_memory_descriptor
_reinterpret = getattr(_Shared, "reinterpret", None) or _Shared._reinterpret


@gluon.jit
def _num_own(num_units):
    """How many units this program has: every `num_programs`-th one."""
    return (num_units - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _unit(units_ptr, i_use, num_units):
    """(page and head, first row, packed counts, first key) of an own unit; zeros if none."""
    i_unit = gl.program_id(0) + i_use * gl.num_programs(0)
    p_unit = units_ptr + i_unit * 4
    is_unit = i_unit < num_units
    return (
        gl.load(p_unit, mask=is_unit, other=0),
        gl.load(p_unit + 1, mask=is_unit, other=0),
        gl.load(p_unit + 2, mask=is_unit, other=0),
        gl.load(p_unit + 3, mask=is_unit, other=0),
    )


@gluon.jit
def _tokens(p_token, i_query, num_queries, TILE: gl.constexpr):
    """Tokens of a tile; 0 where the list has ended."""
    tokens = ()
    for j in gl.static_range(TILE):
        is_there = i_query + j < num_queries
        tokens = tokens + (gl.load(p_token + i_query + j, mask=is_there, other=0),)  # noqa: RUF005
    return tokens


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_boxes, q_full, q_empty, k_smem, v_smem, kv_full, kv_empty, units_ptr,
    tokens_ptr, num_units, rows_per_token, K: gl.constexpr, G: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    num_tiles = 0
    page, row, packed, _first_key = _unit(units_ptr, 0, num_units)
    for i_use in range(_num_own(num_units)):
        p_token = tokens_ptr + row
        num_queries = packed & 0xFFFF
        place = page * k_desc.block_type.shape[0]
        q_row = page % K * G
        page, row, packed, _first_key = _unit(units_ptr, i_use + 1, num_units)
        stage = i_use % STAGES
        mbarrier.wait(kv_empty.index(stage), ((i_use // STAGES) & 1) ^ 1)
        mbarrier.expect(kv_full.index(stage), 2 * k_desc.block_type.nbytes)
        _load(k_desc, [place, 0], kv_full.index(stage), k_smem.index(stage))
        _load(v_desc, [place, 0], kv_full.index(stage), v_smem.index(stage))
        next_tokens = _tokens(p_token, 0, num_queries, TILE)
        for i_query in range(0, num_queries, TILE):
            # What the next tile needs is on its way while this one waits for its place.
            tokens = next_tokens
            next_tokens = _tokens(p_token, i_query + TILE, num_queries, TILE)
            slot = num_tiles % SLOTS
            mbarrier.wait(q_empty.index(slot), ((num_tiles // SLOTS) & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), 2 * TILE * q_desc.block_type.nbytes)
            for j in gl.static_range(TILE):
                place_q = q_row + tokens[j] * rows_per_token
                # Two boxes of half the head dim each: so rows of tokens lie as rows of a tile do.
                box = slot * 2 * TILE + j
                _load(q_desc, [place_q, 0], q_full.index(slot), q_boxes.index(box))
                _load(q_desc, [place_q, 64], q_full.index(slot), q_boxes.index(box + TILE))
            num_tiles += 1


@gluon.jit
def _consume(
    w: gl.constexpr, part_desc, q_tiles, q_full, q_empty, k_smem, v_smem, kv_full, kv_empty,
    units_ptr, tokens_ptr, positions_ptr, lse_ptr, num_units, scale, G: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = q_tiles.shape[1]
    PAGE: gl.constexpr = k_smem.shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    o_m = gl.arange(0, M, gl.SliceLayout(1, mma))
    o_s = gl.arange(0, PAGE, gl.SliceLayout(0, mma))
    b_zero = gl.zeros([M, PAGE], gl.float32, mma)
    first_tile = 0
    _page, next_row, next_packed, next_key = _unit(units_ptr, 0, num_units)
    for i_use in range(_num_own(num_units)):
        row, packed, first_key = next_row, next_packed, next_key
        _page, next_row, next_packed, next_key = _unit(units_ptr, i_use + 1, num_units)
        num_queries = packed & 0xFFFF
        num_keys = (packed >> 16) & 0x7FFF
        is_masked = packed < 0
        num_tiles = (num_queries + TILE - 1) // TILE
        stage = i_use % STAGES
        # Also without a tile here: it must not tell of this use before the one before has ended.
        mbarrier.wait(kv_full.index(stage), (i_use // STAGES) & 1)
        b_k = k_smem.index(stage)
        b_v = v_smem.index(stage)
        for i in range((w + GROUPS - first_tile % GROUPS) % GROUPS, num_tiles, GROUPS):
            i_tile = first_tile + i
            slot = i_tile % SLOTS
            b_q = q_tiles.index(slot)
            mbarrier.wait(q_full.index(slot), (i_tile // SLOTS) & 1)
            b_s = warpgroup_mma(b_q, b_k.permute((1, 0)), b_zero, use_acc=False, is_async=True)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            # Meanwhile the output of the tile before has left its buffer.
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index((i_tile + SLOTS - GROUPS) % SLOTS), pred=i_tile >= GROUPS)
            if is_masked:
                o_q = i * TILE + o_m // G
                b_t = gl.load(tokens_ptr + row + o_q, mask=o_q < num_queries, other=0)
                b_last = gl.load(positions_ptr + b_t).to(gl.int32) - first_key
                b_last = gl.minimum(b_last, num_keys - 1)
                b_s = gl.where(o_s[None, :] <= b_last[:, None], b_s, float("-inf"))
            # [M]
            b_m = gl.maximum(gl.max(b_s, 1) * scale, NO_LSE)
            b_p = gl.exp2(b_s * scale - b_m[:, None])
            b_l = gl.sum(b_p, 1)
            b_p = gl.convert_layout(b_p.to(b_q.dtype), operand)
            b_o = warpgroup_mma(b_p, b_v, b_zero, use_acc=False, is_async=True)
            m_some = b_l > 0
            b_l = gl.where(m_some, b_l, 1.0)
            o_row = ((row + i * TILE) * G).to(gl.int64)
            b_lse = gl.where(m_some, b_m + gl.log2(b_l), NO_LSE)
            gl.store(lse_ptr + o_row + o_m, b_lse)
            b_o = warpgroup_mma_wait(0, deps=(b_o,))
            b_o = b_o * (1.0 / b_l)[:, None]
            if is_masked:
                # A page that nobody wrote may hold anything.
                b_o = gl.where(m_some[:, None], b_o, 0.0)
            b_q.store(b_o.to(b_q.dtype))
            fence_async_shared()
            _barrier()
            _store(part_desc, [(row + i * TILE) * G, 0], b_q)
        mbarrier.arrive(kv_empty.index(stage))
        first_tile += num_tiles
    tma.store_wait(0)


@gluon.jit
def _barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit(
    do_not_specialize=["i_pass", "first_token"],
    do_not_specialize_on_alignment=["num_rows", "max_units", "rows_per_token"],
)
def _block_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    part_desc,
    lse_ptr,
    units_ptr,
    num_units_ptr,
    tokens_ptr,
    positions_ptr,
    scale,
    i_pass,
    first_token,
    num_rows,
    max_units,
    rows_per_token,
    K: gl.constexpr,
    G: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    M: gl.constexpr = part_desc.block_type.shape[0]
    D: gl.constexpr = part_desc.block_type.shape[1]
    PAGE: gl.constexpr = k_desc.block_type.shape[0]
    TILE: gl.constexpr = M // G
    q_boxes = gl.allocate_shared_memory(q_desc.dtype, [SLOTS * 2 * TILE, G, D // 2], q_desc.layout)
    q_tiles = _reinterpret(q_boxes, q_desc.dtype, [SLOTS, M, D], part_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, PAGE, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, PAGE, D], v_desc.layout)
    q_full = _barriers(SLOTS, 1)
    q_empty = _barriers(SLOTS, 1)
    kv_full = _barriers(STAGES, 1)
    kv_empty = _barriers(STAGES, GROUPS)
    fence_async_shared()
    num_units = gl.load(num_units_ptr + i_pass)
    units_ptr += i_pass.to(gl.int64) * max_units * 4
    tokens_ptr += i_pass.to(gl.int64) * num_rows
    positions_ptr += first_token
    gl.warp_specialize(
        [
            (_consume, (0, part_desc, q_tiles, q_full, q_empty, k_smem, v_smem, kv_full, kv_empty,
                        units_ptr, tokens_ptr, positions_ptr, lse_ptr, num_units, scale, G, TILE)),
            (_consume, (1, part_desc, q_tiles, q_full, q_empty, k_smem, v_smem, kv_full, kv_empty,
                        units_ptr, tokens_ptr, positions_ptr, lse_ptr, num_units, scale, G, TILE)),
            (_consume, (2, part_desc, q_tiles, q_full, q_empty, k_smem, v_smem, kv_full, kv_empty,
                        units_ptr, tokens_ptr, positions_ptr, lse_ptr, num_units, scale, G, TILE)),
            (_produce, (q_desc, k_desc, v_desc, q_boxes, q_full, q_empty, k_smem, v_smem, kv_full,
                        kv_empty, units_ptr, tokens_ptr, num_units, rows_per_token, K, G, TILE)),
        ],
        [4, 4, 1],
        REGISTERS,
    )  # fmt: skip


@triton.jit
def _zero_tail_kernel(
    v_pages_ptr,
    seq_len_ptr,
    table_ptr,
    stride_page,
    stride_table,
    D: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Zero the places of a request's last page beyond its keys, for one KV head."""
    i_row, i_kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq_len = tl.load(seq_len_ptr + i_row)
    page = -1
    if seq_len % PAGE > 0:
        page = tl.load(table_ptr + i_row * stride_table + seq_len // PAGE)
    if page >= 0:
        # [PAGE, D]
        o_s = tl.arange(0, PAGE)[:, None]
        p_v = v_pages_ptr + page.to(tl.int64) * stride_page + i_kv * PAGE * D
        p_v += o_s * D + tl.arange(0, D)[None, :]
        b_zero = tl.zeros([PAGE, D], v_pages_ptr.dtype.element_ty)
        tl.store(p_v, b_zero, mask=o_s >= seq_len % PAGE)


def serves(q_THD: Tensor, pages: LayerPages, batch: PagedBatch) -> bool:
    """Whether these shapes and dtypes are the ones this kernel is made for."""
    is_wide = pages.k_pages.dtype == q_THD.dtype
    if not is_wide and wide_bytes(pages, batch) > MAX_BYTES:
        return False
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads = pages.k_pages.shape[1]
    return (
        q_THD.is_cuda
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and pages.k_pages.dtype == pages.v_pages.dtype
        and (is_wide or pages.k_pages.dtype == torch.float8_e4m3fn)
        and pages.k_pages.shape[2:] == (PAGE_SIZE, HEAD_DIM)
        and head_dim == HEAD_DIM
        and num_heads // num_kv_heads in (8, 16, 32, 64)
        and pages.k_pages.is_contiguous()
        and pages.v_pages.is_contiguous()
        and q_THD.stride(0) % HEAD_DIM == 0
        and q_THD.data_ptr() % 16 == 0
        and is_hopper(q_THD.device)
    )


def prepared(
    pages: LayerPages, batch: PagedBatch, dtype: torch.dtype
) -> tuple[LayerPages, PagedBatch]:
    """Pages of `dtype` and the batch that knows them.

    Unwritten places of the last value pages are zeroed: a weight of zero does not silence a NaN.
    """
    if pages.k_pages.dtype != dtype:
        return widen_pages(pages, batch, dtype)
    seq_len_R = batch.host_lengths()[1][batch.num_decodes :]
    if (seq_len_R % PAGE_SIZE).any():
        table_RN = batch.page_table_RN[batch.num_decodes :]
        _zero_tail_kernel[(len(seq_len_R), pages.v_pages.shape[1])](
            pages.v_pages,
            batch.seq_len_R[batch.num_decodes :],
            table_RN,
            pages.v_pages.stride(0),
            table_RN.stride(0),
            D=HEAD_DIM,
            PAGE=PAGE_SIZE,
        )
    return pages, batch


class Attend:
    """Attend pass after pass of one call."""

    def __init__(
        self,
        q_THD: Tensor,
        pages: LayerPages,
        batch: PagedBatch,
        lists: BlockLists,
        scale: float,
    ) -> None:
        num_tokens, num_heads, _ = q_THD.shape
        num_kv_heads = pages.k_pages.shape[1]
        self.group = num_heads // num_kv_heads
        self.rows_per_token = q_THD.stride(0) // HEAD_DIM
        num_q_rows = (num_tokens - 1) * self.rows_per_token + num_heads
        q_XD = q_THD.as_strided((num_q_rows, HEAD_DIM), (HEAD_DIM, 1))
        self.operands = (
            _describe(q_XD, self.group, HEAD_DIM // 2),
            _describe(pages.k_pages.view(-1, HEAD_DIM), PAGE_SIZE, HEAD_DIM),
            _describe(pages.v_pages.view(-1, HEAD_DIM), PAGE_SIZE, HEAD_DIM),
        )
        self.num_kv_heads = num_kv_heads
        self.positions_T = batch.positions_T
        self.first_token = batch.num_decode_tokens
        self.lists = lists
        self.scale = scale
        self.parts: dict[int, TensorDescriptor] = {}

    def __call__(self, index: int, part: Tensor, lse: Tensor, num_programs: int) -> None:
        """Write the parts [rows, group, D] and log-sum-exps [rows, group] of a pass."""
        lists = self.lists
        if part.data_ptr() not in self.parts:
            self.parts[part.data_ptr()] = _describe(part.view(-1, HEAD_DIM), ROWS, HEAD_DIM)
        _block_hopper_kernel[(num_programs,)](
            *self.operands,
            self.parts[part.data_ptr()],
            lse,
            lists.units_PU4,
            lists.num_units_P,
            lists.tokens_PL,
            self.positions_T,
            self.scale,
            index,
            self.first_token,
            lists.tokens_PL.shape[1],
            lists.units_PU4.shape[1],
            self.rows_per_token,
            K=self.num_kv_heads,
            G=self.group,
            REGISTERS=REGISTERS,
            num_warps=4,
            maxnreg=MAX_REGISTERS,
        )


def _describe(flat_XD: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix as the copy engine sees it, in boxes of [rows, columns]."""
    return TensorDescriptor(
        flat_XD, list(flat_XD.shape), list(flat_XD.stride()), [rows, columns], LAYOUT
    )

"""Block scores of prefill queries on Hopper: 256 query rows against one page after another.

Written in Gluon, since the tensor cores are busy only while a page is multiplied and the maxima of
the page before are taken at once: the rows are two halves of 128, and the maxima of one half are
taken while the other is multiplied. Every wait of the loop leaves one product in flight but the
last of a group of pages, for a product in flight across the loop's end would be serialised.

Suffixes: as in `prefill_kernel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from inference.kernels.hardware import is_hopper

if TYPE_CHECKING:
    from inference.kernels.index_select.slabs import DeviceSlab

ROWS = 256
"""Query rows of a tile: (query token, head) pairs side by side."""
HALF = gl.constexpr(128)
PAGE = gl.constexpr(128)
DIM = gl.constexpr(128)
STAGES = gl.constexpr(4)
"""Pages in shared memory."""
GROUP = 8
"""Pages of a round of the loop, whose places in shared memory the compiler then knows."""
NUM_WARPS = 8

# Renamed between Triton 3.6 and 3.9.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def can_run(index_q_TKD: Tensor, index_pages: Tensor) -> bool:
    """Whether this kernel serves these tensors: M3's page and head size, BF16 or FP16, Hopper."""
    return (
        index_q_TKD.is_cuda
        and index_q_TKD.dtype == index_pages.dtype
        and index_q_TKD.dtype in (torch.bfloat16, torch.float16)
        and tuple(index_pages.shape[1:]) == (PAGE.value, DIM.value)
        and index_pages.is_contiguous()
        and is_hopper(index_q_TKD.device)
    )


@gluon.jit
def _put(b_out, b_scores, column: gl.constexpr, LAYOUT: gl.constexpr):
    """Set one column of [HALF, STAGES] to the maxima of the rows of [HALF, PAGE]."""
    b_max = gl.convert_layout(gl.max(b_scores, 1), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    o_column = gl.arange(0, STAGES, layout=gl.SliceLayout(0, LAYOUT))
    return gl.where((o_column == column)[None, :], b_max[:, None], b_out)


@gluon.jit
def _fetch(k_desc, k_smem, bars, slot, i_page, pred):
    mbarrier.expect(bars.index(slot), PAGE * DIM * 2, pred=pred)
    _load(k_desc, [i_page * PAGE, 0], bars.index(slot), k_smem.index(slot), pred=pred)


@gluon.jit(
    do_not_specialize=["first_row", "table_stride"],
    do_not_specialize_on_alignment=["segment_S6", "start_P1", "score_stride"],
)
def _score_kernel(
    q_desc,
    k_desc,
    table_RN,
    segment_S6,
    start_P1,
    scores_XN,
    first_row,
    table_stride,
    score_stride,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16])
    # Where a row's maximum lies in four lanes, each keeps one of four pages.
    OUT: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]],
        [],
        [128, 4],
    )
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, HALF, DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, PAGE, DIM], k_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES + 1):
        mbarrier.init(bars.index(slot), count=1)

    o_row = gl.arange(0, HALF, layout=gl.SliceLayout(1, OUT))
    o_column = gl.arange(0, STAGES, layout=gl.SliceLayout(0, OUT))
    o_query = gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES))
    o_key = gl.arange(0, PAGE, layout=gl.SliceLayout(0, SCORES))
    b_a = gl.zeros([HALF, PAGE], gl.float32, layout=SCORES)
    b_b = gl.zeros([HALF, PAGE], gl.float32, layout=SCORES)
    b_out_a = gl.zeros([HALF, STAGES], gl.float32, layout=OUT)
    b_out_b = gl.zeros([HALF, STAGES], gl.float32, layout=OUT)

    first_segment = gl.load(start_P1 + gl.program_id(0))
    last_segment = gl.load(start_P1 + gl.program_id(0) + 1)
    phase = 0
    for segment in range(first_segment, last_segment):
        i_request = gl.load(segment_S6 + segment * 6).to(gl.int64)
        row = gl.load(segment_S6 + segment * 6 + 1)
        num_rows = gl.load(segment_S6 + segment * 6 + 2)
        position = gl.load(segment_S6 + segment * 6 + 3)
        page = gl.load(segment_S6 + segment * 6 + 4)
        num_pages = gl.load(segment_S6 + segment * 6 + 5)
        p_table = table_RN + i_request * table_stride + page
        p_a = scores_XN + (row - first_row + o_row).to(gl.int64)[:, None] * score_stride
        p_a = p_a + (page + o_column)[None, :]
        p_b = p_a + score_stride.to(gl.int64) * HALF
        m_a = (o_row < num_rows)[:, None]
        m_b = (o_row + HALF < num_rows)[:, None]

        _barrier()
        mbarrier.expect(bars.index(STAGES), 2 * HALF * DIM * 2)
        _load(q_desc, [row, 0], bars.index(STAGES), q_smem.index(0))
        _load(q_desc, [row + HALF, 0], bars.index(STAGES), q_smem.index(1))
        for slot in gl.static_range(STAGES):
            i_page = gl.load(p_table + slot, mask=slot < num_pages, other=0)
            _fetch(k_desc, k_smem, bars, slot, i_page, slot < num_pages)
        mbarrier.wait(bars.index(STAGES), (segment - first_segment) & 1)
        q_a = q_smem.index(0)
        q_b = q_smem.index(1)

        # Pages that all queries of the tile see whole.
        num_whole = gl.minimum(gl.maximum((position + 1) // PAGE - page, 0), num_pages)
        num_groups = num_whole // GROUP
        for group in range(num_groups):
            flying_b = warpgroup_mma_init(b_b)
            for i in gl.static_range(GROUP):
                # The page that takes the slot of the page before.
                ahead = group * GROUP + i + STAGES - 1
                if i > 0:
                    i_page = gl.load(p_table + ahead, mask=ahead < num_pages, other=0)
                mbarrier.wait(bars.index(i % STAGES), phase ^ ((i // STAGES) & 1))
                k_t = k_smem.index(i % STAGES).permute((1, 0))
                flying_a = warpgroup_mma(q_a, k_t, b_a, use_acc=False, is_async=True)
                if i > 0:
                    b_b = warpgroup_mma_wait(1, deps=[flying_b])
                    b_out_b = _put(b_out_b, b_b, (i - 1) % STAGES, OUT)
                    if i % STAGES == 0:
                        gl.store(p_b, b_out_b, mask=m_b)
                        p_b += STAGES
                    _barrier()
                    _fetch(k_desc, k_smem, bars, (i - 1) % STAGES, i_page, ahead < num_pages)
                flying_b = warpgroup_mma(q_b, k_t, b_b, use_acc=False, is_async=True)
                b_a = warpgroup_mma_wait(1, deps=[flying_a])
                b_out_a = _put(b_out_a, b_a, i % STAGES, OUT)
                if i % STAGES == STAGES - 1:
                    gl.store(p_a, b_out_a, mask=m_a)
                    p_a += STAGES
            b_b = warpgroup_mma_wait(0, deps=[flying_b])
            b_out_b = _put(b_out_b, b_b, STAGES - 1, OUT)
            gl.store(p_b, b_out_b, mask=m_b)
            p_b += STAGES
            ahead = group * GROUP + GROUP + STAGES - 1
            i_page = gl.load(p_table + ahead, mask=ahead < num_pages, other=0)
            _barrier()
            _fetch(k_desc, k_smem, bars, STAGES - 1, i_page, ahead < num_pages)
            phase ^= (GROUP // STAGES) & 1

        # What is left of a group, and the pages that straddle the queries' positions.
        for tail in range(num_groups * GROUP, num_pages):
            tail_slot = tail % STAGES
            mbarrier.wait(bars.index(tail_slot), phase)
            k_t = k_smem.index(tail_slot).permute((1, 0))
            last_key = position - (page + tail) * PAGE
            b_a = warpgroup_mma(q_a, k_t, b_a, use_acc=False)
            m_key = o_key[None, :] <= (last_key + o_query // NUM_HEADS)[:, None]
            b_out_a = _put(b_out_a, gl.where(m_key, b_a, float("-inf")), 0, OUT)
            gl.store(p_a, b_out_a, mask=m_a & (o_column == 0)[None, :])
            b_b = warpgroup_mma(q_b, k_t, b_b, use_acc=False)
            m_key = o_key[None, :] <= (last_key + (o_query + HALF) // NUM_HEADS)[:, None]
            b_out_b = _put(b_out_b, gl.where(m_key, b_b, float("-inf")), 0, OUT)
            gl.store(p_b, b_out_b, mask=m_b & (o_column == 0)[None, :])
            p_a += 1
            p_b += 1
            ahead = tail + STAGES
            i_page = gl.load(p_table + ahead, mask=ahead < num_pages, other=0)
            _barrier()
            _fetch(k_desc, k_smem, bars, tail_slot, i_page, ahead < num_pages)
            phase ^= (tail_slot == STAGES - 1).to(gl.int32)
        # Slots that the last pages left out go through an empty phase, so that all agree again.
        rest = num_pages % STAGES
        for slot in gl.static_range(1, STAGES):
            mbarrier.arrive(bars.index(slot), pred=(rest > 0) & (slot >= rest))
        phase ^= (rest > 0).to(gl.int32)


def operands(index_q_XD: Tensor, index_pages: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Queries and pages as the copy engine sees them."""
    gl_dtype = gl.bfloat16 if index_pages.dtype == torch.bfloat16 else gl.float16
    block = [HALF.value, DIM.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl_dtype)
    return (
        TensorDescriptor.from_tensor(index_q_XD, block, layout),
        TensorDescriptor.from_tensor(index_pages.view(-1, DIM.value), block, layout),
    )


def score_pages(
    operands: tuple[TensorDescriptor, TensorDescriptor],
    page_table_RN: Tensor,
    slab: DeviceSlab,
    scores_XN: Tensor,
    num_heads: int,
) -> None:
    """As `prefill_kernel._score_portable`, with tiles of `ROWS` rows."""
    _score_kernel[(slab.start_P1.shape[0] - 1,)](
        *operands,
        page_table_RN,
        slab.segment_S6,
        slab.start_P1,
        scores_XN,
        slab.first_token * num_heads,
        page_table_RN.stride(0),
        scores_XN.stride(0),
        NUM_HEADS=num_heads,
        GROUP=GROUP,
        num_warps=NUM_WARPS,
    )

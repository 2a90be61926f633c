"""Block scores of decodes on Hopper: keys are on their way before the queries exist.

As the kernels of `decode_kernel`, but in Gluon, since Triton would fetch keys only after the
queries. Each launch may begin while the one before it runs (programmatic dependent launch), and
even while several before it do: many kernels let the next one begin before they wait themselves.
What is read before `gdc_wait` must therefore be older than the first such launch of the step:

- The plan, the page table, the positions and the lengths are: they are copied to the device, or
  gathered by a kernel that nothing overlaps, before the first layer.
- Keys of earlier steps are. Where a step has decodes alone, those are the keys of all pages before
  the page of a decode's first query token: the tokens of this step lie in that page and the next
  ones, and a shared page is one that all query tokens of all its requests lie behind. Older pages
  are fetched before the wait, the others after it.
- In a step with prefill chunks a request may join with a single token, and count as a decode,
  while a chunk of this very step still writes the pages of the prompt that both share. There
  nothing is fetched before the wait.

Shared and own pages are read in one launch. It lets the choice begin once all its programs that
have pages, and the first, are past their wait, and the choice lets the kernel behind it begin at
once: programs of that one take the places of those that end here.

Suffixes: as in `decode_kernel`.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference.kernels.decode_plan import SHARED_ROWS
from inference.kernels.hardware import is_hopper
from inference.kernels.paging import PagedBatch

PAGE = gl.constexpr(128)
DIM = gl.constexpr(128)
MAX_COLUMNS = 64
"""Columns of one program; more columns of shared pages are spread over several programs."""
FP8 = torch.float8_e4m3fn
NUM_WARPS = 4

# Renamed between Triton 3.6 and 3.9.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def can_run(index_q_TKD: Tensor, index_pages: Tensor, decode_query_len: int) -> bool:
    """Whether these kernels serve such tensors: M3's page and head size, 16 or 8 bits, Hopper."""
    return (
        index_q_TKD.is_cuda
        and index_q_TKD.dtype in (torch.bfloat16, torch.float16)
        and index_pages.dtype in (index_q_TKD.dtype, FP8)
        and tuple(index_pages.shape[1:]) == (PAGE.value, DIM.value)
        and index_pages.is_contiguous()
        and index_pages.data_ptr() % 16 == 0
        and decode_query_len * index_q_TKD.shape[1] <= MAX_COLUMNS
        and is_hopper(index_q_TKD.device)
    )


@gluon.jit
def _fetch(k_desc, k_smem, bars, slot, i_page, pred):
    BYTES: gl.constexpr = PAGE * DIM * k_desc.dtype.primitive_bitwidth // 8
    mbarrier.expect(bars.index(slot), BYTES, pred=pred)
    _load(k_desc, [i_page * PAGE, 0], bars.index(slot), k_smem.index(slot), pred=pred)


@gluon.jit
def _fetch_first(k_desc, k_smem, bars, p_page_ids, num_pages, first, stop, STAGES: gl.constexpr):
    """Fetch those of the first `STAGES` pages that lie between `first` and `stop`."""
    for slot in gl.static_range(STAGES):
        # Which page it is may be known before `stop` is.
        is_there = (slot >= first) & (slot < num_pages)
        i_page = gl.load(p_page_ids + slot, mask=is_there, other=0)
        _fetch(k_desc, k_smem, bars, slot, i_page, is_there & (slot < stop))


@gluon.jit
def _deal(b, SIZE: gl.constexpr):
    """Dims of [SIZE, DIM] in such an order that what a lane multiplies is side by side."""
    b = gl.permute(gl.reshape(b, [SIZE, 4, 8, 2, 2]), [0, 2, 3, 1, 4])
    return gl.reshape(b, [SIZE, DIM])


@gluon.jit
def _score_pages(
    p_q,
    k_desc,
    k_smem,
    bars,
    p_page_ids,
    p_scores,
    num_pages,
    num_columns,
    b_last_key,
    score_stride,
    BLOCK_C: gl.constexpr,
    STAGES: gl.constexpr,
    SCORES: gl.constexpr,
    COLUMN_AXIS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Scores of pages whose first `STAGES` are on their way; key s of page i is i * PAGE + s."""
    is_fp8: gl.constexpr = k_desc.dtype == gl.float8e4nv
    # FP8 widens to FP16 in one instruction; a query is normed, so it fits.
    q_dtype: gl.constexpr = gl.float16 if is_fp8 else k_desc.dtype
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    # A lane reads 16 bytes at once.
    WIDE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0], [64, 0]],
        [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [PAGE, DIM],
    )
    COLUMNS: gl.constexpr = gl.SliceLayout(1 - COLUMN_AXIS, SCORES)
    o_row = gl.arange(0, BLOCK_C, layout=gl.SliceLayout(1, ROWS))
    o_d = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROWS))
    o_c = gl.arange(0, BLOCK_C, layout=COLUMNS)
    o_s = gl.arange(0, PAGE, layout=gl.SliceLayout(COLUMN_AXIS, SCORES))
    # [C, D]
    p_q = p_q + o_row[:, None] * DIM + o_d[None, :]
    b_q = gl.load(p_q, mask=(o_row < num_columns)[:, None], other=0.0, cache_modifier=".cg")
    q_smem = gl.allocate_shared_memory(
        q_dtype, [BLOCK_C, DIM], gl.NVMMASharedLayout.get_default_for([BLOCK_C, DIM], q_dtype)
    )
    if is_fp8:
        b_q = _deal(b_q, BLOCK_C)
    q_smem.store(b_q.to(q_dtype))
    fence_async_shared()
    _barrier()
    p_score = p_scores + o_c.to(gl.int64) * score_stride
    shape: gl.constexpr = [PAGE, BLOCK_C] if COLUMN_AXIS == 1 else [BLOCK_C, PAGE]
    b_zero = gl.zeros(shape, gl.float32, layout=SCORES)
    for i in range(num_pages):
        place = i % STAGES
        i_next = gl.load(p_page_ids + i + STAGES, mask=i + STAGES < num_pages, other=0)
        mbarrier.wait(bars.index(place), (i // STAGES) & 1)
        if COLUMN_AXIS == 0:
            # [C, S]
            k_t = k_smem.index(place).permute((1, 0))
            b_score = warpgroup_mma(q_smem, k_t, b_zero, use_acc=False)
        elif is_fp8:
            # [S, C]; operands in registers must be rows of the product.
            b_keys = _deal(k_smem.index(place).load(WIDE).to(q_dtype), PAGE)
            OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
            b_keys = gl.convert_layout(b_keys, OPERAND, assert_trivial=True)
            b_score = warpgroup_mma(b_keys, q_smem.permute((1, 0)), b_zero, use_acc=False)
        else:
            # [S, C]
            q_t = q_smem.permute((1, 0))
            b_score = warpgroup_mma(k_smem.index(place), q_t, b_zero, use_acc=False)
        _barrier()
        _fetch(k_desc, k_smem, bars, place, i_next, i + STAGES < num_pages)
        if MASKED:
            m_score = (i * PAGE + o_s)[:, None] <= b_last_key[None, :]
            b_score = gl.where(m_score, b_score, float("-inf"))
        gl.store(p_score + i, gl.max(b_score, 1 - COLUMN_AXIS), mask=o_c < num_columns)


@gluon.jit
def _score_unit(
    p_unit,
    first_column,
    index_q_TKD,
    k_desc,
    k_smem,
    bars,
    page_table_RN,
    positions_T,
    seq_len_R,
    scores_CN,
    table_stride,
    score_stride,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
    BLOCK_C: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    IS_SHARED: gl.constexpr,
):
    """A unit's pages for `BLOCK_C` columns. `EARLY`: older pages are fetched before the wait."""
    # As rows of the product, columns have their maxima within a warp.
    is_wide: gl.constexpr = IS_SHARED and BLOCK_C >= 64 and k_desc.dtype != gl.float8e4nv
    COLUMN_AXIS: gl.constexpr = 0 if is_wide else 1
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, PAGE if is_wide else BLOCK_C, 16]
    )
    COLUMNS: gl.constexpr = QUERIES * HEADS
    # An unused unit may say anything but its number of pages.
    i_row = gl.maximum(gl.load(p_unit), 0).to(gl.int64)
    num_rows = gl.load(p_unit + 1) if IS_SHARED else 1
    p_pages = p_unit + (2 if IS_SHARED else 1)
    first_page, num_pages = gl.maximum(gl.load(p_pages), 0), gl.load(p_pages + 1)
    # Neighbouring requests' columns lie one after another.
    num_columns = num_rows * COLUMNS - first_column
    num_pages = gl.where(num_columns > 0, num_pages, 0)
    p_page_ids = page_table_RN + i_row * table_stride + first_page
    num_early, b_last_key = num_pages if EARLY else 0, 0
    if not IS_SHARED:
        p_position = positions_T + i_row * QUERIES
        if EARLY:
            # Pages before the first query token's; keys of this step are written to none of them.
            num_old = gl.load(p_position).to(gl.int32) // PAGE - first_page
            num_early = gl.minimum(num_old, num_pages)
        # The last key that each column sees, counted from the unit's first one.
        o_query = gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, SCORES)) // HEADS
        b_position = gl.load(p_position + gl.minimum(o_query, QUERIES - 1)).to(gl.int32)
        b_last_key = gl.minimum(b_position, gl.load(seq_len_R + i_row) - 1) - first_page * PAGE
    if EARLY:
        _fetch_first(k_desc, k_smem, bars, p_page_ids, num_pages, 0, num_early, STAGES)
    # A program without pages makes room at once; one waits all the same, so that the launch ends no
    # earlier than the one before it.
    if (num_pages > 0) | (gl.program_id(0) == 0):
        gdc_wait()
    gdc_launch_dependents()
    if num_pages > 0:
        _fetch_first(k_desc, k_smem, bars, p_page_ids, num_pages, num_early, num_pages, STAGES)
        i_column = i_row * COLUMNS + first_column
        _score_pages(
            index_q_TKD + i_column * DIM,
            k_desc,
            k_smem,
            bars,
            p_page_ids,
            scores_CN + i_column * score_stride + first_page,
            num_pages,
            num_columns,
            b_last_key,
            score_stride,
            BLOCK_C,
            STAGES,
            SCORES,
            COLUMN_AXIS,
            not IS_SHARED,
        )


@gluon.jit(do_not_specialize=["num_shared"])
def score_kernel(
    index_q_TKD,
    k_desc,
    page_table_RN,
    own_U3,
    shared_X4,
    positions_T,
    seq_len_R,
    scores_CN,
    num_shared,
    table_stride,
    score_stride,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
    OWN_C: gl.constexpr,
    SHARED_C: gl.constexpr,
    SHARED_TILES: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):
    """A unit a program: `num_shared` of shared pages, `SHARED_TILES` programs each, then own ones.

    `OWN_C` and `SHARED_C` are the columns of a program's tile; no tiles: nothing is shared.
    """
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, PAGE, DIM], k_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(bars.index(slot), count=1)
    i_own = gl.program_id(0)
    if SHARED_TILES > 0:
        i_own -= num_shared * SHARED_TILES
        if i_own < 0:
            # Programs of one unit are neighbours: its pages are in L2 for all but one of them.
            _score_unit(
                shared_X4 + gl.program_id(0) // SHARED_TILES * 4,
                gl.program_id(0) % SHARED_TILES * SHARED_C,
                index_q_TKD,
                k_desc,
                k_smem,
                bars,
                page_table_RN,
                positions_T,
                seq_len_R,
                scores_CN,
                table_stride,
                score_stride,
                QUERIES,
                HEADS,
                SHARED_C,
                STAGES,
                EARLY,
                True,
            )
    if i_own >= 0:
        _score_unit(
            own_U3 + i_own * 3,
            0,
            index_q_TKD,
            k_desc,
            k_smem,
            bars,
            page_table_RN,
            positions_T,
            seq_len_R,
            scores_CN,
            table_stride,
            score_stride,
            QUERIES,
            HEADS,
            OWN_C,
            STAGES,
            EARLY,
            False,
        )


def score_pages(
    index_q_TKD: Tensor, index_pages: Tensor, batch: PagedBatch, scores_CN: Tensor
) -> None:
    """As `decode_kernel._score_portable`, for what `can_run` says yes to."""
    assert batch.plan is not None, "the caller has checked"
    units, table_RN = batch.plan.index, batch.page_table_RN
    num_heads, is_fp8 = index_q_TKD.shape[1], index_pages.dtype == FP8
    columns = batch.decode_query_len * num_heads
    k_desc = _descriptor(index_pages)
    num_shared, num_own = units.shared_X4.shape[0], units.own_U3.shape[0]
    shared_c = min(MAX_COLUMNS, padded_columns(SHARED_ROWS * columns))
    shared_tiles = triton.cdiv(SHARED_ROWS * columns, shared_c) if num_shared else 0
    score_kernel[(num_shared * shared_tiles + num_own,)](
        index_q_TKD,
        k_desc,
        table_RN,
        units.own_U3,
        units.shared_X4,
        batch.positions_T,
        batch.seq_len_R,
        scores_CN,
        num_shared,
        table_RN.stride(0),
        scores_CN.stride(0),
        QUERIES=batch.decode_query_len,
        HEADS=num_heads,
        OWN_C=padded_columns(columns),
        SHARED_C=shared_c,
        SHARED_TILES=shared_tiles,
        # Two programs to a multiprocessor; queries of a group take the room of a sixth FP8 page.
        STAGES=(5 if num_shared else 6) if is_fp8 else 3,
        EARLY=index_q_TKD.shape[0] == batch.num_decode_tokens,
        num_warps=NUM_WARPS,
        launch_pdl=True,
    )


def padded_columns(num_columns: int) -> int:
    """Columns of the tile that holds so many."""
    return max(16, triton.next_power_of_2(num_columns))


def _descriptor(index_pages: Tensor) -> TensorDescriptor:
    """Keys as the copy engine fetches them, a page at a time."""
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, FP8: gl.float8e4nv}
    block = [PAGE.value, DIM.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype[index_pages.dtype])
    return TensorDescriptor.from_tensor(index_pages.view(-1, DIM.value), block, layout)

"""Shared pages of groups on Hopper: one warp fetches them, two warpgroups multiply and take turns.

Does what `shared_kernel` does, by the steps of `steps_hopper_kernel`: rows are query heads of
several requests, and every row sees every key. A program stays on its multiprocessor and takes 128
rows of one unit and KV head after the other. Programs next to each other have the same pages, so
that the second finds them in the L2 cache.
"""

import math

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from inference.kernels.decode_plan import SHARED_ROWS
from inference.kernels.hardware import is_hopper, num_multiprocessors
from inference.kernels.merge_kernel import begin_dependent
from inference.kernels.paged_attention.steps_hopper_kernel import (
    HEAD_DIM,
    PAGE_SIZE,
    ROWS,
    attend,
    fetch,
    make_ring,
    pass_turn,
    to_and_fro,
)
from inference.kernels.paging import LayerPages, PagedBatch

TILE = 2 * ROWS
"""Rows of a program."""
STAGES = 3
"""Pages of keys, and as many of values, in shared memory or on their way there."""


@gluon.jit
def _num_rounds(num_items):
    return (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _unit(
    i_round, num_items, shared_ptr, TILE: gl.constexpr, TILES: gl.constexpr, K: gl.constexpr,
    PER_REQUEST: gl.constexpr,
):  # fmt: skip
    """(round after this one, unit, KV head, first row, first request, rows, first page, pages).

    Used units come first: no round follows one without pages.
    """
    i_item = to_and_fro(i_round, gl.program_id(0), gl.num_programs(0))
    is_item = i_item < num_items
    i_x = i_item // (TILES * K)
    i_kv = i_item // TILES % K
    first_row = i_item % TILES * TILE
    p_unit = shared_ptr + i_x * 4
    request = gl.load(p_unit, mask=is_item, other=0)
    num_rows = gl.load(p_unit + 1, mask=is_item, other=0) * PER_REQUEST
    first_page = gl.load(p_unit + 2, mask=is_item, other=0)
    num_pages = gl.load(p_unit + 3, mask=is_item, other=0)
    i_next = gl.where(num_pages > 0, i_round + 1, num_items)
    num_pages = gl.where(first_row < num_rows, num_pages, 0)
    return i_next, i_x, i_kv, first_row, request, num_rows, first_page, num_pages


@gluon.jit
def _produce(
    k_desc, v_desc, keys, values, shared_ptr, table_ptr, stride_table, num_items,
    TILE: gl.constexpr, TILES: gl.constexpr, K: gl.constexpr, PER_REQUEST: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Fetch the pages; with `EARLY` before the kernel in front has ended.

    In a step of decodes alone shared pages are older than the step. Where there are prefill chunks
    one of them may write the pages that requests which joined with a single token share.
    """
    PAGE: gl.constexpr = keys[0].shape[1]
    if not EARLY:
        gdc_wait()
    i_use = 0
    i_round = 0
    num_rounds = _num_rounds(num_items)
    while i_round < num_rounds:
        i_round, _x, i_kv, _first_row, request, _rows, first_page, num_pages = _unit(
            i_round, num_items, shared_ptr, TILE, TILES, K, PER_REQUEST
        )
        p_table = table_ptr + request.to(gl.int64) * stride_table + first_page
        page = gl.load(p_table, mask=num_pages > 0, other=0)
        before = 0
        # Keys run one page ahead of values, as the products do; page numbers one ahead of keys.
        for j in range(num_pages):
            place = (page * K + i_kv) * PAGE
            page = gl.load(p_table + j + 1, mask=j + 1 < num_pages, other=0)
            fetch(k_desc, place, 0, keys, i_use + j)
            if j > 0:
                fetch(v_desc, before, 0, values, i_use + j - 1)
            before = place
        if num_pages > 0:
            fetch(v_desc, before, 0, values, i_use + num_pages - 1)
        i_use += num_pages


@gluon.jit
def _consume(
    w: gl.constexpr, q_ptr, keys, values, shared_ptr, part_ptr, lse_ptr, stride_qt, stride_qh,
    num_items, scale_log2, ROWS: gl.constexpr, TILES: gl.constexpr, K: gl.constexpr,
    G: gl.constexpr, PER_REQUEST: gl.constexpr, MAX_ROWS: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = keys[0].shape[2]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    begin_dependent(True)
    if w == 1:
        pass_turn(w)
    i_use = 0
    i_round = 0
    num_rounds = _num_rounds(num_items)
    while i_round < num_rounds:
        i_round, i_x, i_kv, first_row, request, num_rows, _first_page, num_pages = _unit(
            i_round, num_items, shared_ptr, 2 * ROWS, TILES, K, PER_REQUEST
        )
        if num_pages > 0:
            # [ROWS, D]
            o_m = first_row + w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, operand))
            o_d = gl.arange(0, D, gl.SliceLayout(0, operand))
            o_t = request * (PER_REQUEST // G) + o_m // G
            p_row = q_ptr + o_t.to(gl.int64) * stride_qt + (i_kv * G + o_m % G) * stride_qh
            b_q = gl.load(p_row[:, None] + o_d[None, :], mask=(o_m < num_rows)[:, None], other=0.0)
            b_acc, b_max, b_sum = attend(
                b_q, keys, values, i_use, num_pages, num_pages, 0, scale_log2, w, False
            )
            i_use += num_pages

            # [ROWS, D]
            o_r = first_row + w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, mma))
            o_c = gl.arange(0, D, gl.SliceLayout(0, mma))
            o_part = (i_x.to(gl.int64) * K + i_kv) * MAX_ROWS + o_r
            b_o = b_acc * (1.0 / b_sum)[:, None]
            p_part = part_ptr + o_part * D
            gl.store(p_part[:, None] + o_c[None, :], b_o, mask=(o_r < num_rows)[:, None])
            gl.store(lse_ptr + o_part, b_max + gl.log2(b_sum), mask=o_r < num_rows)


@gluon.jit(do_not_specialize=["stride_table", "num_items"])
def _attend_shared_hopper(
    q_ptr,
    k_desc,
    v_desc,
    shared_ptr,
    table_ptr,
    part_ptr,
    lse_ptr,
    scale_log2,
    stride_qt,
    stride_qh,
    stride_table,
    num_items,
    ROWS: gl.constexpr,
    TILES: gl.constexpr,
    K: gl.constexpr,
    G: gl.constexpr,
    PER_REQUEST: gl.constexpr,
    MAX_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    keys = make_ring(k_desc, STAGES, 2)
    values = make_ring(v_desc, STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, q_ptr, keys, values, shared_ptr, part_ptr, lse_ptr, stride_qt, stride_qh,
                        num_items, scale_log2, ROWS, TILES, K, G, PER_REQUEST, MAX_ROWS)),
            (_consume, (1, q_ptr, keys, values, shared_ptr, part_ptr, lse_ptr, stride_qt, stride_qh,
                        num_items, scale_log2, ROWS, TILES, K, G, PER_REQUEST, MAX_ROWS)),
            (_produce, (k_desc, v_desc, keys, values, shared_ptr, table_ptr, stride_table,
                        num_items, 2 * ROWS, TILES, K, PER_REQUEST, EARLY)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def serves(q_THD: Tensor, pages: LayerPages) -> bool:
    """Whether this kernel is made for the device, the shapes and the dtypes."""
    return (
        q_THD.is_cuda
        and is_hopper(q_THD.device)
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and q_THD.dtype == pages.k_pages.dtype == pages.v_pages.dtype
        and q_THD.stride(2) == 1
        and pages.k_pages.shape[2:] == (PAGE_SIZE, HEAD_DIM)
        and pages.k_pages.is_contiguous()
        and pages.v_pages.is_contiguous()
    )


def attend_shared(
    q_THD: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    scale: float,
    part_XKMD: Tensor,
    lse_XKM: Tensor,
) -> None:
    """As `shared_kernel.attend_shared`, where `serves` says so."""
    assert batch.plan is not None, "paged_attention_decode checks it"
    units = batch.plan.dense
    num_kv_heads = pages.k_pages.shape[1]
    group = q_THD.shape[1] // num_kv_heads
    per_request = batch.decode_query_len * group
    tiles = triton.cdiv(SHARED_ROWS * per_request, TILE)
    num_items = units.shared_X4.shape[0] * num_kv_heads * tiles
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_desc, v_desc = (
        TensorDescriptor.from_tensor(part.view(-1, HEAD_DIM), [PAGE_SIZE, HEAD_DIM], layout)
        for part in (pages.k_pages, pages.v_pages)
    )
    _attend_shared_hopper[(min(num_multiprocessors(q_THD.device), num_items),)](
        q_THD,
        k_desc,
        v_desc,
        units.shared_X4,
        batch.page_table_RN,
        part_XKMD,
        lse_XKM,
        scale * math.log2(math.e),
        *q_THD.stride()[:2],
        batch.page_table_RN.stride(0),
        num_items,
        ROWS=ROWS,
        TILES=tiles,
        K=num_kv_heads,
        G=group,
        PER_REQUEST=per_request,
        MAX_ROWS=SHARED_ROWS * per_request,
        STAGES=STAGES,
        EARLY=len(q_THD) == batch.num_decode_tokens,
        REGISTERS=240,
        num_warps=4,
        launch_pdl=True,
    )

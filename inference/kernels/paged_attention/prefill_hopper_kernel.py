"""Dense prefill on Hopper: one warp fetches pages, two warpgroups multiply and take turns.

Written in Gluon, Triton's language for explicit layouts. A program stays on its multiprocessor and
takes tile after tile of 128 query tokens of one head, 64 a warpgroup, which keeps them in registers
so that those of the next tile are fetched meanwhile. `steps_hopper_kernel` has the steps.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from inference.kernels.dispatch import send
from inference.kernels.hardware import num_multiprocessors
from inference.kernels.paged_attention.prefill_tiles import prefill_tiles, spread
from inference.kernels.paged_attention.steps_hopper_kernel import (
    HEAD_DIM,
    PAGE_SIZE,
    ROWS,
    attend,
    await_use,
    fetch,
    make_ring,
    pass_turn,
    release,
    to_and_fro,
)
from inference.kernels.paging import LayerPages, PagedBatch


@gluon.jit
def _share(num_items, num_longer):
    """(first item, programs, place among them, rounds) of those this program shares items with.

    `num_longer` programs take the last items, the shortest ones, one more each than the others.
    """
    num_programs = gl.num_programs(0)
    is_longer = gl.program_id(0) >= num_programs - num_longer
    rounds = (num_items + num_programs - 1) // num_programs
    rounds -= gl.where((num_longer > 0) & (is_longer == 0), 1, 0)
    num_shorter = num_programs - num_longer
    first = gl.where(is_longer, (rounds - 1) * num_shorter, 0)
    width = gl.where(is_longer, num_longer, num_shorter)
    place = gl.program_id(0) - gl.where(is_longer, num_shorter, 0)
    return first, width, place, rounds


@gluon.jit
def _tile(i_item, tiles_ptr, num_tiles, heads_together, PAGE: gl.constexpr):
    """(head, pointer to the tile, its pages) of a work item."""
    i_rest = i_item % (num_tiles * heads_together)
    i_group = i_item // (num_tiles * heads_together)
    p_tile = tiles_ptr + i_rest // heads_together * 4
    num_keys = gl.maximum(gl.load(p_tile + 2) + gl.load(p_tile + 3), 0)
    i_head = i_group * heads_together + i_rest % heads_together
    return i_head, p_tile, (num_keys + PAGE - 1) // PAGE


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, queries, keys, values, tiles_ptr, table_ptr, stride_table, num_tiles,
    num_items, num_longer, heads_together, H: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = q_desc.block_type.shape[0]
    D: gl.constexpr = q_desc.block_type.shape[1]
    PAGE: gl.constexpr = keys[0].shape[1]
    i_use = 0
    i_own_tile = 0
    first, width, place, rounds = _share(num_items, num_longer)
    for i_round in range(rounds):
        i_item = first + to_and_fro(i_round, place, width)
        if i_item < num_items:
            i_head, p_tile, num_pages = _tile(i_item, tiles_ptr, num_tiles, heads_together, PAGE)
            token = gl.load(p_tile + 1)
            for w in gl.static_range(2):
                fetch(q_desc, token + w * ROWS, i_head * D, queries, 2 * i_own_tile + w)
            p_table = table_ptr + gl.load(p_tile).to(gl.int64) * stride_table
            page = gl.load(p_table, mask=num_pages > 0, other=0)
            i_kv = i_head // (H // K)
            before = 0
            # Keys run one page ahead of values, as the products do; page numbers one ahead of keys.
            for j in range(num_pages):
                row = (page * K + i_kv) * PAGE
                page = gl.load(p_table + j + 1, mask=j + 1 < num_pages, other=0)
                fetch(k_desc, row, 0, keys, i_use + j)
                if j > 0:
                    fetch(v_desc, before, 0, values, i_use + j - 1)
                before = row
            if num_pages > 0:
                fetch(v_desc, before, 0, values, i_use + num_pages - 1)
            i_use += num_pages
            i_own_tile += 1


@gluon.jit
def _consume(
    w: gl.constexpr, queries, keys, values, tiles_ptr, out_ptr, stride_out, num_tiles, num_items,
    num_longer, heads_together, scale_log2,
):  # fmt: skip
    ROWS: gl.constexpr = queries[0].shape[1]
    D: gl.constexpr = queries[0].shape[2]
    PAGE: gl.constexpr = keys[0].shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    if w == 1:
        pass_turn(w)
    i_use = 0
    i_own_tile = 0
    first, width, place, rounds = _share(num_items, num_longer)
    for i_round in range(rounds):
        i_item = first + to_and_fro(i_round, place, width)
        if i_item < num_items:
            i_head, p_tile, num_pages = _tile(i_item, tiles_ptr, num_tiles, heads_together, PAGE)
            token, count = gl.load(p_tile + 1), gl.load(p_tile + 2)
            position = gl.load(p_tile + 3)
            b_q = await_use(queries, 2 * i_own_tile + w).load(operand)
            release(queries, 2 * i_own_tile + w)
            b_acc = gl.zeros([ROWS, D], gl.float32, mma)
            b_sum = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, mma))
            if num_pages > 0:
                o_m = w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, mma))
                # [ROWS]: the last key a row sees; rows beyond the tile see what its last row sees.
                b_last = position + gl.minimum(o_m, count - 1)
                num_whole = gl.minimum((position + w * ROWS + 1) // PAGE, num_pages)
                b_acc, _max, b_sum = attend(
                    b_q, keys, values, i_use, num_pages, num_whole, b_last, scale_log2, w, True
                )
            b_out = (b_acc * (1.0 / b_sum)[:, None]).to(out_ptr.dtype.element_ty)
            b_out = gl.convert_layout(b_out, store_layout)
            o_r = w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, store_layout))
            o_d = i_head * D + gl.arange(0, D, gl.SliceLayout(0, store_layout))
            p_row = out_ptr + (token + o_r).to(gl.int64) * stride_out
            gl.store(p_row[:, None] + o_d[None, :], b_out, mask=(o_r < count)[:, None])
            i_use += num_pages
            i_own_tile += 1


# A batch of any size is served by what was compiled for the first.
@gluon.jit(
    do_not_specialize=["stride_table", "num_tiles", "num_items", "num_longer", "heads_together"]
)
def _prefill_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    tiles_ptr,
    table_ptr,
    scale_log2,
    stride_out,
    stride_table,
    num_tiles,
    num_items,
    num_longer,
    heads_together,
    H: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    queries = make_ring(q_desc, 2, 1)
    keys = make_ring(k_desc, STAGES, 2)
    values = make_ring(v_desc, 2, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, queries, keys, values, tiles_ptr, out_ptr, stride_out, num_tiles,
                        num_items, num_longer, heads_together, scale_log2)),
            (_consume, (1, queries, keys, values, tiles_ptr, out_ptr, stride_out, num_tiles,
                        num_items, num_longer, heads_together, scale_log2)),
            (_produce, (q_desc, k_desc, v_desc, queries, keys, values, tiles_ptr, table_ptr,
                        stride_table, num_tiles, num_items, num_longer, heads_together, H, K)),
        ],
        [4, 1],
        [REGISTERS, 24],
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
    """Zero the places of the request's last page beyond its keys, for one KV head."""
    i_row, i_kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq_len = tl.load(seq_len_ptr + i_row)
    if seq_len % PAGE > 0:
        page = tl.load(table_ptr + i_row * stride_table + seq_len // PAGE).to(tl.int64)
        # [PAGE, D]
        o_s = tl.arange(0, PAGE)[:, None]
        p_v = v_pages_ptr + page * stride_page + (i_kv * PAGE + o_s) * D + tl.arange(0, D)[None, :]
        b_zero = tl.zeros([PAGE, D], v_pages_ptr.dtype.element_ty)
        tl.store(p_v, b_zero, mask=o_s >= seq_len % PAGE)


def serves(q_THD: Tensor, pages: LayerPages, batch: PagedBatch) -> bool:
    """Whether these shapes and dtypes are the ones this kernel is made for."""
    tensors = (q_THD, pages.k_pages, pages.v_pages)
    return (
        q_THD.dtype in (torch.bfloat16, torch.float16)
        and len({tensor.dtype for tensor in tensors}) == 1
        and pages.k_pages.shape[2:] == (PAGE_SIZE, HEAD_DIM)
        and all(tensor.is_contiguous() for tensor in tensors)
        and batch.page_size == PAGE_SIZE
    )


def paged_attention_prefill(
    q_THD: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    scale: float,
    out_THD: Tensor,
    *,
    num_stages: int = 2,
) -> None:
    """As `prefill_kernel.paged_attention_prefill`; zeroes unwritten places of last value pages."""
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads = pages.k_pages.shape[1]
    tiles_X4 = prefill_tiles(batch, 2 * ROWS)
    num_prefills = len(batch.seq_len_R) - batch.num_decodes
    _zero_tail_kernel[(num_prefills, num_kv_heads)](
        pages.v_pages,
        batch.seq_len_R[batch.num_decodes :],
        batch.page_table_RN[batch.num_decodes :],
        pages.v_pages.stride(0),
        batch.page_table_RN.stride(0),
        D=head_dim,
        PAGE=PAGE_SIZE,
    )
    num_items = len(tiles_X4) * num_heads
    programs = min(num_multiprocessors(q_THD.device), num_items)
    heads_together, num_longer = spread(
        tiles_X4, num_heads, num_heads // num_kv_heads, PAGE_SIZE, programs
    )
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def describe(tensor: Tensor, width: int, rows: int) -> TensorDescriptor:
        flat = tensor.view(-1, width)
        return TensorDescriptor(
            flat, list(flat.shape), list(flat.stride()), [rows, head_dim], layout
        )

    _prefill_hopper_kernel[(programs,)](
        describe(q_THD, num_heads * head_dim, ROWS),
        describe(pages.k_pages, head_dim, PAGE_SIZE),
        describe(pages.v_pages, head_dim, PAGE_SIZE),
        out_THD,
        send(tiles_X4, q_THD.device),
        batch.page_table_RN,
        scale * math.log2(math.e),
        out_THD.stride(0),
        batch.page_table_RN.stride(0),
        len(tiles_X4),
        num_items,
        num_longer,
        heads_together,
        H=num_heads,
        K=num_kv_heads,
        STAGES=num_stages,
        REGISTERS=240,
        num_warps=4,
    )

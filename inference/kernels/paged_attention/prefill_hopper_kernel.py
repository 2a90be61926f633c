"""Dense prefill on Hopper: one warp fetches pages, two warpgroups multiply and take turns.

Written in Gluon, Triton's language for explicit layouts. A program stays on its multiprocessor and
takes tile after tile of 128 query tokens of one head, 64 a warpgroup. While a warpgroup's products
run (scores of page j, values of page j - 1) the other computes its softmax. Pages come through the
tensor memory accelerator into a ring of buffers that both warpgroups read.
"""

import math

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

from inference.kernels.dispatch import send
from inference.kernels.hardware import num_multiprocessors
from inference.kernels.paged_attention.prefill_tiles import prefill_tiles
from inference.kernels.paging import LayerPages, PagedBatch

ROWS, HEAD_DIM, PAGE_SIZE = 64, 128, 128
"""Query tokens of a warpgroup; the only head dim and page size served."""
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Its name changed between Triton 3.6 and 3.9."""
NEG_INF = gl.constexpr(float("-inf"))


@gluon.jit
def _num_rounds(num_items):
    return (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _item(i_round):
    """Rounds run to and fro over the programs, so that each gets as much of the sorted work."""
    last = gl.num_programs(0) - 1
    i_program = gl.program_id(0)
    place = gl.where(i_round % 2 == 0, i_program, last - i_program)
    return i_round * gl.num_programs(0) + place


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
def _fetch(desc, place, ring, i_use):
    """Load the rows from `place` on as use number `i_use` of the ring."""
    smem, full, empty = ring
    STAGES: gl.constexpr = smem.shape[0]
    i_stage = i_use % STAGES
    mbarrier.wait(empty.index(i_stage), ((i_use // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(i_stage), desc.block_type.nbytes)
    _load(desc, [place, 0], full.index(i_stage), smem.index(i_stage))


@gluon.jit
def _await(ring, i_use, pred=True):
    """Wait until use number `i_use` of the ring is loaded, and return its buffer."""
    smem, full, _empty = ring
    STAGES: gl.constexpr = smem.shape[0]
    mbarrier.wait(full.index(i_use % STAGES), (i_use // STAGES) & 1, pred=pred)
    return smem.index(i_use % STAGES)


@gluon.jit
def _release(ring, i_use):
    mbarrier.arrive(ring[2].index(i_use % ring[0].shape[0]))


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, queries, keys, values, tiles_ptr, table_ptr, stride_table, num_tiles,
    num_items, heads_together, H: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    q_smem, q_full, q_empty = queries
    ROWS: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    PAGE: gl.constexpr = keys[0].shape[1]
    i_use = 0
    i_own_tile = 0
    for i_round in range(_num_rounds(num_items)):
        i_item = _item(i_round)
        if i_item < num_items:
            i_head, p_tile, num_pages = _tile(i_item, tiles_ptr, num_tiles, heads_together, PAGE)
            token = gl.load(p_tile + 1)
            for w in gl.static_range(2):
                mbarrier.wait(q_empty.index(w), (i_own_tile & 1) ^ 1)
                mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
                _load(q_desc, [token + w * ROWS, i_head * D], q_full.index(w), q_smem.index(w))
            p_table = table_ptr + gl.load(p_tile).to(gl.int64) * stride_table
            i_kv = i_head // (H // K)
            before = 0
            # Keys run one page ahead of values, as the products do.
            for j in range(num_pages):
                place = (gl.load(p_table + j) * K + i_kv) * PAGE
                _fetch(k_desc, place, keys, i_use + j)
                if j > 0:
                    _fetch(v_desc, before, values, i_use + j - 1)
                before = place
            if num_pages > 0:
                _fetch(v_desc, before, values, i_use + num_pages - 1)
            i_use += num_pages
            i_own_tile += 1


@gluon.jit
def _softmax(b_s, b_max, b_sum, scale_log2, first_key, b_last, IS_MASKED: gl.constexpr):
    """(weights, maximum, their sum, factor on what was summed before); logits to base 2."""
    if IS_MASKED:
        PAGE: gl.constexpr = b_s.shape[1]
        o_key = first_key + gl.arange(0, PAGE, gl.SliceLayout(0, b_s.type.layout))
        b_s = gl.where(o_key[None, :] <= b_last[:, None], b_s, NEG_INF)
    b_new = gl.maximum(b_max, gl.max(b_s, 1) * scale_log2)
    b_alpha = gl.exp2(b_max - b_new)
    b_x = gl.exp2(b_s * scale_log2 - b_new[:, None])
    return b_x, b_new, b_sum * b_alpha + gl.sum(b_x, 1), b_alpha


@gluon.jit
def _start_scores(b_q, b_k, turn, i_use, w: gl.constexpr, IN_TURNS: gl.constexpr):
    """Products of the queries with the keys of a page, left running; begun in one's turn."""
    ROWS: gl.constexpr = b_q.shape[0]
    PAGE: gl.constexpr = b_k.shape[0]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16])
    b_zero = gl.zeros([ROWS, PAGE], gl.float32, mma)
    if IN_TURNS:
        mbarrier.wait(turn.index(w), (i_use & 1) ^ (1 - w))
    return warpgroup_mma(b_q, b_k.permute((1, 0)), b_zero, use_acc=False, is_async=True)


@gluon.jit
def _step(
    b_acc, b_p, b_max, b_sum, b_q, keys, values, turn, i_use, first_key, has_next, b_last,
    scale_log2, w: gl.constexpr, IN_TURNS: gl.constexpr, IS_MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of the page that is use `i_use` of the ring, values of the page before, softmax."""
    b_v = _await(values, i_use - 1)
    b_k = keys[0].index(i_use % keys[0].shape[0])
    b_s = _start_scores(b_q, b_k, turn, i_use, w, IN_TURNS)
    b_acc = warpgroup_mma(b_p, b_v, b_acc, is_async=True)
    if IN_TURNS:
        mbarrier.arrive(turn.index(1 - w))
    b_s = warpgroup_mma_wait(1, deps=(b_s,))
    _release(keys, i_use)
    b_x, b_max, b_sum, b_alpha = _softmax(
        b_s, b_max, b_sum, scale_log2, first_key, b_last, IS_MASKED
    )
    # This wait also keeps the assembler from waiting for the values before the softmax.
    _await(keys, i_use + 1, pred=has_next)
    b_acc, b_x = warpgroup_mma_wait(0, deps=(b_acc, b_x))
    _release(values, i_use - 1)
    b_p = gl.convert_layout(b_x.to(b_p.dtype), b_p.type.layout)
    return b_acc * b_alpha[:, None], b_p, b_max, b_sum


@gluon.jit
def _attend(
    b_acc, b_max, b_sum, b_q, q_empty, keys, values, turn, i_use, num_pages, first_position,
    b_last, scale_log2, w: gl.constexpr, IN_TURNS: gl.constexpr,
):  # fmt: skip
    """(sum of values, sum of weights) over the pages of a tile, the first of them use `i_use`."""
    PAGE: gl.constexpr = keys[0].shape[1]
    operand: gl.constexpr = gl.DotOperandLayout(0, b_acc.type.layout, 2)
    b_s = _start_scores(b_q, _await(keys, i_use), turn, i_use, w, IN_TURNS)
    if IN_TURNS:
        mbarrier.arrive(turn.index(1 - w))
    b_s = warpgroup_mma_wait(0, deps=(b_s,))
    _release(keys, i_use)
    b_x, b_max, b_sum, _b_alpha = _softmax(b_s, b_max, b_sum, scale_log2, 0, b_last, True)
    _await(keys, i_use + 1, pred=num_pages > 1)
    b_p = gl.convert_layout(b_x.to(keys[0].dtype), operand)
    # Pages that even the first row sees whole, then those with a mask.
    num_whole = gl.maximum(gl.minimum((first_position + 1) // PAGE, num_pages), 1)
    for j in range(1, num_whole):
        b_acc, b_p, b_max, b_sum = _step(
            b_acc, b_p, b_max, b_sum, b_q, keys, values, turn, i_use + j, j * PAGE,
            j + 1 < num_pages, b_last, scale_log2, w, IN_TURNS, False,
        )  # fmt: skip
    for j in range(num_whole, num_pages):
        b_acc, b_p, b_max, b_sum = _step(
            b_acc, b_p, b_max, b_sum, b_q, keys, values, turn, i_use + j, j * PAGE,
            j + 1 < num_pages, b_last, scale_log2, w, IN_TURNS, True,
        )  # fmt: skip
    mbarrier.arrive(q_empty)
    b_v = _await(values, i_use + num_pages - 1)
    b_acc = warpgroup_mma(b_p, b_v, b_acc, is_async=True)
    b_acc = warpgroup_mma_wait(0, deps=(b_acc,))
    _release(values, i_use + num_pages - 1)
    return b_acc, b_sum


@gluon.jit
def _consume(
    w: gl.constexpr, queries, keys, values, turn, tiles_ptr, out_ptr, stride_out, num_tiles,
    num_items, heads_together, scale_log2, IN_TURNS: gl.constexpr,
):  # fmt: skip
    q_smem, q_full, q_empty = queries
    ROWS: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    PAGE: gl.constexpr = keys[0].shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    i_use = 0
    i_own_tile = 0
    for i_round in range(_num_rounds(num_items)):
        i_item = _item(i_round)
        if i_item < num_items:
            i_head, p_tile, num_pages = _tile(i_item, tiles_ptr, num_tiles, heads_together, PAGE)
            token, count = gl.load(p_tile + 1), gl.load(p_tile + 2)
            position = gl.load(p_tile + 3)
            o_m = w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, mma))
            # [ROWS]: the last key a row sees; rows beyond the tile see what its last row sees.
            b_last = position + gl.minimum(o_m, count - 1)
            b_max = gl.full([ROWS], NEG_INF, gl.float32, gl.SliceLayout(1, mma))
            b_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, mma))
            b_acc = gl.zeros([ROWS, D], gl.float32, mma)
            mbarrier.wait(q_full.index(w), i_own_tile & 1)
            if num_pages > 0:
                b_acc, b_sum = _attend(
                    b_acc, b_max, b_sum, q_smem.index(w), q_empty.index(w), keys, values, turn,
                    i_use, num_pages, position + w * ROWS, b_last, scale_log2, w, IN_TURNS,
                )  # fmt: skip
            else:
                mbarrier.arrive(q_empty.index(w))
            b_out = b_acc / gl.where(b_sum > 0, b_sum, 1.0)[:, None]
            b_out = gl.convert_layout(b_out.to(out_ptr.dtype.element_ty), store_layout)
            o_r = w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, store_layout))
            o_d = i_head * D + gl.arange(0, D, gl.SliceLayout(0, store_layout))
            p_row = out_ptr + (token + o_r).to(gl.int64) * stride_out
            gl.store(p_row[:, None] + o_d[None, :], b_out, mask=(o_r < count)[:, None])
            i_use += num_pages
            i_own_tile += 1


@gluon.jit
def _ring(desc, STAGES: gl.constexpr, num_readers: gl.constexpr):
    """(buffers, barriers of full ones, barriers of empty ones)."""
    shape: gl.constexpr = desc.block_type.shape
    smem = gl.allocate_shared_memory(desc.dtype, [STAGES, shape[0], shape[1]], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=num_readers)
    return smem, full, empty


@gluon.jit
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
    heads_together,
    H: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    IN_TURNS: gl.constexpr,
):
    queries = _ring(q_desc, 2, 1)
    keys = _ring(k_desc, STAGES, 2)
    values = _ring(v_desc, STAGES, 2)
    # Whose turn at the tensor cores it is.
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, queries, keys, values, turn, tiles_ptr, out_ptr, stride_out, num_tiles,
                        num_items, heads_together, scale_log2, IN_TURNS)),
            (_consume, (1, queries, keys, values, turn, tiles_ptr, out_ptr, stride_out, num_tiles,
                        num_items, heads_together, scale_log2, IN_TURNS)),
            (_produce, (q_desc, k_desc, v_desc, queries, keys, values, tiles_ptr, table_ptr,
                        stride_table, num_tiles, num_items, heads_together, H, K)),
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
    in_turns: bool = True,
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
        num_heads // num_kv_heads,
        H=num_heads,
        K=num_kv_heads,
        STAGES=num_stages,
        REGISTERS=240,
        IN_TURNS=in_turns,
        num_warps=4,
    )

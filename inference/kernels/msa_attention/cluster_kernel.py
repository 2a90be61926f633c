"""Sparse GQA of few decodes on Hopper: the programs of one task form a cluster and merge at once.

Does what `decode_kernel` does with a second launch: each of the `SPLIT` programs of a cluster
attends to its share of the keys, writes its part, waits for the others of the cluster, and merges
all parts of its share of the query heads.

Written in Gluon. To the compiler the programs of a cluster compute the same; what they read depends
on their rank, and they write by `_store`, for the compiler's own store would let one write for all.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from inference.kernels.merge_kernel import (
    LOG2_E,
    begin_dependent,
    fetch_ahead,
    fetch_lines_ahead,
    launch_options,
)
from inference.kernels.paging import LayerPages, PagedBatch

HEAD_DIM, PAGE_SIZE, GROUP, TILE = 128, 128, 16, 64
_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Its name changed between Triton 3.6 and 3.9."""


@gluon.constexpr_function
def _alike(split, rank):
    """Bases of a layout by which every program of a cluster holds the whole tensor."""
    return [[0] * rank for _ in range(split.bit_length() - 1)]


@gluon.constexpr_function
def _memory(split):
    return gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0], _alike(split, 2))


@gluon.constexpr_function
def _row_of_ids(split):
    return gl.BlockedLayout([1], [32], [4], [0], _alike(split, 1))


@gluon.constexpr_function
def _swizzled(split):
    return gl.SwizzledSharedLayout(8, 1, 8, [1, 0], _alike(split, 2))


@gluon.constexpr_function
def _product(split):
    return gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8], _alike(split, 2))


@gluon.constexpr_function
def _cube(split, heads):
    """[heads, parts, D]: a thread has all parts of what it merges."""
    warps = min(heads, 4)
    return gl.BlockedLayout(
        [1, split, warps], [1, 1, 32], [warps, 1, 4 // warps], [2, 1, 0], _alike(split, 3)
    )


@gluon.jit
def _rank():
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _wait_for_cluster():
    """What the programs of the cluster have written is visible."""
    gl.inline_asm_elementwise(
        """
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        mov.u32 $0, 0;
        """,
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _store(b_p, b_x):
    b_p = b_p.to(gl.int64)
    if b_x.dtype == gl.float32:
        gl.inline_asm_elementwise(
            "st.global.b32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [b_p, b_x.to(gl.int32, bitcast=True)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        gl.inline_asm_elementwise(
            "st.global.b16 [$1], $2; mov.u32 $0, 0;",
            "=r,l,h",
            [b_p, b_x.to(gl.int16, bitcast=True)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _fetch(
    i, last, i_slot, k_ptr, v_ptr, k_smem, v_smem, b_page, b_count, stride_page,
    PAGE: gl.constexpr,
):  # fmt: skip
    """Start to load tile i; places that are not visible become zeros."""
    TILE: gl.constexpr = k_smem.shape[1]
    D: gl.constexpr = k_smem.shape[2]
    B: gl.constexpr = b_page.shape[0]
    TILES: gl.constexpr = PAGE // TILE
    memory: gl.constexpr = _memory(gl.num_ctas())
    is_this = gl.arange(0, B, b_page.type.layout) == i // TILES
    page = gl.sum(gl.where(is_this, b_page, 0), 0).to(gl.int64)
    count = gl.where(i < last, gl.sum(gl.where(is_this, b_count, 0), 0), 0)
    offset = i % TILES * TILE
    o_n = gl.arange(0, TILE, gl.SliceLayout(1, memory))
    o_d = gl.arange(0, D, gl.SliceLayout(0, memory))
    o_tile = page * stride_page + offset * D
    o_nd = o_n[:, None] * D + o_d[None, :]
    m_nd = (offset + o_n < count)[:, None] & (o_d >= 0)[None, :]
    _load(k_smem.index(i_slot), k_ptr + o_tile + o_nd, mask=m_nd)
    _load(v_smem.index(i_slot), v_ptr + o_tile + o_nd, mask=m_nd)


@gluon.jit
def _attend_cluster(
    q_ptr,
    k_ptr,
    v_ptr,
    blocks_ptr,
    table_ptr,
    positions_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    scale,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_page,
    stride_head,
    stride_bt,
    stride_bk,
    stride_row,
    num_columns,
    QUERY_LEN: gl.constexpr,
    K: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    B: gl.constexpr,
    B_PAD: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
):
    i_task = gl.program_id(0)
    i_split = _rank()
    i_t = i_task // K
    i_k = i_task % K
    TILES: gl.constexpr = PAGE // TILE
    TYPE: gl.constexpr = q_ptr.dtype.element_ty
    mma: gl.constexpr = _product(SPLIT)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    memory: gl.constexpr = _memory(SPLIT)
    row_of_ids: gl.constexpr = _row_of_ids(SPLIT)
    swizzled: gl.constexpr = _swizzled(SPLIT)
    k_smem = gl.allocate_shared_memory(TYPE, [STAGES, TILE, D], swizzled)
    v_smem = gl.allocate_shared_memory(TYPE, [STAGES, TILE, D], swizzled)
    k_ptr += i_k.to(gl.int64) * stride_head
    v_ptr += i_k.to(gl.int64) * stride_head
    p_row = table_ptr + (i_t // QUERY_LEN).to(gl.int64) * stride_row

    # While the kernel before this one ends: the page table and the page that is always chosen.
    is_first = i_split == 0
    newest = gl.minimum(gl.load(positions_ptr + i_t).to(gl.int32) // PAGE, num_columns - 1)
    o_line = gl.arange(0, 128, row_of_ids) * 32
    fetch_lines_ahead(p_row + o_line, (o_line <= newest) & is_first)
    newest_page = gl.load(p_row + newest).to(gl.int64)
    PAGE_BYTES: gl.constexpr = PAGE * D * 2
    fetch_ahead(k_ptr + newest_page * stride_page, PAGE_BYTES, (newest_page >= 0) & is_first)
    fetch_ahead(v_ptr + newest_page * stride_page, PAGE_BYTES, (newest_page >= 0) & is_first)
    begin_dependent(True)

    # [B_PAD]
    o_b = gl.arange(0, B_PAD, row_of_ids)
    p_block = blocks_ptr + i_t.to(gl.int64) * stride_bt + i_k * stride_bk + o_b
    b_block = gl.load(p_block, mask=o_b < B, other=-1)
    position = gl.load(positions_ptr + i_t).to(gl.int32)
    # [G, D]
    o_g = gl.arange(0, G, gl.SliceLayout(1, memory))
    o_d = gl.arange(0, D, gl.SliceLayout(0, memory))
    p_q = q_ptr + i_t.to(gl.int64) * stride_qt + (i_k * G + o_g)[:, None] * stride_qh + o_d[None, :]
    b_q = gl.load(p_q)
    b_page = gl.load(p_row + b_block, mask=b_block >= 0, other=-1)
    # How many keys of each block the query sees.
    b_count = gl.where(b_page >= 0, position + 1 - b_block * PAGE, 0)
    num_tiles = gl.max(gl.where(b_block >= 0, o_b + 1, 0), 0) * TILES
    first = i_split * num_tiles // SPLIT
    last = (i_split + 1) * num_tiles // SPLIT

    for i in gl.static_range(STAGES):
        _fetch(first + i, last, i, k_ptr, v_ptr, k_smem, v_smem, b_page, b_count, stride_page, PAGE)
        async_copy.commit_group()
    b_q = gl.convert_layout(b_q, left)
    b_m = gl.full([G], -1e30, gl.float32, gl.SliceLayout(1, mma))
    b_l = gl.full([G], 0.0, gl.float32, gl.SliceLayout(1, mma))
    b_acc = gl.zeros([G, D], gl.float32, mma)
    o_n = gl.arange(0, TILE, gl.SliceLayout(0, mma))
    for i in range(first, last):
        i_slot = (i - first) % STAGES
        is_this = o_b == i // TILES
        count = gl.sum(gl.where(is_this, b_count, 0), 0)
        m_n = i % TILES * TILE + o_n < count
        async_copy.wait_group(STAGES - 1)
        b_k = k_smem.index(i_slot).permute((1, 0)).load(right)
        b_s = mma_v2(b_q, b_k, gl.zeros([G, TILE], gl.float32, mma)) * scale
        b_s = gl.where(m_n[None, :], b_s, float("-inf"))
        b_max = gl.maximum(b_m, gl.max(b_s, 1))
        b_p = gl.exp2(b_s - b_max[:, None])
        b_decay = gl.exp2(b_m - b_max)
        b_l = b_l * b_decay + gl.sum(b_p, 1)
        b_v = v_smem.index(i_slot).load(right)
        b_p = gl.convert_layout(b_p.to(TYPE), left)
        b_acc = mma_v2(b_p, b_v, b_acc * b_decay[:, None])
        b_m = b_max
        if i + STAGES < last:
            _fetch(
                i + STAGES, last, i_slot, k_ptr, v_ptr, k_smem, v_smem, b_page, b_count,
                stride_page, PAGE,
            )  # fmt: skip
        async_copy.commit_group()
    async_copy.wait_group(0)

    b_safe = gl.where(b_l > 0, b_l, 1.0)
    o_part = (i_task.to(gl.int64) * SPLIT + i_split) * G
    o_row = o_part + gl.arange(0, G, gl.SliceLayout(1, mma))
    o_column = gl.arange(0, D, gl.SliceLayout(0, mma))
    _store(part_ptr + o_row[:, None] * D + o_column[None, :], b_acc * (1.0 / b_safe)[:, None])
    _store(lse_ptr + o_row, gl.where(b_l > 0, b_m + gl.log2(b_safe), float("-inf")))
    _wait_for_cluster()

    # [heads of this program, SPLIT, D]
    HEADS: gl.constexpr = G // SPLIT
    cube: gl.constexpr = _cube(SPLIT, HEADS)
    flat: gl.constexpr = gl.SliceLayout(2, cube)
    o_h = i_split * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, flat))
    o_x = gl.arange(0, SPLIT, gl.SliceLayout(0, flat))
    o_d = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, cube)))
    o_hx = (i_task.to(gl.int64) * SPLIT + o_x[None, :]) * G + o_h[:, None]
    b_lse = gl.load(lse_ptr + o_hx, cache_modifier=".cg")
    o_hxd = o_hx[:, :, None] * D + gl.expand_dims(o_d[None, :], 1)
    b_o = gl.load(part_ptr + o_hxd, cache_modifier=".cg")
    b_max = gl.maximum(gl.max(b_lse, 1), -1e30)
    b_w = gl.exp2(b_lse - b_max[:, None])
    b_sum = gl.sum(b_w, 1)
    b_o = gl.sum(b_o * b_w[:, :, None], 1)
    plane: gl.constexpr = gl.SliceLayout(1, cube)
    b_inverse = gl.convert_layout(1.0 / gl.where(b_sum > 0, b_sum, 1.0), gl.SliceLayout(1, plane))
    o_h = gl.convert_layout(o_h, gl.SliceLayout(1, plane))
    p_out = out_ptr + i_t.to(gl.int64) * stride_ot + ((i_k * G + o_h) * D)[:, None] + o_d[None, :]
    _store(p_out, (b_o * b_inverse[:, None]).to(TYPE))


def serves(q_THD: Tensor, pages: LayerPages) -> bool:
    """Whether these shapes and dtypes are the ones this kernel is made for."""
    return (
        q_THD.is_cuda
        and torch.cuda.get_device_capability(q_THD.device)[0] == 9
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and q_THD.dtype == pages.k_pages.dtype == pages.v_pages.dtype
        and q_THD.stride(2) == 1
        and pages.k_pages.shape[2:] == (PAGE_SIZE, HEAD_DIM)
        and q_THD.shape[1] == GROUP * pages.k_pages.shape[1]
    )


def msa_attention_decode(
    q_THD: Tensor,
    pages: LayerPages,
    blocks_TKB: Tensor,
    batch: PagedBatch,
    scale: float,
    out_THD: Tensor,
    split: int,
    num_stages: int,
) -> None:
    """As `decode_kernel.msa_attention_decode`; `split` is 2, 4, 8 or 16."""
    num_tokens = batch.num_decode_tokens
    num_kv_heads = pages.k_pages.shape[1]
    shape = (num_tokens, num_kv_heads, split, GROUP)
    part_TKXGD = torch.empty((*shape, HEAD_DIM), dtype=torch.float32, device=q_THD.device)
    lse_TKXG = torch.empty(shape, dtype=torch.float32, device=q_THD.device)
    _attend_cluster[(num_tokens * num_kv_heads,)](
        q_THD,
        pages.k_pages,
        pages.v_pages,
        blocks_TKB,
        batch.page_table_RN,
        batch.positions_T,
        out_THD,
        part_TKXGD,
        lse_TKXG,
        scale * LOG2_E,
        *q_THD.stride()[:2],
        out_THD.stride(0),
        *pages.k_pages.stride()[:2],
        *blocks_TKB.stride()[:2],
        batch.page_table_RN.stride(0),
        batch.page_table_RN.shape[1],
        QUERY_LEN=batch.decode_query_len,
        K=num_kv_heads,
        G=GROUP,
        D=HEAD_DIM,
        B=blocks_TKB.shape[-1],
        B_PAD=triton.next_power_of_2(blocks_TKB.shape[-1]),
        PAGE=PAGE_SIZE,
        TILE=TILE,
        SPLIT=split,
        STAGES=num_stages,
        num_warps=4,
        num_ctas=split,
        **launch_options(is_cuda=True),
    )

"""Block choice of prefill chunks: scores of a slab of query rows, then the best of each row.

A slab's FP32 scores fit in L2, so they never travel to HBM. The pages that its tiles of query rows
see are dealt evenly to programs, which may cut a tile anywhere: a score depends on one page alone.

Suffixes: `X` rows, (query token, head) pairs side by side · `N` pages · `P` programs ·
`S` segments: runs of pages of one tile, each of one program · `L` tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.hardware import num_multiprocessors
from inference.kernels.index_select.select_kernel import check_choice, select_blocks
from inference.kernels.index_select.slabs import DeviceSlab, layout_of
from inference.kernels.paging import PagedBatch


@triton.jit
def _products(
    b_q, p_q, m_row, p_page, m_key, DIM: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr
):
    """[BLOCK_M, BLOCK_S] products of a tile and a page; in parts of the dimension without tensor
    cores, where whole operands would not fit in registers."""
    o_dim = tl.arange(0, BLOCK_D)
    if BLOCK_D >= DIM:
        b_k = tl.load(p_page + o_dim[None, :], mask=m_key & (o_dim < DIM)[None, :], other=0.0)
        return tl.dot(b_q, tl.trans(b_k.to(DTYPE)), input_precision="ieee")
    b_s = tl.dot(
        b_q,
        tl.trans(tl.load(p_page + o_dim[None, :], mask=m_key, other=0.0).to(DTYPE)),
        input_precision="ieee",
    )
    for first in range(BLOCK_D, DIM, BLOCK_D):
        m_dim = (first + o_dim < DIM)[None, :]
        b_part = tl.load(p_q + (first + o_dim)[None, :], mask=m_row & m_dim, other=0.0)
        b_k = tl.load(p_page + (first + o_dim)[None, :], mask=m_key & m_dim, other=0.0)
        b_s = tl.dot(b_part.to(DTYPE), tl.trans(b_k.to(DTYPE)), b_s, input_precision="ieee")
    return b_s


@triton.jit(
    do_not_specialize=["first_row", "table_stride"],
    do_not_specialize_on_alignment=["segment_S6", "start_P1", "score_stride"],
)
def _score_kernel(
    q_XD,
    index_pages,
    table_RN,
    segment_S6,
    start_P1,
    scores_XN,
    first_row,
    table_stride,
    page_stride,
    score_stride,
    NUM_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    o_row, o_key, o_dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    m_page = o_key[:, None] < PAGE
    first_segment = tl.load(start_P1 + tl.program_id(0))
    last_segment = tl.load(start_P1 + tl.program_id(0) + 1)
    for segment in range(first_segment, last_segment):
        i_request = tl.load(segment_S6 + segment * 6).to(tl.int64)
        row = tl.load(segment_S6 + segment * 6 + 1)
        num_rows = tl.load(segment_S6 + segment * 6 + 2)
        position = tl.load(segment_S6 + segment * 6 + 3)
        first_page = tl.load(segment_S6 + segment * 6 + 4)
        last_page = first_page + tl.load(segment_S6 + segment * 6 + 5)
        p_table = table_RN + i_request * table_stride
        m_row = o_row < num_rows
        # [BLOCK_M, BLOCK_D]
        p_q = q_XD + (row + o_row).to(tl.int64)[:, None] * DIM
        m_q = m_row[:, None] & (o_dim < DIM)[None, :]
        b_q = tl.load(p_q + o_dim[None, :], mask=m_q, other=0.0).to(DTYPE)
        p_out = scores_XN + (row - first_row + o_row).to(tl.int64) * score_stride
        # Pages before this one are seen whole by all queries of the tile.
        whole = tl.minimum(tl.maximum((position + 1) // PAGE, first_page), last_page)
        for page in range(first_page, whole):
            p_page = index_pages + tl.load(p_table + page).to(tl.int64) * page_stride
            p_page += o_key[:, None] * DIM
            b_s = _products(b_q, p_q, m_row[:, None], p_page, m_page, DIM, BLOCK_D, DTYPE)
            if PAGE < BLOCK_S:
                b_s = tl.where((o_key < PAGE)[None, :], b_s, float("-inf"))
            tl.store(p_out + page, tl.max(b_s, 1), mask=m_row)
        for page in range(whole, last_page):
            p_page = index_pages + tl.load(p_table + page).to(tl.int64) * page_stride
            p_page += o_key[:, None] * DIM
            b_s = _products(b_q, p_q, m_row[:, None], p_page, m_page, DIM, BLOCK_D, DTYPE)
            o_seen = position + o_row // NUM_HEADS - page * PAGE
            m_key = (o_key[None, :] <= o_seen[:, None]) & (o_key < PAGE)[None, :]
            tl.store(p_out + page, tl.max(tl.where(m_key, b_s, float("-inf")), 1), mask=m_row)


def _tile_shape(dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(rows, warps, stages, programs an SM) of the portable kernel."""
    return (32, 4, 2, 2) if dtype == torch.float32 else (128, 4, 3, 2)


def _portable_operands(index_q_XD: Tensor, index_pages: Tensor) -> tuple[Tensor, Tensor]:
    return index_q_XD, index_pages


def _score_portable(
    operands: tuple[Tensor, Tensor],
    page_table_RN: Tensor,
    slab: DeviceSlab,
    scores_XN: Tensor,
    num_heads: int,
) -> None:
    """Scores of any page size and dtype that are a query's, or FP8 (widened to FP16, exactly)."""
    index_q_XD, index_pages = operands
    _, page_size, dim = index_pages.shape
    is_fp32, is_fp8 = index_q_XD.dtype == torch.float32, index_pages.dtype.itemsize == 1
    is_bf16 = index_q_XD.dtype == torch.bfloat16 and not is_fp8
    rows, warps, stages, _ = _tile_shape(index_q_XD.dtype)
    _score_kernel[(slab.start_P1.shape[0] - 1,)](
        index_q_XD,
        index_pages,
        page_table_RN,
        slab.segment_S6,
        slab.start_P1,
        scores_XN,
        slab.first_token * num_heads,
        page_table_RN.stride(0),
        index_pages.stride(0),
        scores_XN.stride(0),
        NUM_HEADS=num_heads,
        PAGE=page_size,
        DIM=dim,
        BLOCK_M=rows,
        BLOCK_S=max(16, triton.next_power_of_2(page_size)),
        BLOCK_D=16 if is_fp32 else max(16, triton.next_power_of_2(dim)),
        DTYPE=tl.float32 if is_fp32 else tl.bfloat16 if is_bf16 else tl.float16,
        num_warps=warps,
        num_stages=stages,
    )


def _scorer(index_q_TKD: Tensor, index_pages: Tensor):
    """(operands of the scores, scores of a slab, rows of its tiles, programs that run at once)."""
    rows, _, _, programs = _tile_shape(index_q_TKD.dtype)
    if not index_q_TKD.is_cuda:
        return _portable_operands, _score_portable, rows, 3
    num_sms = num_multiprocessors(index_q_TKD.device)
    from inference.kernels.index_select import prefill_hopper_kernel as hopper

    if hopper.can_run(index_q_TKD, index_pages):
        return hopper.operands, hopper.score_pages, hopper.ROWS, num_sms
    return _portable_operands, _score_portable, rows, programs * num_sms


def index_select_prefill(
    index_q_TKD: Tensor,
    index_pages: Tensor,
    batch: PagedBatch,
    blocks_TKB: Tensor,
    topk_blocks: int,
    local_blocks: int,
) -> None:
    """Write the choice of every prefill token into rows [num_decode_tokens, T) of `blocks_TKB`.

    The rule is `reference.choose_blocks`. A chunk's tokens end its request: token i of `query_len`
    has position `seq_len - query_len + i`. A product that is NaN does not count.

    Args:
        index_q_TKD: [T, K, index head dim] float32, float16 or bfloat16.
        index_pages: [num_pages, page_size, index head dim], the queries' dtype or float8_e4m3fn,
            each page contiguous.
        blocks_TKB: [T, K, topk_blocks] int32, contiguous; rows of decodes are left alone.

    Raises:
        ValueError: `topk_blocks` or `local_blocks` out of range; more heads than a tile has rows.
    """
    check_choice(topk_blocks, local_blocks)
    num_tokens, num_heads, _ = index_q_TKD.shape
    if num_tokens <= batch.num_decode_tokens:
        return
    make_operands, score, rows, num_programs = _scorer(index_q_TKD, index_pages)
    if num_heads > rows:
        raise ValueError(f"index_select: {num_heads} heads, at most {rows}")
    device = index_q_TKD.device
    layout = layout_of(batch, num_tokens, num_heads, rows, num_programs, device)
    if layout.has_padding:
        blocks_TKB[batch.num_decode_tokens :] = -1
    operands = make_operands(index_q_TKD.contiguous().flatten(0, 1), index_pages)
    num_scores = [
        (slab.last_token - slab.first_token) * num_heads * slab.num_columns for slab in layout.slabs
    ]
    scratch = torch.empty(max(num_scores, default=0), dtype=torch.float32, device=device)
    blocks_XB = blocks_TKB.flatten(0, 1)
    for slab, count in zip(layout.slabs, num_scores, strict=True):
        part = slice(slab.first_token * num_heads, slab.last_token * num_heads)
        scores_XN = scratch[:count].view(-1, slab.num_columns)
        score(operands, batch.page_table_RN, slab, scores_XN, num_heads)
        select_blocks(
            scores_XN, layout.num_blocks_X[part], blocks_XB[part], topk_blocks, local_blocks
        )

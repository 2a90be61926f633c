"""Block scores of decodes, and the choice among them.

A program of the score kernel reads a run of pages once for all heads and query tokens that see
them; a page's scores are a maximum in registers, and one float a page and head reaches memory.
The score kernels here run on any GPU and in Triton's interpreter; at M3's shapes on Hopper those of
`decode_hopper_kernel` take their place.

Suffixes: `T` tokens · `R` decodes · `N` logical pages · `U` units · `C` columns (query token, head)
· `S` keys of a page · `D` index head dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.decode_plan import SHARED_ROWS
from inference.kernels.index_select import decode_hopper_kernel
from inference.kernels.index_select.decode_hopper_kernel import MAX_COLUMNS, padded_columns
from inference.kernels.index_select.select_kernel import (
    DECODE_ROW,
    WIDE_DECODE_ROW,
    check_choice,
    choose_row,
)
from inference.kernels.paging import PagedBatch

WIDE_TABLE = 2048
"""Page tables of more columns are chosen from by `WIDE_DECODE_ROW`: captured with the launch, the
shape can depend on the table alone."""


def num_workers(num_sms: int) -> int:
    """How many own index units `plan_units` should aim at on a GPU of `num_sms` multiprocessors."""
    return 2 * num_sms


def num_shared_workers(num_sms: int) -> int:
    """The same for units of shared pages."""
    return 2 * num_sms


@triton.jit
def _scores_of_pages(
    p_q,
    p_page_ids,
    index_pages,
    p_scores,
    num_pages,
    num_columns,
    b_last_key,
    page_stride,
    score_stride,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores of `num_pages` pages for `num_columns` columns; key s of page i is i * PAGE + s."""
    page = tl.load(p_page_ids)
    o_c, o_s, o_d = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    m_c = o_c < num_columns
    # [C, D]
    m_q = m_c[:, None] & (o_d[None, :] < DIM)
    b_q = tl.load(p_q + o_c[:, None] * DIM + o_d[None, :], mask=m_q, other=0.0)
    is_fp8: tl.constexpr = index_pages.dtype.element_ty == tl.float8e4nv
    if is_fp8 and b_q.dtype == tl.bfloat16:
        # FP8 widens to FP16 in one instruction; a query is normed, so it fits.
        b_q = b_q.to(tl.float16)
    p_score = p_scores + o_c.to(tl.int64) * score_stride
    # [S, D]
    m_keys = (o_s[:, None] < PAGE) & (o_d[None, :] < DIM)
    o_key = o_s[:, None] * DIM + o_d[None, :]
    for i in tl.range(0, num_pages, num_stages=STAGES):
        next_page = tl.load(p_page_ids + i + 1, mask=i + 1 < num_pages, other=0)
        p_keys = index_pages + page.to(tl.int64) * page_stride
        b_keys = tl.load(p_keys + o_key, mask=m_keys, other=0.0)
        # [S, C]
        b_score = tl.dot(b_keys.to(b_q.dtype), b_q.T, input_precision="ieee")
        if MASKED:
            m_score = i * PAGE + o_s[:, None] <= b_last_key[None, :]
            b_score = tl.where(m_score, b_score, float("-inf"))
        if PAGE != BLOCK_S:
            b_score = tl.where(o_s[:, None] < PAGE, b_score, float("-inf"))
        b_max = tl.max(b_score, 0)
        tl.store(p_score + i, b_max, mask=m_c)
        page = next_page


@triton.jit
def _own_score_kernel(
    index_q_TKD,
    index_pages,
    page_table_RN,
    own_U3,
    positions_T,
    seq_len_R,
    scores_CN,
    page_stride,
    table_stride,
    score_stride,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    p_unit = own_U3 + tl.program_id(0) * 3
    # An unused unit may say anything but its number of pages.
    i_row = tl.maximum(tl.load(p_unit), 0).to(tl.int64)
    first_page, num_pages = tl.maximum(tl.load(p_unit + 1), 0), tl.load(p_unit + 2)
    p_page_ids = page_table_RN + i_row * table_stride + first_page
    # The last key that each column sees, counted from the unit's first one.
    o_query = tl.minimum(tl.arange(0, BLOCK_C) // HEADS, QUERIES - 1)
    b_position = tl.load(positions_T + i_row * QUERIES + o_query).to(tl.int32)
    b_last_key = tl.minimum(b_position, tl.load(seq_len_R + i_row) - 1) - first_page * PAGE
    if num_pages > 0:
        i_column = i_row * QUERIES * HEADS
        _scores_of_pages(
            index_q_TKD + i_column * DIM,
            p_page_ids,
            index_pages,
            scores_CN + i_column * score_stride + first_page,
            num_pages,
            QUERIES * HEADS,
            b_last_key,
            page_stride,
            score_stride,
            PAGE,
            DIM,
            BLOCK_S,
            BLOCK_D,
            BLOCK_C,
            True,
            STAGES,
        )


@triton.jit
def _shared_score_kernel(
    index_q_TKD,
    index_pages,
    page_table_RN,
    shared_X4,
    scores_CN,
    page_stride,
    table_stride,
    score_stride,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    p_unit = shared_X4 + tl.program_id(0) * 4
    i_row, num_rows = tl.maximum(tl.load(p_unit), 0).to(tl.int64), tl.load(p_unit + 1)
    first_page, num_pages = tl.maximum(tl.load(p_unit + 2), 0), tl.load(p_unit + 3)
    p_page_ids = page_table_RN + i_row * table_stride + first_page
    # Neighbouring requests' columns lie one after another.
    first_column = tl.program_id(1) * BLOCK_C
    num_columns = num_rows * COLUMNS - first_column
    if (num_pages > 0) & (num_columns > 0):
        i_column = i_row * COLUMNS + first_column
        _scores_of_pages(
            index_q_TKD + i_column * DIM,
            p_page_ids,
            index_pages,
            scores_CN + i_column * score_stride + first_page,
            num_pages,
            num_columns,
            tl.zeros([BLOCK_C], tl.int32),
            page_stride,
            score_stride,
            PAGE,
            DIM,
            BLOCK_S,
            BLOCK_D,
            BLOCK_C,
            False,
            STAGES,
        )


@triton.jit
def _select_decode_kernel(
    scores_CN,
    positions_T,
    seq_len_R,
    out_CB,
    score_stride,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    TOPK: tl.constexpr,
    LOCAL: tl.constexpr,
    WIDTH: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    i_column = tl.program_id(0).to(tl.int64)
    i_token = i_column // HEADS
    position = tl.load(positions_T + i_token).to(tl.int32)
    num_keys = tl.minimum(position + 1, tl.load(seq_len_R + i_token // QUERIES))
    if PDL:
        # The next kernel may begin before the scores are there; it waits for this one.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    p_row, p_out = scores_CN + i_column * score_stride, out_CB + i_column * TOPK
    choose_row(p_row, p_out, tl.cdiv(num_keys, PAGE), TOPK, LOCAL, WIDTH, MANY)


def index_select_decode(
    index_q_TKD: Tensor,
    index_pages: Tensor,
    batch: PagedBatch,
    blocks_TKB: Tensor,
    topk_blocks: int,
    local_blocks: int,
) -> None:
    """Fill the rows of `blocks_TKB` that belong to decodes.

    Args:
        index_q_TKD: [T, K, D], contiguous.
        index_pages: [num_pages, S, D]; a page is contiguous. The queries' dtype or FP8 e4m3.
        batch: its plan's index units cover the pages of every decode.
        blocks_TKB: [T, K, topk_blocks] int32, contiguous; rows of padding become -1.

    Raises:
        ValueError: `batch` has no plan, or the choice is too large for a row of the kernel.
    """
    check_choice(topk_blocks, local_blocks)
    if batch.plan is None:
        raise ValueError("index_select: decodes on CUDA need batch.plan, made by plan_units")
    num_tokens, num_heads = batch.num_decode_tokens, index_q_TKD.shape[1]
    page_size, dim = index_pages.shape[1:]
    assert index_q_TKD.is_contiguous()
    assert blocks_TKB.is_contiguous()
    assert index_pages.stride()[1:] == (dim, 1), "a page of index keys must be contiguous"
    scores_CN = torch.empty(
        (num_tokens * num_heads, -(-batch.page_table_RN.shape[1] // 16) * 16),
        dtype=torch.float32,
        device=index_q_TKD.device,
    )
    on_hopper = decode_hopper_kernel.can_run(index_q_TKD, index_pages, batch.decode_query_len)
    score = decode_hopper_kernel.score_pages if on_hopper else _score_portable
    score(index_q_TKD, index_pages, batch, scores_CN)
    is_wide = batch.page_table_RN.shape[1] > WIDE_TABLE
    width, many, num_warps = WIDE_DECODE_ROW if is_wide else DECODE_ROW
    _select_decode_kernel[(num_tokens * num_heads,)](
        scores_CN,
        batch.positions_T,
        batch.seq_len_R,
        blocks_TKB,
        scores_CN.stride(0),
        QUERIES=batch.decode_query_len,
        HEADS=num_heads,
        PAGE=page_size,
        TOPK=topk_blocks,
        LOCAL=local_blocks,
        WIDTH=width,
        MANY=many,
        PDL=on_hopper,
        num_warps=num_warps,
        launch_pdl=on_hopper,
    )


def _score_portable(
    index_q_TKD: Tensor, index_pages: Tensor, batch: PagedBatch, scores_CN: Tensor
) -> None:
    """Write the scores of the pages in `batch.plan`; what no query token sees is -inf."""
    assert batch.plan is not None, "the caller has checked"
    units, table_RN = batch.plan.index, batch.page_table_RN
    page_size, dim = index_pages.shape[1:]
    num_heads, is_fp32 = index_q_TKD.shape[1], index_q_TKD.dtype == torch.float32
    columns = batch.decode_query_len * num_heads
    strides = (index_pages.stride(0), table_RN.stride(0), scores_CN.stride(0))
    options = {
        "PAGE": page_size,
        "DIM": dim,
        "BLOCK_S": max(16, triton.next_power_of_2(page_size)),
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        # FP32 is the mode to check against: operands pass through registers.
        "STAGES": 1 if is_fp32 else 3,
        "num_warps": 8 if is_fp32 else 4,
    }
    num_shared, num_own = units.shared_X4.shape[0], units.own_U3.shape[0]
    if num_shared:
        block_c = min(16 if is_fp32 else MAX_COLUMNS, padded_columns(SHARED_ROWS * columns))
        _shared_score_kernel[num_shared, triton.cdiv(SHARED_ROWS * columns, block_c)](
            index_q_TKD,
            index_pages,
            table_RN,
            units.shared_X4,
            scores_CN,
            *strides,
            COLUMNS=columns,
            BLOCK_C=block_c,
            **options,
        )
    if num_own:
        _own_score_kernel[(num_own,)](
            index_q_TKD,
            index_pages,
            table_RN,
            units.own_U3,
            batch.positions_T,
            batch.seq_len_R,
            scores_CN,
            *strides,
            QUERIES=batch.decode_query_len,
            HEADS=num_heads,
            BLOCK_C=padded_columns(columns),
            **options,
        )

"""Block scores of decodes, and the choice among them: two launches, three where prompts are shared.

A program of the score kernel reads a run of pages once for all heads and query tokens that see
them; a page's scores are a maximum in registers, and one float a page and head reaches memory.
Each launch may begin while the one before it ends (programmatic dependent launch): the plan, the
page table, the positions and the lengths are older than that one, so the first pages of every unit
are on their way to L2 before the queries exist.

Suffixes: `T` tokens · `R` decodes · `N` logical pages · `U` units · `C` columns (query token, head)
· `S` keys of a page · `D` index head dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from inference.kernels.decode_plan import SHARED_ROWS
from inference.kernels.index_select.select_kernel import check_choice, choose_row
from inference.kernels.paging import PagedBatch

MAX_COLUMNS = 64
"""Columns of one program; more are spread over programs that read the same pages."""
PREFETCH = 4
"""Leading pages of a unit that are brought to L2 while the launch before still runs."""


def num_workers(num_sms: int) -> int:
    """How many index units `plan_units` should aim at on a GPU of `num_sms` multiprocessors."""
    return 2 * num_sms


@triton.jit
def _prefetch(
    p_page_ids, index_pages, num_pages, page_stride, ELEMENTS: tl.constexpr, PAGES: tl.constexpr
):
    """Have the first `PAGES` pages of a run brought to L2; nothing waits for them.

    What is written to them later is seen nevertheless: L2 is one for all multiprocessors.
    """
    bits: tl.constexpr = index_pages.dtype.element_ty.primitive_bitwidth
    for i in tl.static_range(PAGES):
        page = tl.load(p_page_ids + i, mask=i < num_pages, other=0)
        p_page = index_pages + page.to(tl.int64) * page_stride
        num_bytes = tl.where(i < num_pages, ELEMENTS * bits // 8, 0)
        # One thread asks for the page.
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .u32 t;
            mov.u32 t, %tid.x;
            setp.eq.u32 p, t, 0;
            setp.ne.and.u32 p, $2, 0, p;
            @p cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [p_page.to(tl.int64), num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _scores_of_pages(
    p_q,
    p_page_ids,
    index_pages,
    keys_desc,
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
    # As rows of the product, columns have their maxima within a warp; keys that must be widened
    # come from registers, which only rows can.
    COLUMNS_ARE_ROWS: tl.constexpr = BLOCK_C >= 64 and not is_fp8 and not MASKED
    p_score = p_scores + o_c.to(tl.int64) * score_stride
    o_key = o_s[:, None] * DIM + o_d[None, :]
    for i in tl.range(0, num_pages, num_stages=STAGES):
        next_page = tl.load(p_page_ids + i + 1, mask=i + 1 < num_pages, other=0)
        # [S, D]
        if keys_desc is not None:
            b_keys = keys_desc.load([page * PAGE, 0])
        else:
            m_keys = (o_s[:, None] < PAGE) & (o_d[None, :] < DIM)
            p_keys = index_pages + page.to(tl.int64) * page_stride
            b_keys = tl.load(p_keys + o_key, mask=m_keys, other=0.0)
        if COLUMNS_ARE_ROWS:
            # [C, S]
            b_score = tl.dot(b_q, b_keys.T, input_precision="ieee")
            if PAGE != BLOCK_S:
                b_score = tl.where(o_s[None, :] < PAGE, b_score, float("-inf"))
            b_max = tl.max(b_score, 1)
        else:
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
    keys_desc,
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
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    AFTER_SHARED: tl.constexpr,
):
    p_unit = own_U3 + tl.program_id(0) * 3
    # An unused unit may say anything but its number of pages.
    i_row = tl.maximum(tl.load(p_unit), 0).to(tl.int64)
    first_page, num_pages = tl.maximum(tl.load(p_unit + 1), 0), tl.load(p_unit + 2)
    p_page_ids = page_table_RN + i_row * table_stride + first_page
    if PREFETCH:
        _prefetch(p_page_ids, index_pages, num_pages, page_stride, PAGE * DIM, PREFETCH)
    # The last key that each column sees, counted from the unit's first one.
    o_query = tl.minimum(tl.arange(0, BLOCK_C) // HEADS, QUERIES - 1)
    b_position = tl.load(positions_T + i_row * QUERIES + o_query).to(tl.int32)
    b_last_key = tl.minimum(b_position, tl.load(seq_len_R + i_row) - 1) - first_page * PAGE
    if PDL:
        if not AFTER_SHARED:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if num_pages > 0:
        i_column = i_row * QUERIES * HEADS
        _scores_of_pages(
            index_q_TKD + i_column * DIM,
            p_page_ids,
            index_pages,
            keys_desc,
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
    if PDL and AFTER_SHARED:
        # Nothing here needs the shared pages' scores, but who waits for this launch does.
        tl.extra.cuda.gdc_wait()


@triton.jit
def _shared_score_kernel(
    index_q_TKD,
    index_pages,
    keys_desc,
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
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    p_unit = shared_X4 + tl.program_id(0) * 4
    i_row, num_rows = tl.maximum(tl.load(p_unit), 0).to(tl.int64), tl.load(p_unit + 1)
    first_page, num_pages = tl.maximum(tl.load(p_unit + 2), 0), tl.load(p_unit + 3)
    p_page_ids = page_table_RN + i_row * table_stride + first_page
    if PREFETCH:
        _prefetch(p_page_ids, index_pages, num_pages, page_stride, PAGE * DIM, PREFETCH)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Neighbouring requests' columns lie one after another.
    first_column = tl.program_id(1) * BLOCK_C
    num_columns = num_rows * COLUMNS - first_column
    if (num_pages > 0) & (num_columns > 0):
        i_column = i_row * COLUMNS + first_column
        _scores_of_pages(
            index_q_TKD + i_column * DIM,
            p_page_ids,
            index_pages,
            keys_desc,
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
    PDL: tl.constexpr,
):
    i_column = tl.program_id(0).to(tl.int64)
    i_token = i_column // HEADS
    position = tl.load(positions_T + i_token).to(tl.int32)
    num_keys = tl.minimum(position + 1, tl.load(seq_len_R + i_token // QUERIES))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    p_row, p_out = scores_CN + i_column * score_stride, out_CB + i_column * TOPK
    choose_row(p_row, p_out, tl.cdiv(num_keys, PAGE), TOPK, LOCAL, WIDTH)


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
    units = batch.plan.index
    num_tokens, num_heads = batch.num_decode_tokens, index_q_TKD.shape[1]
    page_size, dim = index_pages.shape[1:]
    assert index_q_TKD.is_contiguous()
    assert blocks_TKB.is_contiguous()
    assert index_pages.stride()[1:] == (dim, 1), "a page of index keys must be contiguous"
    table_RN = batch.page_table_RN
    scores_CN = torch.empty(
        (num_tokens * num_heads, -(-table_RN.shape[1] // 16) * 16),
        dtype=torch.float32,
        device=index_q_TKD.device,
    )
    strides = (index_pages.stride(0), table_RN.stride(0), scores_CN.stride(0))
    keys_desc = _descriptor(index_pages)
    tile = {
        "PREFETCH": 0 if keys_desc is None else PREFETCH,
        "PAGE": page_size,
        "DIM": dim,
        "BLOCK_S": max(16, triton.next_power_of_2(page_size)),
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
    }
    pdl = index_q_TKD.is_cuda
    launch = {"PDL": pdl, "launch_pdl": pdl}
    columns = batch.decode_query_len * num_heads
    num_shared = units.shared_X4.shape[0]
    if num_shared:
        most = 16 if _is_fp32(index_pages) else MAX_COLUMNS
        block_c = min(most, _padded_columns(SHARED_ROWS * columns))
        _shared_score_kernel[num_shared, triton.cdiv(SHARED_ROWS * columns, block_c)](
            index_q_TKD,
            index_pages,
            keys_desc,
            table_RN,
            units.shared_X4,
            scores_CN,
            *strides,
            COLUMNS=columns,
            BLOCK_C=block_c,
            **tile,
            **launch,
            **_stages(index_pages),
        )
    if units.own_U3.shape[0]:
        _own_score_kernel[(units.own_U3.shape[0],)](
            index_q_TKD,
            index_pages,
            keys_desc,
            table_RN,
            units.own_U3,
            batch.positions_T,
            batch.seq_len_R,
            scores_CN,
            *strides,
            QUERIES=batch.decode_query_len,
            HEADS=num_heads,
            BLOCK_C=_padded_columns(columns),
            AFTER_SHARED=num_shared > 0,
            **tile,
            **launch,
            **_stages(index_pages),
        )
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
        WIDTH=64,
        num_warps=4,
        **launch,
    )


def _padded_columns(num_columns: int) -> int:
    return max(16, triton.next_power_of_2(num_columns))


def _descriptor(index_pages: Tensor) -> TensorDescriptor | None:
    """Keys as the copy engine fetches them, a page at a time; None where it cannot."""
    _, page_size, dim = index_pages.shape
    fits = page_size in (64, 128, 256) and dim in (64, 128, 256)
    if not (fits and index_pages.is_cuda and index_pages.is_contiguous()) or _is_fp32(index_pages):
        return None
    return TensorDescriptor.from_tensor(index_pages.view(-1, dim), [page_size, dim])


def _stages(index_pages: Tensor) -> dict[str, int]:
    """Pages in flight of one program: two programs fit a multiprocessor's shared memory."""
    if _is_fp32(index_pages):
        # The mode to check against: no tensor cores, so operands pass through registers.
        return {"STAGES": 1, "num_warps": 8}
    return {"STAGES": 3 if index_pages.element_size() == 2 else 5, "num_warps": 4}


def _is_fp32(index_pages: Tensor) -> bool:
    return index_pages.dtype == torch.float32

"""Block choice of prefill chunks: scores of a slab of query rows, then the best of each row.

A slab's FP32 scores fit in L2, so they never travel to HBM. The pages that its tiles of query rows
see are dealt evenly to programs, which may cut a tile anywhere: a score depends on one page alone.

Suffixes: `X` rows, (query token, head) pairs side by side · `N` pages · `P` programs ·
`S` segments: runs of pages of one tile, each of one program · `L` tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.index_select.select_kernel import check_choice, select_blocks
from inference.kernels.paging import PagedBatch

SCRATCH_BYTES = 32 << 20
"""Scores of a slab; half of an H200's L2, the other half is for the keys."""
COLUMN_ALIGN = 8
"""Scores of a row begin at a multiple of 32 bytes, one sector."""
MIN_PAGES = 4
"""A program takes at least so many pages, or its queries cost more than its keys."""


@dataclass(slots=True)
class Slab:
    """Consecutive tokens whose scores are in the scratch at the same time."""

    first_token: int
    last_token: int
    num_columns: int
    segment_S6: np.ndarray
    """int32 (request, row, rows, position of the first query, first page, pages)."""
    start_P1: np.ndarray
    """int32: program p has the segments `start_P1[p]` to `start_P1[p + 1]`."""


@dataclass(slots=True)
class Tiles:
    """Query tokens of one request each, in the order of the batch."""

    request_L: np.ndarray
    token_L: np.ndarray
    num_tokens_L: np.ndarray
    position_L: np.ndarray
    num_pages_L: np.ndarray


def lay_tiles(batch: PagedBatch, tile_tokens: int) -> Tiles:
    """Cut the prefill chunks into tiles of at most `tile_tokens` tokens."""
    query_len_R, seq_len_R = (length[batch.num_decodes :] for length in batch.host_lengths())
    query_len_R, seq_len_R = query_len_R.astype(np.int64), seq_len_R.astype(np.int64)
    first_token_R = batch.num_decode_tokens + np.cumsum(query_len_R) - query_len_R
    # A padding row has no tile.
    tiles_R = np.where(seq_len_R > 0, -(-query_len_R // tile_tokens), 0)
    row_L = np.repeat(np.arange(len(tiles_R)), tiles_R)
    place_L = np.arange(len(row_L)) - np.repeat(np.cumsum(tiles_R) - tiles_R, tiles_R)
    offset_L = place_L * tile_tokens
    num_tokens_L = np.minimum(query_len_R[row_L] - offset_L, tile_tokens)
    position_L = (seq_len_R - query_len_R)[row_L] + offset_L
    return Tiles(
        request_L=row_L + batch.num_decodes,
        token_L=first_token_R[row_L] + offset_L,
        num_tokens_L=num_tokens_L,
        position_L=position_L,
        num_pages_L=(position_L + num_tokens_L - 1) // batch.page_size + 1,
    )


def count_blocks(tiles: Tiles, num_tokens: int, page_size: int) -> np.ndarray:
    """[num_tokens] int32 blocks that each token sees; 0 for padding and decodes."""
    blocks_T = np.zeros(num_tokens, np.int32)
    place = np.arange(tiles.num_tokens_L.max(initial=0))
    is_real = place < tiles.num_tokens_L[:, None]
    blocks = (tiles.position_L[:, None] + place) // page_size + 1
    blocks_T[(tiles.token_L[:, None] + place)[is_real]] = blocks[is_real]
    return blocks_T


def lay_slabs(tiles: Tiles, num_heads: int, num_programs: int) -> list[Slab]:
    """Group neighbouring tiles whose scores fit in the scratch; deal their pages to programs."""
    slabs = []
    last_L = (tiles.token_L + tiles.num_tokens_L).tolist()
    columns_L = (-(-tiles.num_pages_L // COLUMN_ALIGN) * COLUMN_ALIGN).tolist()
    first, num_columns = 0, 0
    for tile, columns in enumerate(columns_L):
        widest = max(num_columns, columns)
        rows = (last_L[tile] - int(tiles.token_L[first])) * num_heads
        if tile > first and rows * widest * 4 > SCRATCH_BYTES:
            slabs.append(_slab(tiles, first, tile, num_columns, num_heads, num_programs))
            first, widest = tile, columns
        num_columns = widest
    if columns_L:
        slabs.append(_slab(tiles, first, len(columns_L), num_columns, num_heads, num_programs))
    return slabs


def _slab(
    tiles: Tiles, first: int, last: int, num_columns: int, num_heads: int, num_programs: int
) -> Slab:
    """Tiles [first, last), their pages dealt evenly to at most `num_programs` programs."""
    part = slice(first, last)
    end_L = np.cumsum(tiles.num_pages_L[part])
    total = int(end_L[-1])
    num_programs = max(1, min(num_programs, total // MIN_PAGES))
    cut_P1 = total * np.arange(num_programs + 1) // num_programs
    # Segments end where a tile or a program's share does.
    bound_S1 = np.union1d(cut_P1, end_L)
    tile_S = np.searchsorted(end_L, bound_S1[:-1], side="right")
    segment_S6 = np.stack(
        [
            tiles.request_L[part][tile_S],
            tiles.token_L[part][tile_S] * num_heads,
            tiles.num_tokens_L[part][tile_S] * num_heads,
            tiles.position_L[part][tile_S],
            bound_S1[:-1] - (end_L - tiles.num_pages_L[part])[tile_S],
            np.diff(bound_S1),
        ],
        1,
    )
    return Slab(
        first_token=int(tiles.token_L[first]),
        last_token=int(tiles.token_L[last - 1] + tiles.num_tokens_L[last - 1]),
        num_columns=num_columns,
        segment_S6=segment_S6.astype(np.int32),
        start_P1=np.searchsorted(bound_S1, cut_P1).astype(np.int32),
    )


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
    num_sms = torch.cuda.get_device_properties(index_q_TKD.device).multi_processor_count
    from inference.kernels.index_select import prefill_hopper_kernel as hopper

    if hopper.can_run(index_q_TKD, index_pages):
        return hopper.operands, hopper.score_pages, hopper.ROWS, num_sms
    return _portable_operands, _score_portable, rows, programs * num_sms


@dataclass(slots=True)
class DeviceSlab:
    """A `Slab` whose arrays are on the device."""

    first_token: int
    last_token: int
    num_columns: int
    segment_S6: Tensor
    start_P1: Tensor


@dataclass(slots=True)
class Layout:
    """How the prefill tokens of a step are worked on; the same in all layers."""

    key: tuple
    slabs: list[DeviceSlab]
    num_blocks_X: Tensor
    """[T * K] int32 blocks that each row sees."""
    has_padding: bool


_newest: Layout | None = None
"""The layout of the newest step: every layer after a step's first finds it here."""


def layout_of(
    batch: PagedBatch,
    num_tokens: int,
    num_heads: int,
    rows: int,
    num_programs: int,
    device: torch.device,
) -> Layout:
    """The layout of `batch`, made anew unless the newest one had the same lengths."""
    global _newest
    lengths = (length.tobytes() for length in batch.host_lengths())
    sizes = (batch.num_decodes, batch.num_decode_tokens, batch.page_size, num_tokens, num_heads)
    key = (*lengths, *sizes, rows, num_programs, SCRATCH_BYTES, device)
    if _newest is not None and _newest.key == key:
        return _newest
    tiles = lay_tiles(batch, rows // num_heads)
    slabs = lay_slabs(tiles, num_heads, num_programs)
    blocks_T = count_blocks(tiles, num_tokens, batch.page_size)
    parts = [np.repeat(blocks_T, num_heads)]
    for slab in slabs:
        parts += [slab.segment_S6.reshape(-1), slab.start_P1]
    # One copy for all.
    num_blocks_X, *parts = (
        torch.from_numpy(np.concatenate(parts)).to(device).split([len(part) for part in parts])
    )
    _newest = Layout(
        key=key,
        slabs=[
            DeviceSlab(slab.first_token, slab.last_token, slab.num_columns, segment_S6, start_P1)
            for slab, segment_S6, start_P1 in zip(slabs, parts[::2], parts[1::2], strict=True)
        ],
        num_blocks_X=num_blocks_X,
        has_padding=not blocks_T[batch.num_decode_tokens :].all(),
    )
    return _newest


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

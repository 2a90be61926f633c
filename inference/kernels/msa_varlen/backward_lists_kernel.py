"""Which queries chose a block: lists in the order of the queries, the same on every call.

The queries of a call are cut into slabs. Every slab, KV head and block has a list of the tokens
that chose it, padded to whole tiles; a stable sort makes them, so tokens ascend. A pass is some
neighbouring lists: one slab and some heads. Lists are cut into units, each the work of one program.

Suffixes: `Q` query tokens · `B` choices · `N` pages (`Packing.pages`: the blocks of all samples) ·
`X` lists, (slab, head, page) · `L` rows of all lists · `U` units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.msa_attention.invert_kernel import request_of
from inference.kernels.packing import Packing

BLOCK = 1024
UNIT = tl.constexpr(8)
"""Numbers of a unit: first row, rows, first token of its block, keys there, KV head; 3 unused."""


@dataclass(slots=True)
class QueryLists:
    """The lists of one call."""

    row_QKB: Tensor
    """[Q, K, B] int32: row of each choice, -1 for none."""
    tokens_L: Tensor
    """[L] int32: query of each row, -1 where a list is padded. A tile longer than the rows."""
    row_start_X1: Tensor
    """[X + 1] int32: rows of each list."""
    units_U8: Tensor
    """[U, 8] int32, see `UNIT`; units beyond the last list's are undefined."""
    unit_start_X1: Tensor
    """[X + 1] int32: units of each list."""
    num_pages: int


def list_queries(
    blocks_QKB: Tensor, packing: Packing, block_size: int, *, slab: int, tile: int, unit: int
) -> QueryLists:
    """Lists of the choices that a query sees something of; others are as if not made.

    Args:
        slab: queries of a slab.
        unit: most rows of a unit, a multiple of `tile`; the units of a list are about as long.
    """
    device = blocks_QKB.device
    num_queries, num_kv_heads, topk = blocks_QKB.shape
    pages_N2 = packing.pages(block_size).tokens_P2
    num_pages = pages_N2.shape[0]
    num_lists = -(-num_queries // slab) * num_kv_heads * num_pages
    num_choices = blocks_QKB.numel()
    most_lists = min(num_lists, num_choices)
    grid = (-(-num_choices // BLOCK),)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    list_I = empty(num_choices)
    _find_lists[grid](
        blocks_QKB.contiguous(),
        packing.positions_T,
        pages_N2[:, 0].contiguous(),
        list_I,
        packing.first,
        num_choices,
        slab,
        num_pages,
        num_pages.bit_length(),
        num_lists,
        K=num_kv_heads,
        B=topk,
        PAGE=block_size,
        BLOCK=BLOCK,
    )
    list_I, choice_I = torch.sort(list_I, stable=True)
    list_X1 = torch.arange(num_lists + 1, dtype=torch.int32, device=device)
    start_X1 = torch.searchsorted(list_I, list_X1, out_int32=True)
    count_X = start_X1.diff()
    row_start_X1 = _starts((count_X + (tile - 1)) // tile * tile)
    unit_start_X1 = _starts((count_X + (unit - 1)) // unit)
    lists = QueryLists(
        row_QKB=empty(*blocks_QKB.shape),
        tokens_L=torch.full(
            (num_choices + most_lists * (tile - 1) + tile,), -1, dtype=torch.int32, device=device
        ),
        row_start_X1=row_start_X1,
        units_U8=empty(num_choices // unit + most_lists, UNIT.value),
        unit_start_X1=unit_start_X1,
        num_pages=num_pages,
    )
    _place_rows[grid](
        list_I,
        choice_I,
        start_X1,
        row_start_X1,
        lists.row_QKB,
        lists.tokens_L,
        num_choices,
        num_lists,
        CHOICES=num_kv_heads * topk,
        BLOCK=BLOCK,
    )
    _place_units[(-(-lists.units_U8.shape[0] // BLOCK),)](
        row_start_X1,
        unit_start_X1,
        pages_N2,
        lists.units_U8,
        num_lists,
        num_lists.bit_length(),
        num_pages,
        tile,
        K=num_kv_heads,
        BLOCK=BLOCK,
    )
    return lists


def _starts(count_X: Tensor) -> Tensor:
    """[X + 1] int32: exclusive sums."""
    return torch.nn.functional.pad(count_X.cumsum(0), (1, 0)).int()


@triton.jit(do_not_specialize=("first_query", "num_choices", "slab", "num_pages", "steps", "none"))
def _find_lists(
    blocks_ptr,
    positions_ptr,
    page_token_ptr,
    list_ptr,
    first_query,
    num_choices,
    slab,
    num_pages,
    steps,
    none,
    K: tl.constexpr,
    B: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The list of each choice, `none` if the query sees nothing of the block."""
    # [BLOCK]
    o_i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < num_choices
    b_token, b_head = o_i // (K * B), o_i // B % K
    b_block = tl.load(blocks_ptr + o_i, mask=m_i, other=-1)
    b_position = tl.load(positions_ptr + first_query + b_token, mask=m_i, other=0)
    b_own = (b_position // PAGE).to(tl.int32)
    # The page of the query itself, then that of the block.
    b_page = request_of(page_token_ptr, first_query + b_token, 0, num_pages, steps)
    b_page += b_block - b_own
    m_some = (b_block >= 0) & (b_block <= b_own)
    b_list = (b_token // slab * K + b_head) * num_pages + b_page
    tl.store(list_ptr + o_i, tl.where(m_some, b_list, none), mask=m_i)


@triton.jit(do_not_specialize=("num_choices", "num_lists"))
def _place_rows(
    list_ptr,
    choice_ptr,
    start_ptr,
    row_start_ptr,
    row_ptr,
    tokens_ptr,
    num_choices,
    num_lists,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tell rows of BLOCK sorted choices their tokens, and the choices their rows."""
    # [BLOCK]
    o_i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < num_choices
    b_list = tl.load(list_ptr + o_i, mask=m_i, other=num_lists)
    b_choice = tl.load(choice_ptr + o_i, mask=m_i, other=0)
    m_some = b_list < num_lists
    b_row = tl.load(row_start_ptr + b_list, mask=m_some, other=0) + o_i
    b_row -= tl.load(start_ptr + b_list, mask=m_some, other=0)
    tl.store(tokens_ptr + b_row, (b_choice // CHOICES).to(tl.int32), mask=m_some)
    tl.store(row_ptr + b_choice, tl.where(m_some, b_row, -1), mask=m_i)


@triton.jit(do_not_specialize=("num_lists", "steps", "num_pages"))
def _place_units(
    row_start_ptr,
    unit_start_ptr,
    pages_ptr,
    units_ptr,
    num_lists,
    steps,
    num_pages,
    tile,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK units: each list in pieces of about the same number of tiles."""
    # [BLOCK]
    o_u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_u = o_u < tl.load(unit_start_ptr + num_lists)
    o_u = tl.where(m_u, o_u, 0)
    b_list = request_of(unit_start_ptr, o_u, 0, num_lists, steps)
    b_unit = tl.load(unit_start_ptr + b_list)
    b_units = tl.maximum(tl.load(unit_start_ptr + b_list + 1) - b_unit, 1)
    b_row = tl.load(row_start_ptr + b_list)
    b_rows = tl.load(row_start_ptr + b_list + 1) - b_row
    b_size = ((b_rows // tile + b_units - 1) // b_units) * tile
    b_done = (o_u - b_unit) * b_size
    b_page = b_list % num_pages
    p_unit = units_ptr + o_u * UNIT
    tl.store(p_unit, b_row + b_done, mask=m_u)
    tl.store(p_unit + 1, tl.minimum(b_rows - b_done, b_size), mask=m_u)
    tl.store(p_unit + 2, tl.load(pages_ptr + b_page * 2), mask=m_u)
    tl.store(p_unit + 3, tl.load(pages_ptr + b_page * 2 + 1), mask=m_u)
    tl.store(p_unit + 4, b_list // num_pages % K, mask=m_u)

"""From "which blocks does a query read" to "which queries read a block", on the device.

The work of a call is cut into passes of some KV heads and `slab` query tokens. In a pass every
block of every head has a list of the tokens that chose it, and lists are cut into units, each the
work of one program on one page. The order inside a list is arbitrary: a row's result does not
depend on its neighbours.

Suffixes: `P` passes · `L` rows of a pass · `U` units of a pass · `X` lists of all passes.
A list belongs to a block that its queries see whole, or to one that some of them may see in part:
only the latter pay for a mask.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.dispatch import send
from inference.kernels.paging import PagedBatch

BLOCK = 1024
MASKED = tl.constexpr(-(1 << 31))
"""Bit of a unit's third number: some query may not see all of the block."""


@dataclass(slots=True)
class BlockLists:
    """The lists of one call. Tokens are counted from the first prefill token."""

    row_TKB: Tensor
    """[T, K, B] int32: row of the pass that belongs to the token's choice, -1 for none."""
    tokens_PL: Tensor
    """[P, L] int32: token of each row; undefined where a list is padded to whole tiles."""
    units_PU4: Tensor
    """[P, U, 4] int32: page * K + KV head, first row, queries + 2^16 * written keys (+ `MASKED`),
    first key."""
    num_units_P: Tensor
    """[P] int32: units beyond are undefined."""
    slab: int
    """Query tokens of a pass."""
    heads: int
    """KV heads of a pass; pass `h * slabs + s` has the h-th `heads` of them and the s-th slab."""


def _request_lists(batch: PagedBatch, device: torch.device) -> tuple[Tensor, int]:
    """([R, 3] int32, number of lists in a pass) of the prefill requests.

    Per request: its first list, its number of blocks, the first block that a query sees in part.
    """
    query_lens, seq_lens = (
        tuple(part[batch.num_decodes :].tolist()) for part in batch.host_lengths()
    )
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _cached_request_lists(query_lens, seq_lens, batch.page_size, device, stream)


@functools.lru_cache(maxsize=8)
def _cached_request_lists(
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    page_size: int,
    device: torch.device,
    _stream: int,
) -> tuple[Tensor, int]:
    """The layers of a step share one copy; it is ordered before its readers on one stream only."""
    query_len_R, seq_len_R = np.array(query_lens), np.array(seq_lens)
    blocks_R = -(-seq_len_R // page_size)
    partial_R = (seq_len_R - query_len_R).clip(min=0) // page_size
    lists_R = 2 * blocks_R - partial_R
    first_R = np.cumsum(lists_R) - lists_R
    requests_R3 = np.stack([first_R, blocks_R, partial_R], 1).astype(np.int32)
    return send(requests_R3, device), int(lists_R.sum())


def _cdiv(number: int, by: int) -> int:
    """`triton.cdiv` takes microseconds."""
    return -(-number // by)


def invert_blocks(
    blocks_TKB: Tensor, batch: PagedBatch, *, slab: int, heads: int, tile: int, unit: int
) -> BlockLists:
    """Lists of the prefill tokens' choices, each padded to whole tiles of `tile` rows.

    Args:
        blocks_TKB: [T, K, B] of the prefill tokens only. Blocks that the request does not have are
            ignored.
        heads: divides K.
        unit: most rows of a unit, a multiple of `tile`; the units of a list are about as long.
    """
    device = blocks_TKB.device
    num_tokens, num_kv_heads, topk = blocks_TKB.shape
    requests_R3, num_lists = _request_lists(batch, device)
    num_slabs = _cdiv(num_tokens, slab)
    num_passes = num_kv_heads // heads * num_slabs
    num_pairs = heads * min(slab, num_tokens) * topk
    pass_lists = heads * num_lists
    used_lists = min(pass_lists, num_pairs)
    num_rows = _cdiv(num_pairs + used_lists * (tile - 1), tile) * tile
    num_units = num_pairs // unit + used_lists
    num_counts = num_passes * pass_lists

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    # Units of each pass, rows of each pass, choices of each list; the last start aligned.
    first_count = _cdiv(2 * num_passes, 4) * 4
    totals = torch.zeros(first_count + num_counts, dtype=torch.int32, device=device)
    counts = totals[first_count:]
    lists = BlockLists(
        row_TKB=empty(*blocks_TKB.shape),
        tokens_PL=empty(num_passes, num_rows),
        units_PU4=empty(num_passes, num_units, 4),
        num_units_P=totals[:num_passes],
        slab=slab,
        heads=heads,
    )
    if num_lists == 0:
        lists.row_TKB.fill_(-1)
        return lists
    list_TKB, rank_TKB = empty(*blocks_TKB.shape), empty(*blocks_TKB.shape)
    info_X3, place_X3 = empty(num_counts, 3), empty(num_counts, 3)
    grid = (_cdiv(blocks_TKB.numel(), BLOCK),)
    _count_choices[grid](
        blocks_TKB,
        batch.positions_T,
        batch.query_start_R1,
        batch.seq_len_R,
        batch.page_table_RN,
        requests_R3,
        list_TKB,
        rank_TKB,
        info_X3,
        counts,
        blocks_TKB.stride(0),
        blocks_TKB.stride(1),
        batch.page_table_RN.stride(0),
        batch.num_decode_tokens,
        batch.num_decodes,
        len(requests_R3),
        len(requests_R3).bit_length(),
        num_tokens,
        slab,
        num_slabs,
        num_lists,
        K=num_kv_heads,
        HEADS=heads,
        B=topk,
        PAGE=batch.page_size,
        BLOCK=BLOCK,
    )
    _place_lists[(_cdiv(pass_lists, BLOCK), num_passes)](
        counts, totals, place_X3, pass_lists, num_passes, tile, unit, BLOCK=BLOCK
    )
    _fill_lists[grid](
        list_TKB,
        rank_TKB,
        info_X3,
        place_X3,
        counts,
        lists.row_TKB,
        lists.tokens_PL,
        lists.units_PU4,
        blocks_TKB.numel(),
        pass_lists,
        num_rows,
        num_units,
        CHOICES=num_kv_heads * topk,
        BLOCK=BLOCK,
    )
    return lists


@triton.jit
def request_of(start_ptr, i_token, first_request, num_requests, steps):
    """Which of the requests from `first_request` on has the token, counted from there.

    Bisection; works on blocks of tokens too. `steps` is the bit length of `num_requests`.
    """
    b_low = i_token * 0
    b_high = b_low + (num_requests - 1)
    for _ in range(steps):
        b_mid = (b_low + b_high + 1) // 2
        m_right = tl.load(start_ptr + first_request + b_mid) <= i_token
        b_low = tl.where(m_right, b_mid, b_low)
        b_high = tl.where(m_right, b_high, b_mid - 1)
    return b_low


@triton.jit(
    do_not_specialize=(
        "first_token",
        "first_request",
        "num_requests",
        "steps",
        "num_tokens",
        "slab",
        "num_slabs",
        "num_lists",
    )
)
def _count_choices(
    blocks_ptr,
    positions_ptr,
    start_ptr,
    seq_len_ptr,
    table_ptr,
    requests_ptr,
    list_ptr,
    rank_ptr,
    info_ptr,
    count_ptr,
    stride_t,
    stride_k,
    stride_table,
    first_token,
    first_request,
    num_requests,
    steps,
    num_tokens,
    slab,
    num_slabs,
    num_lists,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    B: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Give BLOCK choices their list and their rank there; rank 0 tells of the list's block."""
    # [BLOCK]
    o_i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_token = o_i // (K * B)
    b_head = o_i // B % K
    m_i = b_token < num_tokens
    b_token = tl.where(m_i, b_token, 0)
    p_block = blocks_ptr + b_token.to(tl.int64) * stride_t + b_head * stride_k + o_i % B
    b_block = tl.load(p_block, mask=m_i, other=-1)
    b_position = tl.load(positions_ptr + first_token + b_token)
    b_token += first_token
    b_request = request_of(start_ptr, b_token, first_request, num_requests, steps)
    b_token -= first_token
    b_first = tl.load(requests_ptr + b_request * 3)
    b_blocks = tl.load(requests_ptr + b_request * 3 + 1)
    b_partial = tl.load(requests_ptr + b_request * 3 + 2)
    m_part = (b_block.to(tl.int64) + 1) * PAGE > b_position + 1
    # Only blocks from b_partial on have a second list; positions before the chunk are an error.
    m_some = (b_block >= 0) & (b_block < b_blocks) & ((b_block >= b_partial) | ~m_part)
    b_pass = b_head // HEADS * num_slabs + b_token // slab
    b_list = (b_pass * HEADS + b_head % HEADS) * num_lists
    b_list += b_first + b_block + tl.where(m_part, b_blocks - b_partial, 0)
    b_list = tl.where(m_some, b_list, -1)
    b_rank = tl.atomic_add(count_ptr + b_list, 1, mask=m_some, sem="relaxed")
    tl.store(list_ptr + o_i, b_list, mask=m_i)
    tl.store(rank_ptr + o_i, b_rank, mask=m_i)

    m_first = m_some & (b_rank == 0)
    b_request = (b_request + first_request).to(tl.int64)
    b_page = tl.load(table_ptr + b_request * stride_table + b_block, mask=m_first, other=-1)
    b_keys = tl.load(seq_len_ptr + b_request, mask=m_first, other=0) - b_block * PAGE
    # A block without a page counts as unwritten: its rows add nothing.
    b_keys = tl.where(b_page < 0, 0, tl.minimum(b_keys, PAGE)) << 16
    p_info = info_ptr + b_list.to(tl.int64) * 3
    tl.store(p_info, tl.maximum(b_page, 0) * K + b_head, mask=m_first)
    tl.store(p_info + 1, tl.where(m_part | (b_page < 0), b_keys | MASKED, b_keys), mask=m_first)
    tl.store(p_info + 2, b_block * PAGE, mask=m_first)


@triton.jit(do_not_specialize=("num_lists", "num_passes"))
def _place_lists(
    count_ptr, total_ptr, place_ptr, num_lists, num_passes, tile, unit, BLOCK: tl.constexpr
):
    """Give BLOCK lists of a pass their first row and first unit."""
    i_pass = tl.program_id(1)
    # [BLOCK]
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < num_lists
    o_x += i_pass * num_lists
    b_count = tl.load(count_ptr + o_x, mask=m_x, other=0)
    b_rows = (b_count + tile - 1) // tile * tile
    # Units of a list are about as long.
    b_size = b_count // tl.maximum((b_count + unit - 1) // unit, 1)
    b_size = tl.maximum((b_size + tile) // tile * tile, tile)
    b_size = tl.minimum(b_size, unit)
    b_units = (b_count + b_size - 1) // b_size
    i_unit = tl.atomic_add(total_ptr + i_pass, tl.sum(b_units, 0), sem="relaxed")
    i_row = tl.atomic_add(total_ptr + num_passes + i_pass, tl.sum(b_rows, 0), sem="relaxed")
    p_place = place_ptr + o_x.to(tl.int64) * 3
    tl.store(p_place, i_row + tl.cumsum(b_rows, 0) - b_rows, mask=m_x)
    tl.store(p_place + 1, i_unit + tl.cumsum(b_units, 0) - b_units, mask=m_x)
    tl.store(p_place + 2, b_size, mask=m_x)


@triton.jit(do_not_specialize=("num_choices", "num_lists", "num_rows", "num_units"))
def _fill_lists(
    list_ptr,
    rank_ptr,
    info_ptr,
    place_ptr,
    count_ptr,
    row_ptr,
    tokens_ptr,
    units_ptr,
    num_choices,
    num_lists,
    num_rows,
    num_units,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the tokens of BLOCK choices into their lists; the first of a unit writes the unit."""
    # [BLOCK]
    o_i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < num_choices
    b_list = tl.load(list_ptr + o_i, mask=m_i, other=-1)
    b_rank = tl.load(rank_ptr + o_i, mask=m_i, other=0)
    m_some = b_list >= 0
    p_place = place_ptr + b_list.to(tl.int64) * 3
    b_row = tl.load(p_place, mask=m_some, other=0) + b_rank
    tl.store(row_ptr + o_i, tl.where(m_some, b_row, -1), mask=m_i)
    b_pass = (b_list // num_lists).to(tl.int64)
    tl.store(tokens_ptr + b_pass * num_rows + b_row, o_i // CHOICES, mask=m_some)

    b_size = tl.load(p_place + 2, mask=m_some, other=1)
    m_unit = m_some & (b_rank % b_size == 0)
    b_unit = tl.load(p_place + 1, mask=m_unit, other=0) + b_rank // b_size
    b_count = tl.load(count_ptr + b_list, mask=m_unit, other=0) - b_rank
    p_info = info_ptr + b_list.to(tl.int64) * 3
    b_page = tl.load(p_info, mask=m_unit, other=0)
    b_packed = tl.load(p_info + 1, mask=m_unit, other=0) | tl.minimum(b_count, b_size)
    b_key = tl.load(p_info + 2, mask=m_unit, other=0)
    p_unit = units_ptr + (b_pass * num_units + b_unit) * 4
    tl.store(p_unit, b_page, mask=m_unit)
    tl.store(p_unit + 1, b_row, mask=m_unit)
    tl.store(p_unit + 2, b_packed, mask=m_unit)
    tl.store(p_unit + 3, b_key, mask=m_unit)

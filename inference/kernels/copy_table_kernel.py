"""Copies of the rectangles of a table, in words as wide as the memory of both sides allows."""

import math
from collections.abc import Iterator, Sequence

import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.tables import Box, Entry, TileTable, boxes, grouped
from inference.kernels.tables_kernel import (
    MAPS,
    NUM_UNITS,
    indices,
    loops_of,
    places,
    start_of,
    strides_of,
    tile_of,
)

BLOCK = 4096
"""Words of a tile."""
CHUNK = 1024
"""Words that a program moves at a time."""
NUM_WARPS = 8
MAX_WORD_BYTES = 16

SOURCE, OUT = tl.constexpr(0), tl.constexpr(1)
FIELDS = MAPS.value + 8


@triton.jit(do_not_specialize=["first_tile"])
def _copy_kernel(
    rows_ptr,
    tile_rows_ptr,
    first_tile,
    WORD: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy one tile."""
    p_row, start = tile_of(rows_ptr, tile_rows_ptr, first_tile, FIELDS, BLOCK)
    num_words = tl.load(p_row + NUM_UNITS).to(tl.uint32)
    loops, source, out = loops_of(p_row), strides_of(p_row, SOURCE), strides_of(p_row, OUT)
    # A word of 16 bytes is two of 8.
    HALVES: tl.constexpr = 2 if WORD == 16 else 1
    pointer: tl.constexpr = tl.pointer_type(tl.core.get_int_dtype(8 * WORD // HALVES, False))
    p_source = tl.multiple_of(start_of(p_row, SOURCE).to(pointer), WORD)
    p_out = tl.multiple_of(start_of(p_row, OUT).to(pointer), WORD)
    o_half = tl.arange(0, HALVES)[None, :]
    for i_chunk in range(0, BLOCK, CHUNK):
        # [CHUNK]
        b_word = start + i_chunk + tl.arange(0, CHUNK).to(tl.uint32)
        mask = (b_word < num_words)[:, None]
        b_indices = indices(b_word, loops)
        # [CHUNK, HALVES]
        b_from = (places(b_indices, source) * HALVES)[:, None] + o_half
        b_to = (places(b_indices, out) * HALVES)[:, None] + o_half
        b_words = tl.load(p_source + b_from, mask=mask, eviction_policy="evict_first")
        tl.store(p_out + b_to, b_words, mask=mask)


def tables(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[int, TileTable]:
    """A table for each width of words in bytes."""
    entries = ((word, entry) for i, pair in enumerate(pairs) for word, entry in _entries(i, *pair))
    return grouped(entries, len(pairs), BLOCK, pairs[0][0].device)


def copy(tables: dict[int, TileTable], first: int, last: int) -> None:
    for word, table in tables.items():
        first_tile, num_tiles = table.tiles(first, last)
        if num_tiles:
            _copy_kernel[(num_tiles,)](
                table.rows,
                table.tile_rows,
                first_tile,
                WORD=word,
                FIELDS=FIELDS,
                BLOCK=BLOCK,
                CHUNK=CHUNK,
                num_warps=NUM_WARPS,
            )


def _entries(index: int, source: Tensor, out: Tensor) -> Iterator[tuple[int, Entry]]:
    item_bytes = source.element_size()
    *sizes, num_columns = source.shape if source.ndim else (1,)
    steps = [
        (source.stride(dim) * item_bytes, out.stride(dim) * item_bytes) for dim in range(len(sizes))
    ]
    starts = (source.data_ptr(), out.data_ptr())
    walked = [step for size, step in zip(sizes, steps, strict=True) if size > 1]
    word = math.gcd(MAX_WORD_BYTES, num_columns * item_bytes, *starts, *sum(walked, ()))
    words = [(from_step // word, to_step // word) for from_step, to_step in steps]
    num_words = num_columns * item_bytes // word
    for box in boxes([*sizes, num_words], (0, 0), [*words, (1, 1)]):
        moved = tuple(at + word * by for at, by in zip(starts, box.starts, strict=True))
        yield word, Entry(index, Box(box.sizes, moved, box.strides))

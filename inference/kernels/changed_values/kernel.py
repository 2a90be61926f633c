"""Tiles of changed values on the GPU: a tile is a program's, its entries in order of their place.

Counting and packing read 16 bytes at a time where the rows of both sides begin at multiples of
that; both passes read everything, for the entries of a tile are placed by the counts before it.
"""

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

GRANULE_BYTES = 16
CHUNK_BYTES = 8192
"""Read at a time of either side."""
NUM_WARPS = 4
MAX_CHUNK = 2048
"""Elements at a time: those of a byte take more registers."""
ENTRIES = 256
"""Written at a time, with ENTRY_WARPS warps: a tile has few."""
ENTRY_WARPS = 2

NOW, BEFORE = tl.constexpr(0), tl.constexpr(1)
_TILE_NUMBER = tl.constexpr(MAPS.value + 8)
CHANGED_FIELDS = MAPS.value + 9
OVERWRITE_FIELDS = MAPS.value + 4


@triton.jit
def _bits_at(start, b_units, o_item, mask, ITEM: tl.constexpr, GRANULE: tl.constexpr):
    """(pointers, values) of the elements [units, GRANULE] of units that begin at `b_units`."""
    p_first = start.to(tl.pointer_type(tl.core.get_int_dtype(8 * ITEM, False)))
    p_first = tl.multiple_of(p_first, GRANULE * ITEM)
    p_items = p_first + (b_units * GRANULE)[:, None] + o_item[None, :]
    return p_items, tl.load(p_items, mask=mask[:, None], other=0)


@triton.jit(do_not_specialize=["first_tile"])
def _changed_kernel(
    rows_ptr,
    tile_rows_ptr,
    counts_ptr,
    starts_ptr,
    places_ptr,
    values_ptr,
    first_tile,
    ITEM: tl.constexpr,
    GRANULE: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    TAKES: tl.constexpr,
):
    """Count the changed elements of one tile of BLOCK units of GRANULE elements; or TAKE them."""
    p_row, start = tile_of(rows_ptr, tile_rows_ptr, first_tile, FIELDS, BLOCK)
    num_units = tl.load(p_row + NUM_UNITS).to(tl.uint32)
    i_tile = tl.load(p_row + _TILE_NUMBER) + start.to(tl.int64) // BLOCK
    loops, now, before = loops_of(p_row), strides_of(p_row, NOW), strides_of(p_row, BEFORE)
    start_now, start_before = start_of(p_row, NOW), start_of(p_row, BEFORE)
    o_item = tl.arange(0, GRANULE)
    # [CHUNK, GRANULE]
    b_count = tl.zeros([CHUNK, GRANULE], dtype=tl.int32)
    end = tl.load(starts_ptr + i_tile) if TAKES else tl.zeros([], dtype=tl.int64)
    for i_chunk in range(0, tl.minimum(num_units - start, BLOCK).to(tl.int32), CHUNK):
        b_unit = (i_chunk + tl.arange(0, CHUNK)).to(tl.uint32)
        mask = start + b_unit < num_units
        b_indices = indices(start + b_unit, loops)
        _, b_now = _bits_at(start_now, places(b_indices, now), o_item, mask, ITEM, GRANULE)
        p_before, b_before = _bits_at(
            start_before, places(b_indices, before), o_item, mask, ITEM, GRANULE
        )
        m_changed = b_now != b_before
        b_one = m_changed.to(tl.int32)
        if TAKES:
            b_rank = tl.cumsum(tl.reshape(b_one, [CHUNK * GRANULE]), 0)
            b_to = end + (tl.reshape(b_rank, [CHUNK, GRANULE]) - 1)
            b_place = (b_unit * GRANULE)[:, None] + o_item[None, :].to(tl.uint32)
            tl.store(places_ptr + b_to, b_place.to(tl.int16), mask=m_changed)
            p_values = values_ptr.to(p_before.dtype, bitcast=True)
            tl.store(p_values + b_to, b_now, mask=m_changed)
            tl.store(p_before, b_now, mask=m_changed)
            end += tl.sum(tl.sum(b_one, 1), 0)
        else:
            b_count += b_one
    if not TAKES:
        tl.store(counts_ptr + i_tile, tl.sum(tl.sum(b_count, 1), 0))


@triton.jit(do_not_specialize=["first_tile", "num_entries"])
def _overwrite_kernel(
    rows_ptr,
    tile_rows_ptr,
    starts_ptr,
    places_ptr,
    values_ptr,
    first_tile,
    num_entries,
    ITEM: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Write the entries of one tile; none that lies outside of its part, whatever they say."""
    p_row, start = tile_of(rows_ptr, tile_rows_ptr, first_tile, FIELDS, BLOCK)
    num_units = tl.load(p_row + NUM_UNITS).to(tl.uint32)
    loops, out = loops_of(p_row), strides_of(p_row, NOW)
    pointer: tl.constexpr = tl.pointer_type(tl.core.get_int_dtype(8 * ITEM, False))
    p_out, p_values = start_of(p_row, NOW).to(pointer), values_ptr.to(pointer, bitcast=True)
    p_start = starts_ptr + tl.program_id(0)
    begin = tl.maximum(tl.load(p_start), 0)
    end = tl.minimum(tl.load(p_start + 1), num_entries)
    for i_entry in range(begin, end, ENTRIES):
        # [ENTRIES]
        o_entry = i_entry + tl.arange(0, ENTRIES)
        mask = o_entry < end
        b_place = tl.load(places_ptr + o_entry, mask=mask, other=0).to(tl.uint16, bitcast=True)
        b_unit = start + b_place.to(tl.uint32)
        b_value = tl.load(p_values + o_entry, mask=mask, other=0)
        b_at = places(indices(b_unit, loops), out)
        tl.store(p_out + b_at, b_value, mask=mask & (b_unit < num_units))


class Changed:
    """Tables of (now, before), one for each granule in elements."""

    def __init__(
        self, pairs: Sequence[tuple[Tensor, Tensor]], first_tiles: Sequence[int], tile: int
    ) -> None:
        self._item = pairs[0][0].element_size()
        self._tile = tile
        granule = min(GRANULE_BYTES // self._item, tile)
        entries = [
            entry
            for i, pair in enumerate(pairs)
            for entry in _changed_entries(i, *pair, first_tiles[i], granule)
        ]
        self._tables: dict[int, TileTable] = {}
        for size in {size for size, _ in entries}:
            own = [entry for entry in entries if entry[0] == size]
            device = pairs[0][0].device
            self._tables |= grouped(own, len(pairs), tile // size, device)

    def count(self, first: int, last: int, counts: Tensor) -> None:
        self._launch(first, last, counts, counts, counts, counts, takes=False)

    def take(self, first: int, last: int, starts: Tensor, places: Tensor, values: Tensor) -> None:
        self._launch(first, last, starts, starts, places, values, takes=True)

    def _launch(
        self,
        first: int,
        last: int,
        counts: Tensor,
        starts: Tensor,
        places: Tensor,
        values: Tensor,
        *,
        takes: bool,
    ) -> None:
        for granule, table in self._tables.items():
            first_tile, num_tiles = table.tiles(first, last)
            if num_tiles:
                block = self._tile // granule
                chunk = min(CHUNK_BYTES // self._item, MAX_CHUNK) // granule
                _changed_kernel[(num_tiles,)](
                    table.rows,
                    table.tile_rows,
                    counts,
                    starts,
                    places,
                    values,
                    first_tile,
                    ITEM=self._item,
                    GRANULE=granule,
                    FIELDS=CHANGED_FIELDS,
                    BLOCK=block,
                    CHUNK=min(chunk, block),
                    TAKES=takes,
                    num_warps=NUM_WARPS,
                )


class Overwrite:
    """A table of places to write to."""

    def __init__(self, outs: Sequence[Tensor], tile: int) -> None:
        self._item = outs[0].element_size()
        self._tile = tile
        entries = [entry for i, out in enumerate(outs) for entry in _overwrite_entries(i, out)]
        self._table = TileTable(entries, len(outs), tile, outs[0].device) if entries else None

    def launch(self, first: int, last: int, starts: Tensor, places: Tensor, values: Tensor) -> None:
        first_tile, num_tiles = self._table.tiles(first, last) if self._table else (0, 0)
        if num_tiles:
            _overwrite_kernel[(num_tiles,)](
                self._table.rows,
                self._table.tile_rows,
                starts,
                places,
                values,
                first_tile,
                values.numel(),
                ITEM=self._item,
                FIELDS=OVERWRITE_FIELDS,
                BLOCK=self._tile,
                ENTRIES=ENTRIES,
                num_warps=ENTRY_WARPS,
            )


def _changed_entries(
    index: int, now: Tensor, before: Tensor, first_tile: int, granule: int
) -> Iterator[tuple[int, Entry]]:
    item, sizes = now.element_size(), list(now.shape) or [1]
    walked = [dim for dim in range(len(sizes) - 1) if sizes[dim] > 1]
    is_aligned = sizes[-1] % granule == 0 and all(
        at % (granule * item) == 0
        for tensor in (now, before)
        for at in (tensor.data_ptr(), *(tensor.stride(dim) * item for dim in walked))
    )
    unit = granule if is_aligned else 1
    steps = [(now.stride(dim) // unit, before.stride(dim) // unit) for dim in range(len(sizes) - 1)]
    units = [*sizes[:-1], sizes[-1] // unit]
    for box in boxes(units, (0, 0), [*steps, (1, 1)]):
        starts = (now.data_ptr(), before.data_ptr())
        yield unit, Entry(index, Box(box.sizes, starts, box.strides), (first_tile,))


def _overwrite_entries(index: int, out: Tensor) -> Iterator[Entry]:
    steps = [(out.stride(dim),) for dim in range(out.ndim - 1)]
    for box in boxes(list(out.shape) or [1], (0,), [*steps, (1,)]):
        yield Entry(index, Box(box.sizes, (out.data_ptr(),), box.strides))

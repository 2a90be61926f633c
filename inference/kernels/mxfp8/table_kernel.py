"""MXFP8 from the BF16 rectangles of a table; the bytes of `kernel.py`."""

from collections.abc import Iterator, Sequence

import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.mxfp8.kernel import converts, quantized
from inference.kernels.mxfp8.reference import BLOCK_SIZE, MAX_SCALE
from inference.kernels.tables import Box, Entry, TileTable, boxes, grouped
from inference.kernels.tables_kernel import (
    MAPS,
    NUM_UNITS,
    PART,
    indices,
    loops_of,
    places,
    start_of,
    strides_of,
    tile_of,
)

BLOCK = 512
"""Blocks of 32 of a tile."""
CHUNK = 128
"""Blocks that a program does at a time."""
NUM_WARPS = 4
GRANULE_BYTES = 16

_MAX_SCALE = tl.constexpr(MAX_SCALE)
X, VALUES, SCALE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FIELDS = MAPS.value + 12


@triton.jit(do_not_specialize=["first_tile"])
def _quantize_kernel(
    rows_ptr,
    tile_rows_ptr,
    flags_ptr,
    first_tile,
    GRANULE: tl.constexpr,
    CONVERTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Quantise one tile; places in x and values are in granules of 16 bytes or in elements."""
    p_row, start = tile_of(rows_ptr, tile_rows_ptr, first_tile, FIELDS, BLOCK)
    num_blocks = tl.load(p_row + NUM_UNITS).to(tl.uint32)
    loops = loops_of(p_row)
    x, values, scale = strides_of(p_row, X), strides_of(p_row, VALUES), strides_of(p_row, SCALE)
    p_x = start_of(p_row, X).to(tl.pointer_type(tl.int16))
    p_values = start_of(p_row, VALUES).to(tl.pointer_type(tl.uint8))
    p_scale = start_of(p_row, SCALE).to(tl.pointer_type(tl.uint8))
    if GRANULE > 1:
        p_x, p_values = tl.multiple_of(p_x, GRANULE), tl.multiple_of(p_values, GRANULE)
    X_GRANULE: tl.constexpr = GRANULE // 2 if GRANULE > 1 else 1
    o_k = tl.arange(0, BLOCK_SIZE)[None, :]
    # [CHUNK]
    b_largest = tl.zeros([CHUNK], dtype=tl.int32)
    for i_chunk in range(0, BLOCK, CHUNK):
        # [CHUNK]
        b_block = start + i_chunk + tl.arange(0, CHUNK).to(tl.uint32)
        mask = b_block < num_blocks
        b_indices = indices(b_block, loops)
        # [CHUNK, BLOCK_SIZE]
        b_x = (places(b_indices, x) * X_GRANULE)[:, None] + o_k
        b_bits = tl.load(p_x + b_x, mask=mask[:, None], other=0, eviction_policy="evict_first")
        b_codes, b_scales = quantized(b_bits, CONVERTS)
        b_largest = tl.maximum(b_largest, b_scales.to(tl.int32))
        b_values = (places(b_indices, values) * GRANULE)[:, None] + o_k
        tl.store(p_values + b_values, b_codes, mask=mask[:, None])
        tl.store(p_scale + places(b_indices, scale), b_scales, mask=mask)
    if tl.max(b_largest, 0) > _MAX_SCALE:
        tl.store(flags_ptr + tl.load(p_row + PART), 1)


def tables(pairs: Sequence[tuple[Tensor, Tensor, Tensor]]) -> dict[int, TileTable]:
    """A table for each granule of (x, values, scale)."""
    entries = (
        (granule, entry) for i, pair in enumerate(pairs) for granule, entry in _entries(i, *pair)
    )
    return grouped(entries, len(pairs), BLOCK, pairs[0][0].device)


def quantize(tables: dict[int, TileTable], first: int, last: int, flags: Tensor) -> None:
    """Quantise pairs first..last-1 and set their flags, [pairs] int32."""
    for granule, table in tables.items():
        first_tile, num_tiles = table.tiles(first, last)
        if num_tiles:
            _quantize_kernel[(num_tiles,)](
                table.rows,
                table.tile_rows,
                flags,
                first_tile,
                GRANULE=granule,
                CONVERTS=converts(table.rows.device),
                BLOCK_SIZE=BLOCK_SIZE,
                FIELDS=FIELDS,
                BLOCK=BLOCK,
                CHUNK=CHUNK if granule > 1 else CHUNK // 4,  # single bytes take more registers
                num_warps=NUM_WARPS,
            )


def _entries(index: int, x: Tensor, values: Tensor, scale: Tensor) -> Iterator[tuple[int, Entry]]:
    sizes = scale.shape
    walked = [dim for dim in range(len(sizes) - 1) if sizes[dim] > 1]
    is_aligned = all(
        at % GRANULE_BYTES == 0
        for tensor in (x, values)
        for at in (tensor.data_ptr(), *(tensor.stride(d) * tensor.element_size() for d in walked))
    )
    granule = GRANULE_BYTES if is_aligned else 1
    units = (granule // 2 if is_aligned else 1, granule, 1)
    steps = [
        tuple(t.stride(dim) // unit for t, unit in zip((x, values, scale), units, strict=True))
        for dim in range(len(sizes) - 1)
    ]
    steps.append((BLOCK_SIZE // units[0], BLOCK_SIZE // units[1], scale.stride(-1)))
    item_bytes = (2 * units[0], units[1], 1)
    for box in boxes(sizes, (0, 0, 0), steps):
        starts = tuple(
            tensor.data_ptr() + by * unit
            for tensor, by, unit in zip((x, values, scale), box.starts, item_bytes, strict=True)
        )
        yield granule, Entry(index, Box(box.sizes, starts, box.strides))

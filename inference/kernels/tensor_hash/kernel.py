"""The additive hash of many tensors in one pass; integer sums do not depend on their order.

About 35 integer instructions a unit: with units of 16 bytes the memory and not the integer units
set the time.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.mix64 import GOLDEN, as_int64
from inference.kernels.mix64_kernel import mix64
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
from inference.kernels.tensor_hash.part import HashPart
from inference.kernels.tensor_hash.reference import HIGH, LOW, places_of

BLOCK = 8192
"""Units of a tile."""
CHUNK = 1024
"""Units that a program reads at a time."""
NUM_WARPS = 8

MEMORY, KEYS = tl.constexpr(0), tl.constexpr(1)
_LOW, _HIGH = tl.constexpr(LOW), tl.constexpr(HIGH)
_SALT = tl.constexpr(MAPS.value + 8)
_WORD_STRIDE = tl.constexpr(MAPS.value + 9)
_MASK = tl.constexpr(MAPS.value + 10)
_ONE = tl.constexpr(MAPS.value + 11)
FIELDS = MAPS.value + 12


class Kind(NamedTuple):
    """What a kernel is built for."""

    unit_bytes: int
    word_bytes: int
    """Read at a time; 8, or the unit where that is smaller, or an element's where the memory of a
    unit is not in one piece or not aligned."""
    is_dense: bool


@triton.jit
def _unit_words(
    base, b_at, word_stride, mask, UNIT: tl.constexpr, WORD: tl.constexpr, DENSE: tl.constexpr
):
    """The bytes of units as two 64-bit words, the lower ones first."""
    p_base = base.to(tl.pointer_type(tl.core.get_int_dtype(8 * WORD, False)))
    if DENSE and UNIT == 16:
        # [units, 2]: one load of 16 bytes each
        p_words = tl.multiple_of(p_base, 16) + (b_at * 2)[:, None] + tl.arange(0, 2)[None, :]
        b_words = tl.load(p_words, mask=mask[:, None], other=0, eviction_policy="evict_first")
        return tl.split(b_words)
    if DENSE:
        b_low = tl.load(p_base + b_at, mask=mask, other=0, eviction_policy="evict_first")
        return b_low.to(tl.uint64), tl.zeros_like(b_low).to(tl.uint64)
    b_low = tl.zeros_like(b_at).to(tl.uint64)
    b_high = b_low
    for i in tl.static_range(UNIT // WORD):
        b_word = tl.load(p_base + b_at + i * word_stride, mask=mask, other=0).to(tl.uint64)
        if i * WORD < 8:
            b_low |= b_word << (8 * i * WORD)
        else:
            b_high |= b_word << (8 * i * WORD - 64)
    return b_low, b_high


@triton.jit(do_not_specialize=["first_tile"])
def _hash_kernel(
    rows_ptr,
    tile_rows_ptr,
    sums_ptr,
    flags_ptr,
    first_tile,
    UNIT: tl.constexpr,
    WORD: tl.constexpr,
    DENSE: tl.constexpr,
    CHECK: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add the terms of one tile to the sum of its part."""
    p_row, start = tile_of(rows_ptr, tile_rows_ptr, first_tile, FIELDS, BLOCK)
    num_units = tl.load(p_row + NUM_UNITS).to(tl.uint32)
    loops = loops_of(p_row)
    is_one_loop = loops[3] == num_units
    memory, keys = strides_of(p_row, MEMORY), strides_of(p_row, KEYS)
    base, first_key = start_of(p_row, MEMORY), start_of(p_row, KEYS)
    salt = tl.load(p_row + _SALT).to(tl.uint64, bitcast=True)
    word_stride = tl.load(p_row + _WORD_STRIDE)
    nan_mask = tl.load(p_row + _MASK).to(tl.uint64, bitcast=True)
    nan_one = tl.load(p_row + _ONE).to(tl.uint64, bitcast=True)
    # [CHUNK]
    b_sum = tl.zeros([CHUNK], dtype=tl.uint64)
    b_bad = tl.zeros([CHUNK], dtype=tl.uint64)
    for i_chunk in range(0, BLOCK, CHUNK):
        b_unit = start + i_chunk + tl.arange(0, CHUNK).to(tl.uint32)
        mask = b_unit < num_units
        if is_one_loop:
            b_at = b_unit.to(tl.int64) * memory[2]
            b_key = b_unit.to(tl.int64) * keys[2]
        else:
            b_indices = indices(b_unit, loops)
            b_at, b_key = places(b_indices, memory), places(b_indices, keys)
        b_low, b_high = _unit_words(base, b_at, word_stride, mask, UNIT, WORD, DENSE)
        b_mixed = (b_low ^ (first_key + b_key).to(tl.uint64, bitcast=True) ^ salt) * _LOW
        b_mixed ^= b_mixed >> 32
        b_term = mix64(b_mixed + b_high * _HIGH)
        b_sum += tl.where(mask, b_term, tl.zeros_like(b_term))
        if CHECK:
            # An exponent of all ones carries into the sign's place, cleared by the mask.
            b_bad |= ((b_low & nan_mask) + nan_one) | ((b_high & nan_mask) + nan_one)
    part = tl.load(p_row + PART)
    total = tl.sum(b_sum, 0).to(tl.int64, bitcast=True)
    tl.atomic_add(sums_ptr + part, total, sem="relaxed")
    if CHECK:
        b_is_bad = (b_bad & ~nan_mask & (nan_mask << 1)) != 0
        is_bad = tl.max(b_is_bad.to(tl.int32), 0)
        tl.atomic_or(flags_ptr + part, is_bad.to(tl.int64), mask=is_bad != 0, sem="relaxed")


_EXPONENTS = {
    torch.float32: 0x7F800000_7F800000,
    torch.bfloat16: 0x7F80_7F80_7F80_7F80,
    torch.float8_e4m3fn: 0x7F7F7F7F_7F7F7F7F,
}
"""Bits that are all set where a number is not finite, in 64 bits of neighbours."""


def tables(parts: Sequence[HashPart]) -> dict[Kind, TileTable]:
    """A table for each kind of kernel; none for parts without elements."""
    entries = ((kind, entry) for i, part in enumerate(parts) for kind, entry in _entries(i, part))
    return grouped(entries, len(parts), BLOCK, parts[0].tensor.device)


def add(
    tables: dict[Kind, TileTable], first: int, last: int, sums: Tensor, flags: Tensor | None
) -> None:
    """Add the hashes of parts first..last-1 to `sums` [parts], int64.

    Args:
        flags: [parts] int64, set to 1 where a part to be checked is not finite; None: not checked.
    """
    for kind, table in tables.items():
        first_tile, num_tiles = table.tiles(first, last)
        if num_tiles:
            _hash_kernel[(num_tiles,)](
                table.rows,
                table.tile_rows,
                sums,
                sums if flags is None else flags,
                first_tile,
                UNIT=kind.unit_bytes,
                WORD=kind.word_bytes,
                DENSE=kind.is_dense,
                CHECK=flags is not None,
                FIELDS=FIELDS,
                BLOCK=BLOCK,
                CHUNK=CHUNK,
                num_warps=NUM_WARPS,
            )


def _entries(index: int, part: HashPart) -> Iterator[tuple[Kind, Entry]]:
    tensor, unit = part.tensor, part.unit
    item_bytes = tensor.element_size()
    unit_bytes = unit * item_bytes
    sizes, strides = list(tensor.shape), list(tensor.stride())
    word_stride = strides[-1] if strides else 1
    if unit > 1:
        sizes[-1] //= unit
        strides[-1] *= unit
    walked = [stride for size, stride in zip(sizes, strides, strict=True) if size > 1]
    is_dense = (unit == 1 or word_stride == 1) and all(
        at % unit_bytes == 0
        for at in (tensor.data_ptr(), *(stride * item_bytes for stride in walked))
    )
    granule = unit_bytes if is_dense else item_bytes
    kind = Kind(unit_bytes, min(granule, 8), is_dense)
    first_place, steps = places_of(part.offsets, part.shape, unit)
    mask = _EXPONENTS[tensor.dtype] if part.check_finite else 0
    extras = (as_int64(part.salt), word_stride, mask, _lowest_bits(mask))
    memory = [stride * item_bytes // granule for stride in strides]
    for box in boxes(sizes, (0, first_place), list(zip(memory, steps, strict=True))):
        start, place = box.starts
        starts = (tensor.data_ptr() + start * granule, as_int64(place * GOLDEN))
        loops = tuple((at, as_int64(step * GOLDEN)) for at, step in box.strides)
        yield kind, Entry(index, Box(box.sizes, starts, loops), extras)


def _lowest_bits(mask: int) -> int:
    """The lowest bit of each run of ones."""
    return mask & ~(mask << 1)

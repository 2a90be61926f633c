"""How a kernel finds its way in a table of `tables.py`."""

import triton
import triton.language as tl

# Fields of a row: its first tile, units, part; then size, magic and shift of the second and the
# third loop; then for each map its start and the strides of the three loops; then a kernel's own.
NUM_UNITS = tl.constexpr(1)
PART = tl.constexpr(2)
LOOPS = tl.constexpr(3)
MAPS = tl.constexpr(9)


@triton.jit
def tile_of(rows_ptr, tile_rows_ptr, first_tile, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """(the row of this program's tile, the index of the tile's first unit in its box)."""
    i_tile = first_tile.to(tl.int64) + tl.program_id(0)
    p_row = rows_ptr + tl.load(tile_rows_ptr + i_tile).to(tl.int64) * FIELDS
    return p_row, ((i_tile - tl.load(p_row)) * BLOCK).to(tl.uint32)


@triton.jit
def loops_of(p_row):
    """Size, magic and shift of the second and the third loop, uint32."""
    p_loop = p_row + LOOPS
    size_1, magic_1 = tl.load(p_loop).to(tl.uint32), tl.load(p_loop + 1).to(tl.uint32)
    size_2, magic_2 = tl.load(p_loop + 3).to(tl.uint32), tl.load(p_loop + 4).to(tl.uint32)
    shift_1, shift_2 = tl.load(p_loop + 2).to(tl.uint32), tl.load(p_loop + 5).to(tl.uint32)
    return size_1, magic_1, shift_1, size_2, magic_2, shift_2


@triton.jit
def strides_of(p_row, MAP: tl.constexpr):
    """Strides of the three loops in a map."""
    p_map = p_row + MAPS + 4 * MAP
    return tl.load(p_map + 1), tl.load(p_map + 2), tl.load(p_map + 3)


@triton.jit
def start_of(p_row, MAP: tl.constexpr):
    """Place of the first unit in a map."""
    return tl.load(p_row + MAPS + 4 * MAP)


@triton.jit
def indices(b_unit, loops):
    """Index of each unit, below 2^31, in each of the three loops.

    The quotient by a size, with s = ceil(log2 size) and magic = ceil(2^(31 + s) / size), is
    unit * magic >> (31 + s): rounding the magic up adds less than 2^31 / 2^(31 + s) = 2^-s, at
    most 1 / size and so too little to reach the next integer.
    """
    size_1, magic_1, shift_1, size_2, magic_2, shift_2 = loops
    b_rest = tl.umulhi(b_unit * 2, magic_2) >> shift_2
    b_0 = tl.umulhi(b_rest * 2, magic_1) >> shift_1
    return b_0, b_rest - b_0 * size_1, b_unit - b_rest * size_2


@triton.jit
def places(b_indices, strides):
    """Places of units in a map, less that of the first one; int64, modulo 2^64."""
    b_0, b_1, b_2 = b_indices
    stride_0, stride_1, stride_2 = strides
    b_outer = b_0.to(tl.int64) * stride_0 + b_1.to(tl.int64) * stride_1
    return b_outer + b_2.to(tl.int64) * stride_2

"""The additive hash in one pass; integer sums do not depend on their order.

Two mixes of 64-bit integers an element are more work than its bytes are traffic: about 80 integer
instructions, so integer units and not memory set the time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.mix64 import as_int64
from inference.kernels.mix64_kernel import GOLDEN, mix64
from inference.kernels.tensor_hash.reference import MASK64

BLOCK = 4096
"""Elements of a tile."""
NUM_PROGRAMS = 132 * 8

_BITS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.uint8: torch.uint8,
}


class Dim(NamedTuple):
    """One dimension of a rectangle."""

    size: int
    stride: int
    """In memory, in elements."""
    step: int
    """In the global tensor, row-major."""


# Never a constant: a salt or a place of 1 would be one.
@triton.jit(do_not_specialize=["salt", "first_place"])
def _hash_kernel(
    bits_ptr,
    partials_ptr,
    salt,
    first_place,
    num_tiles,
    tiles_1,
    tiles_2,
    size_1,
    size_2,
    stride_0,
    stride_1,
    stride_2,
    step_0,
    step_1,
    step_2,
    BITS: tl.constexpr,
    BLOCK_1: tl.constexpr,
    BLOCK_2: tl.constexpr,
):
    """Sum of the terms of tiles pid, pid + number of programs, ... of a 3-dimensional rectangle."""
    # [BLOCK_1, BLOCK_2]
    b_sum = tl.zeros([BLOCK_1, BLOCK_2], dtype=tl.uint64)
    for i_tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        i_2 = i_tile % tiles_2
        i_1 = (i_tile // tiles_2) % tiles_1
        i_0 = (i_tile // tiles_2 // tiles_1).to(tl.int64)
        o_1 = (i_1.to(tl.int64) * BLOCK_1 + tl.arange(0, BLOCK_1))[:, None]
        o_2 = (i_2.to(tl.int64) * BLOCK_2 + tl.arange(0, BLOCK_2))[None, :]
        mask = (o_1 < size_1) & (o_2 < size_2)
        p_bits = bits_ptr + (i_0 * stride_0 + o_1 * stride_1 + o_2 * stride_2)
        b_bits = tl.load(p_bits, mask=mask, other=0, eviction_policy="evict_first")
        if BITS == 16:
            b_bits = b_bits.to(tl.uint16, bitcast=True)
        elif BITS == 32:
            b_bits = b_bits.to(tl.uint32, bitcast=True)
        place = first_place + (i_0 * step_0 + o_1 * step_1 + o_2 * step_2)
        key = mix64((2 * place + 1).to(tl.uint64) * GOLDEN + salt.to(tl.uint64))
        b_term = mix64(key ^ b_bits.to(tl.uint64))
        b_sum += tl.where(mask, b_term, tl.zeros_like(b_term))
    total = tl.sum(tl.sum(b_sum, 1), 0)
    tl.store(partials_ptr + tl.program_id(0), total.to(tl.int64, bitcast=True))


def tensor_hash(tensor: Tensor, salt: int, offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """As the reference; waits for the device once."""
    if tensor.numel() == 0:
        return 0
    dims, first_place = _merged_dims(tensor, offsets, shape)
    if len(dims) > 3:
        halves = _split_outer(tensor, offsets)
        return sum(tensor_hash(half, salt, at, shape) for half, at in halves) & MASK64
    dim_0, dim_1, dim_2 = [Dim(1, 0, 0)] * (3 - len(dims)) + dims
    bits = tensor.detach().view(_BITS[tensor.dtype])
    block_2 = min(BLOCK, triton.next_power_of_2(dim_2.size))
    block_1 = min(BLOCK // block_2, triton.next_power_of_2(dim_1.size))
    tiles_1, tiles_2 = triton.cdiv(dim_1.size, block_1), triton.cdiv(dim_2.size, block_2)
    num_tiles = dim_0.size * tiles_1 * tiles_2
    num_programs = min(NUM_PROGRAMS, num_tiles)
    partials = torch.empty(num_programs, dtype=torch.int64, device=tensor.device)
    _hash_kernel[(num_programs,)](
        bits,
        partials,
        as_int64(salt),
        first_place,
        num_tiles,
        tiles_1,
        tiles_2,
        dim_1.size,
        dim_2.size,
        dim_0.stride,
        dim_1.stride,
        dim_2.stride,
        dim_0.step,
        dim_1.step,
        dim_2.step,
        BITS=8 * bits.element_size(),
        BLOCK_1=block_1,
        BLOCK_2=block_2,
        num_warps=8 if block_1 * block_2 == BLOCK else 4,
    )
    return int(partials.sum()) & MASK64


def _merged_dims(
    tensor: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[list[Dim], int]:
    """(dimensions, neighbours joined where memory and places allow it; place of the first one)."""
    merged: list[Dim] = []
    step, first_place = 1, 0
    for dim in reversed(range(tensor.ndim)):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        first_place += offsets[dim] * step
        if size > 1:
            inner = merged[0] if merged else None
            if (
                inner is not None
                and stride == inner.stride * inner.size
                and step == inner.step * inner.size
            ):
                merged[0] = Dim(size * inner.size, inner.stride, inner.step)
            else:
                merged.insert(0, Dim(size, stride, step))
        step *= shape[dim]
    return merged, first_place


def _split_outer(tensor: Tensor, offsets: tuple[int, ...]) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Slices of size 1 along the first dimension longer than that, each with its offsets."""
    dim = next(d for d in range(tensor.ndim) if tensor.shape[d] > 1)
    return [
        (
            tensor.narrow(dim, i, 1),
            (*offsets[:dim], offsets[dim] + i, *offsets[dim + 1 :]),
        )
        for i in range(tensor.shape[dim])
    ]

"""Collectives in one launch each, by loads from memory of the other ranks.

Block b of a launch has to do with block b of the same launch on every rank, and with nothing else:

    own region of this meeting <- what the others are to have
    flag of this block in every rank's memory <- number of the meeting     (release, system scope)
    wait until all ranks' flags in the own memory have that number         (acquire, system scope)
    result <- regions of all ranks, in ascending order

Each block counts its meetings and alternates between two regions. A rank comes to a block's meeting
n + 1 in a later launch than that of meeting n, when it has read all that it was shown there. So who
has seen the flags of n + 1 may write the region of n again, in meeting n + 2: no second wait is
needed, whatever kinds and sizes of launches follow one another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.parallel.peer_memory.layout import NUM_BLOCKS, REGION_BYTES, PeerMemory, part_tile

NUM_WARPS = 8


@triton.jit
def _region(
    address,
    i_block,
    n_meeting,
    TYPE: tl.constexpr,
    REGION: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Where block `i_block` of the rank with memory at `address` puts its values at a meeting."""
    p_region = address + ((n_meeting % 2) * BLOCKS + i_block) * REGION
    return tl.multiple_of(p_region.to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _meet(
    addresses,
    count_ptr,
    i_block,
    n_meeting,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    REGION: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Show the own region to all ranks; returns when theirs can be read."""
    tl.debug_barrier()
    # [BLOCKS, RANKS] of each rank: who has come
    o_flags = 2 * BLOCKS * REGION + i_block * RANKS * 8
    for i_peer in tl.static_range(RANKS):
        if i_peer != RANK:
            p_flag = (addresses[i_peer] + o_flags).to(tl.pointer_type(tl.int64))
            # The larger one stays: a rank that was released is not bound again.
            tl.atomic_max(p_flag + RANK, n_meeting, sem="release", scope="sys")
    p_flag = (addresses[RANK] + o_flags).to(tl.pointer_type(tl.int64))
    for i_peer in tl.static_range(RANKS):
        if i_peer != RANK:
            n_seen = tl.atomic_add(p_flag + i_peer, 0, sem="acquire", scope="sys")
            while n_seen < n_meeting:
                n_seen = tl.atomic_add(p_flag + i_peer, 0, sem="acquire", scope="sys")
    tl.store(count_ptr + i_block, n_meeting)
    tl.debug_barrier()


@triton.jit
def _sum_kernel(
    x_ptr,
    size,
    addresses,
    count_ptr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    REGION: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    i_block = tl.program_id(0).to(tl.int64)
    o_tile = tl.arange(0, TILE)
    p_x = x_ptr + i_block * TILE + o_tile
    m_x = i_block * TILE + o_tile < size
    b_x = tl.load(p_x, mask=m_x, other=0.0)
    n_meeting = tl.load(count_ptr + i_block) + 1
    p_own = _region(addresses[RANK], i_block, n_meeting, TYPE, REGION, BLOCKS)
    tl.store(p_own + o_tile, b_x)
    _meet(addresses, count_ptr, i_block, n_meeting, RANK, RANKS, REGION, BLOCKS)
    b_sum = tl.zeros([TILE], tl.float32)
    for i_peer in tl.static_range(RANKS):
        p_peer = _region(addresses[i_peer], i_block, n_meeting, TYPE, REGION, BLOCKS)
        b_sum += tl.load(p_peer + o_tile, cache_modifier=".cg").to(tl.float32)
    tl.store(p_x, b_sum.to(TYPE), mask=m_x)


@triton.jit
def _gather_tile(
    x_ptr,
    out_ptr,
    size,
    i_tile,
    i_block,
    addresses,
    count_ptr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    REGION: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    TILE: tl.constexpr = REGION // 4
    o_tile = tl.arange(0, TILE)
    o_x = i_tile * TILE + o_tile
    m_x = o_x < size
    b_x = tl.load(x_ptr + o_x, mask=m_x, other=0)
    n_meeting = tl.load(count_ptr + i_block) + 1
    p_own = _region(addresses[RANK], i_block, n_meeting, tl.int32, REGION, BLOCKS)
    tl.store(p_own + o_tile, b_x)
    _meet(addresses, count_ptr, i_block, n_meeting, RANK, RANKS, REGION, BLOCKS)
    for i_peer in tl.static_range(RANKS):
        p_peer = _region(addresses[i_peer], i_block, n_meeting, tl.int32, REGION, BLOCKS)
        b_x = tl.load(p_peer + o_tile, mask=m_x, other=0, cache_modifier=".cg")
        tl.store(out_ptr + i_peer * size + o_x, b_x, mask=m_x)


@triton.jit
def _gather_kernel(
    x_ptr,
    x_out_ptr,
    size_x,
    y_ptr,
    y_out_ptr,
    size_y,
    z_ptr,
    z_out_ptr,
    size_z,
    addresses,
    count_ptr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    REGION: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Up to three tensors of 32-bit words; the sizes of those that are not there are 0."""
    i_block = tl.program_id(0).to(tl.int64)
    end_x = tl.cdiv(size_x, REGION // 4)
    end_y = end_x + tl.cdiv(size_y, REGION // 4)
    if i_block < end_x:
        _gather_tile(
            x_ptr,
            x_out_ptr,
            size_x,
            i_block,
            i_block,
            addresses,
            count_ptr,
            RANK,
            RANKS,
            REGION,
            BLOCKS,
        )
    elif i_block < end_y:
        _gather_tile(
            y_ptr,
            y_out_ptr,
            size_y,
            i_block - end_x,
            i_block,
            addresses,
            count_ptr,
            RANK,
            RANKS,
            REGION,
            BLOCKS,
        )
    else:
        _gather_tile(
            z_ptr,
            z_out_ptr,
            size_z,
            i_block - end_y,
            i_block,
            addresses,
            count_ptr,
            RANK,
            RANKS,
            REGION,
            BLOCKS,
        )


@triton.jit
def _add_parts_kernel(
    y_ptr,
    size_y,
    parts_ptr,
    size,
    addresses,
    count_ptr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    REGION: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Part r of each rank, of `size` values, goes to rank r; `y` has as many or fewer."""
    TYPE: tl.constexpr = y_ptr.dtype.element_ty
    i_block = tl.program_id(0).to(tl.int64)
    o_tile = tl.arange(0, TILE)
    o_x = i_block * TILE + o_tile
    n_meeting = tl.load(count_ptr + i_block) + 1
    p_own = _region(addresses[RANK], i_block, n_meeting, TYPE, REGION, BLOCKS)
    for i_peer in tl.static_range(RANKS):
        b_part = tl.load(parts_ptr + i_peer * size + o_x, mask=o_x < size, other=0.0)
        tl.store(p_own + i_peer * TILE + o_tile, b_part)
    _meet(addresses, count_ptr, i_block, n_meeting, RANK, RANKS, REGION, BLOCKS)
    b_sum = tl.zeros([TILE], tl.float32)
    for i_peer in tl.static_range(RANKS):
        p_peer = _region(addresses[i_peer], i_block, n_meeting, TYPE, REGION, BLOCKS)
        p_part = p_peer + RANK * TILE + o_tile
        b_sum += tl.load(p_part, cache_modifier=".cg").to(tl.float32)
    m_y = o_x < size_y
    b_sum += tl.load(y_ptr + o_x, mask=m_y, other=0.0).to(tl.float32)
    tl.store(y_ptr + o_x, b_sum.to(TYPE), mask=m_y)


def _constants(memory: PeerMemory) -> dict[str, int]:
    return {
        "RANK": memory.rank,
        "RANKS": len(memory.buffers),
        "REGION": REGION_BYTES,
        "BLOCKS": NUM_BLOCKS,
        "num_warps": NUM_WARPS,
    }


def all_reduce(memory: PeerMemory, x: Tensor, num_blocks: int) -> None:
    _sum_kernel[(num_blocks,)](
        x,
        x.numel(),
        memory.addresses,
        memory.count_B,
        TILE=REGION_BYTES // x.itemsize,
        **_constants(memory),
    )


def gather(memory: PeerMemory, pairs: list[tuple[Tensor, Tensor]], num_blocks: int) -> None:
    words = [
        (x.view(torch.int32), out.view(torch.int32), x.numel() * x.itemsize // 4)
        for x, out in pairs
    ]
    missing = [(*words[0][:2], 0)] * (3 - len(pairs))
    _gather_kernel[(num_blocks,)](
        *[value for triple in [*words, *missing] for value in triple],
        memory.addresses,
        memory.count_B,
        **_constants(memory),
    )


def add_parts(memory: PeerMemory, parts: Tensor, y: Tensor, num_blocks: int) -> None:
    _add_parts_kernel[(num_blocks,)](
        y,
        y.numel(),
        parts,
        parts.numel() // len(memory.buffers),
        memory.addresses,
        memory.count_B,
        TILE=part_tile(memory, parts),
        **_constants(memory),
    )

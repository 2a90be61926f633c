"""Token-expert pairs sorted by expert and cut into tiles of rows, for the grouped products.

An expert's last tile may be longer than the others by `tail_rows`: that costs less than a tile of
its own, which would fetch the weights again.

A plan is one int32 tensor: how many tiles there are, then (expert, first, end) of each tile in
sorted order, then the sorted pairs and the place of each. Pair `t * A + a` is token t's a-th
expert.

    plan[0], plan[1]                 number of tiles, of pairs
    plan[4 + 4 * tile + (0, 1, 2)]   expert, first sorted row, first row behind
    plan[order_start + row]          pair of a sorted row
    plan[place_start + pair]         sorted row of a pair; anything where it is nobody's
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PAIRS_AT_ONCE = 2048
"""Up to here one launch compares all pairs with each other; above, chunks are counted first."""
CHUNK = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the tiles of a call stand."""

    data: Tensor
    tile_rows: int
    max_tiles: int
    """Bounds the number of tiles by shapes alone."""
    num_pairs: int
    """Nobody's included."""
    tail_rows: int = 0

    @property
    def order_start(self) -> int:
        """Where in `data` the sorted pairs begin."""
        return 4 + 4 * self.max_tiles

    @property
    def place_start(self) -> int:
        """Where in `data` the places of pairs begin."""
        return self.order_start + self.num_pairs


@triton.jit
def _write_tiles(plan_ptr, b_count, b_end, o_e, BLOCK_M: tl.constexpr, TAIL_M: tl.constexpr):
    """The tile list of experts with `b_count` rows that end at `b_end`."""
    b_tiles = (tl.maximum(b_count - TAIL_M, 0) + BLOCK_M - 1) // BLOCK_M
    b_tiles = tl.where(b_count > 0, tl.maximum(b_tiles, 1), 0)
    b_tile_end = tl.cumsum(b_tiles, 0)
    b_tile = b_tile_end - b_tiles
    b_first = b_end - b_count
    tl.store(plan_ptr, tl.sum(b_tiles, 0))
    tl.store(plan_ptr + 1, tl.sum(b_count, 0))
    for i in range(0, tl.max(b_tiles, 0)):
        m_e = i < b_tiles
        p_tile = plan_ptr + 4 + 4 * (b_tile + i)
        tl.store(p_tile, o_e, mask=m_e)
        tl.store(p_tile + 1, b_first + i * BLOCK_M, mask=m_e)
        b_next = tl.where(i + 1 == b_tiles, b_end, b_first + (i + 1) * BLOCK_M)
        tl.store(p_tile + 2, b_next, mask=m_e)


@triton.jit
def _write_places(plan_ptr, order_start, num_pairs, o_pair, b_row, m_pair):
    tl.store(plan_ptr + order_start + b_row, o_pair, mask=m_pair)
    tl.store(plan_ptr + order_start + num_pairs + o_pair, b_row, mask=m_pair)


@triton.jit(do_not_specialize=["order_start", "num_pairs"])
def _align_kernel(
    ids_ptr,
    plan_ptr,
    order_start,
    num_pairs,
    BLOCK_P: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program 0 writes the tiles, the others the place of BLOCK_I pairs each."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pid = tl.program_id(0)
    if pid == 0:
        # [BLOCK_P]
        o_p = tl.arange(0, BLOCK_P)
        b_ids = tl.load(ids_ptr + o_p, mask=o_p < num_pairs, other=-1)
        o_e = tl.arange(0, BLOCK_E)
        b_count = tl.histogram(tl.maximum(b_ids, 0), BLOCK_E, mask=b_ids >= 0)
        _write_tiles(plan_ptr, b_count, tl.cumsum(b_count, 0), o_e, BLOCK_M, TAIL_M)
    else:
        # [BLOCK_I]
        o_i = (pid - 1) * BLOCK_I + tl.arange(0, BLOCK_I)
        b_i = tl.load(ids_ptr + o_i, mask=o_i < num_pairs, other=-1)
        # [BLOCK_I, BLOCK_J], summed over the pairs once
        b_before = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
        for first in tl.static_range(0, BLOCK_P, BLOCK_J):
            # [BLOCK_J]
            o_j = first + tl.arange(0, BLOCK_J)
            b_j = tl.load(ids_ptr + o_j, mask=o_j < num_pairs, other=-1)
            m_less = b_j[None, :] < b_i[:, None]
            m_same = (b_j[None, :] == b_i[:, None]) & (o_j[None, :] < o_i[:, None])
            b_before += ((m_less | m_same) & (b_j >= 0)[None, :]).to(tl.int32)
        b_row = tl.sum(b_before, 1)
        _write_places(plan_ptr, order_start, num_pairs, o_i, b_row, b_i >= 0)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    ids_ptr,
    count_ptr,
    num_pairs,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """How often each expert occurs in a chunk of pairs."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pid = tl.program_id(0)
    o_p = pid * CHUNK + tl.arange(0, CHUNK)
    b_ids = tl.load(ids_ptr + o_p, mask=o_p < num_pairs, other=-1)
    b_count = tl.histogram(tl.maximum(b_ids, 0), BLOCK_E, mask=b_ids >= 0)
    tl.store(count_ptr + pid * BLOCK_E + tl.arange(0, BLOCK_E), b_count)


@triton.jit(do_not_specialize=["order_start", "num_pairs", "num_chunks"])
def _place_kernel(
    ids_ptr,
    count_ptr,
    plan_ptr,
    order_start,
    num_pairs,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """The place of each pair of a chunk, from the counts of all chunks; program 0 the tiles too."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pid = tl.program_id(0)
    o_e = tl.arange(0, BLOCK_E)
    b_total = tl.zeros([BLOCK_E], tl.int32)
    b_before = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_chunks, BLOCK_N):
        # [BLOCK_N, BLOCK_E]
        o_n = first + tl.arange(0, BLOCK_N)[:, None]
        b_count = tl.load(count_ptr + o_n * BLOCK_E + o_e[None, :], mask=o_n < num_chunks, other=0)
        b_total += tl.sum(b_count, 0)
        b_before += tl.sum(tl.where(o_n < pid, b_count, 0), 0)
    b_end = tl.cumsum(b_total, 0)
    if pid == 0:
        _write_tiles(plan_ptr, b_total, b_end, o_e, BLOCK_M, TAIL_M)
    # [CHUNK]
    o_i = pid * CHUNK + tl.arange(0, CHUNK)
    b_i = tl.load(ids_ptr + o_i, mask=o_i < num_pairs, other=-1)
    b_row = tl.gather(b_end - b_total + b_before, tl.maximum(b_i, 0), 0)
    for first in tl.static_range(0, CHUNK, BLOCK_J):
        # [BLOCK_J]
        o_j = pid * CHUNK + first + tl.arange(0, BLOCK_J)
        b_j = tl.load(ids_ptr + o_j, mask=o_j < num_pairs, other=-1)
        m_same = (b_j[None, :] == b_i[:, None]) & (o_j[None, :] < o_i[:, None])
        b_row += tl.sum(m_same.to(tl.int32), 1)
    _write_places(plan_ptr, order_start, num_pairs, o_i, b_row, b_i >= 0)


def align(
    ids_TA: Tensor, num_experts: int, tile_rows: int, tail_rows: int = 0, *, use_pdl: bool
) -> Plan:
    """Sort the pairs of `ids_TA` by expert, stably; -1 is left out.

    Nothing here depends on values, so the call can be captured in a CUDA graph.
    """
    num_pairs = ids_TA.numel()
    max_tiles = min(num_pairs, num_pairs // tile_rows + num_experts)
    plan = Plan(
        torch.empty(4 + 4 * max_tiles + 2 * num_pairs, dtype=torch.int32, device=ids_TA.device),
        tile_rows,
        max_tiles,
        num_pairs,
        tail_rows,
    )
    block_e = max(16, triton.next_power_of_2(num_experts))
    launch = {"USE_PDL": use_pdl, "launch_pdl": use_pdl, "num_warps": 4}
    if num_pairs <= MAX_PAIRS_AT_ONCE:
        block_p = max(16, triton.next_power_of_2(num_pairs))
        block_i = 32 if num_pairs <= 512 else 16
        _align_kernel[(1 + triton.cdiv(num_pairs, block_i),)](
            ids_TA,
            plan.data,
            plan.order_start,
            num_pairs,
            BLOCK_P=block_p,
            BLOCK_I=block_i,
            BLOCK_J=min(512, block_p),
            BLOCK_E=block_e,
            BLOCK_M=tile_rows,
            TAIL_M=tail_rows,
            **launch,
        )
        return plan
    num_chunks = triton.cdiv(num_pairs, CHUNK)
    counts = torch.empty(num_chunks * block_e, dtype=torch.int32, device=ids_TA.device)
    _count_kernel[(num_chunks,)](ids_TA, counts, num_pairs, CHUNK=CHUNK, BLOCK_E=block_e, **launch)
    _place_kernel[(num_chunks,)](
        ids_TA,
        counts,
        plan.data,
        plan.order_start,
        num_pairs,
        num_chunks,
        CHUNK=CHUNK,
        BLOCK_J=32,
        BLOCK_N=32,
        BLOCK_E=block_e,
        BLOCK_M=tile_rows,
        TAIL_M=tail_rows,
        **(launch | {"num_warps": 8}),
    )
    return plan

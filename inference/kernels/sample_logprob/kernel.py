"""Two launches: every chunk of a row of logits on its own, then one program a row.

A token's sum is its logit and the noise -log(e), where e = -log(1 - u) is above the uniform u. So
its logit and -log(u) make a bound of its sum, and a close one where u is small, as it is for most
winners. The first launch finds the largest bound of every few ids, from 32 bits of u and one
approximate logarithm. The second one takes the ids with the largest bound, computes their sums in
FP64, and is done when the best sum is above every other bound: at once, nearly always.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference.kernels.hardware import USE_PDL
from inference.kernels.mix64_kernel import GOLDEN, mix64
from inference.kernels.sample_logprob import reference
from inference.kernels.sample_logprob.reference import SampledTokens

LANES = 4
"""Neighbouring ids that one thread reads at once; a tile is that of every thread."""

CHUNK_TILES, CHUNK_WARPS = 8, 1
"""The same for any number of rows, so that a row's sums do not depend on it."""

LOG2_E = tl.constexpr(1.4426950408889634)
BOUND_ERROR = tl.constexpr(1e-4)
"""In units of ln 2, above what a bound loses to rounding (2.2e-5: see `_bounds`), and"""
RELATIVE_ERROR = tl.constexpr(2.0**-20)
"""a share of the sum (5 * 2^-24)."""


@triton.jit
def _row_key(seeds_ptr, positions_ptr, i_row):
    seed = tl.load(seeds_ptr + i_row).to(tl.uint64)
    position = tl.load(positions_ptr + i_row).to(tl.uint64)
    return mix64(mix64(seed + GOLDEN) + position * GOLDEN)


@triton.jit
def _bounds(b_x, scale, b_high, FAST: tl.constexpr):
    """log2 of exp(x / temperature) / b_high (uint32); scale is log2(e) / temperature.

    FP32 errs with r = 2^-24 by 3 r in the scale and the quotient it stands for, by 1.5 r in the
    logarithm of a rounded number, by 2^-17 in the approximate logarithm of up to 2^32, and by r in
    the sum, and again where 32 is added: 2^-17 + 230 r + 5 r |bound|, as |x * scale| is at most
    |bound| + 64.
    """
    b_number = b_high.to(tl.float32)
    return b_x * scale - (libdevice.fast_log2f(b_number) if FAST else tl.log2(b_number))


@triton.jit
def _gumbel_fp64(row_key, o_id):
    words = mix64(row_key + (o_id + 1).to(tl.uint64) * GOLDEN)
    bits = (words >> 12).to(tl.int64)
    # 1 - u with u = (bits + 1/2) 2^-52 has 53 bits: exact, and so log(1 - u) is as good as log1p.
    rest = (9007199254740991 - 2 * bits).to(tl.float64) * 1.1102230246251565e-16
    return -tl.log(-tl.log(rest))


@triton.jit
def _divisor(temperature, HAS_SCALED: tl.constexpr):
    """By what the logits drawn from are still to be divided."""
    return tl.where((temperature == 0.0) | HAS_SCALED, 1.0, temperature)


@triton.jit
def _below_largest(b_x):
    """The largest of all, and x - largest: -inf where all are."""
    largest = tl.max(tl.max(b_x, 0), 0)
    return largest, b_x - tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _add3(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def _chunk_kernel(
    logits_ptr,
    scaled_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    bounds_ptr,
    stats_ptr,
    vocab_size,
    stride_logits,
    stride_scaled,
    HAS_SCALED: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """bounds[row, chunk, TILE // LANES], each of LANES ids of every tile; stats[row, 5, chunk]."""
    i_chunk, num_chunks, i_row = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    i_row64 = i_row.to(tl.int64)
    o_tile, o_column = tl.arange(0, NUM_TILES) * TILE, tl.arange(0, TILE)
    first_id = i_chunk * (NUM_TILES * TILE)
    # [NUM_TILES, TILE]
    o_id = first_id + o_tile[:, None] + o_column[None, :]
    m_id = o_id < vocab_size
    p_logit = logits_ptr + i_row64 * stride_logits + o_id
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if first_id + NUM_TILES * TILE <= vocab_size:
        b_logit = tl.load(p_logit)
        b_inside = b_logit
    else:
        b_logit = tl.load(p_logit, mask=m_id, other=float("-inf"))
        b_inside = tl.where(m_id, b_logit, 0.0)
    b_x = b_logit
    if HAS_SCALED:
        b_x = tl.load(scaled_ptr + i_row64 * stride_scaled + o_id, mask=m_id, other=float("-inf"))
    temperature = tl.load(temperature_ptr + i_row)
    divisor = _divisor(temperature, HAS_SCALED)
    scale = tl.div_rn(LOG2_E, divisor)
    if temperature != 0.0:
        row_key = _row_key(seeds_ptr, positions_ptr, i_row)
        column_word = row_key + (first_id + 1 + o_column).to(tl.uint64) * GOLDEN
        b_word = column_word[None, :] + (o_tile.to(tl.uint64) * GOLDEN)[:, None]
        b_high = (mix64(b_word) >> 32).to(tl.uint32)
        b_bound = tl.max(_bounds(b_x, scale, b_high, FAST), 0)
        b_bound = 32.0 + tl.max(tl.reshape(b_bound, (TILE // LANES, LANES)), 1)
        o_group = tl.arange(0, TILE // LANES)
        tl.store(bounds_ptr + (i_row64 * num_chunks + i_chunk) * (TILE // LANES) + o_group, b_bound)

    largest, b_below = _below_largest(b_logit)
    b_sum = tl.sum(tl.exp2(b_below * LOG2_E), 0)
    largest_x, b_sum_x = largest, b_sum
    if HAS_SCALED:
        largest_x, b_below = _below_largest(b_x)
    if HAS_SCALED or divisor != 1.0:
        b_sum_x = tl.sum(tl.exp2(b_below * scale), 0)
    # 0, or NaN where a logit is not finite.
    b_zero = tl.sum(b_inside * 0.0, 0)
    exp_sum, exp_sum_x, zero = tl.reduce((b_sum, b_sum_x, b_zero), 0, _add3)
    p_stats = stats_ptr + i_row64 * 5 * num_chunks + i_chunk
    tl.store(p_stats, largest)
    tl.store(p_stats + num_chunks, exp_sum)
    tl.store(p_stats + 2 * num_chunks, largest_x)
    tl.store(p_stats + 3 * num_chunks, exp_sum_x)
    tl.store(p_stats + 4 * num_chunks, zero)


@triton.jit
def _log_sum_exp(b_largest, b_sum, scale):
    """(largest, log Σ exp((x - largest) * scale ln 2)) over chunks."""
    largest = tl.max(b_largest, 0)
    b_share = tl.exp2((b_largest - tl.where(largest == float("-inf"), 0.0, largest)) * scale)
    # A chunk of nothing but -inf has share 0 and sum 0.
    return largest, tl.log(tl.sum(b_share * b_sum, 0))


@triton.jit
def _lowest_id(row_ptr, i_chunk, value, vocab_size, CHUNK: tl.constexpr):
    """The lowest id of the chunk with this logit."""
    o_id = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_x = tl.load(row_ptr + o_id, mask=o_id < vocab_size, other=float("-inf"))
    return tl.min(tl.where(b_x == value, o_id, vocab_size - 1), 0)


@triton.jit
def _drawn_id(
    row_ptr,
    row_key,
    divisor,
    b_bound,
    o_group,
    vocab_size,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """The lowest id with the largest sum, by groups of falling bounds."""
    o_local = tl.arange(0, NUM_TILES * LANES)
    o_local = o_local // LANES * TILE + o_local % LANES
    best, best_id = tl.full([], float("-inf"), tl.float64), tl.full([], 0, tl.int32)
    limit = tl.full([], float("-inf"), tl.float32)
    bound, i_group = tl.max(b_bound, 0, return_indices=True)
    while bound > limit:
        i_chunk, i_lanes = i_group // (TILE // LANES), i_group % (TILE // LANES)
        o_id = i_chunk * (NUM_TILES * TILE) + i_lanes * LANES + o_local
        b_x = tl.load(row_ptr + o_id, mask=o_id < vocab_size, other=float("-inf"))
        b_sum = tl.div_rn(b_x, divisor).to(tl.float64) + _gumbel_fp64(row_key, o_id)
        largest = tl.max(b_sum, 0)
        first = tl.min(tl.where(b_sum == largest, o_id, vocab_size - 1), 0)
        is_better = (largest > best) | ((largest == best) & (first < best_id))
        best_id = tl.where(is_better, first, best_id)
        best = tl.maximum(largest, best)
        limit = (best * LOG2_E).to(tl.float32)
        limit -= BOUND_ERROR + RELATIVE_ERROR * tl.abs(limit)
        b_bound = tl.where(o_group == i_group, float("-inf"), b_bound)
        bound, i_group = tl.max(b_bound, 0, return_indices=True)
    return best_id


@triton.jit
def _row_kernel(
    logits_ptr,
    scaled_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    bounds_ptr,
    stats_ptr,
    ids_ptr,
    logprobs_ptr,
    raw_logprobs_ptr,
    is_finite_ptr,
    vocab_size,
    num_chunks,
    stride_logits,
    stride_scaled,
    HAS_SCALED: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    i_row = tl.program_id(0)
    i_row64 = i_row.to(tl.int64)
    o_group, o_chunk = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_CHUNKS)
    m_chunk = o_chunk < num_chunks
    num_groups = num_chunks * (TILE // LANES)
    logits_row = logits_ptr + i_row64 * stride_logits
    scaled_row = scaled_ptr + i_row64 * stride_scaled
    p_stats = stats_ptr + i_row64 * 5 * num_chunks + o_chunk
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    temperature = tl.load(temperature_ptr + i_row)
    divisor = _divisor(temperature, HAS_SCALED)
    b_largest = tl.load(p_stats, mask=m_chunk, other=float("-inf"))
    b_sum = tl.load(p_stats + num_chunks, mask=m_chunk, other=0.0)
    b_largest_x = tl.load(p_stats + 2 * num_chunks, mask=m_chunk, other=float("-inf"))
    b_sum_x = tl.load(p_stats + 3 * num_chunks, mask=m_chunk, other=0.0)
    b_zero = tl.load(p_stats + 4 * num_chunks, mask=m_chunk, other=0.0)
    largest, log_sum = _log_sum_exp(b_largest, b_sum, LOG2_E)
    if temperature == 0.0:
        i_chunk = tl.min(tl.where(b_largest == largest, o_chunk, num_chunks), 0)
        best_id = _lowest_id(logits_row, i_chunk, largest, vocab_size, NUM_TILES * TILE)
    else:
        p_bound = bounds_ptr + i_row64 * num_groups + o_group
        b_bound = tl.load(p_bound, mask=o_group < num_groups, other=float("-inf"))
        row_key = _row_key(seeds_ptr, positions_ptr, i_row)
        best_id = _drawn_id(
            scaled_row, row_key, divisor, b_bound, o_group, vocab_size, NUM_TILES, TILE, LANES
        )
    raw_logprob = tl.load(logits_row + best_id) - largest - log_sum
    largest_x, log_sum_x = _log_sum_exp(b_largest_x, b_sum_x, tl.div_rn(LOG2_E, divisor))
    x = tl.div_rn(tl.load(scaled_row + best_id), divisor)
    logprob = x - tl.div_rn(largest_x, divisor) - log_sum_x
    tl.store(ids_ptr + i_row, best_id.to(tl.int64))
    tl.store(raw_logprobs_ptr + i_row, raw_logprob)
    tl.store(logprobs_ptr + i_row, tl.where(temperature == 0.0, raw_logprob, logprob))
    tl.store(is_finite_ptr + i_row, tl.sum(b_zero, 0) == 0.0)


def sample_logprob(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    has_cuts: bool | None,
) -> SampledTokens:
    """`has_cuts` None looks at the rows, which waits for the device."""
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    scaled_RV = None
    if has_cuts is None:
        has_cuts = bool(((top_k_R > 0) | (top_p_R < 1) | (min_p_R > 0)).any())
    if has_cuts:
        scaled_RV = reference.scale_and_cut(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    return draw(logits_RV, scaled_RV, temperature_R, seeds_R, positions_R)


def draw(
    logits_RV: Tensor,
    scaled_RV: Tensor | None,
    temperature_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
) -> SampledTokens:
    """Sample from `scaled_RV`, which is `logits_RV / temperature` unless given.

    Both with the ids of a row side by side (stride 1).
    """
    num_rows, vocab_size = logits_RV.shape
    device = logits_RV.device
    ids_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    logprobs_R, raw_logprobs_R = (torch.empty(num_rows, device=device) for _ in range(2))
    is_finite_R = torch.empty(num_rows, dtype=torch.bool, device=device)
    out = SampledTokens(ids_R, logprobs_R, raw_logprobs_R, is_finite_R)
    if num_rows == 0:
        return out
    tile = CHUNK_WARPS * 32 * LANES
    num_chunks = triton.cdiv(vocab_size, CHUNK_TILES * tile)
    bounds = torch.empty(num_rows, num_chunks, tile // LANES, device=device)
    stats = torch.empty(num_rows, 5, num_chunks, device=device)
    scaled = logits_RV if scaled_RV is None else scaled_RV
    options = {
        "HAS_SCALED": scaled_RV is not None,
        "NUM_TILES": CHUNK_TILES,
        "TILE": tile,
        "LANES": LANES,
        "PDL": USE_PDL,
        "launch_pdl": USE_PDL,
    }
    rows = (logits_RV, scaled, temperature_R, seeds_R, positions_R, bounds, stats)
    _chunk_kernel[(num_chunks, num_rows)](
        *rows,
        vocab_size,
        logits_RV.stride(0),
        scaled.stride(0),
        FAST=logits_RV.is_cuda,
        num_warps=CHUNK_WARPS,
        **options,
    )
    _row_kernel[(num_rows,)](
        *rows,
        *out,
        vocab_size,
        num_chunks,
        logits_RV.stride(0),
        scaled.stride(0),
        BLOCK_GROUPS=triton.next_power_of_2(num_chunks * tile // LANES),
        BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=8,
        **options,
    )
    return out

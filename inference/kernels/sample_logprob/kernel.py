"""Two launches: every chunk of a row of logits on its own, then one program a row.

The noise is needed in FP64 only where it can decide. The first launch adds it up in FP32, whose
error has a bound, and keeps the largest sum of every 128 ids; the second one recomputes in FP64
only the groups whose largest sum lies within twice that bound of the row's: one, nearly always.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference.kernels.hardware import USE_PDL
from inference.kernels.mix64_kernel import GOLDEN, mix64
from inference.kernels.sample_logprob import reference
from inference.kernels.sample_logprob.reference import SampledTokens

GROUP = 128
"""Ids that share one entry of `peaks`."""

CHUNK_GROUPS, CHUNK_WARPS = 8, 4
"""The same for any number of rows, so that a row's sums do not depend on it."""

LOG2_E = tl.constexpr(1.4426950408889634)
NOISE_ERROR = tl.constexpr(1e-4)
"""Above |FP32 noise - FP64 noise| (5e-6: see `_gumbel_fp32`)."""
SUM_ERROR = tl.constexpr(2.0**-20)
"""Above the relative error of temperature scaling and addition in FP32 (2^-22)."""


@triton.jit
def _row_key(seeds_ptr, positions_ptr, i_row):
    seed = tl.load(seeds_ptr + i_row).to(tl.uint64)
    position = tl.load(positions_ptr + i_row).to(tl.uint64)
    return mix64(mix64(seed + GOLDEN) + position * GOLDEN)


@triton.jit
def _uniform_bits(row_key, o_id):
    """52 random bits of each id, as int64."""
    words = mix64(row_key + (o_id + 1).to(tl.uint64) * GOLDEN)
    return (words >> 12).to(tl.int64)


@triton.jit
def _gumbel_fp64(bits):
    # 1 - u with u = (bits + 1/2) 2^-52 has 53 bits: exact, and so log(1 - u) is as good as log1p.
    rest = (9007199254740991 - 2 * bits).to(tl.float64) * 1.1102230246251565e-16
    return -tl.log(-tl.log(rest))


@triton.jit
def _gumbel_fp32(bits):
    """Within 5e-6 at every place, the ends included: log of u or 1 - u, whichever is small."""
    is_low = bits < 2251799813685248
    small = tl.where(is_low, bits, 4503599627370495 - bits)
    # min(u, 1 - u) with 24 bits, however small it is.
    part = (small.to(tl.float32) + 0.5) * 2.220446049250313e-16
    exact = -tl.log(tl.where(is_low, 1.0 - part, part))
    series = part * (1.0 + part * (0.5 + part * (0.33333334 + part * (0.25 + part * 0.2))))
    return -tl.log(tl.where(is_low & (part < 0.0625), series, exact))


@triton.jit
def _exp_sum(b_x, largest):
    """Σ exp(x - largest); 0 where all are -inf."""
    return tl.sum(tl.exp2((b_x - tl.where(largest == float("-inf"), 0.0, largest)) * LOG2_E))


@triton.jit
def _chunk_kernel(
    logits_ptr,
    scaled_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    peaks_ptr,
    stats_ptr,
    vocab_size,
    num_groups,
    stride_logits,
    stride_scaled,
    HAS_SCALED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of NUM_GROUPS groups of a row: peaks[row, group], and stats[row, chunk] of 5 values."""
    i_chunk, num_chunks, i_row = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    o_group = tl.arange(0, NUM_GROUPS)
    # [NUM_GROUPS, GROUP]
    o_id = i_chunk * NUM_GROUPS * GROUP + o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    m_id = o_id < vocab_size
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    temperature = tl.load(temperature_ptr + i_row)
    is_greedy = temperature == 0.0
    p_logits = logits_ptr + i_row.to(tl.int64) * stride_logits + o_id
    b_logit = tl.load(p_logits, mask=m_id, other=float("-inf"))
    is_scaled = (temperature != 1.0) & (is_greedy == 0)
    if HAS_SCALED:
        p_scaled = scaled_ptr + i_row.to(tl.int64) * stride_scaled + o_id
        b_scaled = tl.load(p_scaled, mask=m_id, other=float("-inf"))
    else:
        b_scaled = b_logit
        if is_scaled:
            b_scaled = tl.div_rn(b_logit, tl.zeros_like(b_logit) + temperature)
    b_noise = _gumbel_fp32(_uniform_bits(_row_key(seeds_ptr, positions_ptr, i_row), o_id))
    b_sum = tl.where(is_greedy, b_logit, b_scaled + b_noise)
    o_peak = i_chunk * NUM_GROUPS + o_group
    p_peak = peaks_ptr + i_row.to(tl.int64) * num_groups + o_peak
    tl.store(p_peak, tl.max(b_sum, 1), mask=o_peak < num_groups)

    largest = tl.max(tl.max(b_logit, 1), 0)
    exp_sum = _exp_sum(b_logit, largest)
    largest_scaled, exp_sum_scaled = largest, exp_sum
    if is_scaled or HAS_SCALED:
        largest_scaled = tl.max(tl.max(b_scaled, 1), 0)
        exp_sum_scaled = _exp_sum(b_scaled, largest_scaled)
    m_bad = (tl.abs(b_logit) < float("inf")) == 0
    p_stats = stats_ptr + (i_row.to(tl.int64) * 5) * num_chunks + i_chunk
    tl.store(p_stats, largest)
    tl.store(p_stats + num_chunks, exp_sum)
    tl.store(p_stats + 2 * num_chunks, largest_scaled)
    tl.store(p_stats + 3 * num_chunks, exp_sum_scaled)
    tl.store(p_stats + 4 * num_chunks, tl.max(tl.max((m_bad & m_id).to(tl.float32), 1), 0))


@triton.jit
def _log_sum_exp(p_largest, p_sum, mask):
    """(largest, log Σ exp(x - largest)) over chunks."""
    b_largest = tl.load(p_largest, mask=mask, other=float("-inf"))
    b_sum = tl.load(p_sum, mask=mask, other=0.0)
    largest = tl.max(b_largest, 0)
    b_share = tl.exp2((b_largest - tl.where(largest == float("-inf"), 0.0, largest)) * LOG2_E)
    # A chunk of nothing but -inf has share 0 and sum 0.
    return largest, tl.log(tl.sum(b_share * b_sum, 0))


@triton.jit
def _row_kernel(
    logits_ptr,
    scaled_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    peaks_ptr,
    stats_ptr,
    ids_ptr,
    logprobs_ptr,
    raw_logprobs_ptr,
    is_finite_ptr,
    vocab_size,
    num_groups,
    num_chunks,
    stride_logits,
    stride_scaled,
    HAS_SCALED: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    i_row = tl.program_id(0)
    i_row64 = i_row.to(tl.int64)
    o_group = tl.arange(0, BLOCK_GROUPS)
    o_chunk = tl.arange(0, BLOCK_CHUNKS)
    o_local = tl.arange(0, GROUP)
    m_chunk = o_chunk < num_chunks
    logits_row = logits_ptr + i_row64 * stride_logits
    scaled_row = scaled_ptr + i_row64 * stride_scaled
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    temperature = tl.load(temperature_ptr + i_row)
    is_greedy = temperature == 0.0
    divisor = tl.where(is_greedy, 1.0, temperature)
    row_key = _row_key(seeds_ptr, positions_ptr, i_row)

    p_peak = peaks_ptr + i_row64 * num_groups + o_group
    b_peak = tl.load(p_peak, mask=o_group < num_groups, other=float("-inf"))
    peak = tl.max(b_peak, 0)
    margin = tl.where(tl.abs(peak) < float("inf"), NOISE_ERROR + SUM_ERROR * tl.abs(peak), 0.0)
    m_open = (b_peak >= peak - 2.0 * margin) & (o_group < num_groups)
    best = tl.full([], float("-inf"), tl.float64)
    best_id = tl.full([], 0, tl.int32)
    i_group = tl.min(tl.where(m_open, o_group, num_groups), 0)
    # Ascending groups and a strict comparison: among equal sums the lowest id stays.
    while i_group < num_groups:
        o_id = i_group * GROUP + o_local
        m_id = o_id < vocab_size
        b_logit = tl.load(logits_row + o_id, mask=m_id, other=float("-inf"))
        if HAS_SCALED:
            b_scaled = tl.load(scaled_row + o_id, mask=m_id, other=float("-inf"))
        else:
            b_scaled = tl.div_rn(b_logit, divisor)
        b_noise = _gumbel_fp64(_uniform_bits(row_key, o_id))
        b_sum = tl.where(is_greedy, b_logit.to(tl.float64), b_scaled.to(tl.float64) + b_noise)
        largest = tl.max(b_sum, 0)
        first = tl.min(tl.where(b_sum == largest, o_id, vocab_size - 1), 0)
        best_id = tl.where(largest > best, first, best_id)
        best = tl.maximum(largest, best)
        m_open = m_open & (o_group > i_group)
        i_group = tl.min(tl.where(m_open, o_group, num_groups), 0)

    p_stats = stats_ptr + i_row64 * 5 * num_chunks + o_chunk
    raw_largest, raw_log = _log_sum_exp(p_stats, p_stats + num_chunks, m_chunk)
    largest, log_sum = _log_sum_exp(p_stats + 2 * num_chunks, p_stats + 3 * num_chunks, m_chunk)
    b_bad = tl.load(p_stats + 4 * num_chunks, mask=m_chunk, other=0.0)
    logit = tl.load(logits_row + best_id)
    scaled = tl.load(scaled_row + best_id) if HAS_SCALED else tl.div_rn(logit, divisor)
    raw_logprob = logit - raw_largest - raw_log
    tl.store(ids_ptr + i_row, best_id.to(tl.int64))
    tl.store(raw_logprobs_ptr + i_row, raw_logprob)
    logprob = tl.where(is_greedy, raw_logprob, scaled - largest - log_sum)
    tl.store(logprobs_ptr + i_row, logprob)
    tl.store(is_finite_ptr + i_row, tl.max(b_bad, 0) == 0.0)


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
    """Sample from `scaled_RV`, which is `logits_RV / temperature` unless given."""
    num_rows, vocab_size = logits_RV.shape
    device = logits_RV.device
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    ids_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    logprobs_R, raw_logprobs_R = (torch.empty(num_rows, device=device) for _ in range(2))
    is_finite_R = torch.empty(num_rows, dtype=torch.bool, device=device)
    out = SampledTokens(ids_R, logprobs_R, raw_logprobs_R, is_finite_R)
    if num_rows == 0:
        return out
    groups_per_chunk, num_warps = CHUNK_GROUPS, CHUNK_WARPS
    num_groups = triton.cdiv(vocab_size, GROUP)
    num_chunks = triton.cdiv(num_groups, groups_per_chunk)
    peaks = torch.empty(num_rows, num_groups, device=device)
    stats = torch.empty(num_rows, 5, num_chunks, device=device)
    scaled = logits_RV if scaled_RV is None else scaled_RV
    has_scaled = scaled_RV is not None
    launch = {"launch_pdl": True} if USE_PDL else {}
    _chunk_kernel[(num_chunks, num_rows)](
        logits_RV,
        scaled,
        temperature_R,
        seeds_R,
        positions_R,
        peaks,
        stats,
        vocab_size,
        num_groups,
        logits_RV.stride(0),
        scaled.stride(0),
        HAS_SCALED=has_scaled,
        NUM_GROUPS=groups_per_chunk,
        GROUP=GROUP,
        PDL=USE_PDL,
        num_warps=num_warps,
        **launch,
    )
    _row_kernel[(num_rows,)](
        logits_RV,
        scaled,
        temperature_R,
        seeds_R,
        positions_R,
        peaks,
        stats,
        ids_R,
        logprobs_R,
        raw_logprobs_R,
        is_finite_R,
        vocab_size,
        num_groups,
        num_chunks,
        logits_RV.stride(0),
        scaled.stride(0),
        HAS_SCALED=has_scaled,
        BLOCK_GROUPS=triton.next_power_of_2(num_groups),
        BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
        GROUP=GROUP,
        PDL=USE_PDL,
        num_warps=4,
        **launch,
    )
    return out

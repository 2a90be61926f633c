"""Sampling by Gumbel-max with counter-based noise.

Adding -log(e) with e ~ Exp(1) to the logits and taking the largest draws from their softmax. The
noise of (seed, position, vocabulary id) is a hash, so it is the same in any batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from inference.kernels.mix64 import GOLDEN, as_int64, mix64


class SampledTokens(NamedTuple):
    """One token a row."""

    ids_R: Tensor
    """int64"""
    logprobs_R: Tensor
    """FP32: under the distribution really sampled from, after temperature and truncation."""
    raw_logprobs_R: Tensor
    """FP32: under the model's own distribution, temperature 1 and nothing cut."""
    is_finite_R: Tensor
    """bool: False where a logit of the row is NaN or infinite."""


def sample_logprob(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
) -> SampledTokens:
    is_greedy_R = temperature_R == 0
    scaled_RV = scale_and_cut(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    noise_RV = gumbel_noise(seeds_R, positions_R, logits_RV.shape[1])
    sampled_R = (scaled_RV + noise_RV).argmax(-1)
    ids_R = torch.where(is_greedy_R, logits_RV.argmax(-1), sampled_R)
    chosen_R1 = ids_R[:, None]
    raw_R = logits_RV.log_softmax(-1).gather(-1, chosen_R1).squeeze(-1)
    logprobs_R = scaled_RV.log_softmax(-1).gather(-1, chosen_R1).squeeze(-1)
    logprobs_R = torch.where(is_greedy_R, raw_R, logprobs_R)
    return SampledTokens(ids_R, logprobs_R, raw_R, logits_RV.isfinite().all(-1))


def scale_and_cut(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor
) -> Tensor:
    """Logits over temperature, -inf where a cut takes the token; greedy rows stay as they are."""
    is_greedy_R = temperature_R == 0
    scaled_RV = logits_RV / torch.where(is_greedy_R, 1.0, temperature_R)[:, None]
    is_cut_R = ((top_k_R > 0) | (top_p_R < 1)) & ~is_greedy_R
    if is_cut_R.any():
        scaled_RV[is_cut_R] = keep_top(scaled_RV[is_cut_R], top_k_R[is_cut_R], top_p_R[is_cut_R])
    if (min_p_R > 0).any():
        least_R = scaled_RV.amax(-1) + torch.where(is_greedy_R, 0.0, min_p_R).log()
        scaled_RV = torch.where(scaled_RV < least_R[:, None], -torch.inf, scaled_RV)
    return scaled_RV


def keep_top(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """-inf for all but the `top_k` best (ties to the lower id), then for all but the nucleus.

    The nucleus is the shortest run of best tokens whose probabilities, renormalised after top-k,
    reach `top_p`; it is never empty.
    """
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    is_kept_RV = (rank_V < top_k_R[:, None]) | (top_k_R == 0)[:, None]
    probs_RV = torch.where(is_kept_RV, sorted_RV, -torch.inf).double().softmax(-1)
    mass_before_RV = probs_RV.cumsum(-1) - probs_RV
    is_kept_RV &= (mass_before_RV < top_p_R[:, None]) | (top_p_R >= 1)[:, None]
    sorted_RV = torch.where(is_kept_RV, sorted_RV, -torch.inf)
    return torch.empty_like(logits_RV).scatter_(-1, order_RV, sorted_RV)


def gumbel_noise(seeds_R: Tensor, positions_R: Tensor, vocab_size: int) -> Tensor:
    """[R, V] FP64 standard Gumbel variables, a pure function of (seed, position, id)."""
    golden = as_int64(GOLDEN)
    id_V = torch.arange(1, vocab_size + 1, device=seeds_R.device)
    row_R1 = mix64(mix64(seeds_R + golden) + positions_R * golden)[:, None]
    bits_RV = mix64(row_R1 + id_V * golden)
    # 52 bits and a half: exact in FP64 and never 0 or 1. Small e, the winners, keep full precision.
    uniform_RV = (((bits_RV >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log1p(-uniform_RV))

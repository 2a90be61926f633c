"""What is maximised for each token: the surrogates of the GRPO family, and the level of the ratio.

Each surrogate takes the ratio r = π / π_old of every token and its advantage A, and tells which
tokens it cut on the low side (a bad token that is already less likely) and on the high side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ObjectiveKind = Literal["ppo_clip", "cispo", "dppo_tv", "pg"]
OBJECTIVES: tuple[ObjectiveKind, ...] = ("ppo_clip", "cispo", "dppo_tv", "pg")


@dataclass(frozen=True, slots=True)
class Surrogate:
    """To be maximised; all [T]."""

    value_T: Tensor
    is_cut_low_T: Tensor
    """bool"""
    is_cut_high_T: Tensor


def ppo_clip(
    ratio_T: Tensor, advantages_T: Tensor, *, low: float, high: float, dual: float | None
) -> Surrogate:
    """min(r·A, clip(r, 1-low, 1+high)·A) (arXiv:1707.06347; two bounds: arXiv:2503.14476).

    Args:
        dual: bound c on r where A < 0: the value is at least c·A (arXiv:1912.09729).
    """
    clipped_T = ratio_T.clamp(1 - low, 1 + high)
    value_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    if dual is not None:
        bounded_T = torch.maximum(value_T, dual * advantages_T)
        value_T = torch.where(advantages_T < 0, bounded_T, value_T)
    return Surrogate(
        value_T,
        (advantages_T < 0) & (ratio_T < 1 - low),
        (advantages_T > 0) & (ratio_T > 1 + high),
    )


def cispo(ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, *, high: float) -> Surrogate:
    """sg(min(r, 1+high))·A·log π: the weight is cut, never the token (arXiv:2506.13585, eq. 4).

    As MiniMax-M1 trained with it: no lower bound.
    """
    weight_T = ratio_T.detach().clamp(max=1 + high)
    is_cut_T = ratio_T > 1 + high
    return Surrogate(weight_T * advantages_T * logprobs_T, torch.zeros_like(is_cut_T), is_cut_T)


def dppo_tv(
    ratio_T: Tensor,
    logprobs_T: Tensor,
    behaviour_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    low: float,
    high: float,
) -> Surrogate:
    """r·A, but 0 where the update leads out of a trust region around μ (arXiv:2602.04879).

    A token is out when its probability π has fallen by more than `low` below that of μ, which
    sampled it, and A < 0; or has risen by more than `high` above it, and A > 0.
    """
    moved_T = (logprobs_T.exp() - behaviour_logprobs_T.exp()).detach()
    is_cut_low_T = (advantages_T < 0) & (moved_T < -low)
    is_cut_high_T = (advantages_T > 0) & (moved_T > high)
    value_T = (ratio_T * advantages_T).masked_fill(is_cut_low_T | is_cut_high_T, 0.0)
    return Surrogate(value_T, is_cut_low_T, is_cut_high_T)


def policy_gradient(logprobs_T: Tensor, advantages_T: Tensor) -> Surrogate:
    """A·log π: REINFORCE, right for samples of the policy itself alone."""
    never_T = torch.zeros_like(advantages_T, dtype=torch.bool)
    return Surrogate(advantages_T * logprobs_T, never_T, never_T)


def sequence_mean(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """[T] the mean of the values of a token's own sequence, differentiable.

    Of log ratios it is the logarithm of GSPO's ratio (arXiv:2507.18071, eq. 7). Every sequence must
    be whole in the micro-batch.
    """
    total_B = values_T.new_zeros(num_sequences).index_add(0, sequence_T, values_T)
    return (total_B / _lengths(values_T, sequence_T, num_sequences))[sequence_T]


def sequence_weight(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """[T] one over the number of trained tokens of each token's own sequence."""
    return _lengths(values_T, sequence_T, num_sequences).reciprocal()[sequence_T]


def _lengths(like_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    ones_T = torch.ones_like(like_T, requires_grad=False)
    counts_B = like_T.new_zeros(num_sequences).index_add(0, sequence_T, ones_T)
    return counts_B.clamp(min=1)

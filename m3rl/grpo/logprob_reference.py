"""Passes over the logits of some ids in plain torch: the truth for `logprob_kernel`."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST, TOTAL, WEIGHTED, CHOSEN = range(4)
"""Rows of the sums that `fold` updates; y is how far a logit is below the largest one so far, over
the temperature: the largest logit, Σ exp(y), Σ exp(y) y, and the logit of the target."""


def new_sums(targets_T: Tensor, dtype: torch.dtype) -> Tensor:
    """[4, T], before the first id; a target that is never met leaves NaN."""
    sums_4T = torch.zeros(4, len(targets_T), dtype=dtype, device=targets_T.device)
    sums_4T[LARGEST] = -torch.inf
    sums_4T[CHOSEN] = torch.nan
    return sums_4T


def fold(
    sums_4T: Tensor, logits_TN: Tensor, targets_T: Tensor, first_id: int, inverse: float
) -> None:
    """Add the ids first_id .. first_id + N to the sums, in place; the logits may be overwritten.

    Args:
        inverse: 1 / temperature.
    """
    place_T = targets_T - first_id
    num_ids = logits_TN.shape[1]
    is_here_T = (place_T >= 0) & (place_T < num_ids)
    chosen_T = logits_TN.gather(1, place_T.clamp(0, num_ids - 1)[:, None]).squeeze(1)
    sums_4T[CHOSEN] = torch.where(is_here_T, chosen_T, sums_4T[CHOSEN])
    largest_T = torch.maximum(sums_4T[LARGEST], logits_TN.amax(1))
    shift_T = largest_T.masked_fill(largest_T == -torch.inf, 0.0)
    # Sums so far, seen from the new largest logit.
    below_T = (sums_4T[LARGEST] - shift_T) * inverse
    share_T, total_T = below_T.exp(), sums_4T[TOTAL]
    # The limit of exp(y) y is 0, also at -inf.
    weighted_T = share_T * (sums_4T[WEIGHTED] + total_T * below_T)
    weighted_T.masked_fill_(share_T == 0, 0.0)
    below_TN = logits_TN.sub_(shift_T[:, None]).mul_(inverse)
    exp_TN = below_TN.exp()
    weighted_TN = below_TN.mul_(exp_TN).masked_fill_(exp_TN == 0, 0.0)
    sums_4T[LARGEST] = largest_T
    sums_4T[TOTAL] = share_T * total_T + exp_TN.sum(1)
    sums_4T[WEIGHTED] = weighted_T + weighted_TN.sum(1)


def logits_gradient(
    logits_TN: Tensor,
    targets_T: Tensor,
    first_id: int,
    inverse: float,
    largest_T: Tensor,
    log_total_T: Tensor,
    entropy_T: Tensor,
    grad_T: Tensor,
    grad_entropy_T: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[T, N] of `dtype`: gradients of these ids' logits, which may be overwritten.

    d logp / d logit = (onehot - p) / temperature, d entropy / d logit = -p (log p + entropy) /
    temperature.
    """
    log_p_TN = logits_TN.sub_(largest_T[:, None]).mul_(inverse).sub_(log_total_T[:, None])
    grad_TN = log_p_TN.exp()
    is_zero_TN = grad_TN == 0
    if grad_entropy_T is None:
        grad_TN.mul_(-grad_T[:, None])
    else:
        log_p_TN.add_(entropy_T[:, None]).mul_(grad_entropy_T[:, None]).add_(grad_T[:, None])
        grad_TN.mul_(log_p_TN.neg_())
    grad_TN.masked_fill_(is_zero_TN, 0.0)
    place_T = targets_T - first_id
    num_ids = logits_TN.shape[1]
    onehot_T = torch.where((place_T >= 0) & (place_T < num_ids), grad_T, 0.0)
    grad_TN.scatter_add_(1, place_T.clamp(0, num_ids - 1)[:, None], onehot_T[:, None])
    return grad_TN.mul_(inverse).to(dtype)

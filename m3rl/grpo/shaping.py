"""What is taken off the scorers' rewards before completions are compared.

The completions keep their own rewards: metrics, filters and records speak of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from m3rl.grpo.filters import is_scored
from m3rl.grpo.kl import KlEstimator, kl_to_reference
from m3rl.types import Group, SampleId, TrainBatch


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int, penalty: float) -> float:
    """DAPO's soft punishment of a length, 0 or less (arXiv:2503.14476, eq. 13, times `penalty`).

    0 up to `max_tokens` - `buffer` tokens, from there on falling evenly to -penalty at `max_tokens`
    and beyond.
    """
    over = num_tokens - (max_tokens - buffer)
    if over <= 0:
        return 0.0
    return -penalty * min(over / buffer, 1.0) if buffer else -penalty


def overlong_penalties(
    groups: Sequence[Group], *, max_tokens: int, buffer: int, penalty: float
) -> dict[SampleId, float]:
    """`overlong_penalty` of every scored completion."""
    return {
        c.sample_id: overlong_penalty(
            len(c.completion_ids), max_tokens=max_tokens, buffer=buffer, penalty=penalty
        )
        for group in groups
        for c in group.completions
        if is_scored(c)
    }


@dataclass(frozen=True, slots=True)
class RewardKl:
    """KL of completions from the reference policy, under the policy that sampled them."""

    by_sample: dict[SampleId, float]
    """Summed over the trained tokens of each row, in nats."""
    mean_k1: float
    """Per token."""
    mean_k3: float


def reward_kl(batch: TrainBatch, ref_logprobs_BS: np.ndarray, estimator: KlEstimator) -> RewardKl:
    """KL(μ ‖ π_ref) of the rows of `batch`, which has a trained token.

    Args:
        ref_logprobs_BS: float, log π_ref of every trained token.

    Raises:
        ValueError: the KL of a row is not finite.
    """
    mask_BS = batch.loss_mask_BS
    sampled = torch.from_numpy(batch.behaviour_logprobs_BS[mask_BS].astype(np.float64))
    reference = torch.from_numpy(ref_logprobs_BS[mask_BS].astype(np.float64))
    kl_BS = np.zeros(mask_BS.shape)
    kl_BS[mask_BS] = kl_to_reference(sampled, reference, estimator).numpy()
    kl_B = kl_BS.sum(1)
    if not np.isfinite(kl_B).all():
        bad = batch.sample_ids[int(np.flatnonzero(~np.isfinite(kl_B))[0])]
        raise ValueError(
            f"the KL of sample {bad} from the reference policy is not finite: its logprobs or the "
            "reference's are not; look at mismatch/* of earlier steps"
        )
    return RewardKl(
        dict(zip(batch.sample_ids, kl_B.tolist(), strict=True)),
        float(kl_to_reference(sampled, reference, "k1").mean()),
        float(kl_to_reference(sampled, reference, "k3").mean()),
    )

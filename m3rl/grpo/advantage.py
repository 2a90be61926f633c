"""Rewards of a group become advantages: how much better than its siblings each completion was."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "batch_std", "maxrl"]
ADVANTAGE_KINDS: tuple[AdvantageKind, ...] = ("grpo", "dr_grpo", "rloo", "batch_std", "maxrl")
STD_EPS = 1e-6
"""Added to a standard deviation; small against any reward scale a user would choose."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages in the order of the rewards they were computed from."""

    values_B: np.ndarray
    """[B] float32"""
    is_zero_variance_B: np.ndarray
    """[B] bool: True when all rewards of the sample's group are the same number."""
    num_groups: int
    num_zero_variance_groups: int


def group_advantages(
    rewards_B: Sequence[float] | np.ndarray,
    group_ids: Sequence[Hashable],
    *,
    kind: AdvantageKind,
    eps: float = STD_EPS,
) -> GroupAdvantages:
    """Compare every reward with the rewards of its own group, found by id and never by position.

    With R the rewards of one group of n:

        grpo       (R - mean) / (std + eps), population std            arXiv:2402.03300
        dr_grpo    R - mean                                            arXiv:2503.20783
        rloo       R - mean of the n - 1 others                        arXiv:2402.14740
        batch_std  (R - mean) / (std of R - mean over the batch + eps) REINFORCE++-baseline,
                                                                       arXiv:2501.03262
        maxrl      (R - mean) / mean, for rewards that are not         arXiv:2602.02710
                   negative: rare successes count most

    A group whose largest and smallest reward are equal gets exact zeros: ten rewards of 0.1 have a
    computed std near 1e-9, which must not become a signal.

    Args:
        rewards_B: one finite reward a sample.
        group_ids: the group of each sample; order and grouping are free.
        kind: which baseline.
        eps: added to the std of `grpo` and `batch_std`, in units of reward.

    Raises:
        ValueError: unknown kind, lengths that differ, a reward that is not finite, or with `maxrl`
            one below 0.
    """
    if kind not in ADVANTAGE_KINDS:
        raise ValueError(f"advantage kind {kind!r} is unknown; use one of {ADVANTAGE_KINDS}")
    rewards = np.asarray(rewards_B, dtype=np.float64)
    if rewards.shape != (len(group_ids),):
        raise ValueError(f"rewards of shape {rewards.shape} for {len(group_ids)} group ids")
    if not np.isfinite(rewards).all():
        bad = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise ValueError(
            f"reward of sample {bad} in group {group_ids[bad]!r} is {rewards[bad]}; "
            "leave unscored samples out of the group before comparing it"
        )
    if kind == "maxrl" and len(rewards) and rewards.min() < 0:
        bad = int(rewards.argmin())
        raise ValueError(
            f"reward of sample {bad} in group {group_ids[bad]!r} is {rewards[bad]:g}; "
            "grpo.advantage: maxrl divides by a group's mean reward and needs rewards of 0 or more"
        )
    members: dict[Hashable, list[int]] = {}
    for i, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(i)

    values = np.zeros(len(rewards))
    is_zero_variance = np.zeros(len(rewards), dtype=bool)
    num_zero_variance = 0
    for indices in members.values():
        group_rewards = rewards[indices]
        if group_rewards.max() == group_rewards.min():
            is_zero_variance[indices] = True
            num_zero_variance += 1
        else:
            values[indices] = _advantages_of_one_group(group_rewards, kind, eps)
    if kind == "batch_std":
        # Groups are centred, so the batch is: its std is the root of the mean square.
        values /= np.sqrt(np.sort(values**2).mean()) + eps if len(values) else 1.0
    return GroupAdvantages(
        values.astype(np.float32), is_zero_variance, len(members), num_zero_variance
    )


def _advantages_of_one_group(rewards_G: np.ndarray, kind: AdvantageKind, eps: float) -> np.ndarray:
    # Summed in sorted order: the same rewards give the same bits whatever order they arrived in.
    mean = np.sort(rewards_G).mean()
    centred_G = rewards_G - mean
    if kind == "grpo":
        std = np.sqrt(np.sort(centred_G**2).mean())
        return np.asarray(centred_G / (std + eps))
    if kind == "rloo":
        return np.asarray(centred_G * (len(rewards_G) / (len(rewards_G) - 1)))
    if kind == "maxrl":
        return np.asarray(centred_G / mean)
    return centred_G

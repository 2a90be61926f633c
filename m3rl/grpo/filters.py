"""Which completions and groups can teach something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from m3rl.types import Completion, Group

TruncatedRule = Literal["keep", "mask"]


def is_scored(completion: Completion) -> bool:
    """It came to an end and has a reward: it belongs to its group's baseline."""
    return bool(np.isfinite(completion.reward)) and completion.finish_reason in ("stop", "length")


def is_trained(completion: Completion, truncated: TruncatedRule) -> bool:
    """It has a token to train on; with 'mask' not where the length limit cut it (overlong
    filtering, arXiv:2503.14476)."""
    is_masked = truncated == "mask" and completion.finish_reason == "length"
    return not is_masked and bool(completion.loss_mask.any())


def is_flat(rewards: Sequence[float]) -> bool:
    """All rewards are the same number: there is nothing to compare."""
    return min(rewards) == max(rewards)


def has_signal(group: Group, truncated: TruncatedRule) -> bool:
    """At least two scored completions with different rewards, and one of them to train on.

    The scorer's own rewards decide, before any shaping: what a penalty on length adds to a group
    that is right (or wrong) throughout says nothing about the task.
    """
    scored = [c for c in group.completions if is_scored(c)]
    return (
        len(scored) >= 2
        and not is_flat([c.reward for c in scored])
        and any(is_trained(c, truncated) for c in scored)
    )

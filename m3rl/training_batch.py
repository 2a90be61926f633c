"""From groups to the batch of an update, as `grpo.*` says: shaped rewards, advantages, filters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from m3rl.config import Config
from m3rl.grpo.batch import batch_metrics, build_batch
from m3rl.grpo.filters import has_signal, is_scored
from m3rl.grpo.kl import KlController
from m3rl.grpo.shaping import overlong_penalties, reward_kl
from m3rl.types import Group, SampleId, TrainBatch


class BatchMaker:
    """Makes the batches of a run; holds the KL coefficient, which may adapt.

    Args:
        reference_logprobs: [B, S] float, log π_ref of every trained token of a batch; called where
            the KL is taken off rewards.
    """

    def __init__(
        self, config: Config, reference_logprobs: Callable[[TrainBatch], np.ndarray]
    ) -> None:
        self._grpo = config.grpo
        self._temperature = config.rollout.temperature
        self._max_tokens = config.rollout.max_tokens
        self._reference_logprobs = reference_logprobs
        self.kl = KlController(config.grpo.kl.coef, config.grpo.kl.target, config.grpo.kl.gain)
        self.reference_s = 0.0
        """Time that the reference's log-probabilities of the last batch took."""

    def has_signal(self, group: Group) -> bool:
        """Whether a group teaches something; what does not is refilled, see grpo.refill_rounds."""
        return has_signal(group, self._grpo.truncated)

    def make(self, groups: Sequence[Group]) -> tuple[TrainBatch, dict[str, float]]:
        """The batch, and `adv/*`, `data/*`; where rewards are shaped also the means of what that
        added to those of scored completions, `reward/overlong_penalty` and `reward/kl_penalty`."""
        rewards, metrics = self._shaped_rewards(groups)
        batch = self._build(groups, rewards)
        metrics |= batch_metrics(groups, batch, advantage=self._grpo.advantage, rewards=rewards)
        if self._grpo.kl.target is not None and self._grpo.kl.place == "loss":
            batch.kl_coef = self.kl.coef
        if self.kl.coef > 0:
            metrics["policy/kl_coef"] = self.kl.coef
        return batch, metrics

    def _build(self, groups: Sequence[Group], rewards: dict[SampleId, float] | None) -> TrainBatch:
        return build_batch(
            groups,
            temperature=self._temperature,
            advantage=self._grpo.advantage,
            skip_zero_variance=self._grpo.skip_zero_variance,
            truncated=self._grpo.truncated,
            rewards=rewards,
        )

    def _shaped_rewards(
        self, groups: Sequence[Group]
    ) -> tuple[dict[SampleId, float] | None, dict[str, float]]:
        """None where the scorers' rewards stay what they are."""
        added: dict[str, dict[SampleId, float]] = {}
        metrics: dict[str, float] = {}
        self.reference_s = 0.0
        if self._grpo.overlong.buffer > 0:
            added["reward/overlong_penalty"] = overlong_penalties(
                groups,
                max_tokens=self._max_tokens,
                buffer=self._grpo.overlong.buffer,
                penalty=self._grpo.overlong.penalty,
            )
        if self._grpo.kl.place == "reward" and self.kl.coef > 0:
            added["reward/kl_penalty"] = self._kl_penalties(groups, metrics)
        if not added:
            return None, metrics
        rewards = {
            c.sample_id: c.reward for group in groups for c in group.completions if is_scored(c)
        }
        for name, penalties in added.items():
            metrics[name] = sum(penalties.values()) / max(len(penalties), 1)
            for sample_id, value in penalties.items():
                rewards[sample_id] += value
        return rewards, metrics

    def _kl_penalties(
        self, groups: Sequence[Group], metrics: dict[str, float]
    ) -> dict[SampleId, float]:
        """-β · KL of every completion that its group is compared with; without a token to train on
        it is 0. Truncated ones have theirs also where they are masked later: they are in the
        baseline."""
        batch = build_batch(
            groups,
            temperature=self._temperature,
            advantage="dr_grpo",
            skip_zero_variance=self._grpo.skip_zero_variance,
            truncated="keep",
        )
        if not batch.sample_ids:
            return {}
        begin = time.perf_counter()
        reference_BS = self._reference_logprobs(batch)
        self.reference_s = time.perf_counter() - begin
        kl = reward_kl(batch, reference_BS, self._grpo.kl.estimator)
        metrics["policy/kl_ref_k1"], metrics["policy/kl_ref_k3"] = kl.mean_k1, kl.mean_k3
        return {sample_id: -self.kl.coef * value for sample_id, value in kl.by_sample.items()}

"""What forward passes showed at the weights before the first optimizer step of an update."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from m3rl.grpo.mismatch import mismatch_metrics
from m3rl.grpo.replay import ChoiceStats
from m3rl.policy_packed import PackedPolicy
from m3rl.rank_group import RankGroup
from m3rl.rank_settings import RankSettings
from m3rl.types import TrainBatch


@dataclass(slots=True)
class Observed:
    """What this rank saw of it."""

    rows: np.ndarray
    """Rows of the batch, over all ranks, that were looked at."""
    logprobs_BS: np.ndarray
    stats: ChoiceStats

    @classmethod
    def nothing(cls, batch: TrainBatch, rows: np.ndarray, policy: PackedPolicy) -> Observed:
        """Nothing yet of `rows`."""
        stats = policy.new_stats(next(policy.parameters()).device)
        return cls(rows, np.zeros(batch.ids_BS.shape, np.float32), stats)

    def metrics(
        self, batch: TrainBatch, policy: PackedPolicy, group: RankGroup, settings: RankSettings
    ) -> dict[str, float]:
        """`mismatch/*` and `m3/*`, over all ranks, which call it together."""
        mask_RS = batch.loss_mask_BS[self.rows]
        trainer_BS = group.sum_array(self.logprobs_BS)
        stats = ChoiceStats(group.sum(self.stats.load_LE), group.sum(self.stats.totals_23))
        return (
            mismatch_metrics(
                trainer_BS[self.rows][mask_RS],
                batch.behaviour_logprobs_BS[self.rows][mask_RS],
                cap=settings.loss.importance_cap,
            )
            | stats.metrics(
                replays_experts=settings.replay_routing, replays_blocks=settings.replay_blocks
            )
            | policy.state_metrics()
        )

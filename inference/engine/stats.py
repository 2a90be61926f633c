"""What an engine counts about itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inference.engine.scheduler import Schedule, Scheduler


@dataclass(slots=True)
class Counters:
    """Totals since the engine was made."""

    steps: int = 0
    prefill_tokens: int = 0
    """Tokens computed in chunks, recomputation after preemption included."""
    generated_tokens: int = 0
    nonfinite_logits: int = 0
    """Requests that ended with 'error'."""
    _decode_steps: int = 0
    _decodes: int = 0

    def count_step(
        self, schedule: Schedule, is_token_S: np.ndarray, is_finite_S: np.ndarray
    ) -> None:
        """`is_token_S`: the row got a token; `is_finite_S` False: its request failed."""
        self.steps += 1
        self.prefill_tokens += int(schedule.num_new_R[schedule.num_decodes :].sum())
        self.generated_tokens += int(is_token_S.sum())
        self.nonfinite_logits += int((~is_finite_S).sum())
        self._decode_steps += schedule.num_decodes > 0
        self._decodes += schedule.num_decodes

    def stats(self, scheduler: Scheduler) -> dict[str, float]:
        """All numbers by name; shares are in [0, 1]."""
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_usage": scheduler.pool.num_owned / scheduler.pool.num_pages,
            "prefix_hit_rate": scheduler.num_cached_tokens / max(1, scheduler.num_prompt_tokens),
            "preemptions": scheduler.num_preemptions,
            "decode_batch_mean": self._decodes / max(1, self._decode_steps),
            "nonfinite_logits": self.nonfinite_logits,
            "steps": self.steps,
            "generated_tokens": self.generated_tokens,
            "prefill_tokens": self.prefill_tokens,
        }

"""Trainer and replica compute the same function, after they were shown to hold the same bits.

Both sides compute the log-probabilities of the same prompts, with the new weights, before the
replica serves. It sees what a hash cannot: a tensor that both call by a wrong name, a kernel that
reads its weights wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np

from m3rl.types import TrainBatch
from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.transport import in_background

SHORT_TOKENS = 64
"""Of a short prompt, and of what a long one has beyond the keys that block selection keeps."""
GIVE_UP_AFTER = 2
"""Failures in a row: a replica that was restarted and still fails is not mended by restarts."""
STRIDE = 17
"""Tokens by which each prompt begins later in the text."""

Scores = Sequence[np.ndarray]
"""Of each prompt, [n - 1] float32: log-probability of every token but the first."""


class ProbeError(SyncError):
    """Trainer and replica compute different functions of weights with equal hashes."""


def probe_prompts(
    text_ids: np.ndarray, count: int, *, num_kept: int, longest: int
) -> list[np.ndarray]:
    """Prompts of two lengths in turn: short, and so long that sparse attention leaves some out.

    Args:
        text_ids: [n] int32, repeated where it ends.
        num_kept: tokens of which block selection keeps all (top-k times block).
        longest: most tokens of a prompt; where it does not exceed `num_kept` nothing is left out.
    """
    lengths = min(SHORT_TOKENS, longest), min(num_kept + SHORT_TOKENS, longest)
    return [np.resize(np.roll(text_ids, -STRIDE * i), lengths[i % 2]) for i in range(count)]


def probe_batch(prompts: Sequence[np.ndarray]) -> TrainBatch:
    """The prompts as rows for a trainer, every token but the first to be scored."""
    length_B = np.array([len(ids) for ids in prompts], np.int64)
    shape = len(prompts), int(length_B.max())
    ids_BS = np.zeros(shape, np.int64)
    for row, ids in enumerate(prompts):
        ids_BS[row, : len(ids)] = ids
    places_S = np.arange(shape[1])
    return TrainBatch(
        sample_ids=[(row, 0) for row in range(len(prompts))],
        ids_BS=ids_BS,
        length_B=length_B,
        loss_mask_BS=(places_S > 0) & (places_S < length_B[:, None]),
        behaviour_logprobs_BS=np.zeros(shape, np.float32),
        advantages_B=np.zeros(len(prompts), np.float32),
        temperature=1.0,
        denominator=1.0,
    )


def scores_of(batch: TrainBatch, logprobs_BS: np.ndarray) -> list[np.ndarray]:
    """Scores by prompt, from those of a `probe_batch`."""
    return [logprobs_BS[row, 1:length] for row, length in enumerate(batch.length_B)]


class Probe:
    """Compares the replicas of a sync with the trainer, which computes while weights travel."""

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        *,
        trainer: Callable[[Sequence[np.ndarray]], Scores],
        replica: Callable[[int, Sequence[np.ndarray]], Scores],
        every: int,
        max_error: float,
    ) -> None:
        """
        Args:
            trainer: scores prompts at the trainer's present weights.
            replica: has a replica, by number, score them at its own, serving nothing else.
            every: of the policy versions that are multiples of it.
            max_error: largest mean |difference| on any prompt.
        """
        self._prompts = list(prompts)
        self._trainer = trainer
        self._replica = replica
        self._every = every
        self._max_error = max_error
        self._expected: Future[Scores] | None = None
        self._faults: dict[int, list[str]] = {}
        """Of each replica: what was wrong, probe by probe, since it last passed one."""

    def is_due(self, version: int) -> bool:
        return version % self._every == 0

    def begin(self) -> None:
        """Have the trainer compute, in the background; its weights stay until the sync ends."""
        self._expected = in_background(lambda: self._trainer(self._prompts), "probe-trainer")

    def error(self, replica: int) -> float:
        """Mean |difference| of the log-probabilities on the prompt where it is largest.

        Raises:
            ProbeError: it exceeds `max_error`, or is NaN; names the replica.
        """
        assert self._expected is not None, "begin() comes first"
        found = self._replica(replica, self._prompts)
        errors = [
            float(np.abs(np.asarray(here, np.float64) - there).mean())
            for here, there in zip(found, self._expected.result(), strict=True)
        ]
        largest = float(np.max(errors))  # NaN if any is
        if not largest <= self._max_error:
            lengths = [len(ids) for ids in self._prompts]
            raise ProbeError(
                f"replica {replica}: with equal weights its log-probabilities of the probe's "
                f"prompts ({lengths} tokens) differ from the trainer's by {_listed(errors)} on "
                f"average; weight_sync.probe.max_error={self._max_error:g}. One of them computes "
                "something else, or knows a tensor by a wrong name"
            )
        return largest

    @contextmanager
    def counted(self, replica: int) -> Iterator[None]:
        """Around one probe of a replica: passed if nothing is raised."""
        try:
            yield
        except SyncError as error:
            self._faults.setdefault(replica, []).append(str(error))
            raise
        self._faults.pop(replica, None)

    def forget(self, replica: int) -> None:
        """Of a replica that is gone for good."""
        self._faults.pop(replica, None)

    def gives_up(self, replica: int) -> str | None:
        """Why the replica is not worth another restart; None: it is."""
        faults = self._faults.get(replica, [])
        if len(faults) < GIVE_UP_AFTER:
            return None
        return f"it failed the probe {len(faults)} times in a row: {faults[-1]}"

    def condemns(self, replicas: Collection[int]) -> str | None:
        """Why the fault is none of these replicas': each failed its last probe, and there were
        enough of them. None: it may be."""
        faults = [self._faults.get(number, []) for number in replicas]
        if not all(faults) or sum(map(len, faults)) < GIVE_UP_AFTER:
            return None
        return (
            f"every replica fails the probe of the weight sync ({len(faults)} of {len(faults)}), "
            "so it is no single worker's fault: either trainer and runtime do compute different "
            "functions of the same weights, or weight_sync.probe.max_error="
            f"{self._max_error:g} is below what their dtypes allow; "
            + "; ".join(each[-1] for each in faults)
        )


def _listed(errors: Sequence[float]) -> str:
    return ", ".join(f"{error:.3g}" for error in errors)

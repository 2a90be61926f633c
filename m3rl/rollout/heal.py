"""Bringing lost replicas back, until the restarts of the run are used up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from m3rl.errors import M3rlError
from m3rl.rollout.backend import GenerationBackend

logger = logging.getLogger(__name__)


class GivenUpError(M3rlError):
    """A replica cannot be brought back, and more restarts would not help."""


class Healer:
    """Call it with lost replicas: True when they are back, False when one is dropped for good."""

    def __init__(
        self,
        backend: GenerationBackend,
        *,
        bring: Callable[[int], object],
        forget: Callable[[int], None],
        max_restarts: int,
        lose: Callable[[Collection[int]], None] | None = None,
        poisoned: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """
        Args:
            bring: gives a fresh replica the current weights; raises GivenUpError or another
                M3rlError when that fails.
            forget: told of a replica that is dropped.
            max_restarts: of all replicas together, in the whole run.
            lose: told of all replicas that are gone or do not answer, before one is brought back;
                None: nobody counts on them. What it raises ends the healing, and costs no restart.
            poisoned: replicas that are not to serve, found out while others were healed: they are
                healed, too, whatever came of those.
        """
        self._backend = backend
        self._bring = bring
        self._forget = forget
        self._max_restarts = max_restarts
        self._lose = lose
        self._poisoned = poisoned
        self.num_restarts = 0
        """Restarts so far; saved with the run."""

    def __call__(self, *replicas: int) -> bool:
        queue = list(replicas)
        is_back = {}
        while queue:
            number = queue.pop(0)
            is_back[number] = self._heal(number)
            queue += [n for n in self._poisoned() if n not in is_back and n not in queue]
        return all(is_back[replica] for replica in replicas)

    def _heal(self, replica: int) -> bool:
        why = f"rollout.backend.max_restarts={self._max_restarts} is used up"
        while self.num_restarts < self._max_restarts:
            self._tell_lost(replica)
            self.num_restarts += 1
            try:
                self._backend.restart(replica)
                self._bring(replica)
            except GivenUpError as error:
                why = str(error)
                break
            except M3rlError as error:
                logger.error("replica %d could not be brought back: %s", replica, error)
                continue
            logger.warning("replica %d is back", replica)
            return True
        logger.error("replica %d is dropped: %s", replica, why)
        self._backend.drop(replica)
        self._forget(replica)
        return False

    def _tell_lost(self, replica: int) -> None:
        """One that is gone and counted still would be asked for weights, or thought to serve."""
        if self._lose is not None:
            health = self._backend.health()
            self._lose({replica} | {each.replica for each in health if not each.is_alive})

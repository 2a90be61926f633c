"""Bringing lost replicas back, until the restarts of the run are used up."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable

from m3rl.errors import M3rlError
from m3rl.rollout.backend import GenerationBackend

logger = logging.getLogger(__name__)


class GivenUpError(M3rlError):
    """A replica cannot be brought back, and more restarts would not help."""


class Healer:
    """Call it with a lost replica: True when it is back, False when it is dropped for good."""

    def __init__(
        self,
        backend: GenerationBackend,
        *,
        bring: Callable[[int], Iterable[int] | None],
        forget: Callable[[int], None],
        max_restarts: int,
        lose: Callable[[Collection[int]], None] | None = None,
    ) -> None:
        """
        Args:
            bring: gives a fresh replica the current weights; raises GivenUpError or another
                M3rlError when that fails. What it returns are replicas that were found unfit to
                serve meanwhile: they are healed, too.
            forget: told of a replica that is dropped.
            max_restarts: of all replicas together, in the whole run.
            lose: told of all replicas that are gone or do not answer, before one is brought back;
                None: nobody counts on them.
        """
        self._backend = backend
        self._bring = bring
        self._forget = forget
        self._max_restarts = max_restarts
        self._lose = lose
        self.num_restarts = 0
        """Restarts so far; saved with the run."""

    def __call__(self, replica: int) -> bool:
        unfit = deque([replica])
        is_back = {}
        while unfit:
            number = unfit.popleft()
            found = self._heal(number)
            is_back[number] = found is not None
            unfit.extend(found or ())
        return is_back[replica]

    def _heal(self, replica: int) -> list[int] | None:
        """Replicas found unfit meanwhile; None: this one is dropped."""
        why = f"rollout.backend.max_restarts={self._max_restarts} is used up"
        while self.num_restarts < self._max_restarts:
            self.num_restarts += 1
            self._tell_lost(replica)
            try:
                self._backend.restart(replica)
                unfit = list(self._bring(replica) or ())
            except GivenUpError as error:
                why = str(error)
                break
            except M3rlError as error:
                logger.error("replica %d could not be brought back: %s", replica, error)
                continue
            logger.warning("replica %d is back", replica)
            return unfit
        logger.error("replica %d is dropped: %s", replica, why)
        self._backend.drop(replica)
        self._forget(replica)
        return None

    def _tell_lost(self, replica: int) -> None:
        """One that is gone and counted still would be asked for weights, or thought to serve."""
        if self._lose is not None:
            health = self._backend.health()
            self._lose({replica} | {each.replica for each in health if not each.is_alive})

"""Bringing lost replicas back, until the restarts of the run are used up."""

from __future__ import annotations

import logging
from collections.abc import Callable

from m3rl.errors import M3rlError
from m3rl.rollout.backend import GenerationBackend

logger = logging.getLogger(__name__)


class Healer:
    """Call it with a lost replica: True when it is back, False when it is dropped for good."""

    def __init__(
        self,
        backend: GenerationBackend,
        *,
        bring: Callable[[int], None],
        forget: Callable[[int], None],
        max_restarts: int,
    ) -> None:
        """
        Args:
            bring: gives a fresh replica the current weights; raises M3rlError when that fails.
            forget: told of a replica that is dropped.
            max_restarts: of all replicas together, in the whole run.
        """
        self._backend = backend
        self._bring = bring
        self._forget = forget
        self._max_restarts = max_restarts
        self.num_restarts = 0
        """Restarts so far; saved with the run."""

    def __call__(self, replica: int) -> bool:
        while self.num_restarts < self._max_restarts:
            self.num_restarts += 1
            try:
                self._backend.restart(replica)
                self._bring(replica)
            except M3rlError as error:
                logger.error("replica %d could not be brought back: %s", replica, error)
                continue
            logger.warning("replica %d is back", replica)
            return True
        logger.error("replica %d is dropped: rollout.backend.max_restarts is used up", replica)
        self._backend.drop(replica)
        self._forget(replica)
        return False

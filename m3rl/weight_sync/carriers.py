"""What carries the weights, where the first choice turns out not to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from m3rl.weight_sync.errors import NotMappableError
from m3rl.weight_sync.join import JoiningReplica

logger = logging.getLogger(__name__)


def join_over(
    backends: Sequence[str],
    one: JoiningReplica,
    join: Callable[[JoiningReplica, str], None],
) -> Sequence[str]:
    """Join a replica over the first of `backends` whose members can reach one another.

    Returns:
        That one and those behind it: what others are to be joined over from here on.

    Raises:
        SyncError: the last one cannot, or something else is wrong.
    """
    for i, backend in enumerate(backends[:-1]):
        try:
            join(one, backend)
        except NotMappableError as error:
            one.disconnect()
            logger.warning(
                "replica %d cannot be joined over %s, trying %s: %s",
                one.number,
                backend,
                backends[i + 1],
                error,
            )
        else:
            return _left(backends, i)
    join(one, backends[-1])
    return _left(backends, len(backends) - 1)


def _left(backends: Sequence[str], used: int) -> Sequence[str]:
    if used > 0:
        logger.warning("weights travel over %s from here on, not %s", backends[used], backends[0])
    return backends[used:]

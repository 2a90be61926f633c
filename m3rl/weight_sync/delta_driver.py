"""The driver's side of deltas: who can take one, how much changed, and whether it pays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from m3rl.types import SenderGroup
from m3rl.weight_sync.delta import Changes
from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.plan import Plan
from m3rl.weight_sync.transport import Deadline, in_background

if TYPE_CHECKING:
    from m3rl.weight_sync.replica import Replica

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a replica that can take a delta is told; others of its plan wait for it, too."""

    base: int
    """Serial of the sync whose weights the trainer ranks compare with."""
    changes: Future[Changes | None]
    """None: it does not pay. An error: it could not be found out; nothing has moved then."""


@dataclass(slots=True)
class _Known:
    """What the trainer ranks know for the replicas of one plan."""

    serial: int
    num_deltas: int = 0
    """Since the last full sync."""


class Deltas:
    """Decides, sync by sync and plan by plan; replicas of one plan share what the ranks compare.

    Snapshots follow the last sync in which a replica of the plan became READY. A replica that was
    not part of it has another base, and takes a full sync.
    """

    def __init__(
        self, senders: SenderGroup, full_every: int, chunk_bytes: int, timeout_s: float
    ) -> None:
        """
        Args:
            full_every: of so many syncs one is full; 1: all are.
            chunk_bytes: most that a worker receives of a delta at a time.
            timeout_s: longest wait for the trainer ranks.
        """
        if full_every < 1:
            raise ValueError(f"full_every={full_every} must be at least 1")
        self._senders = senders
        self._full_every = full_every
        self._chunk_bytes = chunk_bytes
        self._timeout_s = timeout_s
        self._known: dict[str, _Known] = {}
        """By the plan's digest."""

    def begin(self, serial: int, replicas: Sequence[Replica]) -> dict[int, Offer]:
        """Have the trainer ranks compare, in the background; returns offers by replica number.

        Args:
            replicas: those of this sync.
        """
        offers: dict[int, Offer] = {}
        for plan, group in _by_plan(replicas):
            known = self._known.get(plan.digest)
            if known is None or known.num_deltas + 1 >= self._full_every:
                continue
            able = next((one for one in group if one.base == known.serial), None)
            if able is not None:
                compare = self._comparing(able.number, plan, known.serial, serial)
                offer = Offer(known.serial, in_background(compare, f"compare-{serial}"))
                offers |= {one.number: offer for one in group}
        return offers

    def end(self, serial: int, replicas: Sequence[Replica], offers: dict[int, Offer]) -> None:
        """After all replicas are done: remember what the trainer ranks' snapshots are of."""
        for plan, group in _by_plan(replicas):
            known = self._known.pop(plan.digest, None)
            if any(one.base == serial for one in group):
                is_delta = any(one.record.is_delta for one in group)
                num_deltas = known.num_deltas + 1 if known is not None and is_delta else 0
                self._known[plan.digest] = _Known(serial, num_deltas)
        if offers:
            for rank in range(self._senders.num_ranks):
                self._senders.call(rank, "sync_release", serial)  # nobody waits for it

    def _comparing(
        self, replica: int, plan: Plan, base: int, serial: int
    ) -> Callable[[], Changes | None]:
        deadline = Deadline(self._timeout_s)  # of both steps: nobody waits for what comes later

        def compare() -> Changes | None:
            counts = self._on_all(deadline, "sync_compare", replica, base)
            changes = Changes(plan, base, counts, self._chunk_bytes)
            if not changes.pays:
                logger.info(
                    "a delta of %d bytes does not pay beside a full sync of %d",
                    changes.nbytes,
                    plan.nbytes,
                )
                return None
            self._on_all(deadline, "sync_pack", replica, serial)
            return changes

        return compare

    def _on_all(self, deadline: Deadline, method: str, *args: Any) -> list[Any]:
        """What all trainer ranks answer. SyncError when one does not, or with another error."""
        ranks = range(self._senders.num_ranks)
        if deadline.is_over:
            raise SyncError(f"{method}: {self._timeout_s:g} s are over before it begins")
        asked = [self._senders.call(rank, method, *args) for rank in ranks]
        _, late = wait(asked, deadline.left_s, return_when=FIRST_EXCEPTION)
        told = [
            f"trainer rank {rank}: {type(error).__name__}: {error}"
            for rank in ranks
            if asked[rank].done() and (error := asked[rank].exception()) is not None
        ]
        if told:
            raise SyncError(f"{method}: {'; '.join(told)}")
        if late:
            names = ", ".join(f"trainer rank {rank}" for rank in ranks if asked[rank] in late)
            raise SyncError(f"{method}: no answer from {names} within {self._timeout_s:g} s")
        return [one.result() for one in asked]


def _by_plan(replicas: Sequence[Replica]) -> list[tuple[Plan, list[Replica]]]:
    groups: dict[str, tuple[Plan, list[Replica]]] = {}
    for one in replicas:
        if one.plan is not None:
            groups.setdefault(one.plan.digest, (one.plan, []))[1].append(one)
    return list(groups.values())

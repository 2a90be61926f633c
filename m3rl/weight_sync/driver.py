"""What all replicas of a WeightSync share, and the states that one can be in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from m3rl.types import SenderGroup
from m3rl.weight_sync.probe import Probe
from m3rl.weight_sync.report import SyncEvent


class ReplicaState(Enum):
    EMPTY = "EMPTY"
    SYNCING = "SYNCING"
    READY = "READY"
    POISONED = "POISONED"


@dataclass(frozen=True, slots=True)
class Driver:
    """What all replicas of a WeightSync share."""

    senders: SenderGroup
    pause: Callable[[int], object]
    resume: Callable[[int], object]
    timeout_s: float
    verify: bool
    events: list[SyncEvent]
    probe: Probe | None = None
    keeps: bool = False
    """See `Prepare.keeps`."""
    num_replicas: int = 1
    """That take turns at the trainer ranks; see `turns`."""

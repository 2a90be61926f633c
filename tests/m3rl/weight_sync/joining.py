"""What tests of late replicas share: an engine that gives, and the phases of its taker."""

from __future__ import annotations

from torch import Tensor

from m3rl.weight_sync.sync import WeightSync
from tests.m3rl.weight_sync.sync_fakes import FakeEngine


class GivingEngine(FakeEngine):
    """One that others can take weights from."""

    def serving_places(self) -> list[Tensor]:
        return [self.tensors[name] for name in self.slots]


def phases(sync: WeightSync, replica: int) -> list[str]:
    return [event.phase for event in sync.events if event.replica == replica]


TAKEN = ["prepare", "stream", "pause", "commit", "resume"]
SYNCED = ["prepare", "pause", "stream", "verify", "commit", "resume"]

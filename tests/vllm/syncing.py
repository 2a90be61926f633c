"""Trainer ranks that hold a checkpoint, and the handle on a replica's receivers, in one process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from m3rl.model_layout import whole_layout
from m3rl.rollout.vllm_replica import VllmReplica
from m3rl.types import Receiver
from m3rl.weight_sync.send import Sender
from m3rl.weight_sync.sync import WeightSync
from tests.m3rl.weight_sync.sync_fakes import LocalSenders, cut, rows


class Rank:
    """A trainer rank with its share of the rows of every tensor of a checkpoint."""

    def __init__(self, path: Path, rank: int, world: int) -> None:
        self.load(path)
        layout = [
            replace(slot, bounds=rows(slot.shape, rank, world))
            for slot in whole_layout(path, "float32")
        ]
        self.sender = Sender(rank, layout, lambda name, bounds: cut(self.weights[name], bounds))

    def load(self, path: Path) -> None:
        stored = load_file(path / "model.safetensors")
        self.weights = {name.removeprefix("language_model."): t for name, t in stored.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sender, name)


class Receivers:
    """`RemoteReceiver` of one rank of a replica."""

    def __init__(self, replica: VllmReplica, rank: int = 0) -> None:
        self._replica, self._rank = replica, rank
        self._threads = ThreadPoolExecutor(4)

    def attach(self, receiver: Receiver) -> None:
        self._replica.attach(self._rank, receiver)

    def call(self, method: str, *args: Any) -> Future[Any]:
        return self._threads.submit(self._replica.receiver_call, self._rank, method, *args)


def connected(
    replica: VllmReplica, ranks: list[Rank], *, pause: str = "recompute", **options: Any
) -> WeightSync:
    sync = WeightSync(
        LocalSenders(ranks),
        {0: [Receivers(replica, rank) for rank in range(len(replica.engine.workers))]},
        pause=lambda _: replica.pause(pause),
        resume=lambda _: replica.resume(),
        host="127.0.0.1",
        timeout_s=20.0,
        min_replicas=1,
        verify=True,
        chunk_bytes=10_000,
        **options,
    )
    sync.connect(0)
    return sync

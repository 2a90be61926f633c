"""What a `WeightSync` is given, over processes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from benchmarks.remote import RemoteProcess


class Trainers:
    """`SenderGroup` over processes."""

    def __init__(self, ranks: Sequence[RemoteProcess]) -> None:
        self.ranks = list(ranks)
        self.num_ranks = len(ranks)

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        return self.ranks[rank].call(method, *args)


class Worker:
    """`RemoteReceiver` over a process."""

    def __init__(self, replica: RemoteProcess) -> None:
        self.replica = replica

    def attach(self, receiver: Any) -> None:
        self.replica.attach(receiver)

    def call(self, method: str, *args: Any) -> Future[Any]:
        return self.replica.call("receive", method, *args)

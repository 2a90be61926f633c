"""A replica's process dies and another one comes: real processes, each worker one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from m3rl.weight_sync import hand_over
from tests.m3rl.weight_sync.joining import SYNCED, TAKEN, GivingEngine, phases
from tests.m3rl.weight_sync.processes import ForkedProcess
from tests.m3rl.weight_sync.sync_fakes import (
    ReplicaBody,
    TrainerRank,
    Worker,
    assert_holds,
    layout,
)
from tests.m3rl.weight_sync.test_sync_processes import TIMEOUT_S, driver


class Body(ReplicaBody):
    """What a replica's process runs."""

    def __init__(self, rank: int, world: int) -> None:
        Worker.__init__(self, GivingEngine(layout(rank, world)))
        self._receiving = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        """The receiver's methods, one call at a time, as a replica has it."""

        method = getattr(self.receiver, name)

        def call(*args: Any) -> Any:
            with self._receiving:
                return method(*args)

        return call

    def die_in_give(self, num_rounds: int) -> None:
        """Amid the next hand-over, after so many rounds."""
        rounds = hand_over._rounds

        def dying(*args):
            for i, each in enumerate(rounds(*args)):
                if i == num_rounds:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield each

        hand_over._rounds = dying


@pytest.fixture
def processes() -> Iterator[tuple[ForkedProcess, dict[int, list[ForkedProcess]]]]:
    """A trainer rank, and two replicas of two row-sharded workers."""
    rank = ForkedProcess(TrainerRank, 0, 1)
    replicas = {r: [ForkedProcess(Body, i, 2) for i in range(2)] for r in range(2)}
    yield rank, replicas
    for process in [rank, *replicas[0], *replicas[1]]:
        process.end()


def holds(worker: ForkedProcess, rank: int, version: int, seed: int) -> None:
    held_version, tensors = worker.call("snapshot").result(TIMEOUT_S)
    assert held_version == version
    assert_holds(tensors, layout(rank, 2), seed)


def replaced(replicas: dict[int, list[ForkedProcess]], replica: int) -> list[ForkedProcess]:
    """The replica dies; fresh processes are in its place."""
    for worker in replicas[replica]:
        worker.kill()
        worker.end()
    replicas[replica][:] = [ForkedProcess(Body, i, 2) for i in range(2)]
    return replicas[replica]


@pytest.mark.timeout(120)
def test_a_replica_that_was_killed_comes_back_from_its_peer_and_then_on_with_all(processes):
    rank, replicas = processes
    sync = driver([rank], replicas, min_replicas=0)
    rank.call("load", 1).result(TIMEOUT_S)
    assert sync.sync(1).ready == (0, 1)
    rank.call("load", 2).result(TIMEOUT_S)  # the trainer has gone on; version 1 is not there now
    del sync.events[:]
    sync.bring(1, 1, replaced(replicas, 1))
    assert sync.states() == {0: "READY(1)", 1: "READY(1)"}
    assert phases(sync, 1) == TAKEN
    for worker in range(2):
        holds(replicas[1][worker], worker, 1, seed=1)
    assert sync.sync(2).ready == (0, 1)
    for each in replicas.values():
        for worker in range(2):
            holds(each[worker], worker, 2, seed=2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_rounds", [0, 2])
def test_a_peer_that_dies_meanwhile_is_replaced_by_the_trainer(processes, num_rounds):
    rank, replicas = processes
    sync = driver([rank], replicas, min_replicas=0)
    rank.call("load", 1).result(TIMEOUT_S)
    sync.sync(1)
    replicas[0][1].call("die_in_give", num_rounds).result(TIMEOUT_S)
    del sync.events[:]
    sync.bring(1, 1, replaced(replicas, 1))
    assert sync.states()[1] == "READY(1)"
    assert phases(sync, 1) == ["prepare", "stream", *SYNCED]
    for worker in range(2):
        holds(replicas[1][worker], worker, 1, seed=1)
    rank.call("load", 2).result(TIMEOUT_S)
    report = sync.sync(2)
    assert report.ready == (1,)
    assert "replica 0 worker 1: RuntimeError: the process died" in report.failed[0]

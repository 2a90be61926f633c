"""Real gloo groups between real processes; all tests share two trainer ranks and their replicas."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from torch import Tensor

from m3rl.weight_sync.layout import Bounds
from m3rl.weight_sync.sync import WeightSync
from tests.m3rl.weight_sync.processes import ForkedProcess
from tests.m3rl.weight_sync.sync_fakes import (
    EXPERT,
    RemoteSenders,
    ReplicaBody,
    TrainerRank,
    assert_holds,
    layout,
)

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def processes():
    """Two trainer ranks (row shards) and four workers: two replicas of two row-sharded workers."""
    ranks = [ForkedProcess(TrainerRank, rank, 2) for rank in range(2)]
    workers = [ForkedProcess(ReplicaBody, i % 2, 2) for i in range(4)]
    yield ranks, workers
    for process in [*ranks, *workers]:
        process.end()


def driver(
    ranks, replicas, timeout_s: float = TIMEOUT_S, min_replicas: int = 1, **options
) -> WeightSync:
    def on_all(method: str):
        def call(replica: int) -> None:
            for worker in replicas[replica]:
                worker.call(method).result(TIMEOUT_S)

        return call

    sync = WeightSync(
        RemoteSenders(ranks),
        replicas,
        pause=on_all("pause"),
        resume=on_all("resume"),
        host="127.0.0.1",
        timeout_s=timeout_s,
        min_replicas=min_replicas,
        verify=True,
        chunk_bytes=100,
        **options,
    )
    for replica in replicas:
        sync.connect(replica)
    return sync


def load(ranks, seed: int) -> None:
    for rank in ranks:
        rank.call("load", seed).result(TIMEOUT_S)


def holds(worker, rank: int, world: int, version: int, seed: int) -> None:
    held_version, tensors = worker.call("snapshot").result(TIMEOUT_S)
    assert held_version == version
    assert_holds(tensors, layout(rank, world), seed)


def test_two_sharded_trainer_ranks_bring_two_sharded_replicas_from_a_to_b_to_a(processes):
    ranks, workers = processes
    replicas = {0: workers[:2], 1: workers[2:]}
    sync = driver(ranks, replicas)
    hashes = []
    for version, seed in enumerate([1, 2, 1], start=1):
        load(ranks, seed)
        report = sync.sync(version)
        assert (report.ready, report.failed, report.checksum_ok) == ((0, 1), {}, True)
        hashes.append(report.wire_hash)
        for each in replicas.values():
            for rank, worker in enumerate(each):
                holds(worker, rank, 2, version, seed)
    assert hashes[0] == hashes[2] != hashes[1]
    sync.close()


def test_one_trainer_rank_brings_one_replica_from_a_to_b_to_a():
    rank, worker = ForkedProcess(TrainerRank, 0, 1), ForkedProcess(ReplicaBody, 0, 1)
    try:
        sync = driver([rank], {0: [worker]})
        for version, seed in enumerate([1, 2, 1], start=1):
            load([rank], seed)
            assert sync.sync(version).ready == (0,)
            holds(worker, 0, 1, version, seed)
    finally:
        rank.end()
        worker.end()


def test_a_worker_killed_amid_a_stream_costs_one_replica_and_comes_back(processes):
    ranks, workers = processes
    replicas = {0: workers[:2], 1: workers[2:]}
    sync = driver(ranks, replicas)
    load(ranks, 3)
    assert sync.sync(1).ready == (0, 1)
    load(ranks, 4)
    workers[3].call("die_in_write", EXPERT.format(1)).result(TIMEOUT_S)
    report = sync.sync(2)
    assert report.ready == (0,)
    assert "replica 1 worker 1: RuntimeError: the process died" in report.failed[1]
    assert "trainer rank 1: replica 1 worker 1 is gone or has left the group" in report.failed[1]
    assert report.seconds < TIMEOUT_S  # nobody waited for the deadline
    assert sync.states() == {0: "READY(2)", 1: "POISONED"}
    for rank in range(2):
        holds(workers[rank], rank, 2, 2, 4)
    assert workers[2].call("snapshot").result(TIMEOUT_S)[0] is None

    workers[3].end()
    workers[3] = replicas[1][1] = ForkedProcess(ReplicaBody, 1, 2)
    sync.connect(1, replicas[1])
    assert sync.states() == {0: "READY(2)", 1: "EMPTY"}
    assert sync.sync(2, [1]).ready == (1,)
    for rank in range(2):
        holds(replicas[1][rank], rank, 2, 2, 4)
    load(ranks, 5)
    assert sync.sync(3).ready == (0, 1)
    for each in replicas.values():
        for rank, worker in enumerate(each):
            holds(worker, rank, 2, 3, 5)


class DyingRank(TrainerRank):
    """Dies where a tensor is read to be sent, buckets after the first."""

    deadly = ""

    def die_in_read(self, name: str) -> None:
        self.deadly = name

    def read(self, name: str, bounds: Bounds) -> Tensor:
        if name == self.deadly and threading.current_thread().name.startswith("sync-replica"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(name, bounds)


def test_a_trainer_rank_killed_amid_a_stream_is_named_at_once_and_nothing_serves(processes):
    _, workers = processes
    ranks = [ForkedProcess(DyingRank, rank, 2) for rank in range(2)]
    try:
        sync = driver(ranks, {0: workers[:2]}, min_replicas=0)
        load(ranks, 6)
        assert sync.sync(1).ready == (0,)
        load(ranks, 7)
        ranks[1].call("die_in_read", EXPERT.format(2)).result(TIMEOUT_S)
        report = sync.sync(2)
        assert report.ready == ()
        assert "trainer rank 1: RuntimeError: the process died" in report.failed[0]
        assert report.seconds < TIMEOUT_S  # nobody waited for the deadline
        assert sync.states() == {0: "POISONED"}
        for worker in workers[:2]:  # of which one may not have begun yet
            assert worker.call("snapshot").result(TIMEOUT_S)[0] in (None, 1)
            events = worker.call("events").result(TIMEOUT_S)
            assert events[-1] != "resume"
            assert events.count("commit") == events.count("resume") == events.count("pause") - 1
    finally:
        for process in ranks:
            process.end()


class SteppingRank(TrainerRank):
    """Also changes one element, the same on every rank."""

    def step(self, name: str, at: int) -> None:
        flat = self.weights[name].view(-1)
        flat[at] = 3.0 - flat[at]

    def held(self, name: str) -> list[float]:
        return self.weights[name].view(-1).tolist()


def test_a_worker_killed_amid_a_delta_costs_one_replica_and_then_takes_all():
    name = EXPERT.format(2)
    ranks = [ForkedProcess(SteppingRank, rank, 2) for rank in range(2)]
    workers = [ForkedProcess(ReplicaBody, 0, 1) for _ in range(2)]
    try:
        replicas = {0: [workers[0]], 1: [workers[1]]}
        sync = driver(ranks, replicas, delta_full_every=9)
        deltas = [sync.sync(0).num_deltas]
        for version in (1, 2, 3):
            for rank in ranks:
                rank.call("step", name, 7).result(TIMEOUT_S)
            if version == 2:
                workers[1].call("die_in_write", name).result(TIMEOUT_S)
            report = sync.sync(version)
            deltas.append(report.num_deltas)
            if version == 2:
                assert report.ready == (0,)
                assert "replica 1 worker 0: RuntimeError: the process died" in report.failed[1]
                assert sync.states() == {0: "READY(2)", 1: "POISONED"}
                workers[1].end()
                workers[1] = replicas[1][0] = ForkedProcess(ReplicaBody, 0, 1)
                sync.connect(1, replicas[1])
        assert deltas == [0, 2, 1, 1]
        truth = ranks[0].call("held", name).result(TIMEOUT_S)
        for worker in workers:
            version, tensors = worker.call("snapshot").result(TIMEOUT_S)
            assert (version, tensors[name].view(-1).tolist()) == (3, truth)
    finally:
        for process in [*ranks, *workers]:
            process.end()

"""Replicas that are lost, or hold what they should not, count nowhere and give nothing away."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from functools import partial

import pytest
import torch

from m3rl.errors import M3rlError
from m3rl.rollout.backend import ReplicaHealth
from m3rl.rollout.heal import Healer
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.errors import NotReadyError, SyncError
from m3rl.weight_sync.sync import WeightSync
from tests.m3rl.weight_sync.joining import SYNCED, TAKEN, GivingEngine, phases
from tests.m3rl.weight_sync.sync_fakes import (
    EXPERT,
    assert_holds,
    layout,
    local_sync,
    store_without_sockets,
)


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


def synced(num_replicas: int, num_workers: int = 1, **options):
    """Replicas that hold version 1, of seed 1, while the trainer has the weights of seed 2."""
    engines = {
        r: [GivingEngine(layout(w, num_workers)) for w in range(num_workers)]
        for r in range(num_replicas)
    }
    sync, senders, workers = local_sync(engines, **options)
    senders.load(1)
    sync.sync(1)
    senders.load(2)
    del sync.events[:]
    return sync, senders, engines, workers


def flip(engine: GivingEngine, name: str = EXPERT.format(2)) -> None:
    engine.tensors[name].view(torch.int16)[0, 0] ^= 1


def test_two_of_three_replicas_that_are_lost_at_once_count_nowhere():
    sync, _, _, _ = synced(3, min_replicas=2)
    assert sync.ready(1) == [0, 1, 2]
    sync.lose([0, 1, 9])
    assert sync.states() == {0: "POISONED", 1: "POISONED", 2: "READY(1)"}
    assert sync.ready(1) == [2]
    with pytest.raises(NotReadyError, match=r"replica 0 is POISONED, replica 1 is POISONED"):
        sync.require_ready(1)
    with pytest.raises(SyncError, match=r"1 replicas hold policy version 1 .*connect\(1\)"):
        sync.sync(1, [1, 2])


def test_of_two_lost_replicas_neither_is_asked_for_the_weights_of_the_other():
    sync, _, engines, workers = synced(3)
    called = []
    call = workers[1][0].call
    workers[1][0].call = lambda method, *args: called.append(method) or call(method, *args)
    sync.lose([0, 1])
    assert called == ["close"], "its group is left, and nothing else is asked of it"
    sync.bring(0, 1)
    assert called == ["close"]
    assert phases(sync, 0) == TAKEN
    assert sync.states() == {0: "READY(1)", 1: "POISONED", 2: "READY(1)"}
    assert_holds(engines[0][0].tensors, layout(), 1)


def test_when_all_are_lost_the_trainer_gives():
    sync, senders, engines, _ = synced(2)
    senders.load(1)
    sync.lose([0, 1])
    sync.bring(0, 1)
    assert phases(sync, 0) == SYNCED
    sync.bring(1, 1)
    assert phases(sync, 1) == TAKEN
    assert sync.ready(1) == [0, 1]
    for (engine,) in engines.values():
        assert_holds(engine.tensors, layout(), 1)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_peer_whose_memory_has_changed_since_is_found_by_the_trainers_sums(num_workers, caplog):
    """Its own sums would agree with what the newcomer takes."""
    sync, senders, engines, _ = synced(2, num_workers)
    flip(engines[0][-1])
    senders.load(1)
    sync.bring(1, 1)
    assert sync.poisoned() == [0]
    assert sync.states() == {0: "POISONED", 1: "READY(1)"}
    assert phases(sync, 1) == ["prepare", "stream", *SYNCED]
    for w, engine in enumerate(engines[1]):
        assert_holds(engine.tensors, layout(w, num_workers), 1)
        assert engine.events.count("commit") == 2
    name = f"replica 0 worker {num_workers - 1}"
    assert f"replica 0 is lost: {name} holds other bits than version 1 has in 1 te" in caplog.text


def test_the_sums_go_from_hand_to_hand():
    sync, _, engines, _ = synced(3)
    sync.lose([1, 2])
    sync.bring(1, 1)  # from replica 0
    sync.lose([0])
    flip(engines[1][0])
    sync.bring(2, 1)
    assert sync.poisoned() == [0, 1], "what it took was verified, and it has changed since"


def test_replicas_that_were_sent_the_same_by_other_plans_compare():
    engines = {r: [GivingEngine(layout()) for _ in range(2)] for r in range(2)}
    sync, senders, workers = local_sync(engines, connect=False)
    for worker in workers[0]:
        worker.node = "one"  # here one worker passes on to the other
    for replica in engines:
        sync.connect(replica)
    assert sync.plan(0).digest != sync.plan(1).digest
    senders.load(1)
    sync.sync(1)
    senders.load(2)
    for coming in (1, 0):
        del sync.events[:]
        sync.bring(coming, 1)
        assert phases(sync, coming) == TAKEN
        for engine in engines[coming]:
            assert_holds(engine.tensors, layout(), 1)


def test_where_nothing_was_verified_the_newcomer_is_compared_with_the_peer_and_that_is_said(caplog):
    sync, _, engines, _ = synced(2, verify=False)
    flip(engines[0][0])
    sync.bring(1, 1)
    assert phases(sync, 1) == TAKEN
    assert "synced without verification: what replica 1 takes is compared with rep" in caplog.text
    for name, tensor in engines[0][0].tensors.items():
        assert torch.equal(engines[1][0].tensors[name], tensor)


class Backend:
    """Every process is there; those of `silent` do not answer."""

    def __init__(self, num_replicas: int, silent: Collection[int] = ()) -> None:
        self.num_replicas, self.silent = num_replicas, set(silent)
        self.restarted: list[int] = []

    def restart(self, replica: int) -> None:
        self.restarted.append(replica)
        self.silent.discard(replica)

    def health(self) -> list[ReplicaHealth]:
        return [ReplicaHealth(r, r not in self.silent, 1, "") for r in range(self.num_replicas)]


def healer(sync: WeightSync, backend: Backend) -> Healer:
    return Healer(
        backend,  # type: ignore[arg-type]
        bring=lambda replica: sync.bring(replica, 1),
        forget=sync.forget,
        max_restarts=5,
        lose=sync.lose,
        poisoned=sync.poisoned,
    )


def test_a_peer_found_unfit_is_healed_also_where_the_rest_of_the_bringing_failed(monkeypatch):
    sync, senders, engines, _ = synced(2)
    flip(engines[0][0])
    senders.load(1)
    outcomes = [SyncError("the trainer was late once")]
    synced_by_trainer = sync.sync

    def sync_late_once(*args):
        if outcomes:
            raise outcomes.pop()
        return synced_by_trainer(*args)

    monkeypatch.setattr(sync, "sync", sync_late_once)
    backend = Backend(2)
    assert healer(sync, backend)(1)
    assert backend.restarted == [1, 1, 0]
    assert sync.ready(1) == [0, 1]
    for (engine,) in engines.values():
        assert_holds(engine.tensors, layout(), 1)


def test_a_silent_replica_that_was_lost_beside_another_is_healed_with_it():
    sync, senders, _, _ = synced(3)
    senders.load(1)
    backend = Backend(3, silent={1})
    assert healer(sync, backend)(0)
    assert backend.restarted == [0, 1]
    assert sync.ready(1) == [0, 1, 2]


def test_replicas_that_were_sent_different_weights_serve_no_more():
    sync, _, _, _ = synced(2)
    ends = iter([1, 2])
    replicas = sync._replicas
    for one in replicas.values():
        one.run = partial(_end_ready, one, ends)
    with pytest.raises(SyncError, match="were sent different weights"):
        sync.sync(2)
    assert sync.poisoned() == [0, 1]
    assert sync.ready(2) == []


def _end_ready(one, ends, version, serial, offer):
    one.version, one.record.wire_hash = version, next(ends)


def test_a_trainer_rank_that_does_not_tell_its_layout_is_named():
    sync, senders, _ = local_sync({0: [GivingEngine(layout())]}, connect=False, timeout_s=0.2)
    call = senders.call
    senders.call = lambda rank, method, *args: (
        Future() if method == "sync_layout" else call(rank, method, *args)
    )
    with pytest.raises(M3rlError, match=r"layout: no answer from trainer rank 0 within 0\.2 s"):
        sync.connect(0)

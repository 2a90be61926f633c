"""Syncs into a second copy: the replica serves until the commit, and a fault costs it nothing."""

from __future__ import annotations

import threading

import pytest

from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.receive import ReceiverState
from tests.m3rl.weight_sync.sync_fakes import (
    EXPERT,
    TENSORS,
    FakeEngine,
    assert_holds,
    layout,
    local_sync,
    store_without_sockets,
)


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


def phases(sync) -> list[str]:
    return [event.phase for event in sync.events]


def flip_a_bit(engine: FakeEngine, names: list[str]) -> None:
    if "lm_head.weight" in names:
        engine.loaded["lm_head.weight"][1, 1] += 1


def test_the_pause_comes_after_stream_and_verify():
    engine = FakeEngine(layout(), has_shadow=True)
    sync, senders, _ = local_sync({0: [engine]})
    for version, seed in enumerate([1, 2, 1], start=1):
        del engine.events[:], sync.events[:]
        senders.load(seed)
        report = sync.sync(version)
        writes = ["write"] * len(TENSORS)
        assert engine.events == ["begin_load", *writes, "pause", "commit", "resume"]
        assert phases(sync) == ["prepare", "stream", "verify", "pause", "commit", "resume"]
        assert_holds(engine.tensors, layout(), seed)
        assert report.paused_s < report.seconds


def test_the_old_version_serves_and_counts_while_the_new_one_streams():
    engine = FakeEngine(layout(), has_shadow=True)
    seen = []

    def pause(replica: int) -> None:
        seen.append((engine.serves, engine.version, phases(sync)[-2], sync.ready(1)))
        engine.pause()

    sync, senders, _ = local_sync({0: [engine]}, pause=pause)
    senders.load(1)
    sync.sync(1)
    del seen[:]
    senders.load(2)
    sync.sync(2)
    assert seen == [(True, 1, "verify", [])]
    assert sync.states() == {0: "READY(2)"}


@pytest.mark.parametrize("verify", [True, False])
def test_a_trainer_that_sends_nonsense_leaves_the_old_version_serving(verify: bool):
    engine = FakeEngine(layout(), has_shadow=True)
    sync, senders, _ = local_sync({0: [engine]}, verify=verify)
    senders.load(1)
    sync.sync(1)
    rank = senders.ranks[0]
    rank.weights[EXPERT.format(2)] = rank.weights[EXPERT.format(2)].float()
    with pytest.raises(SyncError, match=r"gave torch\.float32"):
        sync.sync(2)
    assert (engine.serves, engine.version, engine.paused) == (True, 1, False)
    assert_holds(engine.tensors, layout(), 1)
    assert sync.states() == {0: "READY(1)"}
    senders.load(3)
    assert "call connect(0)" in sync_failure(sync, 2)
    sync.connect(0)
    sync.sync(2)
    assert_holds(engine.tensors, layout(), 3)


def sync_failure(sync, version: int) -> str:
    with pytest.raises(SyncError) as caught:
        sync.sync(version)
    return str(caught.value)


def test_wrong_bits_never_reach_what_serves():
    engine = FakeEngine(layout(), has_shadow=True)
    sync, senders, _ = local_sync({0: [engine]})
    senders.load(1)
    sync.sync(1)
    del sync.events[:]
    engine.fault = flip_a_bit
    senders.load(2)
    assert "other bits than the trainer in 1 tensors" in sync_failure(sync, 2)
    assert phases(sync) == ["prepare", "stream", "verify", "stream", "verify"]
    assert (engine.serves, engine.version) == (True, 1)
    assert_holds(engine.tensors, layout(), 1)


def fail() -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("where", ["on the way", "in the engine"])
def test_a_commit_that_is_refused_leaves_the_old_version_serving(monkeypatch, where):
    engine = FakeEngine(layout(), has_shadow=True)
    sync, senders, workers = local_sync({0: [engine]})
    senders.load(1)
    sync.sync(1)
    senders.load(2)
    with monkeypatch.context() as patched:
        if where == "on the way":
            patched.setitem(workers[0][0].before, "commit", fail)
        else:
            patched.setattr(engine, "commit", fail)
        assert "commit: replica 0 worker 0: RuntimeError: out of memory" in sync_failure(sync, 2)
    assert sync.states() == {0: "READY(1)"}
    receiver = workers[0][0].receiver
    assert (receiver.state, receiver.version) == (ReceiverState.READY, 1)
    assert (engine.serves, engine.version, engine.paused) == (True, 1, False)
    assert engine.loading is None, "the refused load is given up"
    assert_holds(engine.tensors, layout(), 1)
    sync.connect(0)
    assert sync.sync(2).ready == (0,)
    assert_holds(engine.tensors, layout(), 2)


@pytest.mark.parametrize("version", [1, 2])
def test_a_commit_that_fails_amid_its_work_poisons(monkeypatch, version):
    """Of the same version too: nobody could tell the old weights from the new ones."""
    engine = FakeEngine(layout(), has_shadow=True)
    sync, senders, workers = local_sync({0: [engine]})
    sync.sync(1)

    def fail_late() -> None:
        engine.tensors[EXPERT.format(0)].copy_(engine.loaded[EXPERT.format(0)])
        engine.version = None if version == 2 else 1
        fail()

    monkeypatch.setattr(engine, "commit", fail_late)
    senders.load(2)
    assert "commit: replica 0 worker 0: RuntimeError: out of memory" in sync_failure(sync, version)
    assert sync.states() == {0: "POISONED"}
    assert workers[0][0].receiver.state is ReceiverState.POISONED
    assert engine.paused


def test_of_two_workers_of_which_one_has_committed_neither_serves(monkeypatch):
    engines = [FakeEngine(layout(w, 2), has_shadow=True) for w in range(2)]
    sync, senders, _ = local_sync({0: engines})
    sync.sync(1)
    monkeypatch.setattr(engines[1], "commit", fail)
    senders.load(2)
    assert "commit: replica 0 worker 1: RuntimeError" in sync_failure(sync, 2)
    assert sync.states() == {0: "POISONED"}
    assert all(engine.paused for engine in engines)


def test_an_engine_that_does_not_pause_for_the_commit_is_given_up(monkeypatch):
    monkeypatch.setattr("m3rl.weight_sync.replica.GRACE_S", 0.1)
    never = threading.Event()
    engine = FakeEngine(layout(), has_shadow=True)
    sync, _, _ = local_sync({0: [engine]}, pause=lambda r: never.wait(30), timeout_s=0.5)
    assert "pause: no answer from pause(0)" in sync_failure(sync, 1)
    never.set()
    assert sync.states() == {0: "POISONED"}
    assert engine.version is None

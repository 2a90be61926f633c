"""A delta that cannot be had costs a full sync in its place: no replica, no restart, no version."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch

from m3rl.weight_sync import delta_send
from m3rl.weight_sync import replica as replica_module
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.delta_send import Snapshot
from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.sync import WeightSync
from tests.m3rl.weight_sync.sync_fakes import FakeEngine, layout, local_sync, store_without_sockets
from tests.m3rl.weight_sync.test_sync_delta import FULL_BYTES, Trainer, assert_same

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 3.00 GiB"


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


def full_memory(*args, **options):
    raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def delta_run(num_ranks: int = 1, has_shadow: bool = False, **options):
    """Two replicas hold version 0; the trainer has made a step since."""
    trainer = Trainer(num_ranks)
    engines = {r: [FakeEngine(layout(), has_shadow=has_shadow)] for r in range(2)}
    sync, _, workers = local_sync(engines, trainer.ranks, delta_full_every=9, **options)
    sync.sync(0)
    trainer.step()
    return sync, trainer, engines, workers


def assert_all_was_sent(sync: WeightSync, trainer: Trainer, engines, caplog, why: str) -> None:
    """The next sync sends all to both and says why; the one after it is a delta again."""
    with caplog.at_level(logging.WARNING):
        report = sync.sync(1)
    assert (report.ready, report.failed, report.checksum_ok) == ((0, 1), {}, True)
    assert (report.num_deltas, report.num_delta_faults) == (0, 2)
    assert report.num_bytes == 2 * FULL_BYTES
    assert report.metrics()["refit/delta_faults"] == 2
    assert why in caplog.text
    for each in engines.values():
        assert_same(each[0], trainer)
    trainer.step()
    after = sync.sync(2)
    assert (after.ready, after.num_deltas, after.num_delta_faults) == ((0, 1), 2, 0)
    for each in engines.values():
        assert_same(each[0], trainer)


@pytest.mark.parametrize("step", ["compare", "pack"])
@pytest.mark.parametrize("has_shadow", [True, False])
def test_an_error_while_comparing_is_a_full_sync(monkeypatch, caplog, has_shadow, step):
    sync, trainer, engines, _ = delta_run(2, has_shadow)
    real = getattr(Snapshot, step)
    calls = []

    def failing(snapshot, serial):
        calls.append(serial)
        if len(calls) == 1:
            full_memory()
        return real(snapshot, serial)

    monkeypatch.setattr(Snapshot, step, failing)
    assert_all_was_sent(sync, trainer, engines, caplog, OUT_OF_MEMORY)


def test_a_rank_that_has_no_memory_to_remember_what_it_sent_sends_all_until_it_has(
    monkeypatch, caplog
):
    trainer = Trainer(2)
    engine = FakeEngine(layout())
    sync, _, _ = local_sync({0: [engine]}, trainer.ranks, delta_full_every=9)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(delta_send, "_Held", full_memory)
        for version in range(3):
            trainer.step()
            report = sync.sync(version)
            assert (report.ready, report.num_deltas) == ((0,), 0)
            assert report.num_delta_faults == min(version, 1)
            assert_same(engine, trainer)
    assert "trainer rank 1 cannot remember what it sends" in caplog.text
    assert f"the replica holds (OutOfMemoryError: {OUT_OF_MEMORY}); it needs" in caplog.text
    kinds = []
    for version in (3, 4):
        trainer.step()
        kinds.append(sync.sync(version).num_deltas)
        assert_same(engine, trainer)
    assert kinds == [0, 1]


def test_a_comparison_that_comes_late_is_a_full_sync(monkeypatch, caplog):
    monkeypatch.setattr(replica_module, "GRACE_S", 0.5)
    sync, trainer, engines, _ = delta_run(timeout_s=0.5)
    compare = Snapshot.compare

    def slow(snapshot, base):
        if base == 3:
            time.sleep(0.7)
        return compare(snapshot, base)

    monkeypatch.setattr(Snapshot, "compare", slow)
    assert sync._replicas[0].base == 3
    why = "sync_compare: no answer from trainer rank 0 within 0.5 s"
    assert_all_was_sent(sync, trainer, engines, caplog, why)


def test_nothing_is_packed_for_weights_that_were_sent_meanwhile():
    trainer = Trainer()
    sync, _, _ = local_sync({0: [FakeEngine(layout())]}, trainer.ranks, delta_full_every=9)
    sync.sync(0)
    (snapshot,) = trainer.ranks[0].sender._snapshots.values()
    base = snapshot.serial
    trainer.step()
    snapshot.compare(base)
    snapshot.take(77)
    with pytest.raises(SyncError, match=r"compare\(\) comes before pack\(78\)"):
        snapshot.pack(78)
    assert snapshot.serial == 77


def test_a_rank_that_never_answers_fails_the_sync_in_bounded_time_and_harms_no_weights(monkeypatch):
    """Before a byte has moved; the old version serves on."""
    monkeypatch.setattr(replica_module, "GRACE_S", 0.1)
    sync, _, engines, _ = delta_run(timeout_s=0.3)
    never = threading.Event()
    monkeypatch.setattr(Snapshot, "compare", lambda snapshot, base: never.wait(30))
    with pytest.raises(SyncError, match=r"prepare: no answer from trainer rank 0 within 0\.4 s"):
        sync.sync(1)
    never.set()
    assert sync.states() == {0: "READY(0)", 1: "READY(0)"}
    assert all(each[0].serves and not each[0].paused for each in engines.values())


def test_a_worker_that_holds_another_base_takes_all_at_once(caplog):
    sync, trainer, engines, workers = delta_run()
    workers[0][0].receiver._base = 77
    report = sync.sync(1)
    assert (report.ready, report.num_deltas, report.num_delta_faults) == ((0, 1), 1, 1)
    assert "replica 0 worker 0 holds the weights of sync 77, and the delta is one" in caplog.text
    for each in engines.values():
        assert_same(each[0], trainer)


def test_a_rank_that_does_not_know_the_base_sends_all(caplog):
    sync, trainer, engines, _ = delta_run()
    trainer.ranks[0].sender._snapshots.clear()
    why = "trainer rank 0 knows the weights of sync None, not those of sync 3"
    assert_all_was_sent(sync, trainer, engines, caplog, why)


def test_nobody_waits_on_for_hashes_of_a_sync_that_another_replaced():
    sync, trainer, _, _ = delta_run()
    sender = trainer.ranks[0].sender
    link = sender._links[0]
    # As after a sync whose hashes were asked for, and which failed before its first round.
    sender.sync_prepare(0, link.prepare)
    waiting = transport_module.in_background(lambda: sender.sync_hashes(0), "waiting")
    time.sleep(0.05)
    assert not waiting.done()
    sender.sync_prepare(0, link.prepare)
    with pytest.raises(SyncError, match="nothing was hashed: another sync has begun"):
        waiting.result(2)
    sync.close()

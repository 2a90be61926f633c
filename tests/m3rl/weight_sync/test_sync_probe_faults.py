"""Probes that go on failing: a replica, or the run, is given up with their numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.probe import Probe, ProbeError
from tests.m3rl.weight_sync.joining import SYNCED, TAKEN, GivingEngine, phases
from tests.m3rl.weight_sync.sync_fakes import layout, local_sync, store_without_sockets

WRONG = r"differ from the trainer's by 0\.5 on average; weight_sync\.probe\.max_error=0\.1"


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


class Pool:
    """Replicas of which some compute something else than the trainer."""

    def __init__(self, count: int, wrong: Sequence[int], **options) -> None:
        self.wrong = set(wrong)
        self.asked: list[int] = []
        engines = {r: [GivingEngine(layout())] for r in range(count)}
        probe = Probe(
            [np.arange(3, dtype=np.int32)],
            trainer=self.trainer_scores,
            replica=self.scores,
            every=1,
            max_error=0.1,
        )
        self.sync, self.senders, _ = local_sync(engines, probe=probe, min_replicas=0, **options)

    def trainer_scores(self, prompts) -> list[np.ndarray]:
        return [np.array([-1.0, -2.0], np.float32)]

    def scores(self, replica: int, prompts) -> list[np.ndarray]:
        self.asked.append(replica)
        shift = 0.5 if replica in self.wrong else 0.0
        return [scores + shift for scores in Pool.trainer_scores(self, prompts)]


def test_a_replica_that_fails_again_after_a_restart_is_given_up_with_the_numbers():
    pool = Pool(3, wrong=[1])
    sync = pool.sync
    assert sorted(sync.sync(1).failed) == [1]
    assert sync.gives_up(1) is None, "a restart may mend it"
    with pytest.raises(ProbeError, match=WRONG):
        sync.bring(1, 1)
    assert pool.asked.count(1) == 2, "verified bits are not fetched again from elsewhere"
    assert "failed the probe 2 times in a row: probe: probe(1): ProbeError: rep" in sync.gives_up(1)
    assert "by 0.5 on average" in sync.gives_up(1)
    assert sync.states() == {0: "READY(1)", 1: "POISONED", 2: "READY(1)"}
    assert sync.gives_up(0) is None
    assert sync.condemns() is None
    sync.forget(1)
    assert sync.gives_up(1) is None


def test_a_probe_that_is_passed_again_is_forgotten():
    pool = Pool(2, wrong=[1])
    sync = pool.sync
    for version in range(1, 4):
        pool.wrong = {1}
        assert sorted(sync.sync(version).failed) == [1]
        pool.wrong = set()
        sync.bring(1, version)
        assert sync.gives_up(1) is None
        assert sync.ready(version) == [0, 1]


def test_where_all_fail_it_is_the_weights_or_the_bound():
    pool = Pool(2, wrong=[0, 1])
    assert sorted(pool.sync.sync(1).failed) == [0, 1]
    reason = pool.sync.condemns()
    assert reason.startswith("every replica fails the probe of the weight sync (2 of 2)")
    assert "max_error=0.1 is below what their dtypes allow" in reason
    assert reason.count("by 0.5 on average") == 2


def test_a_single_replica_is_tried_once_more_before_the_weights_are_blamed():
    pool = Pool(1, wrong=[0])
    pool.sync.sync(1)
    assert pool.sync.condemns() is None
    with pytest.raises(SyncError, match=WRONG):
        pool.sync.bring(0, 1)
    assert "(1 of 1)" in pool.sync.condemns()
    assert phases(pool.sync, 0).count("probe") == 2


def test_a_trainer_that_cannot_compute_the_probe_is_no_fault_of_a_replica():
    pool = Pool(2, wrong=[])

    def fail(prompts):
        raise RuntimeError("out of memory")

    pool.sync._driver.probe._trainer = fail
    pool.sync.sync(1)
    assert pool.sync.condemns().count("RuntimeError: out of memory") == 2


def test_without_a_probe_nothing_is_given_up_for_it():
    sync, _, _ = local_sync({0: [GivingEngine(layout())]})
    sync.sync(1)
    assert (sync.gives_up(0), sync.condemns()) == (None, None)


def test_a_newcomer_is_probed_whoever_gives():
    pool = Pool(2, wrong=[])
    pool.sync.sync(1)
    del pool.sync.events[:]
    pool.sync.bring(1, 1)
    assert phases(pool.sync, 1) == [*TAKEN[:-1], "probe", "resume"]
    pool.sync.lose([0])
    pool.sync.bring(0, 2)
    assert phases(pool.sync, 0) == [*SYNCED[:-1], "probe", "resume"]

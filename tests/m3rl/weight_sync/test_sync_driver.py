from __future__ import annotations

import threading

import pytest
import torch

from inference.kernels.tensor_hash import HashTable
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.errors import BusyError, NotReadyError
from m3rl.weight_sync.report import PHASES
from tests.m3rl.weight_sync.sync_fakes import (
    BIAS,
    TENSORS,
    FakeEngine,
    TrainerRank,
    assert_holds,
    cut,
    layout,
    local_sync,
    store_without_sockets,
    weights,
    wire_hash_of,
)

NUM_BYTES = 2 * (11 * 6 + 8 * 6 + 6 + 4 * 5 * 6 + 11 * 6) + 4 * (4 * 6 + 4)


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


def phases(sync, replica: int = 0) -> list[str]:
    return [event.phase for event in sync.events if event.replica == replica]


def test_weights_a_then_b_then_a_arrive_bit_for_bit():
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]})
    hashes = []
    for version, seed in enumerate([1, 2, 1], start=1):
        senders.load(seed)
        hashes.append(sync.sync(version).wire_hash)
        assert_holds(engine.tensors, layout(), seed)
        assert engine.version == version
        assert sync.states() == {0: f"READY({version})"}
    assert hashes[0] == hashes[2] != hashes[1]


def test_the_same_version_sent_again_brings_the_present_weights():
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]})
    first = sync.sync(7)
    senders.load(3)
    second = sync.sync(7)
    assert_holds(engine.tensors, layout(), 3)
    assert first.wire_hash != second.wire_hash


@pytest.mark.parametrize("chunk_bytes", [64, 150, 1 << 20])
def test_the_size_of_a_chunk_changes_nothing(chunk_bytes: int):
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]}, chunk_bytes=chunk_bytes)
    for version, seed in ((1, 4), (2, 5)):
        senders.load(seed)
        sync.sync(version)
        assert_holds(engine.tensors, layout(), seed)
    plan = sync.plan(0)
    assert plan is not None
    assert (len([op for op in plan.ops if "gate_proj" in op.name]) > 1) == (chunk_bytes < 96)


# BR-006
def test_a_router_bias_arrives_as_the_float32_it_is():
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]})
    bias = torch.tensor([0.0, 0.0, 0.1234567, 10.0])
    senders.ranks[0].weights[BIAS] = bias
    sync.sync(1)
    assert torch.equal(engine.tensors[BIAS], bias)
    assert engine.tensors[BIAS].dtype == torch.float32


# BR-012
def test_a_sync_goes_through_its_phases_in_order_and_the_engine_sees_it_so():
    engine = FakeEngine(layout())
    sync, _, _ = local_sync({0: [engine]})
    sync.sync(1)
    assert phases(sync) == ["prepare", "pause", "stream", "verify", "commit", "resume"]
    writes = ["write"] * len(TENSORS)
    assert engine.events == ["pause", "begin_load", *writes, "commit", "resume"]


def test_the_report_counts_bytes_tensors_and_hashes_the_wire():
    engines = {0: [FakeEngine(layout())], 1: [FakeEngine(layout())]}
    sync, senders, _ = local_sync(engines)
    senders.load(1)
    report = sync.sync(3)
    truth = wire_hash_of(weights(1), sync.plan(0).ops)
    assert report.wire_hash == truth
    assert (report.version, report.ready, report.failed) == (3, (0, 1), {})
    assert (report.num_bytes, report.num_tensors) == (2 * NUM_BYTES, len(TENSORS))
    assert (report.checksum_ok, report.checksum_mismatches) == (True, 0)
    metrics = report.metrics()
    assert metrics["refit/hash"] == f"{truth:016x}"
    assert metrics["refit/bytes"] == 2 * NUM_BYTES
    assert metrics["refit/checksum_ok"] == 1.0
    assert {"refit/version", "refit/gbytes_per_s", "refit/tensors", "refit/paused_s"} <= set(
        metrics
    )
    assert set(report.phase_seconds) == set(PHASES) - {"probe"}
    assert report.seconds >= report.paused_s >= report.phase_seconds["stream"]


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 2), (2, 1), (3, 2), (2, 3)])
def test_the_wire_hash_and_the_tensors_do_not_depend_on_the_sharding(num_ranks, num_workers):
    engines = [FakeEngine(layout(w, num_workers)) for w in range(num_workers)]
    ranks = [TrainerRank(r, num_ranks) for r in range(num_ranks)]
    sync, senders, _ = local_sync({0: engines}, ranks, chunk_bytes=100)
    senders.load(6)
    report = sync.sync(1)
    assert report.wire_hash == wire_hash_of(weights(6), sync.plan(0).ops)
    for w, engine in enumerate(engines):
        assert_holds(engine.tensors, layout(w, num_workers), 6)


def test_without_verification_nothing_is_hashed_and_the_report_says_so(monkeypatch):
    launched = []
    monkeypatch.setattr(HashTable, "launch", lambda table, *parts: launched.append(parts))
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]}, verify=False)
    senders.load(1)
    report = sync.sync(1)
    assert_holds(engine.tensors, layout(), 1)
    assert launched == []
    assert (report.checksum_ok, report.wire_hash) == (None, None)
    assert "refit/checksum_ok" not in report.metrics()
    assert phases(sync) == ["prepare", "pause", "stream", "commit", "resume"]


# BR-008
def test_a_second_caller_learns_who_holds_the_open_sync_and_the_first_one_ends_well():
    entered, leave = threading.Event(), threading.Event()
    engine = FakeEngine(layout())

    def pause(replica: int) -> None:
        entered.set()
        assert leave.wait(10)

    sync, senders, _ = local_sync({0: [engine]}, pause=pause)
    senders.load(1)
    first = threading.Thread(target=sync.sync, args=(1,), name="trainer-loop")
    first.start()
    assert entered.wait(10)
    with pytest.raises(BusyError, match=r"version 2: sync to version 1 \(thread trainer-loop\)"):
        sync.sync(2)
    with pytest.raises(BusyError, match=r"connect\(0\): sync to version 1"):
        sync.connect(0)
    leave.set()
    first.join(10)
    assert sync.states() == {0: "READY(1)"}
    sync.sync(2)
    assert engine.version == 2
    assert_holds(engine.tensors, layout(), 1)


# BR-018
def test_after_a_resume_rollouts_wait_for_the_push_of_the_loaded_version():
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]})
    senders.load(5)
    with pytest.raises(
        NotReadyError, match=r"version 5 is not in the replicas \(replica 0 is EMPTY\).*sync\(5\)"
    ):
        sync.require_ready(5)
    sync.sync(5)
    assert sync.require_ready(5) == [0]
    with pytest.raises(NotReadyError, match=r"replica 0 is READY\(5\)"):
        sync.require_ready(6)


def test_a_pause_that_answers_later_is_waited_for():
    from concurrent.futures import ThreadPoolExecutor

    engine = FakeEngine(layout())
    pool = ThreadPoolExecutor(1)
    sync, _, _ = local_sync(
        {0: [engine]},
        pause=lambda r: pool.submit(lambda: (threading.Event().wait(0.1), engine.pause())),
        resume=lambda r: pool.submit(engine.resume),
    )
    sync.sync(1)
    assert engine.events[0] == "pause"
    assert engine.events[-1] == "resume"


def test_a_closed_driver_leaves_the_engine_serving_what_it_had():
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]})
    senders.load(1)
    sync.sync(1)
    sync.close()
    sync.close()
    assert engine.serves
    assert torch.equal(cut(engine.tensors[BIAS], ((0, 4),)), weights(1)[BIAS])

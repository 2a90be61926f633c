from __future__ import annotations

import dataclasses
import re
import threading

import pytest
import torch

from m3rl.weight_sync import replica as replica_module
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.layout import whole
from m3rl.weight_sync.plan import ops_digest
from tests.m3rl.weight_sync.sync_fakes import (
    BIAS,
    EXPERT,
    FakeEngine,
    TrainerRank,
    assert_holds,
    layout,
    local_sync,
    store_without_sockets,
)

NUM_BYTES = 2 * (11 * 6 + 8 * 6 + 6 + 4 * 5 * 6 + 11 * 6) + 4 * (4 * 6 + 4)


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


def phases(sync, replica: int = 0) -> list[str]:
    return [event.phase for event in sync.events if event.replica == replica]


def flip_a_bit(engine, names):
    if "lm_head.weight" in names:
        engine.loaded["lm_head.weight"].view(torch.int16)[10, 5] ^= 1


def swap_experts(engine, names):
    if EXPERT.format(1) in names:
        assert EXPERT.format(2) in names
        one, two = (engine.loaded[EXPERT.format(e)] for e in (1, 2))
        first = one.clone()
        one.copy_(two)
        two.copy_(first)


def swap_rows(engine, names):
    if EXPERT.format(3) in names:
        rows = engine.loaded[EXPERT.format(3)]
        rows.copy_(rows.flip(0))


def drop_a_write(engine, names):
    if BIAS in names:
        engine.loaded[BIAS].zero_()


def write_twice(engine, names):
    if EXPERT.format(1) in names:
        engine.loaded[EXPERT.format(0)].copy_(engine.loaded[EXPERT.format(1)])


FAULTS = [
    (flip_a_bit, ["lm_head.weight"]),
    (swap_experts, [EXPERT.format(1), EXPERT.format(2)]),
    (swap_rows, [EXPERT.format(3)]),
    (drop_a_write, [BIAS]),
    (write_twice, [EXPERT.format(0)]),
]


# BR-001
@pytest.mark.parametrize(("fault", "names"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_wrong_bits_are_found_retried_once_and_never_served(fault, names):
    engines = {0: [FakeEngine(layout(), fault)], 1: [FakeEngine(layout())]}
    sync, senders, _ = local_sync(engines)
    senders.load(1)
    report = sync.sync(1)
    assert report.ready == (1,)
    assert f"other bits than the trainer in {len(names)} tensors" in report.failed[0]
    assert all(name in report.failed[0] for name in names)
    assert (report.checksum_ok, report.checksum_mismatches) == (False, 2 * len(names))
    assert phases(sync) == ["prepare", "pause", "stream", "verify", "stream", "verify"]
    assert sync.states() == {0: "POISONED", 1: "READY(1)"}
    assert not engines[0][0].serves
    assert_holds(engines[1][0].tensors, layout(), 1)


def test_a_fault_that_does_not_repeat_is_mended_by_the_retry():
    def flip_in_the_first_load(engine, names):
        if engine.num_loads == 1:
            flip_a_bit(engine, names)

    engine = FakeEngine(layout(), flip_in_the_first_load)
    sync, senders, _ = local_sync({0: [engine]})
    senders.load(1)
    report = sync.sync(1)
    assert_holds(engine.tensors, layout(), 1)
    assert (report.ready, report.checksum_ok, report.checksum_mismatches) == ((0,), True, 1)
    assert report.num_bytes == 2 * NUM_BYTES
    assert phases(sync)[2:] == ["stream", "verify", "stream", "verify", "commit", "resume"]


def test_a_part_that_comes_into_place_twice_is_not_committed():
    engine = FakeEngine(layout())
    sync, _, _ = local_sync({0: [engine]})
    written = engine.written

    def twice(first, last):
        written(first, last)
        if first == 0:
            written(first, last)

    engine.written = twice
    with pytest.raises(SyncError, match="replica 0 worker 0"):
        sync.sync(1)
    assert sync.states() == {0: "POISONED"}
    assert "commit" not in engine.events
    assert not engine.serves


@pytest.mark.parametrize("options", [{}, {"delta_full_every": 9}])
def test_equal_weights_three_times_are_three_versions_of_the_same_bits(options):
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]}, **options)
    senders.load(1)
    reports = [sync.sync(version) for version in (1, 2, 3)]
    assert len({report.wire_hash for report in reports}) == 1
    assert [report.num_deltas for report in reports] == [0, *[len(options)] * 2]
    assert (engine.version, engine.events.count("commit")) == (3, 3)
    assert_holds(engine.tensors, layout(), 1)


def test_too_few_ready_replicas_are_an_error_that_says_why():
    engines = {0: [FakeEngine(layout(), drop_a_write)], 1: [FakeEngine(layout())]}
    sync, senders, _ = local_sync(engines, min_replicas=2)
    senders.load(1)
    with pytest.raises(SyncError, match=r"1 replicas hold policy version 4.*2 are needed.*ca 0"):
        sync.sync(4)
    assert sync.ready(4) == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_and_the_replica_serves_nothing(bad):
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]})
    sync.sync(1)
    senders.ranks[0].weights[EXPERT.format(2)][1, 1] = bad
    with pytest.raises(SyncError, match=r"NaN or infinity in .*experts.2.w1.weight\[0:5,0:6\]"):
        sync.sync(2)
    assert sync.states() == {0: "POISONED"}
    assert not engine.serves


# BR-006
def test_a_bias_read_as_bfloat16_is_not_sent():
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]})
    rank = senders.ranks[0]
    rank.weights[BIAS] = rank.weights[BIAS].bfloat16()
    with pytest.raises(SyncError, match=r"correction_bias\[0:4\].* gave torch.bfloat16.*float32"):
        sync.sync(1)
    assert torch.equal(engine.tensors[BIAS], torch.zeros(4))
    assert not engine.serves


def test_trainer_ranks_that_have_drifted_apart_are_found():
    ranks = [TrainerRank(r, 2, is_replicated=True) for r in range(2)]
    sync, _, _ = local_sync({0: [FakeEngine(layout()), FakeEngine(layout())]}, ranks)
    assert sync.sync(1).ready == (0,)
    plan = sync.plan(0)
    assert plan is not None
    # Both workers hold it; each gets it from another trainer rank.
    senders = {name: {op.sender for op in plan.ops if op.name == name} for name in ranks[1].weights}
    name = next(name for name, found in senders.items() if found == {0, 1})
    ranks[1].weights[name].view(-1)[-1] += 1
    with pytest.raises(SyncError, match=rf"ranks 0 and 1 hold different bits of {re.escape(name)}"):
        sync.sync(2)


# BR-003
def test_an_engine_that_rearranged_a_tensor_is_refused_and_still_serves_the_old_version():
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]})
    senders.load(1)
    sync.sync(1)
    name = EXPERT.format(0)
    engine.slots[name] = dataclasses.replace(
        engine.slots[name], shape=(1, 5, 2, 3), bounds=whole((1, 5, 2, 3))
    )
    before = list(engine.events)
    senders.load(2)
    with pytest.raises(SyncError, match="replica 0 worker 0 refuses version 2: its tensors"):
        sync.sync(2)
    assert engine.events == before
    assert engine.serves
    assert sync.states() == {0: "READY(1)"}
    assert_holds(engine.tensors, layout(), 1)


@pytest.mark.parametrize("mends_digest", [False, True])
@pytest.mark.parametrize("tamper", [lambda ops: ops[1:], lambda ops: (ops[0], *ops)])
def test_a_worker_that_is_told_other_ops_refuses(tamper, mends_digest):
    engine = FakeEngine(layout())
    sync, _, workers = local_sync({0: [engine]})
    call = workers[0][0].call

    def tampering(method, *args):
        if method == "prepare":
            ops = tamper(args[0].ops)
            digest = ops_digest(ops) if mends_digest else args[0].ops_digest
            args = (dataclasses.replace(args[0], ops=ops, ops_digest=digest),)
        return call(method, *args)

    workers[0][0].call = tampering
    words = "gate_proj|embed_tokens" if mends_digest else "are not those of the driver's plan"
    with pytest.raises(SyncError, match=f"replica 0 worker 0 refuses version 1.*({words})"):
        sync.sync(1)
    assert engine.events == []
    assert sync.states() == {0: "EMPTY"}


def test_an_unconnected_replica_is_reported_with_the_cure():
    engines = {0: [FakeEngine(layout())], 1: [FakeEngine(layout())]}
    sync, _, _ = local_sync(engines, connect=False)
    sync.connect(0)
    report = sync.sync(1)
    assert report.ready == (0,)
    assert "call connect(1)" in report.failed[1]
    with pytest.raises(ValueError, match=r"no replica 5; known are \[0, 1\]"):
        sync.sync(1, [5])


def test_layouts_that_do_not_fit_are_refused_when_connecting():
    rounded = [dataclasses.replace(s, dtype="bfloat16") if s.name == BIAS else s for s in layout()]
    sync, _, _ = local_sync({0: [FakeEngine(rounded)]}, connect=False)
    with pytest.raises(SyncError, match=r"bias: dtype is float32 on trainer.*bfloat16 on worker 0"):
        sync.connect(0)


def test_an_engine_that_does_not_pause_is_given_up_in_bounded_time(monkeypatch):
    monkeypatch.setattr(replica_module, "GRACE_S", 0.1)
    never = threading.Event()
    engine = FakeEngine(layout())
    sync, _, _ = local_sync({0: [engine]}, pause=lambda r: never.wait(30), timeout_s=0.3)
    with pytest.raises(SyncError, match=r"pause: no answer from pause\(0\) within 0.4 s"):
        sync.sync(1)
    never.set()
    assert engine.events == []
    assert sync.states() == {0: "POISONED"}


def test_a_trainer_rank_that_stalls_is_named_by_the_worker_that_waits_for_it():
    engine = FakeEngine(layout())
    ranks = [TrainerRank(r, 2) for r in range(2)]
    sync, _, _ = local_sync({0: [engine]}, ranks, timeout_s=0.5)
    never, read = threading.Event(), ranks[1].read

    def stall(name, bounds):
        never.wait(1.0 if threading.current_thread().name.startswith("sync-") else 0)
        return read(name, bounds)

    ranks[1].sender._read = stall
    with pytest.raises(SyncError, match=r"worker 0: trainer rank 1 is late: after 0\.[5-9] s"):
        sync.sync(1)
    assert not engine.serves


def test_a_replica_does_not_wait_for_another_that_stalls():
    engines = {0: [FakeEngine(layout())], 1: [FakeEngine(layout())]}
    other_is_done = threading.Event()

    def resume(replica: int) -> None:
        engines[replica][0].resume()
        if replica == 1:
            other_is_done.set()

    sync, senders, workers = local_sync(engines, resume=resume)
    senders.load(1)

    def stall() -> None:
        assert other_is_done.wait(4)

    workers[0][0].before["stream"] = stall
    assert sync.sync(1).ready == (0, 1)
    assert_holds(engines[0][0].tensors, layout(), 1)


def test_a_worker_that_never_answers_is_named_after_the_deadline(monkeypatch):
    monkeypatch.setattr(replica_module, "GRACE_S", 0.2)
    engines = {0: [FakeEngine(layout())], 1: [FakeEngine(layout())]}
    sync, _, workers = local_sync(engines, timeout_s=0.8)
    never = threading.Event()
    workers[0][0].before["stream"] = lambda: never.wait(30) and None
    report = sync.sync(1)
    never.set()
    assert report.ready == (1,)
    assert "stream: no answer from replica 0 worker 0 within 1 s" in report.failed[0]
    assert "trainer rank 0: TransportError" in report.failed[0]


def test_a_poisoned_replica_comes_back_by_connecting_and_a_full_sync():
    engines = {0: [FakeEngine(layout(), flip_a_bit)], 1: [FakeEngine(layout())]}
    sync, senders, _ = local_sync(engines)
    senders.load(1)
    assert sync.sync(1).ready == (1,)
    engines[0][0].fault = None
    assert "call connect(0)" in sync.sync(2).failed[0]
    sync.connect(0)
    assert sync.states() == {0: "EMPTY", 1: "READY(2)"}
    report = sync.sync(2, [0])
    assert (report.ready, sync.ready(2)) == ((0,), [0, 1])
    assert_holds(engines[0][0].tensors, layout(), 1)


def test_nobody_waits_for_hashes_of_a_sending_that_failed_before_it_hashed():
    """Who does holds a thread of the rank that the closing of the group may need."""
    rank = TrainerRank(0, 1)
    sync, senders, _ = local_sync({0: [FakeEngine(layout())]}, [rank], min_replicas=0)
    asked = []
    call = senders.call

    def noted(number, method, *args):
        future = call(number, method, *args)
        if method == "sync_hashes":
            asked.append(future)
        return future

    sync.sync(0)
    senders.call = noted
    rank.weights = {}
    (fault,) = sync.sync(1).failed.values()
    assert "KeyError" in fault
    with pytest.raises(SyncError, match="nothing was hashed: the sending failed before it"):
        asked[0].result(10)

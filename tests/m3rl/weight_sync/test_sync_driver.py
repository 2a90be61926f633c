from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from inference.kernels.tensor_hash import combine, tensor_hash
from m3rl.weight_sync import replica as replica_module
from m3rl.weight_sync.errors import BusyError, NotReadyError, SyncError
from m3rl.weight_sync.layout import whole
from tests.m3rl.weight_sync.sync_fakes import (
    BIAS,
    EXPERT,
    TENSORS,
    FakeEngine,
    TrainerRank,
    assert_holds,
    cut,
    layout,
    local_sync,
    weights,
)

NUM_BYTES = 2 * (11 * 6 + 8 * 6 + 6 + 4 * 5 * 6 + 11 * 6) + 4 * (4 * 6 + 4)


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


def test_a_router_bias_arrives_as_the_float32_it_is():
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]})
    bias = torch.tensor([0.0, 0.0, 0.1234567, 10.0])
    senders.ranks[0].weights[BIAS] = bias
    sync.sync(1)
    assert torch.equal(engine.tensors[BIAS], bias)
    assert engine.tensors[BIAS].dtype == torch.float32


def test_a_sync_goes_through_its_phases_in_order_and_the_engine_sees_it_so():
    engine = FakeEngine(layout())
    sync, _, _ = local_sync({0: [engine]})
    sync.sync(1)
    assert phases(sync) == ["prepare", "pause", "stream", "verify", "commit", "resume"]
    writes = ["write"] * len(TENSORS)
    assert engine.events == ["pause", "begin_load", *writes, "hash", "commit", "resume"]


def test_the_report_counts_bytes_tensors_and_hashes_the_wire():
    engines = {0: [FakeEngine(layout())], 1: [FakeEngine(layout())]}
    sync, senders, _ = local_sync(engines)
    senders.load(1)
    report = sync.sync(3)
    truth = combine(tensor_hash(tensor, name=name) for name, tensor in weights(1).items())
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
    assert set(report.phase_seconds) == set(replica_module.PHASES)
    assert report.seconds >= report.paused_s >= report.phase_seconds["stream"]


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 2), (2, 1), (3, 2), (2, 3)])
def test_the_wire_hash_and_the_tensors_do_not_depend_on_the_sharding(num_ranks, num_workers):
    engines = [FakeEngine(layout(w, num_workers)) for w in range(num_workers)]
    ranks = [TrainerRank(r, num_ranks) for r in range(num_ranks)]
    sync, senders, _ = local_sync({0: engines}, ranks, chunk_bytes=100)
    senders.load(6)
    report = sync.sync(1)
    assert report.wire_hash == combine(tensor_hash(t, name=n) for n, t in weights(6).items())
    for w, engine in enumerate(engines):
        assert_holds(engine.tensors, layout(w, num_workers), 6)


def test_without_verification_nothing_is_hashed_and_the_report_says_so():
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]}, verify=False)
    senders.load(1)
    report = sync.sync(1)
    assert_holds(engine.tensors, layout(), 1)
    assert "hash" not in engine.events
    assert (report.checksum_ok, report.wire_hash) == (None, None)
    assert "refit/checksum_ok" not in report.metrics()
    assert phases(sync) == ["prepare", "pause", "stream", "commit", "resume"]


# --- what arrives is not what was sent ------------------------------------------------------------


def flip_a_bit(engine, name, tensor):
    if name == "lm_head.weight":
        tensor = tensor.clone()
        tensor.view(torch.int16)[10, 5] ^= 1
    return name, tensor


def swap_experts(engine, name, tensor):
    pair = {EXPERT.format(1): EXPERT.format(2), EXPERT.format(2): EXPERT.format(1)}
    return pair.get(name, name), tensor


def swap_rows(engine, name, tensor):
    return name, tensor.flip(0) if name == EXPERT.format(3) else tensor


def drop_a_write(engine, name, tensor):
    return None if name == BIAS else (name, tensor)


def write_twice(engine, name, tensor):
    if name == EXPERT.format(1):
        engine.tensors[EXPERT.format(0)].copy_(tensor)
    return name, tensor


FAULTS = [
    (flip_a_bit, ["lm_head.weight"]),
    (swap_experts, [EXPERT.format(1), EXPERT.format(2)]),
    (swap_rows, [EXPERT.format(3)]),
    (drop_a_write, [BIAS]),
    (write_twice, [EXPERT.format(0)]),
]


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
    def flip_in_the_first_load(engine, name, tensor):
        return flip_a_bit(engine, name, tensor) if engine.num_loads == 1 else (name, tensor)

    engine = FakeEngine(layout(), flip_in_the_first_load)
    sync, senders, _ = local_sync({0: [engine]})
    senders.load(1)
    report = sync.sync(1)
    assert_holds(engine.tensors, layout(), 1)
    assert (report.ready, report.checksum_ok, report.checksum_mismatches) == ((0,), True, 1)
    assert report.num_bytes == 2 * NUM_BYTES
    assert phases(sync)[2:] == ["stream", "verify", "stream", "verify", "commit", "resume"]


def test_too_few_ready_replicas_are_an_error_that_says_why():
    engines = {0: [FakeEngine(layout(), drop_a_write)], 1: [FakeEngine(layout())]}
    sync, senders, _ = local_sync(engines, min_replicas=2)
    senders.load(1)
    with pytest.raises(
        SyncError, match=r"1 replicas hold policy version 4.*2 are needed.*replica 0"
    ):
        sync.sync(4)
    assert sync.ready(4) == [1]


def test_nan_is_refused_and_the_replica_serves_nothing():
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]})
    sync.sync(1)
    senders.ranks[0].weights[EXPERT.format(2)][1, 1] = float("nan")
    with pytest.raises(SyncError, match=r"NaN or infinity in .*experts.2.w1.weight\[0:5,0:6\]"):
        sync.sync(2)
    assert sync.states() == {0: "POISONED"}
    assert not engine.serves
    assert not engine.tensors[EXPERT.format(2)].isnan().any()


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
    # Two workers hold the same norm; each is served by another trainer rank.
    ranks = [TrainerRank(r, 1) for r in range(2)]
    engines = [FakeEngine(layout(w, 2)) for w in range(2)]
    sync, _, _ = local_sync({0: engines}, ranks)
    plan = sync.plan(0)
    assert plan is not None
    sent_by = {name: {op.sender for op in plan.ops if op.name == name} for name in TENSORS}
    name = next(n for n in TENSORS if engines[0].slots[n].bounds == whole(TENSORS[n][1]))
    assert sent_by[name] == {0, 1}
    ranks[1].weights[name] = ranks[1].weights[name] + 1
    with pytest.raises(SyncError, match="trainer ranks 0 and 1 hold different bits of"):
        sync.sync(1)


# --- refused before a byte moves ------------------------------------------------------------------


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
            digest = replica_module.ops_digest(ops) if mends_digest else args[0].ops_digest
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


# --- time, order and callers ----------------------------------------------------------------------


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
    with pytest.raises(SyncError, match="replica 0 worker 0: trainer rank 1 is late: after 0.5 s"):
        sync.sync(1)
    assert not engine.serves


def test_a_worker_that_stalls_in_a_stream_does_not_keep_the_other_replica_waiting(monkeypatch):
    monkeypatch.setattr(replica_module, "GRACE_S", 0.2)
    engines = {0: [FakeEngine(layout())], 1: [FakeEngine(layout())]}
    resumed: dict[int, float] = {}
    never = threading.Event()
    sync, senders, workers = local_sync(engines, timeout_s=0.8)
    senders.load(1)
    sync._driver.events.clear()
    workers[0][0].before["stream"] = lambda: never.wait(30)
    report = sync.sync(1)
    never.set()
    assert report.ready == (1,)
    assert "no answer from replica 0 worker 0 within 1 s" in report.failed[0]
    assert "trainer rank 0: TransportError" in report.failed[0]
    assert_holds(engines[1][0].tensors, layout(), 1)
    assert report.paused_s < report.seconds / 2
    assert resumed == {}


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

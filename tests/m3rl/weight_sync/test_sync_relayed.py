"""Syncs in which workers of a node pass on to one another what they all hold."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch

from m3rl.types import TensorSlot
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.errors import PlanError, SyncError
from m3rl.weight_sync.layout import extents, whole
from m3rl.weight_sync.nccl import NcclTransport
from m3rl.weight_sync.plan import Plan, make_plan, ops_digest
from m3rl.weight_sync.relay import check_passes, relayed
from m3rl.weight_sync.transport import Transport
from tests.m3rl.weight_sync import sync_fakes
from tests.m3rl.weight_sync.sync_fakes import (
    EXPERT,
    TENSORS,
    FakeEngine,
    TrainerRank,
    assert_holds,
    layout,
    local_sync,
    store_without_sockets,
    wire_hash_of,
)
from tests.m3rl.weight_sync.test_sync_nccl import CPU, FakeGroup

NODES = ["a", "a", "b", "b"]


@pytest.fixture(autouse=True)
def _larger_model_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)
    for name, (dtype, shape, bucket) in TENSORS.items():
        larger = (8 * shape[0], *(8 * size for size in shape[1:]))
        monkeypatch.setitem(sync_fakes.TENSORS, name, (dtype, larger, bucket))


def expert_parallel(worker: int) -> list[TensorSlot]:
    """All of the model but the experts of other workers."""
    own = EXPERT.format(worker)
    return [
        TensorSlot(name, dtype, shape, whole(shape), bucket)
        for name, (dtype, shape, bucket) in TENSORS.items()
        if ".experts." not in name or name == own
    ]


class StridedEngine(FakeEngine):
    """No place of a matrix is contiguous: everything is staged, and passed on from there."""

    def __init__(self, slots: list[TensorSlot]) -> None:
        super().__init__(slots)
        for slot in slots:
            if len(slot.shape) == 2:
                rows, columns = extents(slot.bounds)
                wide = torch.zeros((rows, columns + 1), dtype=self.tensors[slot.name].dtype)
                self.tensors[slot.name] = wide[:, 1:]
        self.loaded = self.tensors


@pytest.fixture(params=["gloo", "nccl"])
def sent(request, monkeypatch):
    """(backend, bytes that each rank sends)"""
    FakeGroup.mail = collections.defaultdict(collections.deque)

    def meet(spec, rank, store, device):
        return NcclTransport(FakeGroup(spec.key, rank), spec, rank, store, CPU)

    monkeypatch.setattr(NcclTransport, "meet", meet)
    counts: collections.Counter[int] = collections.Counter()
    for kind in (Transport, NcclTransport):
        post = kind.post

        def counting(transport, *, sends=(), receives=(), post=post):
            counts[transport.rank] += sum(each.wire.numel() for each in sends)
            return post(transport, sends=sends, receives=receives)

        monkeypatch.setattr(kind, "post", counting)
    return request.param, counts


def connected(engines, ranks, nodes, **options):
    sync, senders, workers = local_sync({0: engines}, ranks, connect=False, **options)
    for worker, node in zip(workers[0], nodes, strict=True):
        worker.node = node
    sync.connect(0)
    return sync, senders


@pytest.mark.parametrize("engine", [FakeEngine, StridedEngine])
@pytest.mark.parametrize("chunk_bytes", [2000, 1 << 20])
def test_what_a_node_holds_twice_leaves_the_trainers_once_for_it(sent, engine, chunk_bytes):
    backend, counts = sent
    engines = [engine(expert_parallel(w)) for w in range(4)]
    ranks = [TrainerRank(r, 2) for r in range(2)]
    sync, senders = connected(engines, ranks, NODES, chunk_bytes=chunk_bytes, backend=backend)
    for version, seed in enumerate([1, 2, 1], start=1):
        senders.load(seed)
        counts.clear()
        report = sync.sync(version)
        assert report.wire_hash == wire_hash_of(sync_fakes.weights(seed), sync.plan(0).ops)
        for w, each in enumerate(engines):
            assert_holds(each.tensors, expert_parallel(w), seed)
        experts = sum(w.nbytes for n, w in sync_fakes.weights(0).items() if ".experts." in n)
        others = sum(w.nbytes for n, w in sync_fakes.weights(0).items() if ".experts." not in n)
        assert counts[0] + counts[1] == experts + 2 * others == report.num_bytes
        assert max(counts[0], counts[1]) <= 1.1 * (counts[0] + counts[1]) / 2
        # Each worker passes on about half of what both want.
        assert sum(counts[2 + w] for w in range(4)) == 2 * others
        assert max(counts[2 + w] for w in range(4)) <= 1.1 * others / 2


def test_a_part_that_is_damaged_on_its_way_round_a_node_is_found():
    def damage(engine, names):
        name = "lm_head.weight"
        if name in names:
            engine.loaded[name][40, 3] = 100.0  # not flipped: it comes in two rounds

    engines = [FakeEngine(expert_parallel(w)) for w in range(3)]
    engines.append(FakeEngine(expert_parallel(3), damage))
    sync, senders = connected(engines, [TrainerRank(0, 1)], NODES)
    senders.load(1)
    with pytest.raises(SyncError, match=r"other bits than the trainer in 1 tensors.*lm_head"):
        sync.sync(1)
    assert not any(engine.serves for engine in engines)


def test_workers_of_different_nodes_or_with_different_parts_get_the_plan_as_it_is():
    alone, parts = [layout()], [layout(w, 2) for w in range(2)]
    plan = make_plan(alone, parts, 1 << 20)
    assert relayed(plan, [0, 1]) is plan
    vectors = {op.name for op in relayed(plan, [0, 0]).ops if op.via >= 0}
    assert vectors == {op.name for op in plan.ops if op.bounds == whole(TENSORS[op.name][1])}
    twice = make_plan(alone, [layout(), layout()], 1 << 20)
    assert relayed(twice, [3, 4]) is twice
    assert relayed(twice, [3, 3]).nbytes == twice.nbytes // 2


def test_a_pass_of_what_has_not_come_is_refused():
    sides = [layout()], [layout(), layout()]
    plan = relayed(make_plan(*sides, 2000), [0, 0])
    check_passes(plan, *sides)
    number, one = next((k, op) for k, op in enumerate(plan.ops) if op.via >= 0)
    early = dataclasses.replace(one, round=one.round - 1)
    ops = (*plan.ops[:number], early, *plan.ops[number + 1 :])
    with pytest.raises(PlanError, match=rf"worker {one.via} is to pass .* has not come there in t"):
        check_passes(Plan(ops, ops_digest(ops)), *sides)
    ops = (*plan.ops[:number], *plan.ops[number + 1 :])
    with pytest.raises(PlanError, match=rf"worker {one.receiver} would receive .*copy is missing"):
        check_passes(Plan(ops, ops_digest(ops)), *sides)


def test_a_node_is_named_alike_by_all_of_its_workers():
    sync, _, workers = local_sync({0: [FakeEngine(layout())], 1: [FakeEngine(layout())]})
    names = {workers[r][0].receiver.node() for r in (0, 1)}
    assert len(names) == 1
    assert names != {" "}
    sync.close()

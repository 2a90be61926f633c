from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.parallel.config import ParallelConfig
from m3rl.types import TensorSlot
from m3rl.weight_sync.errors import PlanError
from m3rl.weight_sync.layout import Bounds, whole
from m3rl.weight_sync.plan import CopyOp, Plan, make_plan, ops_digest
from m3rl.weight_sync.relay import RelayedPlan, check_relay, relay
from m3rl.weight_sync.trainer_layout import TrainerShards
from tests.m3rl.weight_sync.model_layouts import REPLICAS, TRAINERS, replica, trainer

CHUNK = 4096
Layouts = Sequence[Sequence[TensorSlot]]


def slot(bounds: Bounds) -> TensorSlot:
    return TensorSlot("w", "float32", (8, 2), bounds, "pre")


def relayed_model(
    split: TrainerShards, parallel: ParallelConfig, per_node: int
) -> tuple[RelayedPlan, Layouts, Layouts, list[int]]:
    senders, receivers = trainer(split), replica(parallel)
    nodes = [worker // per_node for worker in range(parallel.world)]
    plan = make_plan(senders, receivers, CHUNK)
    return relay(plan.ops, nodes, CHUNK), senders, receivers, nodes


def test_two_nodes_of_two_workers_that_want_all_by_hand():
    senders = [[slot(((0, 4), (0, 2)))], [slot(((4, 8), (0, 2)))]]
    receivers = [[slot(whole((8, 2)))]] * 4
    plan = make_plan(senders, receivers, 1 << 20)
    assert len(plan.ops) == 8
    found = relay(plan.ops, [5, 5, 7, 7], 1 << 20)
    check_relay(found, senders, receivers, [5, 5, 7, 7])
    # A worker's share is 32 bytes, so pieces are cut to a quarter of it: one row.
    copies = [(op.sender, op.receiver, op.bounds[0]) for op in found.plan.ops]
    rows = [(row, row + 1) for row in range(8)]
    for node in ((0, 1), (2, 3)):
        assert sorted(each for _, worker, each in copies if worker in node) == rows
    assert all(sender == each[0] // 4 for sender, _, each in copies)
    assert [sum(worker == w for _, worker, _ in copies) for w in range(4)] == [4, 4, 4, 4]
    assert found.onward == tuple((op.receiver ^ 1,) for op in found.plan.ops)
    assert found.arrivals(0) == [op for op in found.plan.ops if op.receiver < 2]


def test_what_one_worker_of_a_node_wants_is_left_alone():
    senders = [[slot(whole((8, 2)))]]
    receivers = [[slot(whole((8, 2)))]] * 3
    plan = make_plan(senders, receivers, 1 << 20)
    found = relay(plan.ops, [0, 1, 2], 1 << 20)
    assert found.plan == plan
    assert found.onward == ((), (), ())


def replay(found: RelayedPlan, senders: Layouts, receivers: Layouts) -> list[dict[str, np.ndarray]]:
    """What each worker holds after both stages, round by round; NaN where nothing arrived."""
    shapes = {each.name: each.shape for layout in senders for each in layout}
    values = {
        name: np.arange(np.prod(shape, dtype=int), dtype=float).reshape(shape)
        for name, shape in shapes.items()
    }
    held = [{each.name: np.full(each.shape, np.nan) for each in layout} for layout in receivers]
    for number in range(found.plan.ops[-1].round + 2):
        before = [{name: array.copy() for name, array in arrays.items()} for arrays in held]
        for op in found.plan.ops:
            if op.round == number:
                place = tuple(slice(*edges) for edges in op.bounds)
                assert np.isnan(held[op.receiver][op.name][place]).all()
                held[op.receiver][op.name][place] = values[op.name][place]
        for op, onward in zip(found.plan.ops, found.onward, strict=True):
            for worker in onward if op.round + 1 == number else ():
                place = tuple(slice(*edges) for edges in op.bounds)
                assert np.isnan(held[worker][op.name][place]).all()
                held[worker][op.name][place] = before[op.receiver][op.name][place]
    return held


@pytest.mark.parametrize("split", [TRAINERS[0], TRAINERS[3]], ids=str)
@pytest.mark.parametrize("parallel", [REPLICAS[1], REPLICAS[3]], ids=str)
def test_a_replay_in_rounds_brings_every_worker_what_it_holds(
    split: TrainerShards, parallel: ParallelConfig
):
    found, senders, receivers, _ = relayed_model(split, parallel, 2)
    assert any(found.onward)
    held = replay(found, senders, receivers)
    for layout, arrays in zip(receivers, held, strict=True):
        for each in layout:
            place = tuple(slice(*edges) for edges in each.bounds)
            want = np.arange(np.prod(each.shape, dtype=int), dtype=float).reshape(each.shape)
            assert np.array_equal(arrays[each.name][place], want[place])
            assert np.isnan(arrays[each.name]).sum() == want.size - want[place].size


def into_nodes(ops: Sequence[CopyOp], nodes: Sequence[int]) -> dict[int, int]:
    found = dict.fromkeys(nodes, 0)
    for op in ops:
        found[nodes[op.receiver]] += op.nbytes
    return found


def wanted_in_nodes(receivers: Layouts, nodes: Sequence[int]) -> dict[int, int]:
    """Bytes of the elements that any worker of a node holds: arrays, no rectangles."""
    masks: dict[tuple[int, str], np.ndarray] = {}
    sizes = {each.name: 4 if each.dtype == "float32" else 2 for each in receivers[0]}
    for layout, node in zip(receivers, nodes, strict=True):
        for each in layout:
            mask = masks.setdefault((node, each.name), np.zeros(each.shape, bool))
            mask[tuple(slice(*edges) for edges in each.bounds)] = True
    found = dict.fromkeys(nodes, 0)
    for (node, name), mask in masks.items():
        found[node] += int(mask.sum()) * sizes.get(name, 2)  # experts elsewhere are BF16
    return found


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(TRAINERS), st.sampled_from(REPLICAS), st.integers(1, 8))
def test_each_byte_enters_a_node_once_and_shares_are_even(split, parallel, per_node):
    found, senders, receivers, nodes = relayed_model(split, parallel, per_node)
    check_relay(found, senders, receivers, nodes)
    assert into_nodes(found.plan.ops, nodes) == wanted_in_nodes(receivers, nodes)
    if parallel.world % per_node or per_node % parallel.tp:
        return  # workers of a node have nothing, or not all, in common with one another
    got = [sum(op.nbytes for op in found.plan.receives(rank)) for rank in range(parallel.world)]
    largest = max(op.nbytes for op in found.plan.ops)
    for node in set(nodes):
        here = [got[rank] for rank in range(parallel.world) if nodes[rank] == node]
        assert max(here) - min(here) <= largest + 0.05 * max(here)


def test_check_finds_every_fault_of_a_pass():
    found, senders, receivers, nodes = relayed_model(TRAINERS[1], REPLICAS[1], 2)
    for i in range(0, len(found.onward), 7):
        if not found.onward[i]:
            continue
        op, (other,) = found.plan.ops[i], found.onward[i]
        name = re.escape(op.name)
        faults = {
            (): f"elements of {name}; a copy is missing",
            (other, other): f"a part of {name} twice",
            (other, op.receiver): f"a part of {name} twice",
            (other, (other + 2) % 4): "which is on another node",
            (other, 4): "names a rank that does not exist",
        }
        for workers, words in faults.items():
            onward = (*found.onward[:i], workers, *found.onward[i + 1 :])
            with pytest.raises(PlanError, match=words):
                check_relay(RelayedPlan(found.plan, onward), senders, receivers, nodes)
    with pytest.raises(PlanError, match="lists of whom to pass them on to"):
        check_relay(RelayedPlan(found.plan, found.onward[1:]), senders, receivers, nodes)


def test_check_finds_a_copy_that_its_trainer_rank_does_not_hold():
    found, senders, receivers, nodes = relayed_model(TRAINERS[1], REPLICAS[1], 2)
    ops = (dataclasses.replace(found.plan.ops[0], sender=2), *found.plan.ops[1:])
    moved = RelayedPlan(Plan(ops, ops_digest(ops)), found.onward)
    assert moved.digest != found.digest
    with pytest.raises(PlanError, match=r"trainer rank 2 is to send .* which it does not hold so"):
        check_relay(moved, senders, receivers, nodes)


def test_what_a_trainer_rank_sends_to_a_node_goes_to_one_worker():
    def held(rows: tuple[int, int]) -> list[TensorSlot]:
        return [TensorSlot(f"w{i}", "float32", (8, 2), (rows, (0, 2)), "layer.0") for i in range(6)]

    plan = make_plan([held((r, r + 1)) for r in range(8)], [held((0, 8))] * 2, 1 << 20)
    found = relay(plan.ops, [0, 0], 1 << 20)
    assert len(found.plan.ops) == 48
    pairs = {(op.sender, op.receiver) for op in found.plan.ops}
    assert len(pairs) == 8
    assert sum(worker for _, worker in pairs) == 4

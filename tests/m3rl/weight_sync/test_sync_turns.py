"""Turns of replicas and of trainer ranks: who sends what to which replica, and when."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from inference.parallel.config import ParallelConfig
from m3rl.types import TensorSlot
from m3rl.weight_sync.plan import Plan, check_plan, make_plan
from m3rl.weight_sync.relay import check_passes, relayed, source_of
from m3rl.weight_sync.simulate import Links, simulate
from m3rl.weight_sync.trainer_layout import TrainerShards
from m3rl.weight_sync.turns import Turn, ahead_of, first_place, take_turns, twins
from tests.m3rl.weight_sync.model_layouts import REPLICAS, replica, trainer

CHUNK = 4096
SPLITS = [
    TrainerShards(world=6, replicas=6),
    TrainerShards(world=8, replicas=2, ep=2),
    TrainerShards(world=12, replicas=3, ep=4),
]


def sent(plan: Plan, num_senders: int) -> np.ndarray:
    """[trainer rank]: bytes."""
    return np.array([sum(op.nbytes for op in plan.sends(rank)) for rank in range(num_senders)])


def test_ranks_with_equal_layouts_are_twins():
    assert twins(trainer(TrainerShards(world=4, replicas=4))) == [(0, 1, 2, 3)]
    assert twins(trainer(TrainerShards(world=4, replicas=2))) == [(0, 2), (1, 3)]
    assert twins(trainer(TrainerShards(world=3))) == [(0,), (1,), (2,)]


def test_copies_of_a_round_go_round_the_ranks_and_the_next_replica_begins_with_the_next_rank():
    held = [TensorSlot(f"w{i}", "float32", (25,), ((0, 25),), "pre") for i in range(4)]
    senders = [held] * 4
    plan = make_plan(senders, [held], 200)  # two of 100 bytes a round
    first = take_turns(plan, senders, Turn(0, 2))
    assert [(op.round, op.sender) for op in first.ops] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    second = take_turns(plan, senders, Turn(1, 2))
    assert [(op.round, op.sender) for op in second.ops] == [(0, 2), (0, 3), (1, 0), (1, 1)]


def test_a_plan_stays_what_it_is_where_no_two_ranks_hold_the_same():
    senders = trainer(TrainerShards(world=4, ep=4))
    plan = make_plan(senders, replica(REPLICAS[1]), CHUNK)
    assert take_turns(plan, senders, Turn(0, 3)) is plan


def test_replicas_that_all_take_from_the_same_rank_begin_with_several_rounds():
    held = [
        TensorSlot(f"{bucket}.w{i}", "float32", (25,), ((0, 25),), bucket)
        for bucket in ("pre", "post")
        for i in range(4)
    ]
    plan = make_plan([held], [held], 100)
    for number, names in ((1, "1230"), (2, "2301")):
        turned = take_turns(plan, [held], Turn(4 - number, 4))
        check_plan(turned, [held], [held])
        assert [op.round for op in turned.ops] == list(range(8))
        assert "".join(op.name[-1] for op in turned.ops) == 2 * names


def test_only_replicas_for_which_the_same_ranks_begin_differ_in_their_rounds():
    assert [ahead_of(1, Turn(i, 3)) for i in range(3)] == [(0, 3), (1, 3), (2, 3)]
    assert [ahead_of(2, Turn(i, 5)) for i in range(5)] == [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]
    assert {ahead_of(8, Turn(i, 5)) for i in range(5)} == {(0, 1)}


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("parallel", [REPLICAS[0], REPLICAS[1], REPLICAS[5]], ids=str)
def test_turns_change_senders_and_rounds_alone_and_a_round_is_shared_out_evenly(
    split: TrainerShards, parallel: ParallelConfig
):
    senders, receivers = trainer(split), replica(parallel)
    plan = make_plan(senders, receivers, CHUNK)
    turned = take_turns(plan, senders, Turn(2, 5))
    check_plan(turned, senders, receivers)
    same = {dataclasses.replace(op, sender=0, round=0): op.round for op in plan.ops}
    became = {dataclasses.replace(op, sender=0, round=0): op.round for op in turned.ops}
    assert became.keys() == same.keys()
    moves = {(same[op], became[op]) for op in same}
    assert len(moves) == len(set(same.values()))  # whole rounds
    group_of = {rank: group for group in twins(senders) for rank in group}
    load: Counter[tuple[int, int]] = Counter()
    largest: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for op in turned.ops:
        load[op.round, op.sender] += op.nbytes
        key = op.round, group_of[op.sender]
        largest[key] = max(largest[key], op.nbytes)
    for (number, group), most in largest.items():
        each = [load[number, rank] for rank in group]
        bundle = sum(each) // (16 * len(group))
        assert max(each) - min(each) <= max(most, bundle)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_what_workers_pass_on_names_the_rank_that_sent_it(split: TrainerShards):
    senders, receivers = trainer(split), replica(ParallelConfig(tp=1, dp=4))
    plan = relayed(make_plan(senders, receivers, CHUNK), [0, 0, 1, 1])
    turned = take_turns(plan, senders, Turn(1, 2))
    check_passes(turned, senders, receivers)
    sources = source_of(turned.ops)
    passes = [op for op in turned.ops if op.via >= 0]
    assert passes
    for op in passes:
        assert op.sender == turned.ops[sources[op.via, op.name, op.bounds]].sender


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_all_replicas_together_take_equally_much_from_all_ranks(
    split: TrainerShards, num_replicas: int
):
    senders, receivers = trainer(split), replica(ParallelConfig(tp=1, dp=4))
    plan = relayed(make_plan(senders, receivers, CHUNK), [0, 0, 1, 1])
    turns = [Turn(number, num_replicas) for number in range(num_replicas)]
    load = sum(sent(take_turns(plan, senders, turn), split.world) for turn in turns)
    # Of the few buckets of this model none evens out what another leaves.
    assert load.max() <= (1.1 if num_replicas == 1 else 1.05) * load.mean()


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("parallel", [REPLICAS[1], REPLICAS[3], REPLICAS[5]], ids=str)
def test_the_simulation_is_of_the_plans_that_replicas_carry_out(
    split: TrainerShards, parallel: ParallelConfig
):
    senders, receivers = trainer(split), replica(parallel)
    found = simulate(
        senders, receivers, num_replicas=3, chunk_bytes=CHUNK, links=Links(gpus_per_node=4)
    )
    load = np.zeros(split.world, int)
    for number in range(3):
        first = split.world + number * parallel.world
        nodes = [(first + worker) // 4 for worker in range(parallel.world)]
        plan = relayed(make_plan(senders, receivers, CHUNK), nodes)
        load += sent(take_turns(plan, senders, Turn(number, 3)), split.world)
    # Rounds may differ by an op: a replica joins what is relayed to rounds of its largest one.
    assert sum(found.sent_bytes) == load.sum()
    assert found.sent_bytes == pytest.approx(tuple(load), rel=0.01)


def test_buckets_begin_with_ranks_that_are_evenly_spread():
    for size, num_buckets in ((2, 60), (8, 60), (128, 512)):
        begun = Counter(first_place(size, bucket, Turn()) for bucket in range(num_buckets))
        mean = num_buckets / size
        assert all(abs(begun[place] - mean) <= 2 for place in range(size))

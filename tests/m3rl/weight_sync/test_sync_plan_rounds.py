"""The rounds of a plan, and the grain of its cuts."""

from __future__ import annotations

import dataclasses

import pytest

from m3rl.types import TensorSlot
from m3rl.weight_sync.errors import PlanError
from m3rl.weight_sync.plan import CopyOp, Plan, check_plan, make_plan, ops_digest
from tests.m3rl.weight_sync.sync_fakes import TENSORS, layout

BUCKETS = {bucket for *_, bucket in TENSORS.values()}


def slot(name: str, shape: tuple[int, ...], bounds: tuple[tuple[int, int], ...]) -> TensorSlot:
    return TensorSlot(name, "float32", shape, bounds, "pre")


def replace_ops(plan: Plan, ops: list[CopyOp]) -> Plan:
    return Plan(tuple(ops), ops_digest(ops))


def small_plan() -> tuple[Plan, list[list[TensorSlot]], list[list[TensorSlot]]]:
    senders, receivers = [layout(r, 2) for r in range(2)], [layout()]
    return make_plan(senders, receivers, 128), senders, receivers


def test_rounds_keep_buckets_and_size_and_fill_up():
    plan, _, _ = small_plan()
    assert [op.round for op in plan.ops] == sorted(op.round for op in plan.ops)
    rounds = {number: [op for op in plan.ops if op.round == number] for number in range(100)}
    filled = [ops for ops in rounds.values() if ops]
    assert all(len({op.bucket for op in ops}) == 1 for ops in filled)
    assert all(len(ops) == 1 or sum(op.nbytes for op in ops) <= 128 for ops in filled)
    assert max(op.round for op in plan.ops) + 1 == len(filled)
    one_each = make_plan([layout()], [layout()], 1 << 20)
    assert {op.round for op in one_each.ops} == set(range(len(BUCKETS)))


def test_a_worker_takes_from_the_trainer_ranks_by_turns_each_beginning_with_another():
    senders = [[slot(f"w{r}{i}", (8,), ((0, 8),)) for i in range(3)] for r in range(2)]
    wanted = [each for held in senders for each in held]
    plan = make_plan(senders, [wanted, wanted], 64)
    for receiver in range(2):
        by_round = [
            [op.sender for op in plan.receives(receiver) if op.round == number]
            for number in range(3)
        ]
        assert by_round == [[receiver, 1 - receiver]] * 3


def test_check_finds_rounds_out_of_order_or_of_two_buckets_and_wrong_grains():
    plan, senders, receivers = small_plan()
    last = dataclasses.replace(plan.ops[-1], round=0)
    first_of_a_bucket = next(
        i for i, op in enumerate(plan.ops) if i and op.bucket != plan.ops[i - 1].bucket
    )
    joined = list(plan.ops)
    joined[first_of_a_bucket] = dataclasses.replace(
        joined[first_of_a_bucket], round=joined[first_of_a_bucket - 1].round
    )
    for ops in ([*plan.ops[:-1], last], joined):
        with pytest.raises(PlanError, match="is not ordered by round, or not of the bucket"):
            check_plan(replace_ops(plan, ops), senders, receivers)
    ops = [dataclasses.replace(op, grain=2 * op.grain) for op in plan.ops]
    with pytest.raises(PlanError, match=r"has grain \d+, its tensor is cut by \d+"):
        check_plan(replace_ops(plan, ops), senders, receivers)


@pytest.mark.parametrize(
    ("held", "wanted", "grain"),
    [
        ([(0, 1536)], [(0, 1536)], 512),
        ([(0, 640), (640, 1536)], [(0, 1536)], 128),
        ([(0, 1536)], [(0, 512), (512, 1024), (1024, 1536)], 512),
        ([(0, 96), (96, 1536)], [(0, 1440), (1440, 1536)], 32),
        ([(0, 7), (7, 1536)], [(0, 1536)], 1),
    ],
)
def test_the_grain_divides_every_cut_of_both_sides(held, wanted, grain):
    def layouts(cuts):
        return [[slot("w", (2, 1536), ((0, 2), cut))] for cut in cuts]

    plan = make_plan(layouts(held), layouts(wanted), 1 << 20)
    check_plan(plan, layouts(held), layouts(wanted))
    assert {op.grain for op in plan.ops} == {grain}

"""Memory that layers share in turn: never received over what is not loaded. Needs no vLLM."""

from __future__ import annotations

import random
from itertools import chain

import numpy as np
import pytest

from inference.engine.coverage import WeightLoadError
from m3rl.rollout.vllm_layers import LayeredPlan
from m3rl.rollout.vllm_staging import num_buckets_staged
from m3rl.types import TensorSlot
from m3rl.weight_sync.messages import STAGED, Limits, arrange
from m3rl.weight_sync.plan import make_plan
from m3rl.weight_sync.relay import largest_part, relayed
from m3rl.weight_sync.turns import Turn, take_turns

BUCKETS = ["pre", *(f"layer.{i}" for i in range(7)), "post"]


def rounds_of(seed: int, num_workers: int) -> list[tuple[list[int], list[list[int]]]]:
    """Of each worker the number of each part's bucket, and its rounds, of a plan like any."""
    draw = random.Random(seed)
    shared, own = [], [[] for _ in range(num_workers)]
    for bucket in BUCKETS:
        num_shared = draw.randint(0, 3)
        shared += [
            slot(f"{bucket}.{i}", bucket, draw.choice([8, 64, 640])) for i in range(num_shared)
        ]
        for worker in range(num_workers):
            for i in range(draw.randint(num_shared == 0, 3)):
                name = f"{bucket}.experts.{worker}.{i}"
                own[worker].append(slot(name, bucket, draw.choice([8, 64, 640])))
    workers = [[*shared, *each] for each in own]
    trainer = [*shared, *chain(*own)]
    senders = [trainer] * draw.randint(1, 3)
    plan = make_plan(senders, workers, chunk_bytes=draw.choice([64, 512, 4096, 1 << 20]))
    plan = relayed(plan, [0] * num_workers)
    plan = take_turns(plan, senders, Turn(draw.randint(0, 2), 3))
    spots = [
        [np.full((count, 2), (STAGED, 0), np.int64) for count in counts]
        for counts in (
            [len(plan.sends(rank)) for rank in range(len(senders))],
            [len(plan.receives(rank)) for rank in range(num_workers)],
        )
    ]
    limits = Limits(draw.choice([64, 4096, 1 << 30]), draw.choice([0, 1 << 20]))
    _, receives = arrange(plan.ops, *spots, largest_part(plan.ops), limits)
    found = []
    for worker, (arranged, _) in enumerate(receives):
        buckets = [BUCKETS.index(op.bucket) for op in plan.receives(worker)]
        found.append((buckets, [list(chain(*messages)) for messages in arranged]))
    return found


def slot(name: str, bucket: str, rows: int) -> TensorSlot:
    return TensorSlot(name, "float32", (rows, 4), ((0, rows), (0, 4)), bucket)


def check(buckets: list[int], rounds: list[list[int]], num_staged: int) -> None:
    LayeredPlan((), (), tuple(buckets), num_staged).check_rounds(rounds)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_what_is_staged_is_enough_for_every_plan(num_workers):
    for seed in range(15):
        for buckets, rounds in rounds_of(seed, num_workers):
            assert sorted(chain(*rounds)) == list(range(len(buckets)))
            check(buckets, rounds, num_buckets_staged(num_workers))


def test_two_layers_are_not_enough_where_workers_pass_on_to_one_another():
    refused = 0
    for seed in range(15):
        for buckets, rounds in rounds_of(seed, 2):
            try:
                check(buckets, rounds, 2)
            except WeightLoadError:
                refused += 1
    assert refused > 0


def test_a_part_may_come_two_rounds_after_what_has_its_memory():
    """Round 1 is under way when bucket 0 is loaded, round 2 is not."""
    check([0, 1, 2], [[0], [1], [2]], 2)
    with pytest.raises(WeightLoadError, match="round 1 would be received over weights of round 0"):
        check([0, 1, 2], [[0], [1, 2]], 2)
    with pytest.raises(WeightLoadError, match="round 2 would be received over weights of round 1"):
        check([0, 0, 1, 2], [[0], [1, 2], [3]], 2)

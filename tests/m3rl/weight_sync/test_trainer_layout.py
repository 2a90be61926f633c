from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.models.weights import Placement, transformers_placement
from inference.parallel.config import ParallelConfig
from m3rl.types import TensorSlot
from m3rl.weight_sync.errors import LayoutError
from m3rl.weight_sync.layout import Bounds, whole
from m3rl.weight_sync.plan import check_plan, make_plan
from m3rl.weight_sync.trainer_layout import TrainerShards, chunk, expert_of, trainer_layout
from tests.m3rl.weight_sync.model_layouts import (
    MODEL,
    TRAINERS,
    published,
    replica,
    trainer,
)

PLACES = transformers_placement(MODEL)
EXPERT = "model.layers.1.block_sparse_moe.experts.{}.w1.weight"


def slots(**shapes: tuple[int, ...]) -> list[TensorSlot]:
    return [
        TensorSlot(name.replace("__", "."), "bfloat16", shape, whole(shape), "post")
        for name, shape in shapes.items()
    ]


def held(tensors, places, split: TrainerShards) -> list[dict[str, Bounds]]:
    layouts = [trainer_layout(tensors, places, split, rank) for rank in range(split.world)]
    return [{slot.name: slot.bounds for slot in layout} for layout in layouts]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 8])
def test_rows_are_cut_where_torch_cuts_them(parts: int):
    for rows in range(1, 30):
        pieces = torch.chunk(torch.arange(rows), parts)
        mine = [chunk(rows, parts, part) for part in range(parts)]
        theirs = [(int(piece[0]), int(piece[-1]) + 1) for piece in pieces]
        assert mine == theirs + [None] * (parts - len(theirs))


def test_two_tensors_of_one_parameter_are_cut_as_one_by_hand():
    tensors = slots(norm=(10,), gate=(6, 8), up=(6, 8))
    places = {
        "norm": Placement("norm"),
        "gate": Placement("gate_up", (slice(0, 6),)),
        "up": Placement("gate_up", (slice(6, 12),)),
    }
    columns = (0, 8)
    assert held(tensors, places, TrainerShards(world=4)) == [
        {"norm": ((0, 3),), "gate": ((0, 3), columns)},
        {"norm": ((3, 6),), "gate": ((3, 6), columns)},
        {"norm": ((6, 9),), "up": ((0, 3), columns)},
        {"norm": ((9, 10),), "up": ((3, 6), columns)},
    ]


def test_a_rank_has_whole_experts_if_that_is_even_and_else_rows_of_each_by_hand():
    tensors = slots(**{f"layer__experts__{e}__{w}": (4, 8) for e in range(4) for w in ("w1", "w3")})
    places = {
        f"layer.experts.{e}.{w}": Placement("w13", (e, slice(at, at + 4)))
        for e in range(4)
        for w, at in (("w1", 0), ("w3", 4))
    }

    def summary(split: TrainerShards) -> list[list[tuple[str, tuple[int, int]]]]:
        return [
            [(name.removeprefix("layer.experts."), bounds[0]) for name, bounds in rank.items()]
            for rank in held(tensors, places, split)
        ]

    def both(expert: int) -> list[tuple[str, tuple[int, int]]]:
        return [(f"{expert}.w1", (0, 4)), (f"{expert}.w3", (0, 4))]

    assert summary(TrainerShards(world=4, ep=2)) == [both(0), both(2), both(1), both(3)]
    assert summary(TrainerShards(world=4, ep=4)) == [both(0), both(1), both(2), both(3)]
    ranks = summary(TrainerShards(world=8, ep=2))
    assert ranks[0] == [("0.w1", (0, 2)), ("1.w1", (0, 2))]
    assert ranks[1] == [("2.w1", (0, 2)), ("3.w1", (0, 2))]
    assert ranks[4] == [("0.w3", (0, 2)), ("1.w3", (0, 2))]


def test_a_shared_expert_is_no_routed_one():
    assert expert_of(EXPERT.format(17)) == 17
    assert expert_of("model.layers.1.block_sparse_moe.shared_experts.up_proj.weight") is None


@pytest.mark.parametrize("split", TRAINERS, ids=str)
def test_ranks_together_hold_each_element_once_for_each_replica(split: TrainerShards):
    layouts = trainer(split)
    for tensor in published():
        count = np.zeros(tensor.shape, int)
        for layout in layouts:
            for slot in layout:
                if slot.name == tensor.name:
                    count[tuple(slice(*edges) for edges in slot.bounds)] += 1
        assert (count == split.replicas).all(), tensor.name


def test_splits_that_do_not_divide_are_refused_with_their_values():
    with pytest.raises(LayoutError, match="world=6 is no multiple of replicas=2 times ep=2"):
        TrainerShards(world=6, replicas=2, ep=2)
    with pytest.raises(LayoutError, match="ep=0 must be at least 1"):
        TrainerShards(ep=0)
    with pytest.raises(LayoutError, match="ep=3 does not divide 8 experts"):
        trainer_layout(published(), PLACES, TrainerShards(world=3, ep=3), 0)
    with pytest.raises(LayoutError, match="rank 3 is not one of world=3"):
        trainer_layout(published(), PLACES, TrainerShards(world=3), 3)


@st.composite
def trainers(draw: st.DrawFn) -> TrainerShards:
    ep = draw(st.sampled_from([1, 2, 4, 8]))
    replicas = draw(st.integers(1, 3))
    return TrainerShards(draw(st.integers(1, 12 // ep)) * ep * replicas, replicas, ep)


@st.composite
def replicas(draw: st.DrawFn) -> ParallelConfig:
    tp, dp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2]))
    return ParallelConfig(tp, dp, dp * draw(st.sampled_from([d for d in (1, 2, 4) if tp % d == 0])))


@settings(max_examples=25, deadline=None)
@given(trainers(), replicas(), st.sampled_from([1000, 1 << 20]))
def test_any_pair_of_layouts_has_a_plan_that_covers_each_worker_once(split, parallel, chunk_bytes):
    senders, receivers = trainer(split), replica(parallel)
    plan = make_plan(senders, receivers, chunk_bytes)
    check_plan(plan, senders, receivers)
    sent = [sum(op.nbytes for op in plan.sends(rank)) for rank in range(split.world)]
    # Where all tensors are cut evenly, trainer ranks send equally much, up to one copy.
    if 8 % split.shards == 0:
        assert max(sent) <= sum(sent) / len(sent) + max(op.nbytes for op in plan.ops)

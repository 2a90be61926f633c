from __future__ import annotations

import dataclasses
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3rl.types import TensorSlot
from m3rl.weight_sync.errors import LayoutError, PlanError
from m3rl.weight_sync.layout import (
    Bounds,
    bucket_order,
    first_overlap,
    grid_cells,
    intersect,
    layout_digest,
    volume,
    whole,
)
from m3rl.weight_sync.plan import CopyOp, Plan, check_plan, in_rounds, make_plan, ops_digest
from tests.m3rl.weight_sync.sync_fakes import BIAS, EMBEDDING, layout


def slot(name: str, shape: tuple[int, ...], bounds: Bounds, bucket: str = "pre") -> TensorSlot:
    return TensorSlot(name, "float32", shape, bounds, bucket)


def replace_ops(plan: Plan, ops: list[CopyOp]) -> Plan:
    return Plan(tuple(ops), ops_digest(ops))


def test_two_row_shards_meet_three_row_shards_in_four_copies():
    senders = [[slot("w", (12, 2), ((r * 6, r * 6 + 6), (0, 2)))] for r in range(2)]
    receivers = [[slot("w", (12, 2), ((r * 4, r * 4 + 4), (0, 2)))] for r in range(3)]
    plan = make_plan(senders, receivers, 1 << 20)
    assert [(op.sender, op.receiver, op.bounds) for op in plan.ops] == [
        (0, 0, ((0, 4), (0, 2))),
        (1, 1, ((6, 8), (0, 2))),
        (0, 1, ((4, 6), (0, 2))),
        (1, 2, ((8, 12), (0, 2))),
    ]
    assert plan.nbytes == 12 * 2 * 4


def mxfp8_slot(columns: tuple[int, int], storage: str = "mxfp8") -> TensorSlot:
    return TensorSlot("w", "bfloat16", (3, 160), ((0, 3), columns), "pre", storage)


@pytest.mark.parametrize("chunk_bytes", [64, 100, 200, 700, 1 << 20])
def test_what_is_quantised_on_receive_is_cut_between_blocks_only(chunk_bytes: int):
    senders = [[mxfp8_slot((0, 96), "plain")], [mxfp8_slot((96, 160), "plain")]]
    receivers = [[mxfp8_slot((0, 64))], [mxfp8_slot((64, 160))]]
    plan = make_plan(senders, receivers, chunk_bytes)
    check_plan(plan, senders, receivers)
    assert {op.storage for op in plan.ops} == {"mxfp8"}
    assert all(edge % 32 == 0 for op in plan.ops for edge in op.bounds[1])
    assert all(op.nbytes <= chunk_bytes for op in plan.ops)


def test_shards_that_cut_a_block_are_refused_by_name():
    held = [[mxfp8_slot((0, 80), "plain")], [mxfp8_slot((80, 160), "plain")]]
    with pytest.raises(
        PlanError, match=r"w: .* through a block of 32 .* worker 0 .* shard its row"
    ):
        make_plan(held, [[mxfp8_slot((0, 160))]], 1 << 20)
    with pytest.raises(LayoutError, match=r"worker 0: w: bounds .* cut a block of MXFP8"):
        make_plan([[mxfp8_slot((0, 160), "plain")]], [[mxfp8_slot((0, 80))]], 1 << 20)


def test_a_receiver_that_no_longer_quantises_does_not_fit_the_plan():
    senders, receivers = [[mxfp8_slot((0, 160), "plain")]], [[mxfp8_slot((0, 160))]]
    plan = make_plan(senders, receivers, 1 << 20)
    other = [[mxfp8_slot((0, 160), "plain")]]
    assert layout_digest(receivers[0]) != layout_digest(other[0])
    with pytest.raises(PlanError, match=r"is to receive .*, for which it has no place"):
        check_plan(plan, senders, other)


def test_row_shards_meet_column_shards_in_rectangles():
    senders = [[slot("w", (4, 6), ((r * 2, r * 2 + 2), (0, 6)))] for r in range(2)]
    receivers = [[slot("w", (4, 6), ((0, 4), (r * 3, r * 3 + 3)))] for r in range(2)]
    plan = make_plan(senders, receivers, 1 << 20)
    assert {(op.sender, op.receiver, op.bounds) for op in plan.ops} == {
        (0, 0, ((0, 2), (0, 3))),
        (0, 1, ((0, 2), (3, 6))),
        (1, 0, ((2, 4), (0, 3))),
        (1, 1, ((2, 4), (3, 6))),
    }


def test_a_tensor_held_by_all_ranks_is_sent_by_each_in_turn():
    held = [slot(f"w{i}", (8,), ((0, 8),)) for i in range(6)]
    plan = make_plan([held, held, held], [held], 1 << 20)
    assert [op.sender for op in plan.ops] == [0, 1, 2, 0, 1, 2]


def test_a_large_copy_is_split_into_even_rows():
    held = [slot("w", (10, 8), ((0, 10), (0, 8)))]
    plan = make_plan([held], [held], chunk_bytes=96)  # three rows of 32 bytes
    assert [op.bounds[0] for op in plan.ops] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    plan = make_plan([held], [held], chunk_bytes=64)
    assert max(op.nbytes for op in plan.ops) == 64


def test_a_scalar_is_one_copy():
    held = [slot("s", (), ())]
    plan = make_plan([held], [held], 64)
    assert [(op.bounds, op.nbytes) for op in plan.ops] == [((), 4)]
    check_plan(plan, [held], [held])


def test_buckets_travel_from_the_embedding_up():
    names = ["post", "layer.10", "layer.2", "pre"]
    assert sorted(names, key=bucket_order) == ["pre", "layer.2", "layer.10", "post"]
    with pytest.raises(LayoutError, match=r"'head' is not 'pre', 'layer.<number>' or 'post'"):
        bucket_order("head")


def test_digests_are_the_same_in_every_process():
    plan = make_plan([layout(0, 2), layout(1, 2)], [layout()], 128)
    assert plan.digest[:16] == "dccfa452f42a82b3"
    assert layout_digest(layout())[:16] == "4b00864295036c54"
    assert layout_digest(layout()[::-1]) == layout_digest(layout())
    renamed = [dataclasses.replace(layout()[0], dtype="float32"), *layout()[1:]]
    assert layout_digest(renamed) != layout_digest(layout())


# BR-006
def test_an_export_that_forgets_the_router_bias_is_refused_by_name():
    without = [s for s in layout() if s.name != BIAS]
    with pytest.raises(
        PlanError, match=rf"{re.escape(BIAS)} is held by worker 0 and by no trainer"
    ):
        make_plan([without], [layout()], 1 << 20)
    with pytest.raises(
        PlanError, match=rf"{re.escape(BIAS)} is held by trainer rank 0 and by no w"
    ):
        make_plan([layout()], [without], 1 << 20)


# BR-006
def test_a_bias_offered_as_bfloat16_is_refused():
    rounded = [dataclasses.replace(s, dtype="bfloat16") if s.name == BIAS else s for s in layout()]
    with pytest.raises(LayoutError, match=r"bias: dtype is bfloat16 on trainer.*float32 on worker"):
        make_plan([rounded], [layout()], 1 << 20)


# BR-003
def test_an_engine_that_rearranged_an_expert_is_refused_before_anything_moves():
    blocked = [
        dataclasses.replace(s, shape=(1, 5, 2, 3), bounds=whole((1, 5, 2, 3)))
        if "experts.2" in s.name
        else s
        for s in layout()
    ]
    with pytest.raises(LayoutError, match=r"experts.2.w1.weight: shape is \(5, 6\) on trainer"):
        make_plan([layout()], [blocked], 1 << 20)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        (((0, 4), (0, 7)), "reach outside shape"),
        (((2, 2), (0, 6)), "are empty"),
        (((0, 4),), "do not fit shape"),
    ],
)
def test_impossible_bounds_are_refused(bounds: Bounds, words: str):
    with pytest.raises(LayoutError, match=words):
        make_plan([[slot("w", (4, 6), bounds)]], [[slot("w", (4, 6), whole((4, 6)))]], 64)


def test_a_part_that_no_rank_holds_is_named():
    senders = [[slot("w", (9,), ((0, 4),))], [slot("w", (9,), ((5, 9),))]]
    with pytest.raises(PlanError, match=r"w: no trainer rank holds \(\(4, 5\),\), which worker 0"):
        make_plan(senders, [[slot("w", (9,), ((0, 9),))]], 64)


def test_a_replica_that_is_not_a_whole_model_is_refused():
    receivers = [[slot("w", (9,), ((0, 4),))], [slot("w", (9,), ((5, 9),))]]
    with pytest.raises(PlanError, match="not a complete copy of the model"):
        make_plan([[slot("w", (9,), ((0, 9),))]], receivers, 64)


def test_a_rank_that_lists_a_part_twice_is_refused():
    twice = [slot("w", (9,), ((0, 5),)), slot("w", (9,), ((4, 9),))]
    with pytest.raises(LayoutError, match="holds a part twice"):
        make_plan([twice], [[slot("w", (9,), ((0, 9),))]], 64)


def small_plan() -> tuple[Plan, list[list[TensorSlot]], list[list[TensorSlot]]]:
    senders, receivers = [layout(r, 2) for r in range(2)], [layout()]
    return make_plan(senders, receivers, 128), senders, receivers


def test_check_finds_a_dropped_copy():
    plan, senders, receivers = small_plan()
    for i, op in enumerate(plan.ops):
        dropped = replace_ops(plan, [*plan.ops[:i], *plan.ops[i + 1 :]])
        with pytest.raises(PlanError, match=f"elements of {re.escape(op.name)}; a copy is missing"):
            check_plan(dropped, senders, receivers)


def test_check_finds_a_doubled_copy():
    plan, senders, receivers = small_plan()
    for i, op in enumerate(plan.ops):
        with pytest.raises(PlanError, match=f"a part of {re.escape(op.name)} twice"):
            check_plan(replace_ops(plan, [*plan.ops[:i], op, *plan.ops[i:]]), senders, receivers)


def test_check_finds_a_sender_that_does_not_hold_what_it_is_to_send():
    plan, senders, receivers = small_plan()
    ops = [dataclasses.replace(op, sender=1 - op.sender) for op in plan.ops]
    with pytest.raises(PlanError, match=r"trainer rank 0 is to send .* which it does not hold so"):
        check_plan(replace_ops(plan, ops), senders, receivers)


def test_check_finds_a_copy_in_another_dtype():
    plan, senders, receivers = small_plan()
    ops = [dataclasses.replace(op, dtype="bfloat16") for op in plan.ops]
    with pytest.raises(PlanError, match=f"{re.escape(BIAS)}.* as bfloat16, which it does not hold"):
        check_plan(replace_ops(plan, ops), senders, receivers)


def test_check_finds_ops_that_are_not_those_of_the_digest_or_out_of_order():
    plan, senders, receivers = small_plan()
    with pytest.raises(PlanError, match="does not belong to its ops"):
        check_plan(Plan(plan.ops[::-1], plan.digest), senders, receivers)
    backwards = [dataclasses.replace(op, round=i) for i, op in enumerate(plan.ops[::-1])]
    with pytest.raises(PlanError, match="not ordered by bucket"):
        check_plan(replace_ops(plan, backwards), senders, receivers)
    ops = [*plan.ops[:-1], dataclasses.replace(plan.ops[-1], receiver=1)]
    with pytest.raises(PlanError):
        check_plan(replace_ops(plan, ops), senders, receivers)


def random_layouts(
    rng: random.Random, shapes: dict[str, tuple[int, ...]]
) -> list[list[TensorSlot]]:
    """Each tensor cut by a random grid, every cell held by a random non-empty set of ranks."""
    layouts: list[list[TensorSlot]] = [[] for _ in range(rng.randint(1, 4))]
    for name, shape in shapes.items():
        cuts = [
            sorted(rng.sample(range(1, n), rng.randint(0, min(2, n - 1)))) if n > 1 else []
            for n in shape
        ]
        for cell in grid_cells(whole(shape), cuts):
            for rank in rng.sample(range(len(layouts)), rng.randint(1, len(layouts))):
                layouts[rank].append(slot(name, shape, cell, f"layer.{len(name) % 3}"))
    first = next(iter(shapes))
    for each in layouts:  # a rank without any tensor is refused: give it all of the first
        if not each:
            each.append(slot(first, shapes[first], whole(shapes[first]), f"layer.{len(first) % 3}"))
    return layouts


@st.composite
def shardings(draw: st.DrawFn) -> tuple[list[list[TensorSlot]], list[list[TensorSlot]], int]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    num_tensors = draw(st.integers(1, 4))
    shapes = {
        "w" * (i + 1): tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
        for i in range(num_tensors)
    }
    chunk_bytes = draw(st.sampled_from([64, 100, 1 << 20]))
    return random_layouts(rng, shapes), random_layouts(rng, shapes), chunk_bytes


def held_elements(layouts: list[list[TensorSlot]], rank: int, name: str) -> np.ndarray:
    """How often the rank's slots hold each element of a tensor: arrays, no rectangles."""
    shape = next(s.shape for each in layouts for s in each if s.name == name)
    count = np.zeros(shape, int)
    for s in layouts[rank]:
        if s.name == name:
            count[tuple(slice(*edge) for edge in s.bounds)] += 1
    return count


def assert_rounds(plan: Plan, chunk_bytes: int) -> None:
    """Ascending from 0 without gaps, of one bucket each, bounded for each receiver; both ends of a
    pair of ranks see their transfers in the same order (they are slices of one list)."""
    numbers = [op.round for op in plan.ops]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(numbers[-1] + 1))
    for number in set(numbers):
        here = [op for op in plan.ops if op.round == number]
        assert len({op.bucket for op in here}) == 1
        for receiver in {op.receiver for op in here}:
            sizes = [op.nbytes for op in here if op.receiver == receiver]
            assert len(sizes) == 1 or sum(sizes) <= chunk_bytes


def assert_grains(
    plan: Plan, senders: list[list[TensorSlot]], receivers: list[list[TensorSlot]]
) -> None:
    """The grain is a power of two that cuts through nothing that either side holds."""
    held = {
        op.name: [s for each in (*senders, *receivers) for s in each if s.name == op.name]
        for op in plan.ops
    }
    for op in plan.ops:
        assert op.grain & (op.grain - 1) == 0
        for one in (op, *held[op.name]):
            assert all(edge % op.grain == 0 for edge in (one.bounds[-1] if one.bounds else ()))


@settings(max_examples=150, deadline=None)
@given(shardings())
def test_every_element_is_sent_once_to_each_holder_by_a_rank_that_holds_it(case):
    senders, receivers, chunk_bytes = case
    plan = make_plan(senders, receivers, chunk_bytes)
    check_plan(plan, senders, receivers)
    assert make_plan(senders, receivers, chunk_bytes) == plan
    assert in_rounds(plan.ops[::-1], chunk_bytes)[-1].round <= len(plan.ops) - 1
    assert_rounds(plan, chunk_bytes)
    assert_grains(plan, senders, receivers)
    for receiver, held in enumerate(receivers):
        for name in {s.name for s in held}:
            wanted = held_elements(receivers, receiver, name)
            arrived = np.zeros_like(wanted)
            for op in plan.receives(receiver):
                if op.name == name:
                    place = tuple(slice(*edge) for edge in op.bounds)
                    assert held_elements(senders, op.sender, name)[place].all()
                    arrived[place] += 1
            assert np.array_equal(arrived, wanted)
    assert all(op.nbytes <= chunk_bytes for op in plan.ops)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_replicated_sources_share_the_bytes_within_one_copy(num_senders: int, sizes: list[int]):
    held = [slot(f"w{i}", (n,), ((0, n),)) for i, n in enumerate(sizes)]
    plan = make_plan([held] * num_senders, [held], 1 << 20)
    load = [sum(op.nbytes for op in plan.sends(rank)) for rank in range(num_senders)]
    assert max(load) - min(load) <= max(op.nbytes for op in plan.ops)


@settings(max_examples=60, deadline=None)
@given(shardings(), st.randoms(use_true_random=False))
def test_any_dropped_or_doubled_copy_is_found(case, rng: random.Random):
    senders, receivers, chunk_bytes = case
    plan = make_plan(senders, receivers, chunk_bytes)
    i = rng.randrange(len(plan.ops))
    for ops in ([*plan.ops[:i], *plan.ops[i + 1 :]], [*plan.ops[: i + 1], *plan.ops[i:]]):
        with pytest.raises(PlanError, match=f" of {plan.ops[i].name}[ ;]"):
            check_plan(replace_ops(plan, ops), senders, receivers)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 3).flatmap(
        lambda dims: st.lists(
            st.tuples(*[st.tuples(st.integers(0, 3), st.integers(1, 3))] * dims),
            min_size=1,
            max_size=6,
        )
    )
)
def test_overlap_is_found_exactly_when_some_element_is_held_twice(raw):
    rectangles = [tuple((start, start + size) for start, size in each) for each in raw]
    count = np.zeros((7,) * len(rectangles[0]), int)
    for rectangle in rectangles:
        count[tuple(slice(*edge) for edge in rectangle)] += 1
    found = first_overlap(rectangles)
    assert (found is not None) == bool((count > 1).any())
    if found is not None:
        assert intersect(*found) is not None
    assert sum(map(volume, rectangles)) == count.sum()


def test_the_embedding_of_two_replica_workers_comes_from_both_trainer_ranks():
    plan = make_plan([layout(r, 2) for r in range(2)], [layout(r, 2) for r in range(2)], 1 << 20)
    ops = [op for op in plan.ops if op.name == EMBEDDING]
    assert [(op.sender, op.receiver, op.bounds[0]) for op in ops] == [
        (0, 0, (0, 5)),
        (1, 1, (5, 11)),
    ]

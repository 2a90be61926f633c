"""What travels as one message, and in which rounds."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from itertools import chain, groupby, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m3rl.types import TensorSlot
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.layout import Bounds, extents, volume
from m3rl.weight_sync.messages import STAGED, Limits, arrange, unjoined
from m3rl.weight_sync.plan import CopyOp, make_plan
from m3rl.weight_sync.relay import check_passes, relayed
from m3rl.weight_sync.rounds import Clock, joined, spots, staged_ops
from m3rl.weight_sync.send import Sender
from m3rl.weight_sync.transport import WIRE_DTYPES, Transport, wire_bytes
from tests.m3rl.weight_sync.sync_fakes import (
    FakeEngine,
    TrainerRank,
    assert_holds,
    cut,
    layout,
    local_sync,
    store_without_sockets,
    weights,
)

JOIN = Limits(pack_bytes=0)


def op(name: str, rows: int, *, sender=0, receiver=0, bucket="layer.1", round=0) -> CopyOp:
    """With 4 columns of 2 bytes: 8 bytes a row."""
    bounds = ((0, rows), (0, 4))
    return CopyOp(bucket, name, "bfloat16", bounds, sender, receiver, round=round)


def lying(*each: tuple[int, int]) -> np.ndarray:
    return np.array(each, np.int64)


def test_neighbours_at_both_ends_are_one_message_wherever_the_plan_has_them():
    # w1, w2, w3 of two experts; w1 and w3 lie side by side, in two parameters for both experts.
    ops = [op(f"{e}.w{i}", 2) for e in range(2) for i in (1, 2, 3)]
    here = lying((0, 0), (1, 0), (0, 16), (0, 32), (1, 16), (0, 48))
    there = lying((7, 64), (3, 8), (7, 80), (7, 96), (3, 24), (7, 112))
    [sends], [(receives, _)] = arrange(ops, [here], [there], 1 << 20, JOIN)
    assert sends == receives == (((0, 2, 3, 5), (1, 4)),)
    # Experts the other way round at one end: only w1 and w3 of one still join.
    there = lying((7, 96), (3, 24), (7, 112), (7, 64), (3, 8), (7, 80))
    assert arrange(ops, [here], [there], 1 << 20, JOIN)[0] == [(((0, 2), (1,), (3, 5), (4,)),)]


def test_an_op_that_is_staged_lies_where_the_other_end_has_it():
    ops = [op("a", 2), op("b", 3), op("c", 2), op("d", 2)]
    here = lying((0, 0), (0, 40), (0, 16), (0, 64))
    staged = lying(*[(STAGED, 0)] * 4)
    # a, c, then b; d would follow b, whose 24 bytes would leave it unaligned.
    assert arrange(ops, [here], [staged], 1 << 20, JOIN)[0] == [(((0, 2), (1,), (3,)),)]
    here = lying((0, 0), (0, 32), (0, 16), (0, 56))
    assert arrange(ops, [here], [staged], 1 << 20, JOIN)[0] == [(((0, 2, 1), (3,)),)]
    assert arrange(ops, [staged], [here], 1 << 20, JOIN)[0] == [(((0, 2, 1), (3,)),)]
    assert arrange(ops, [staged], [staged], 1 << 20, JOIN)[0] == [(((0, 1), (2, 3)),)]
    mixed = lying((0, 0), (0, 32), (STAGED, 0), (0, 56))
    assert arrange(ops, [here], [mixed], 1 << 20, JOIN)[0] == [(((0,), (1, 3), (2,)),)]


def test_rounds_grow_to_their_limits_in_a_bucket_and_the_last_one_stays_small():
    ops = [op(f"w{i}", 2, round=i, bucket=f"layer.{i // 8}") for i in range(12)]
    here = lying(*[(i, 0) for i in range(12)])
    staged = lying(*[(STAGED, 0)] * 12)

    def sizes(sends, receives, chunk_bytes, round_bytes):
        [arranged], _ = arrange(ops, [sends], [receives], chunk_bytes, Limits(round_bytes, 0))
        return [len([*chain(*messages)]) for messages in arranged]

    assert sizes(here, here, 16, 1 << 20) == [8, 3, 1]
    assert sizes(here, here, 16, 48) == [3, 3, 2, 3, 1]
    assert sizes(here, staged, 32, 1 << 20) == sizes(staged, here, 32, 1 << 20)
    assert sizes(here, staged, 32, 1 << 20) == [2, 2, 2, 2, 2, 1, 1]
    assert sizes(here, staged, 16, 1 << 20) == [1] * 12


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_both_ends_go_through_the_same_messages_in_the_same_order(data):
    senders, workers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    chunk_bytes = data.draw(st.sampled_from([64, 200, 1 << 20]))
    tp = data.draw(st.sampled_from([n for n in (1, 2, 4) if workers % n == 0]))
    layouts = (
        [layout(r, senders) for r in range(senders)],
        [layout(w % tp, tp) for w in range(workers)],
    )
    nodes = data.draw(st.lists(st.integers(0, 1), min_size=workers, max_size=workers))
    plan = relayed(make_plan(*layouts, chunk_bytes), nodes)
    check_passes(plan, *layouts)
    pack_bytes = data.draw(st.sampled_from([0, 100, 1 << 20]))
    sides = [
        [_memory(data, share(i)) for i in range(count)]
        for share, count in ((plan.sends, senders), (plan.receives, workers))
    ]
    sends, receives = arrange(plan.ops, *sides, chunk_bytes, Limits(4 * chunk_bytes, pack_bytes))
    going: dict[tuple[int, int], list] = defaultdict(list)
    coming: dict[tuple[int, int], list] = defaultdict(list)
    for r, rounds in enumerate(sends):
        for message in chain(*rounds):
            ops = [plan.sends(r)[i] for i in message]
            going[r, ops[0].receiver].append([(op.name, op.bounds) for op in ops])
    for w, (rounds, passes) in enumerate(receives):
        theirs = plan.receives(w)
        assert sorted(chain(*chain(*rounds))) == list(range(len(theirs)))
        has_come: set[int] = set()
        for messages, passed in zip(rounds, passes, strict=True):
            for message in messages:
                ops = [theirs[i] for i in message]
                origin = ops[0].sender if ops[0].via < 0 else senders + ops[0].via
                coming[origin, w].append([(op.name, op.bounds) for op in ops])
            for worker, message in passed:
                assert has_come.issuperset(message)
                ops = [theirs[i] for i in message]
                going[senders + w, worker].append([(op.name, op.bounds) for op in ops])
            has_come.update(chain(*messages))
    assert going == coming


def _memory(data, ops) -> np.ndarray:
    """Ops anywhere in a few pieces of memory, or staged."""
    order = data.draw(st.permutations(range(len(ops))))
    ends = [0, 0, 0]
    found = np.full((len(ops), 2), (STAGED, 0), np.int64)
    for i in order:
        memory = data.draw(st.integers(-1, 2))
        if memory >= 0:
            found[i] = memory, ends[memory]
            ends[memory] += ops[i].nbytes
    return found


def test_spots_name_the_memory_and_the_byte():
    memory, other = torch.zeros(8, 4), torch.zeros(3, dtype=torch.bfloat16)
    wires = [wire_bytes(memory[2:4]), None, wire_bytes(other), wire_bytes(memory[4:])]
    assert spots(wires).tolist() == [[0, 32], [STAGED, 0], [1, 0], [0, 64]]
    run = joined([wires[0], wires[3]])
    assert (run.data_ptr(), run.numel()) == (memory[2:].data_ptr(), 6 * 16)
    with pytest.raises(AssertionError, match="in one piece"):
        joined([wires[3], wires[0]])


class StackedEngine(FakeEngine):
    """All tensors of a bucket and dtype in one piece of memory."""

    def __init__(self, slots: list[TensorSlot]) -> None:
        super().__init__(slots)
        self.tensors |= stacked(slots)
        self.loaded = self.tensors


def stacked(slots: list[TensorSlot]) -> dict[str, torch.Tensor]:
    found = {}
    ordered = sorted(slots, key=lambda slot: (slot.bucket, slot.dtype))
    for (_, dtype), group in groupby(ordered, key=lambda slot: (slot.bucket, slot.dtype)):
        each = list(group)
        sizes = [volume(slot.bounds) for slot in each]
        parts = torch.zeros(sum(sizes), dtype=WIRE_DTYPES[dtype]).split(sizes)
        for slot, part in zip(each, parts, strict=True):
            found[slot.name] = part.view(extents(slot.bounds))
    return found


class StackedRank(TrainerRank):
    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        slots = layout(rank, world)
        self.bounds: dict[str, Bounds] = {slot.name: slot.bounds for slot in slots}
        self.weights = stacked(slots)
        self.sender = Sender(rank, slots, self.read, stays=True)

    def read(self, name: str, bounds: Bounds) -> torch.Tensor:
        origin = self.bounds[name]
        here = tuple((a - s, b - s) for (a, b), (s, _) in zip(bounds, origin, strict=True))
        return cut(self.weights[name], here)

    def load(self, seed: int) -> None:
        for name, tensor in weights(seed).items():
            self.weights[name].copy_(cut(tensor, self.bounds[name]))


@pytest.mark.parametrize("chunk_bytes", [100, 1 << 20])
@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 1), (2, 2), (1, 3)])
def test_stacked_tensors_travel_joined_and_arrive(monkeypatch, num_ranks, num_workers, chunk_bytes):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)
    posted = []
    post = Transport.post

    def counting(transport, *, sends=(), receives=()):
        posted.extend(receives)
        return post(transport, sends=sends, receives=receives)

    monkeypatch.setattr(Transport, "post", counting)
    engines = [StackedEngine(layout(w, num_workers)) for w in range(num_workers)]
    ranks = [StackedRank(r, num_ranks) for r in range(num_ranks)]
    sync, senders, _ = local_sync({0: engines}, ranks, chunk_bytes=chunk_bytes)
    for version, seed in enumerate([1, 2, 1], start=1):
        senders.load(seed)
        del posted[:]
        assert sync.sync(version).checksum_ok
        for w, engine in enumerate(engines):
            assert_holds(engine.tensors, layout(w, num_workers), seed)
    assert sum(transfer.wire.numel() for transfer in posted) == sync.plan(0).nbytes
    if (num_ranks, num_workers, chunk_bytes) == (1, 1, 1 << 20):
        # pre, layer.0, the two dtypes of layer.1, post.
        assert len(posted) == 5
    assert len(posted) < len(sync.plan(0).ops)


def test_a_clock_counts_from_its_own_beginning():
    clock = Clock()
    clock.note("first")
    clock.note("second")
    assert 0 <= clock.seconds["first"] <= clock.seconds["second"] < 1


def test_what_is_not_arranged_travels_op_by_op_in_the_rounds_of_the_plan():
    ops = make_plan([layout()], [layout()], 100).ops
    found = unjoined(ops)
    assert [i for messages in found for (i,) in messages] == list(range(len(ops)))
    rounds = [{ops[i].round for (i,) in messages} for messages in found]
    assert all(len(numbers) == 1 for numbers in rounds)
    assert all(max(a) < min(b) for a, b in pairwise(rounds))


def test_small_messages_of_a_pair_are_packed_and_passed_on_so():
    ops = [op(name, 2) for name in "abc"] + [op("d", 40), op("e", 3)]
    passes = [dataclasses.replace(each, receiver=1, via=0, round=1) for each in ops]
    here = lying(*[(i, 0) for i in range(5)])
    there = lying(*[(i, 0) for i in range(5)])
    sides = [here], [there, there]
    [sends], [(first, onward), (second, _)] = arrange(
        (*ops, *passes), *sides, 1 << 20, Limits(pack_bytes=64)
    )
    # e is small, and would leave what comes behind it unaligned.
    assert sends == (((0, 1, 2), (3,), (4,)),)
    assert first == (((0, 1, 2), (3,), (4,)), ())
    assert onward == ((), ((1, (0, 1, 2)), (1, (3,)), (1, (4,))))
    assert second == (((0, 1, 2), (3,), (4,)),)


def test_a_message_that_is_not_in_one_piece_is_staged_as_a_whole():
    memory = torch.zeros(8, 4)
    wires = [wire_bytes(memory[i : i + 1]) for i in (0, 1, 4, 3)]
    assert staged_ops((((0, 1), (2,)), ((3,),)), wires) == set()
    assert staged_ops((((0, 1), (2, 3)),), wires) == {2, 3}
    assert staged_ops((((0, 1), (2,)), ((3,),)), [None, *wires[1:]]) == {0, 1}

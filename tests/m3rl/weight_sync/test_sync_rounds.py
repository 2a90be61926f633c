"""The data path of a share: what travels in place, what by slots, and what is hashed of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from inference.kernels.copy_table import CopyTable
from m3rl.types import TensorSlot
from m3rl.weight_sync import replica
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.layout import whole
from m3rl.weight_sync.messages import Limits, unjoined
from m3rl.weight_sync.plan import make_plan
from m3rl.weight_sync.rounds import Slots
from m3rl.weight_sync.send import Sender
from tests.m3rl.weight_sync.sync_fakes import (
    TENSORS,
    FakeEngine,
    TrainerRank,
    assert_holds,
    cut,
    layout,
    local_sync,
    store_without_sockets,
    weights,
)


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


def columns(rank: int, world: int) -> list[TensorSlot]:
    """What one of `world` column-sharded ranks holds; vectors whole."""
    return [
        TensorSlot(name, dtype, shape, whole(shape) if len(shape) < 2 else part(shape), bucket)
        for name, (dtype, shape, bucket) in TENSORS.items()
        for part in [
            lambda shape: (
                (0, shape[0]),
                (shape[1] * rank // world, shape[1] * (rank + 1) // world),
            )
        ]
    ]


class WholeEngine(FakeEngine):
    """Holds columns of memory that is wider, so no place of a matrix is contiguous."""

    def __init__(self, slots: list[TensorSlot]) -> None:
        super().__init__(slots)
        for slot in slots:
            if len(slot.shape) == 2:
                shape = (slot.bounds[0][1], slot.bounds[1][1] - slot.bounds[1][0])
                wide = torch.full((shape[0], shape[1] + 3), 9.0)
                wide = wide.to(self.tensors[slot.name].dtype)
                self.tensors[slot.name] = wide[:, 1:-2]
        self.loaded = self.tensors


@pytest.mark.parametrize("chunk_bytes", [64, 200, 1 << 20])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_parts_that_are_not_contiguous_are_copied_into_their_places(num_ranks, chunk_bytes):
    engines = [WholeEngine(columns(w, 2)) for w in range(2)]
    ranks = [TrainerRank(r, num_ranks) for r in range(num_ranks)]
    sync, senders, _ = local_sync({0: engines}, ranks, chunk_bytes=chunk_bytes)
    for version, seed in enumerate([1, 2, 1], start=1):
        senders.load(seed)
        assert sync.sync(version).checksum_ok
        for w, engine in enumerate(engines):
            assert_holds(engine.tensors, columns(w, 2), seed)


def test_contiguous_plain_parts_are_received_in_place(monkeypatch):
    copied = []
    monkeypatch.setattr(replica, "LIMITS", Limits(pack_bytes=0))
    monkeypatch.setattr(CopyTable, "__init__", lambda table, pairs: copied.append(pairs))
    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]}, chunk_bytes=100)
    senders.load(3)
    sync.sync(1)
    assert copied == []
    assert_holds(engine.tensors, layout(), 3)


class StayingRank(TrainerRank):
    """Its weights stay where they are; a step changes them there."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.num_reads = 0
        self.sender = Sender(rank, self.sender.sync_layout(), self.read, stays=True)

    def read(self, name: str, bounds):
        self.num_reads += 1
        return cut(self.weights[name], bounds)

    def load(self, seed: int) -> None:
        for name, tensor in weights(seed).items():
            self.weights[name].copy_(tensor)


@pytest.mark.parametrize("chunk_bytes", [100, 1 << 20])
def test_weights_that_stay_are_read_once_and_sent_from_where_they_are(chunk_bytes: int):
    engines = [WholeEngine(columns(w, 2)) for w in range(2)]
    ranks = [StayingRank(r, 2) for r in range(2)]
    sync, senders, _ = local_sync({0: engines}, ranks, chunk_bytes=chunk_bytes)
    sync.sync(1)
    whole_rows = [op for op in sync.plan(0).ops if len(op.bounds) == 1]
    assert whole_rows
    for version, seed in enumerate([2, 3], start=2):
        before = [rank.num_reads for rank in ranks]
        senders.load(seed)
        assert sync.sync(version).checksum_ok
        for w, engine in enumerate(engines):
            assert_holds(engine.tensors, columns(w, 2), seed)
        # Columns are no contiguous views, and are copied from where they are.
        assert [rank.num_reads for rank in ranks] == before


def test_a_trainer_rank_with_nothing_to_send_takes_part():
    class Idle(TrainerRank):
        def __init__(self) -> None:
            super().__init__(1, 2)
            held = [slot for slot in layout() if slot.name == "lm_head.weight"][:1]
            self.sender = Sender(1, held, self.read)

    engine = FakeEngine(layout())
    sync, senders, _ = local_sync({0: [engine]}, [TrainerRank(0, 1), Idle()])
    plan = sync.plan(0)
    assert plan is not None
    assert {op.name for op in plan.sends(1)} <= {"lm_head.weight"}
    senders.load(4)
    assert sync.sync(1).checksum_ok
    assert_holds(engine.tensors, layout(), 4)


def test_two_rounds_in_turn_never_share_a_slot_and_an_op_keeps_its_bytes():
    ops = make_plan([layout()], [layout()], 100).ops
    rounds = [[i for (i,) in messages] for messages in unjoined(ops)]
    assert [i for chosen in rounds for i in chosen] == list(range(len(ops)))
    assert len(rounds) == 1 + max(op.round for op in ops)
    slots = Slots(ops, rounds, range(len(ops)), torch.device("cpu"))
    spans = []
    for chosen in rounds:
        here = [(slots.wire(i).data_ptr(), ops[i].nbytes) for i in chosen]
        assert all(start % 16 == 0 for start, _ in here)
        here.sort()
        assert all(a + n <= b for (a, n), (b, _) in pairwise(here))
        spans.append({byte for start, n in here for byte in range(start, start + n)})
    for one, other in pairwise(spans):
        assert not one & other
    assert slots.tensor(0).shape == tuple(stop - start for start, stop in ops[0].bounds)

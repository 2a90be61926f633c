"""Syncs of what changed: the same bits as a full sync, and a full one wherever it cannot be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from inference.config import EngineConfig
from inference.engine import Engine
from m3rl.types import TensorSlot
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.delta_send import Snapshot
from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.plan import CopyOp
from m3rl.weight_sync.send import Sender
from m3rl.weight_sync.sync import WeightSync
from m3rl.weight_sync.transport import WIRE_DTYPES
from tests.m3rl.weight_sync.sync_fakes import (
    BIAS,
    EMBEDDING,
    EXPERT,
    TENSORS,
    FakeEngine,
    LocalSenders,
    LocalWorker,
    TrainerRank,
    cut,
    layout,
    local_sync,
    store_without_sockets,
    weights,
)
from tests.m3rl.weight_sync.test_sync_engine import MXFP8_RAW
from tests.m3rl.weight_sync.test_sync_join import GivingEngine
from tests.m3rl.weight_sync.test_sync_rounds import WholeEngine, columns
from tests.tiny_models import model_config, random_tensors


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


class Trainer:
    """One set of weights that all ranks show parts of, in memory that stays or anew."""

    def __init__(self, num_ranks: int = 1, *, stays: bool = True, is_replicated: bool = False):
        self.weights = weights(0)
        self.ranks = []
        for rank in range(num_ranks):
            made = TrainerRank(rank, num_ranks, is_replicated=is_replicated)
            made.weights = self.weights
            slots = made.sender.sync_layout()
            made.sender = Sender(rank, slots, self.read(stays), stays=stays)
            self.ranks.append(made)

    def read(self, stays: bool):
        if stays:
            return lambda name, bounds: cut(self.weights[name], bounds)
        return lambda name, bounds: cut(self.weights[name], bounds).clone()

    def load(self, seed: int) -> None:
        for name, tensor in weights(seed).items():
            self.weights[name].copy_(tensor)

    def step(self, changes: Sequence[tuple[str, int]] = ()) -> None:
        """Change one element each, by its place in a tensor; without any a few all over."""
        for name, at in changes or [(EMBEDDING, 65), (EXPERT.format(2), 0), (BIAS, 3)]:
            flat = self.weights[name].view(-1)
            flat[at] = 3.0 - flat[at]


def assert_same(engine: FakeEngine, trainer: Trainer) -> None:
    for slot in engine.slots.values():
        assert torch.equal(engine.tensors[slot.name], cut(trainer.weights[slot.name], slot.bounds))


def bytes_of_changes(op: CopyOp) -> int:
    """Of the elements that `Trainer.step` changes in an op, with their places."""
    changed = {EMBEDDING: (10, 5), EXPERT.format(2): (0, 0), BIAS: (3,)}.get(op.name, (99, 99))
    is_in = all(a <= at < b for at, (a, b) in zip(changed, op.bounds, strict=False))
    return is_in * (2 + WIRE_DTYPES[op.dtype].itemsize)


FULL_BYTES = sum(
    int(np.prod(shape)) * WIRE_DTYPES[dtype].itemsize for dtype, shape, _ in TENSORS.values()
)


@pytest.mark.parametrize("has_shadow", [True, False])
@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_only_what_changed_travels_and_the_bits_are_the_trainers(
    num_ranks, num_workers, chunk_bytes, stays, has_shadow
):
    trainer = Trainer(num_ranks, stays=stays)
    engines = [
        FakeEngine(layout(w, num_workers), has_shadow=has_shadow) for w in range(num_workers)
    ]
    options = {"chunk_bytes": chunk_bytes, "delta_full_every": 9}
    sync, _, _ = local_sync({0: engines}, trainer.ranks, **options)
    first = sync.sync(0)
    assert first.num_deltas == 0
    for version in range(1, 5):
        trainer.step()
        report = sync.sync(version)
        assert report.num_deltas == 1
        assert report.num_bytes == sum(4 + bytes_of_changes(op) for op in sync.plan(0).ops)
        assert report.checksum_ok
        assert report.wire_hash != first.wire_hash or version % 2 == 0
        for engine in engines:
            assert engine.version == version
            assert_same(engine, trainer)


def test_workers_that_hold_the_same_are_both_told_by_the_trainer(monkeypatch):
    """A full sync goes to one of them, which passes it on."""
    monkeypatch.setattr("m3rl.weight_sync.delta.PAYS_BELOW", 1.0)  # parts of a few elements
    trainer = Trainer(2)
    engines = [FakeEngine(layout()) for _ in range(2)]
    options = {"connect": False, "delta_full_every": 9}
    sync, _, workers = local_sync({0: engines}, trainer.ranks, **options)
    for worker in workers[0]:
        worker.node = "one"
    sync.connect(0)
    for version in range(3):
        trainer.step()
        report = sync.sync(version)
        assert report.num_deltas == min(version, 1)
        for engine in engines:
            assert_same(engine, trainer)
    ops = sync.plan(0).ops
    assert any(op.via >= 0 for op in ops)
    assert report.num_bytes == sum(4 + bytes_of_changes(op) for op in ops)


def test_nothing_changed_and_everything_changed():
    trainer = Trainer()
    engine = FakeEngine(layout())
    sync, _, _ = local_sync({0: [engine]}, trainer.ranks, delta_full_every=9)
    sync.sync(0)
    same = sync.sync(1)
    assert (same.num_deltas, same.num_bytes) == (1, 4 * len(TENSORS))
    trainer.load(5)
    full = sync.sync(2)
    assert (full.num_deltas, full.num_bytes) == (0, FULL_BYTES)
    assert_same(engine, trainer)
    trainer.step()
    assert sync.sync(3).num_deltas == 1
    assert_same(engine, trainer)


def test_zero_that_changes_its_sign_and_nan_that_stays_are_told_by_their_bits():
    trainer = Trainer()
    trainer.weights[EMBEDDING][3, 3] = 0.0
    engine = FakeEngine(layout())
    sync, _, _ = local_sync({0: [engine]}, trainer.ranks, delta_full_every=9)
    sync.sync(0)
    trainer.weights[EMBEDDING][3, 3] = -0.0
    assert sync.sync(1).num_bytes == 4 * len(TENSORS) + 4
    assert engine.tensors[EMBEDDING][3, 3].signbit()


def test_every_so_many_syncs_one_is_full():
    trainer = Trainer()
    sync, _, _ = local_sync({0: [FakeEngine(layout())]}, trainer.ranks, delta_full_every=3)
    kinds = []
    for version in range(8):
        trainer.step()
        kinds.append(sync.sync(version).num_deltas)
    assert kinds == [0, 1, 1, 0, 1, 1, 0, 1]


def test_a_replica_that_missed_a_sync_takes_a_full_one_beside_one_that_did_not():
    trainer = Trainer(2)
    engines = {r: [FakeEngine(layout())] for r in range(3)}
    sync, _, _ = local_sync(engines, trainer.ranks, delta_full_every=99)
    sync.sync(0)
    for version, asked, num_deltas in [
        (1, [0, 1, 2], 3),
        (2, [0, 2], 2),
        (3, [0, 1, 2], 2),
        (4, [1], 1),
        (5, [0, 1, 2], 1),
        (6, [0, 1, 2], 3),
    ]:
        trainer.step()
        report = sync.sync(version, asked)
        assert (report.num_deltas, report.ready) == (num_deltas, tuple(asked))
        for number in asked:
            assert_same(engines[number][0], trainer)


def test_a_replica_that_is_connected_anew_takes_a_full_sync():
    trainer = Trainer()
    engine = FakeEngine(layout())
    sync, _, _ = local_sync({0: [engine]}, trainer.ranks, delta_full_every=9)
    sync.sync(0)
    sync.connect(0)
    trainer.step()
    assert sync.sync(1).num_deltas == 0
    assert_same(engine, trainer)


def test_a_replica_that_took_its_weights_from_another_is_sent_all_of_the_next():
    trainer = Trainer()
    engines = {r: [GivingEngine(layout())] for r in range(2)}
    sync, _, _ = local_sync(engines, trainer.ranks, delta_full_every=9)
    sync.sync(0)
    trainer.step()
    sync.sync(1)
    sync.bring(1, 1)
    assert sync.states() == {0: "READY(1)", 1: "READY(1)"}
    for version, num_deltas in ((2, 1), (3, 2)):
        trainer.step()
        assert sync.sync(version).num_deltas == num_deltas
        for (engine,) in engines.values():
            assert_same(engine, trainer)


@pytest.mark.parametrize("has_shadow", [True, False])
def test_a_base_that_is_not_what_it_should_be_is_seen_and_mended(has_shadow):
    """As when something else wrote the engine's weights meanwhile."""
    trainer = Trainer()
    engine = FakeEngine(layout(), has_shadow=has_shadow)
    sync, _, _ = local_sync({0: [engine]}, trainer.ranks, delta_full_every=9)
    sync.sync(0)
    engine.loaded["lm_head.weight"][2, 2] += 1
    trainer.step()
    report = sync.sync(1)
    assert (report.checksum_mismatches, report.checksum_ok, report.num_deltas) == (1, True, 0)
    assert_same(engine, trainer)
    trainer.step()
    assert sync.sync(2).num_deltas == 1
    assert_same(engine, trainer)


@pytest.mark.parametrize("has_shadow", [True, False])
def test_a_delta_that_breaks_off_leaves_what_a_broken_full_sync_leaves(monkeypatch, has_shadow):
    trainer = Trainer()
    engine = FakeEngine(layout(), has_shadow=has_shadow)
    sync, _, _ = local_sync({0: [engine]}, trainer.ranks, delta_full_every=9, timeout_s=2.0)
    sync.sync(0)
    before = {name: tensor.clone() for name, tensor in engine.tensors.items()}

    def fail(self, *args):
        raise RuntimeError("the rank is out of memory")

    trainer.step()
    with monkeypatch.context() as patched:
        patched.setattr(Snapshot, "send", fail)
        with pytest.raises(SyncError, match=r"out of memory|has left the group"):
            sync.sync(1)
    assert sync.states() == {0: "READY(0)" if has_shadow else "POISONED"}
    assert (engine.version, engine.serves) == ((0, True) if has_shadow else (None, False))
    assert not has_shadow or all(torch.equal(engine.tensors[n], before[n]) for n in before)
    sync.connect(0)
    assert sync.sync(1).num_deltas == 0
    assert_same(engine, trainer)


def test_columns_that_lie_apart_in_memory_are_written_in_their_places():
    trainer = Trainer(2)
    engines = [WholeEngine(columns(w, 2)) for w in range(2)]
    sync, _, _ = local_sync({0: engines}, trainer.ranks, delta_full_every=9)
    for version in range(3):
        trainer.step()
        assert sync.sync(version).num_deltas == min(version, 1)
        for engine in engines:
            assert_same(engine, trainer)


def test_a_delta_needs_hashes():
    with pytest.raises(ValueError, match="delta_full_every=2 without verify"):
        local_sync({0: [FakeEngine(layout())]}, verify=False, delta_full_every=2)


class QuantizedTrainer:
    """A trainer of the tiny model, whose engines hold experts in MXFP8."""

    def __init__(self, num_ranks: int, stays: bool) -> None:
        self.weights = random_tensors(MXFP8_RAW, 1, torch.bfloat16)
        self.ranks = []
        for rank in range(num_ranks):
            slots = [
                slot_of_rows(name, tensor, rank, num_ranks, engine_buckets()[name])
                for name, tensor in self.weights.items()
            ]
            read = lambda name, bounds: cut(self.weights[name], bounds)  # noqa: E731
            self.ranks.append(Sender(rank, slots, read, stays=stays))

    def step(self, generator: torch.Generator, share: float) -> None:
        """A share of all elements moves by a little, as BF16 shows it."""
        for tensor in self.weights.values():
            moves = torch.rand(tensor.shape, generator=generator) < share
            tensor[moves] *= 1.02


def engine_buckets() -> dict[str, str]:
    return {slot.name: slot.bucket for slot in quantized().weight_layout()}


def slot_of_rows(name: str, tensor: Tensor, rank: int, world: int, bucket: str) -> TensorSlot:
    shape = tuple(tensor.shape)
    rows = (shape[0] * rank // world, shape[0] * (rank + 1) // world)
    bounds = (rows, *((0, size) for size in shape[1:]))
    return TensorSlot(name, str(tensor.dtype).removeprefix("torch."), shape, bounds, bucket)


def quantized(weights: dict[str, Tensor] | None = None, **options) -> Engine:
    config = EngineConfig(dtype="bfloat16", num_pages=32, quantization="mxfp8", **options)
    made = Engine(model_config(MXFP8_RAW), config)
    if weights is not None:
        made.load_weights(weights.items(), 0)
    return made


@pytest.mark.parametrize("has_shadow", [True, False])
@pytest.mark.parametrize(
    ("wire", "num_ranks", "stays"), [("bf16", 2, True), ("mxfp8", 1, False), ("mxfp8", 2, True)]
)
def test_mxfp8_is_compared_as_it_is_stored(wire, num_ranks, stays, has_shadow):
    trainer = QuantizedTrainer(num_ranks, stays)
    target = quantized(shadow_weights=has_shadow)
    sync = WeightSync(
        LocalSenders(trainer.ranks),
        {0: LocalWorker(target)},
        pause=lambda replica: target.pause("keep"),
        resume=lambda replica: target.resume(),
        host="127.0.0.1",
        timeout_s=20.0,
        min_replicas=1,
        verify=True,
        chunk_bytes=5_000,
        wire=wire,
        delta_full_every=9,
    )
    sync.connect(0)
    generator = torch.Generator().manual_seed(3)
    for version in range(3):
        report = sync.sync(version)
        assert report.num_deltas == min(version, 1)
        assert target.weights_hash() == quantized(trainer.weights).weights_hash()
        trainer.step(generator, 0.02)
    trainer.weights[EXPERT.format(1)][2, 2] = torch.nan
    with pytest.raises(SyncError, match=r"NonFiniteError: trainer rank 0: NaN or.*experts\.1\.w1"):
        sync.sync(3)

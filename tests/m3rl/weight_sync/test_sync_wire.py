"""Tensors that the trainer quantises: half the bytes, and the same ones in the engine."""

from __future__ import annotations

import itertools

import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine
from inference.kernels.mxfp8 import quantize
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.plan import check_plan, make_plan
from m3rl.weight_sync.rounds import rectangle_of
from m3rl.weight_sync.send import Sender
from m3rl.weight_sync.sync import WeightSync
from m3rl.weight_sync.transport import wire_bytes
from tests.m3rl.weight_sync import test_sync_engine as synced
from tests.m3rl.weight_sync.sync_fakes import LocalSenders, LocalWorker, store_without_sockets
from tests.m3rl.weight_sync.test_sync_engine import EXPERT, MXFP8_RAW, Rank, damage_once
from tests.tiny_models import model_config, random_tensors


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)
    monkeypatch.setattr(synced, "RAW", MXFP8_RAW)


class StayingRank(Rank):
    """Its weights stay where they are; a step changes them there."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(torch.bfloat16, rank, world)
        self.sender = Sender(rank, self.sender.sync_layout(), self.sender._read, stays=True)

    def load(self, seed: int) -> None:
        fresh = random_tensors(MXFP8_RAW, seed, torch.bfloat16)
        if "weights" not in vars(self):
            self.weights = fresh
        for name, tensor in fresh.items():
            self.weights[name].copy_(tensor)


def ranks_of(kind: str, count: int) -> list[Rank]:
    if kind == "stays":
        return [StayingRank(r, count) for r in range(count)]
    return [Rank(torch.bfloat16, r, count) for r in range(count)]


def quantized(quantization: str = "mxfp8", seed: int | None = None, **options) -> Engine:
    config = EngineConfig(dtype="bfloat16", num_pages=32, quantization=quantization, **options)
    made = Engine(model_config(MXFP8_RAW), config)
    if seed is not None:
        made.load_weights(random_tensors(MXFP8_RAW, seed, torch.bfloat16).items(), 0)
    return made


def driver(target: Engine, ranks: list[Rank], wire: str, chunk_bytes: int = 1 << 20, **options):
    sync = WeightSync(
        LocalSenders(ranks),
        {0: LocalWorker(target)},
        pause=lambda replica: target.pause("keep"),
        resume=lambda replica: target.resume(),
        host="127.0.0.1",
        timeout_s=20.0,
        min_replicas=1,
        chunk_bytes=chunk_bytes,
        wire=wire,
        **{"verify": True, **options},
    )
    sync.connect(0)
    return sync


@pytest.mark.parametrize(
    ("quantization", "chunk_bytes", "kind"),
    [
        ("mxfp8", 700, "stays"),
        ("mxfp8", 5_000, "anew"),
        ("mxfp8_released", 5_000, "stays"),
        ("mxfp8_released", 1 << 20, "anew"),
    ],
)
def test_what_the_trainer_quantised_is_what_the_engine_would_have_made(
    quantization: str, chunk_bytes: int, kind: str
):
    reports = {}
    for wire in ("bf16", "mxfp8"):
        target, ranks = quantized(quantization), ranks_of(kind, 2)
        sync = driver(target, ranks, wire, chunk_bytes)
        for version, seed in enumerate([1, 2, 1], start=1):
            for rank in ranks:
                rank.load(seed)
            reports[wire, version] = sync.sync(version)
            truth = quantized(quantization, seed)
            assert target.weights_hash() == truth.weights_hash()
    for version in (1, 2, 3):
        plain, small = reports["bf16", version], reports["mxfp8", version]
        assert plain.wire_hash == small.wire_hash, "hashes are those of the trainer's BF16"
    stored = [slot for slot in target.weight_layout() if slot.storage == "mxfp8"]
    count = sum(slot.shape[0] * slot.shape[1] for slot in stored)
    assert plain.num_bytes - small.num_bytes == 2 * count - count * 33 // 32


@pytest.mark.parametrize(
    ("kind", "bad", "has_shadow"),
    [("stays", torch.nan, True), ("anew", -torch.inf, True), ("stays", 6e4, False)],
)
def test_weights_that_cannot_be_served_are_found_by_their_scales(kind: str, bad, has_shadow: bool):
    """Without hashes too: 60,000 is a number, and above what a scale can stand for."""
    target, ranks = quantized(shadow_weights=has_shadow), ranks_of(kind, 1)
    sync = driver(target, ranks, "mxfp8", verify=False)
    ranks[0].load(1)
    sync.sync(1)
    ranks[0].weights[EXPERT][3, 3] = bad
    with pytest.raises(SyncError, match=rf"NonFiniteError: trainer rank 0: NaN or.*{EXPERT}"):
        sync.sync(2)
    assert target.version == (1 if has_shadow else None)
    ranks[0].load(2)
    sync.connect(0)
    sync.sync(2)
    assert target.weights_hash() == quantized(seed=2).weights_hash()


def test_a_byte_lost_on_the_way_is_mended_by_the_retry(monkeypatch):
    target, ranks = quantized(), ranks_of("anew", 1)
    sync = driver(target, ranks, "mxfp8")
    stored = target._worker.weights.views[EXPERT]

    def damage() -> None:
        stored.scale[1, 0] ^= 1

    damage_once(target, monkeypatch, EXPERT, damage)
    assert sync.sync(1).checksum_mismatches == 1
    assert target.weights_hash() == quantized(seed=0).weights_hash()


def test_a_plan_of_quantised_tensors_is_another_plan_and_covers_the_same():
    layouts = [rank.sync_layout() for rank in ranks_of("anew", 2)]
    worker = list(quantized().weight_layout())
    plans = [make_plan(layouts, [worker], 1000, wire) for wire in ("bf16", "mxfp8")]
    assert plans[0].digest != plans[1].digest
    for plan in plans:
        check_plan(plan, layouts, [worker])
    sizes = [{(op.name, op.bounds): op.nbytes for op in plan.ops} for plan in plans]
    for plain, sent in zip(*(sizes[i].items() for i in (0, 1)), strict=True):
        assert plain[0] == sent[0]
    halves = {33 * sizes[0][key] == 64 * sizes[1][key] for key in sizes[0]}
    assert halves == {True, False}, "norms stay what they are"
    with pytest.raises(ValueError, match="wire='fp4' is not known"):
        make_plan(layouts, [worker], 1000, "fp4")


def test_a_message_holds_values_then_scales():
    layouts = [rank.sync_layout() for rank in ranks_of("anew", 1)]
    plan = make_plan(layouts, [list(quantized().weight_layout())], 1 << 20, "mxfp8")
    op = next(op for op in plan.ops if op.wire == "mxfp8")
    shape = [stop - start for start, stop in op.bounds]
    whole = quantize(torch.randn(shape).bfloat16())
    message = torch.cat([wire_bytes(whole.values), wire_bytes(whole.scale)])
    assert message.numel() == op.nbytes
    for part, again in itertools.zip_longest(whole, rectangle_of(message, op)):
        assert torch.equal(part.view(torch.uint8), again.view(torch.uint8))

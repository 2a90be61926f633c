"""The bundled engine at the receiving end: a sync and a load from disk are the same weights."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inference.config import EngineConfig
from inference.engine import Engine, Request, SamplingParams
from inference.kernels.mxfp8 import MXFP8Tensor, QuantizeTable
from inference.models.weights import published_tensors
from m3rl.types import TensorSlot
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.layout import Bounds, whole
from m3rl.weight_sync.send import Sender
from m3rl.weight_sync.sync import WeightSync
from tests.m3rl.weight_sync.sync_fakes import (
    LocalSenders,
    LocalWorker,
    cut,
    store_without_sockets,
    wire_hash_of,
)
from tests.tiny_models import model_config, random_tensors, tiny_config

RAW = tiny_config(num_hidden_layers=2)
BIAS = "model.layers.1.block_sparse_moe.e_score_correction_bias"


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


class Rank:
    """A trainer rank that holds its share of the rows of every tensor, in wire dtypes."""

    def __init__(self, dtype: torch.dtype, rank: int, world: int) -> None:
        self._dtype = dtype
        self.load(0)
        layout = []
        for spec in published_tensors(model_config(RAW)):
            size = spec.shape[0]
            rows = (size * rank // world, size * (rank + 1) // world)
            name = str(self.weights[spec.name].dtype).removeprefix("torch.")
            bounds: Bounds = (rows, *whole(spec.shape[1:]))
            layout.append(TensorSlot(spec.name, name, spec.shape, bounds, spec.bucket))
        self.sender = Sender(rank, layout, lambda name, bounds: cut(self.weights[name], bounds))

    def load(self, seed: int) -> None:
        self.weights = random_tensors(RAW, seed, self._dtype)

    def __getattr__(self, name: str):
        return getattr(self.sender, name)


def engine(dtype: str = "float32") -> Engine:
    return Engine(model_config(RAW), EngineConfig(dtype=dtype, num_pages=32))


def fresh(seed: int, dtype: str = "float32") -> Engine:
    """An engine that was given its weights without any sync."""
    loaded = engine(dtype)
    loaded.load_weights(random_tensors(RAW, seed, getattr(torch, dtype)).items(), 0)
    return loaded


def driver(target: Engine, ranks: list[Rank], chunk_bytes: int = 1 << 20):
    worker = LocalWorker(target)
    sync = WeightSync(
        LocalSenders(ranks),
        {0: worker},
        pause=lambda replica: target.pause("keep"),
        resume=lambda replica: target.resume(),
        host="127.0.0.1",
        timeout_s=20.0,
        min_replicas=1,
        verify=True,
        chunk_bytes=chunk_bytes,
    )
    sync.connect(0)
    return sync


def greedy(target: Engine) -> tuple[list[int], list[float]]:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    target.add(Request("r", [5, 6, 7, 8, 9, 10, 11, 12, 13], params))
    outputs = []
    while target.has_work:
        outputs += target.step()
    return outputs[0].token_ids.tolist(), outputs[0].logprobs.tolist()


# BR-001
@pytest.mark.parametrize("chunk_bytes", [700, 5_000, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_synced_engine_is_a_fresh_engine(dtype: str, chunk_bytes: int):
    target = engine(dtype)
    ranks = [Rank(getattr(torch, dtype), r, 2) for r in range(2)]
    sync = driver(target, ranks, chunk_bytes)
    for version, seed in enumerate([1, 2, 1], start=1):
        for rank in ranks:
            rank.load(seed)
        sync.sync(version)
        truth = fresh(seed, dtype)
        assert target.version == version
        assert target.weights_hash() == truth.weights_hash()
        assert greedy(target) == greedy(truth)


MXFP8_RAW = tiny_config(
    num_hidden_layers=2,
    intermediate_size=64,
    dense_intermediate_size=32,
    shared_intermediate_size=32,
)
FEW_ROWS = MXFP8_RAW | {"num_local_experts": 2, "vocab_size": 33}
"""For parts so small that there are thousands of them in the other."""
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"  # [32, 64]


@pytest.fixture
def mxfp8_raw(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "RAW", MXFP8_RAW)


def quantized(quantization: str, seed: int | None = None) -> Engine:
    made = Engine(
        model_config(RAW),
        EngineConfig(dtype="bfloat16", num_pages=32, quantization=quantization),
    )
    if seed is not None:
        made.load_weights(random_tensors(RAW, seed, torch.bfloat16).items(), 0)
    return made


@pytest.mark.parametrize(
    ("quantization", "chunk_bytes", "seeds"),
    [
        ("mxfp8", 100, [1]),
        ("mxfp8", 5_000, [1, 2]),
        ("mxfp8", 1 << 20, [1, 2]),
        ("mxfp8_released", 5_000, [1, 2]),
        ("mxfp8_released", 1 << 20, [1, 2]),
    ],
)
@pytest.mark.usefixtures("mxfp8_raw")
def test_bf16_weights_are_quantised_on_receive_and_proven(
    monkeypatch, quantization: str, chunk_bytes: int, seeds: list[int]
):
    """100 bytes: ops of 32 columns, so rows are cut within a tensor of two blocks."""
    if chunk_bytes == 100:
        monkeypatch.setattr(sys.modules[__name__], "RAW", FEW_ROWS)
    target = quantized(quantization)
    ranks = [Rank(torch.bfloat16, r, 2) for r in range(2)]
    sync = driver(target, ranks, chunk_bytes)
    for version, seed in enumerate(seeds, start=1):
        for rank in ranks:
            rank.load(seed)
        report = sync.sync(version)
        truth = quantized(quantization, seed)
        assert report.checksum_ok is True
        assert report.wire_hash == wire_hash(seed, sync)
        assert target.weights_hash() == truth.weights_hash()
        assert greedy(target) == greedy(truth)


def wire_hash(seed: int, sync: WeightSync) -> int:
    plan = sync.plan(0)
    assert plan is not None
    return wire_hash_of(random_tensors(RAW, seed, torch.bfloat16), plan.ops)


def damage_once(target: Engine, monkeypatch, name: str, damage: Callable[[], object]) -> None:
    """When a first round with a part of `name` is in the engine's memory, do `damage`."""
    begin_load, written = target.begin_load, target.written
    plans, seen = [], []

    def beginning(version: int, plan) -> None:
        plans.append(plan)
        begin_load(version, plan)

    def damaging(first: int, last: int) -> None:
        written(first, last)
        if name in dict(plans[-1].parts[first:last]) and not seen:
            seen.append(name)
            damage()

    monkeypatch.setattr(target, "begin_load", beginning)
    monkeypatch.setattr(target, "written", damaging)


@pytest.mark.parametrize("part", ["weight", "scale"])
@pytest.mark.usefixtures("mxfp8_raw")
def test_a_flipped_bit_in_what_was_quantised_is_mended_by_the_retry(monkeypatch, part: str):
    target, rank = quantized("mxfp8"), Rank(torch.bfloat16, 0, 1)
    sync = driver(target, [rank])
    stored = target._worker.weights.views[EXPERT]
    assert isinstance(stored, MXFP8Tensor)
    damaged = stored.values.view(torch.uint8) if part == "weight" else stored.scale

    def damage() -> None:
        damaged[5, 1] ^= 1

    damage_once(target, monkeypatch, EXPERT, damage)
    rank.load(3)
    report = sync.sync(1)
    assert (report.checksum_ok, report.checksum_mismatches) == (True, 1)
    assert target.weights_hash() == quantized("mxfp8", 3).weights_hash()


@pytest.mark.usefixtures("mxfp8_raw")
def test_a_bf16_bit_lost_on_the_way_to_the_quantiser_is_seen_where_it_changes_a_byte(monkeypatch):
    target, rank = quantized("mxfp8"), Rank(torch.bfloat16, 0, 1)
    sync = driver(target, [rank])
    stored = target._worker.weights.views[EXPERT]
    assert isinstance(stored, MXFP8Tensor)
    launch, seen = QuantizeTable.launch, []

    def flipping(table: QuantizeTable, first: int, last: int) -> None:
        # The sender quantises too, for its hashes: only what goes into the engine is damaged.
        for x, out in table._pairs[first:last]:
            if out.values.data_ptr() == stored.values.data_ptr() and not seen:
                seen.append(EXPERT)
                x.view(torch.int16)[5, 1] ^= -0x8000  # the sign
        launch(table, first, last)

    monkeypatch.setattr(QuantizeTable, "launch", flipping)
    report = sync.sync(1)
    assert (report.checksum_ok, report.checksum_mismatches) == (True, 1)


@pytest.mark.usefixtures("mxfp8_raw")
def test_nan_never_reaches_the_quantiser():
    target, rank = quantized("mxfp8"), Rank(torch.bfloat16, 0, 1)
    sync = driver(target, [rank])
    rank.weights[EXPERT][3, 3] = torch.nan
    with pytest.raises(SyncError, match=rf"{EXPERT}.*NaN or inf|NaN or inf.*{EXPERT}"):
        sync.sync(1)
    assert target.version is None


@pytest.mark.usefixtures("mxfp8_raw")
def test_a_trainer_that_sends_fp32_to_a_quantised_engine_is_refused():
    rank = Rank(torch.float32, 0, 1)
    with pytest.raises(SyncError, match="dtype is float32 on trainer rank 0 and bfloat16 on work"):
        driver(quantized("mxfp8_released"), [rank])


def test_a_flipped_bit_in_the_engine_is_mended_by_the_retry(monkeypatch):
    target, rank = engine(), Rank(torch.float32, 0, 1)
    sync = driver(target, [rank])
    bias = target._worker.weights.views[BIAS]
    assert isinstance(bias, Tensor)

    def damage() -> None:
        bias.view(torch.int32)[0] ^= 1

    damage_once(target, monkeypatch, BIAS, damage)
    rank.load(3)
    report = sync.sync(1)
    assert (report.checksum_ok, report.checksum_mismatches) == (True, 1)
    assert target.weights_hash() == fresh(3).weights_hash()
    assert greedy(target) == greedy(fresh(3))


def test_nan_poisons_the_engine_until_a_whole_sync(monkeypatch):
    target, rank = engine(), Rank(torch.float32, 0, 1)
    sync = driver(target, [rank], chunk_bytes=5_000)
    sync.sync(1)
    rank.weights["lm_head.weight"][3, 3] = torch.nan
    with pytest.raises(SyncError, match=r"NaN or infinity in lm_head\.weight"):
        sync.sync(2)
    assert target.version is None
    with pytest.raises(RuntimeError, match="POISONED"):
        target.resume()
    rank.load(4)
    sync.connect(0)
    sync.sync(2)
    assert greedy(target) == greedy(fresh(4))


# BR-006
def test_a_trainer_that_forgets_the_correction_bias_or_rounds_it_is_refused():
    target, rank = engine(), Rank(torch.float32, 0, 1)
    slots = rank.sender._layout
    rank.sender._layout = tuple(slot for slot in slots if slot.name != BIAS)
    with pytest.raises(SyncError, match=f"{BIAS} is held by worker 0 and by no trainer rank"):
        driver(target, [rank])
    rank.sender._layout = tuple(
        dataclasses.replace(slot, dtype="bfloat16") if slot.name == BIAS else slot for slot in slots
    )
    with pytest.raises(SyncError, match=f"{BIAS}: dtype is bfloat16 on trainer rank 0 and float32"):
        driver(target, [rank])
    assert target.version is None

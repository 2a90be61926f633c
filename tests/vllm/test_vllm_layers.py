"""Weight syncs into a vLLM engine that has room for a few layers of them at a time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm")

from inference.engine.coverage import WeightLoadError
from m3rl.model_layout import whole_layout
from m3rl.rollout.vllm_coverage import CoverageCheck
from m3rl.rollout.vllm_layers import LayeredWeights
from m3rl.rollout.vllm_replica import VllmReplica
from m3rl.types import GenerationRequest, SamplingSettings
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.errors import SyncError
from tests.m3rl.weight_sync.sync_fakes import store_without_sockets
from tests.vllm.conftest import settings
from tests.vllm.syncing import Rank, connected
from tests.vllm.tiny_hf import greedy, load_model

PROMPT = [5, 6, 7, 8]
LAYERS = ("model.layers.0.", "model.layers.1.")


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


@pytest.fixture(scope="session")  # the end of one engine ends the groups of all in the process
def replica(qwen3) -> Iterator[VllmReplica]:
    replica = VllmReplica(settings(qwen3 / "1", staging="layers"))
    yield replica
    replica.engine.close()


def worker_of(replica: VllmReplica):
    return replica.engine._core.model_executor.driver_worker.worker


def generated(replica: VllmReplica, name: str):
    sampling = SamplingSettings(0.0, 1.0, 0, 0.0, 12)
    asked = GenerationRequest(name, name, 0, 0, np.array(PROMPT, np.int32), 7, sampling)
    return replica.generate([asked])[0]


def expect_model(replica: VllmReplica, folder, version: int) -> None:
    tokens, logprobs = greedy(load_model(folder), PROMPT, 12)
    found = generated(replica, f"of {version}")
    assert found.token_ids.tolist() == tokens
    np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-5)
    assert found.version_spans.tolist() == [[0, version]]


def test_a_synced_engine_computes_with_the_trainers_weights(qwen3, replica):
    ranks = [Rank(qwen3 / "1", r, 2) for r in range(2)]
    sync = connected(replica, ranks)
    for version, folder in enumerate(["1", "2", "1"], start=10):
        for rank in ranks:
            rank.load(qwen3 / folder)
        assert sync.sync(version).checksum_ok is True
        expect_model(replica, qwen3 / folder, version)


def test_layers_share_memory_with_the_next_but_one(replica):
    staging = worker_of(replica)._m3rl_weights.staging
    memories = {tensor.untyped_storage().data_ptr() for tensor in staging.values()}
    assert len(memories) == 2
    one, other = (staging[f"{layer}self_attn.q_proj.weight"] for layer in LAYERS)
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in staging.values()}
    held = sum(storage.nbytes() for storage in storages.values())
    assert held < sum(tensor.nbytes for tensor in staging.values())


def test_a_request_that_comes_while_layers_do_is_served_by_the_new_version(qwen3, replica):
    ranks = [Rank(qwen3 / "1", 0, 1)]
    sync = connected(replica, ranks)
    sync.sync(20)
    ranks[0].load(qwen3 / "2")
    weights = worker_of(replica)._m3rl_weights
    written, asked = weights.written, []

    def asking(first: int, last: int) -> None:
        if not asked:
            asked.append(ThreadPoolExecutor(1).submit(generated, replica, "early"))
            while replica.engine._live == {}:
                time.sleep(0.01)
        written(first, last)

    weights.written = asking
    try:
        sync.sync(21)
    finally:
        del weights.written
    found = asked[0].result(30)
    assert found.version_spans.tolist() == [[0, 21]]
    assert found.token_ids.tolist() == greedy(load_model(qwen3 / "2"), PROMPT, 12)[0]


def test_a_trainer_that_is_gone_leaves_no_version_and_the_next_sync_mends_it(
    qwen3, replica, monkeypatch
):
    ranks = [Rank(qwen3 / "1", 0, 1)]
    sync = connected(replica, ranks)
    sync.sync(1)
    ranks[0].load(qwen3 / "2")
    weights = worker_of(replica)._m3rl_weights
    transport = ranks[0].sender._links[0].transport
    post = transport.post

    def gone(**transfers):
        if weights._load is not None and weights._load.num_left[1] == 0:
            raise RuntimeError("the trainer was killed")  # two layers are loaded
        return post(**transfers)

    monkeypatch.setattr(transport, "post", gone)
    with pytest.raises(SyncError, match="the trainer was killed"):
        sync.sync(2)
    assert sync.states() == {0: "POISONED"}
    assert replica.health()["version"] is None
    with pytest.raises(RuntimeError, match="committed"):
        generated(replica, "none")
    with pytest.raises(RuntimeError, match="without whole weights"):
        replica.resume()
    sync.connect(0)
    sync.sync(3)
    expect_model(replica, qwen3 / "2", 3)


def test_a_flipped_bit_is_streamed_again_into_a_new_reload(qwen3, replica):
    ranks = [Rank(qwen3 / "2", 0, 1)]
    sync = connected(replica, ranks)
    weights = worker_of(replica)._m3rl_weights
    written, is_damaged = weights.written, []

    def damaging(first: int, last: int) -> None:
        if not is_damaged:
            is_damaged.append(True)
            weights.staging["model.embed_tokens.weight"][0, 3] += 1.0  # of the first part
        written(first, last)

    weights.written = damaging
    try:
        report = sync.sync(4)
    finally:
        del weights.written
    assert report.checksum_mismatches == 1
    expect_model(replica, qwen3 / "2", 4)


def test_a_sync_that_is_damaged_twice_leaves_no_version(qwen3, replica):
    ranks = [Rank(qwen3 / "2", 0, 1)]
    sync = connected(replica, ranks)
    sync.sync(5)
    weights = worker_of(replica)._m3rl_weights
    written = weights.written

    def damaging(first: int, last: int) -> None:
        if first == 0:
            weights.staging["model.embed_tokens.weight"][0, 3] += 1.0
        written(first, last)

    weights.written = damaging
    try:
        with pytest.raises(SyncError, match="after two full attempts"):
            sync.sync(6)
    finally:
        del weights.written
    assert (sync.states(), replica.health()["version"]) == ({0: "POISONED"}, None)
    sync.connect(0)
    sync.sync(7)
    expect_model(replica, qwen3 / "2", 7)


def test_a_plan_that_would_overwrite_what_is_not_loaded_is_refused_before_a_byte_moves(
    qwen3, replica, monkeypatch
):
    ranks = [Rank(qwen3 / "1", 0, 1)]
    connected(replica, ranks).sync(30)
    ranks[0].load(qwen3 / "2")
    monkeypatch.setattr(worker_of(replica)._m3rl_weights, "_num_staged", 1)
    sync = connected(replica, ranks)
    with pytest.raises(
        SyncError, match=r"would be received over weights of round \d+ that are not"
    ):
        sync.sync(31)
    expect_model(replica, qwen3 / "1", 30)


def test_weights_come_from_the_trainer_alone(qwen3, replica):
    """Nothing is kept that a delta could change, or that another replica could take."""
    ranks = [Rank(qwen3 / "1", 0, 1)]
    sync = connected(replica, ranks, delta_full_every=4)
    sync.sync(1)
    ranks[0].weights = {name: tensor.clone() for name, tensor in ranks[0].weights.items()}
    ranks[0].weights["model.norm.weight"][:8] *= 1.5
    report = sync.sync(2)
    assert (report.num_deltas, report.checksum_ok) == (0, True)
    assert not sync._replicas[0].gives


class Target:
    """Loads of some tensors of a checkpoint, into the model of a replica's worker."""

    def __init__(self, replica, path) -> None:
        worker = worker_of(replica)
        self.slots = {slot.name: slot for slot in whole_layout(path, "float32")}
        self.tensors = load_file(path / "model.safetensors")
        self.module = worker.model_runner.get_model()

        def reload(tensors) -> None:
            worker.reload_weights(weights_iterator=iter(tensors), is_checkpoint_format=True)

        self._reload = reload

    def load(self, slots, version: int = 3) -> LayeredWeights:
        check = CoverageCheck(self.module)
        target = LayeredWeights(slots, torch.device("cpu"), self._reload, check, 2)
        self.again(target, version)
        return target

    def again(self, target: LayeredWeights, version: int) -> None:
        slots = target.weight_layout()
        plan = target.plan_load([(slot.name, slot.bounds) for slot in slots])
        target.begin_load(version, plan)
        for i, slot in enumerate(slots):
            plan.places[i].copy_(self.tensors.get(slot.name, torch.ones(slot.shape)))
            target.written(i, i + 1)
            assert target.version is None
        target.commit()

    def without(self, *names: str):
        return [slot for slot in self.slots.values() if slot.name not in names]


@pytest.fixture
def target(qwen3, replica):
    yield Target(replica, qwen3 / "1")
    replica.load(str(qwen3 / "1"), 99)  # what was left out is there again
    expect_model(replica, qwen3 / "1", 99)


Q = "model.layers.0.self_attn.q_proj.weight"


def test_a_whole_model_is_accepted_twice(target):
    weights = target.load(list(target.slots.values()))
    assert weights.version == 3
    target.again(weights, 4)
    assert weights.version == 4


def test_a_part_that_is_missing_in_a_fused_parameter_is_told_with_its_elements(target):
    with pytest.raises(WeightLoadError, match=r"qkv_proj\.weight \(8192 of 16384 elements\)"):
        target.load(target.without(Q))


def test_parameters_to_which_nothing_comes_are_told(target):
    with pytest.raises(WeightLoadError, match=r"1 received nothing: model\.norm\.weight"):
        target.load(target.without("model.norm.weight"))


def test_a_tensor_without_a_place_is_told_when_its_layer_is_loaded(target):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    extra = dataclasses.replace(target.slots["model.layers.0.input_layernorm.weight"], name=name)
    slots = list(target.slots.values())
    place = slots.index(target.slots[Q])
    with pytest.raises(WeightLoadError, match=rf"layer: 1 have no place, or are kept .*: {name}"):
        target.load([*slots[:place], extra, *slots[place:]])


@pytest.mark.parametrize("is_first", [True, False])
def test_a_model_that_reads_tensors_later_is_refused(target, is_first):
    """It takes all before it loads one, when memory of the first layers holds the last ones."""
    slots = list(target.slots.values())
    weights = None if is_first else target.load(slots)
    load = (lambda: target.load(slots)) if is_first else (lambda: target.again(weights, 4))
    with pytest.MonkeyPatch.context() as patch:
        load_weights = target.module.load_weights
        patch.setattr(target.module, "load_weights", lambda each: load_weights(list(each)))
        with pytest.raises(WeightLoadError, match=r"set rollout\.backend\.engine\.staging: whole"):
            load()


def test_a_module_that_spans_layers_is_refused(target):
    """k and v would be read with q, where other weights lie then."""
    moved = [
        dataclasses.replace(slot, bucket="layer.1") if slot.name == Q else slot
        for slot in target.slots.values()
    ]
    moved.sort(key=lambda slot: ["pre", "layer.0", "layer.1", "post"].index(slot.bucket))
    with pytest.raises(WeightLoadError, match=r"qkv_proj\.weight \(8192 of 16384 elements\)"):
        target.load(moved)


def test_a_tied_head_that_comes_nevertheless_is_refused(target):
    embedding = target.slots["model.embed_tokens.weight"]
    head = dataclasses.replace(embedding, name="lm_head.weight", bucket="post")
    with pytest.raises(WeightLoadError, match="not known where a sync comes layer by layer"):
        target.load([*target.slots.values(), head])

"""Weight syncs into a vLLM engine, from real senders over gloo."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from m3rl.types import GenerationRequest, SamplingSettings
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.probe import Probe
from tests.m3rl.weight_sync.sync_fakes import store_without_sockets
from tests.vllm.syncing import Rank, connected
from tests.vllm.tiny_hf import greedy, load_model, scores

PROMPT = [5, 6, 7, 8]


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


def request(name: str, max_tokens: int = 12, temperature: float = 0.0) -> GenerationRequest:
    sampling = SamplingSettings(temperature, 1.0, 0, 0.0, max_tokens)
    return GenerationRequest(name, name, 0, 0, np.array(PROMPT, np.int32), 7, sampling)


def staged(replica) -> dict[str, torch.Tensor]:
    return replica.engine._core.model_executor.driver_worker.worker._m3rl_weights.staging


def test_a_synced_engine_computes_with_the_trainers_weights(qwen3, qwen3_replica):
    ranks = [Rank(qwen3 / "1", r, 2) for r in range(2)]
    sync = connected(qwen3_replica, ranks)
    for version, folder in enumerate(["1", "2", "1"], start=10):
        for rank in ranks:
            rank.load(qwen3 / folder)
        report = sync.sync(version)
        assert report.checksum_ok is True
        tokens, logprobs = greedy(load_model(qwen3 / folder), PROMPT, 12)
        (found,) = qwen3_replica.generate([request("r")])
        assert found.token_ids.tolist() == tokens
        np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-5)
        assert found.version_spans.tolist() == [[0, version]]
        truth = ranks[0].weights
        assert all(torch.equal(tensor, truth[n]) for n, tensor in staged(qwen3_replica).items())


def test_a_delta_arrives_over_what_was_staged_before(qwen3, qwen3_replica):
    ranks = [Rank(qwen3 / "1", 0, 1)]
    sync = connected(qwen3_replica, ranks, delta_full_every=4)
    sync.sync(1)
    ranks[0].weights = {name: tensor.clone() for name, tensor in ranks[0].weights.items()}
    ranks[0].weights["model.norm.weight"][:8] *= 1.5
    report = sync.sync(2)
    assert report.num_deltas == 1
    assert report.checksum_ok is True
    assert torch.equal(
        staged(qwen3_replica)["model.norm.weight"], ranks[0].weights["model.norm.weight"]
    )
    assert qwen3_replica.health()["version"] == 2


def test_a_replica_hands_over_what_it_serves(qwen3, qwen3_replica):
    qwen3_replica.load(str(qwen3 / "1"), 6)
    weights = qwen3_replica.engine._core.model_executor.driver_worker.worker._m3rl_weights
    truth = Rank(qwen3 / "1", 0, 1).weights
    names = [slot.name for slot in weights.weight_layout()]
    held = dict(zip(names, weights.serving_places(), strict=True))
    assert all(torch.equal(held[name], truth[name]) for name in truth)
    weights.begin_load(7)
    with pytest.raises(RuntimeError, match="sync from the trainer"):
        weights.serving_places()
    weights.abort_load()


def test_a_flipped_bit_keeps_the_old_version_serving(qwen3, qwen3_replica):
    ranks = [Rank(qwen3 / "1", 0, 1)]
    sync = connected(qwen3_replica, ranks)
    sync.sync(1)
    before = qwen3_replica.generate([request("a")])[0].token_ids.tolist()
    ranks[0].load(qwen3 / "2")
    weights = qwen3_replica.engine._core.model_executor.driver_worker.worker._m3rl_weights
    written = weights.written

    def damaging(first: int, last: int) -> None:
        written(first, last)
        if first == 0:
            weights.staging["model.embed_tokens.weight"][0, 3] += 1.0  # of the first part

    weights.written = damaging
    try:
        with pytest.raises(SyncError):
            sync.sync(2)
    finally:
        del weights.written
    assert qwen3_replica.health()["version"] == 1
    with pytest.raises(RuntimeError, match="version 1 serves, and is not whole in the staging"):
        weights.serving_places()
    qwen3_replica.resume()
    assert qwen3_replica.generate([request("b")])[0].token_ids.tolist() == before


def test_a_commit_that_fails_leaves_no_version_and_the_next_sync_mends_it(
    qwen3, qwen3_replica, monkeypatch
):
    ranks = [Rank(qwen3 / "1", 0, 1)]
    sync = connected(qwen3_replica, ranks)
    sync.sync(1)
    weights = qwen3_replica.engine._core.model_executor.driver_worker.worker._m3rl_weights
    reload = weights._reload

    def some_of(tensors):
        yield from list(tensors)[:5]  # q of the first layer's fused qkv among them, not k and v
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(weights, "_reload", lambda tensors: reload(some_of(tensors)))
    with pytest.raises(SyncError, match="the device is gone"):
        sync.sync(2)
    assert qwen3_replica.health()["version"] is None
    with pytest.raises(RuntimeError, match="committed"):
        qwen3_replica.generate([request("r")])
    monkeypatch.undo()
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    sync.connect(0)
    sync.sync(3)
    tokens, _ = greedy(load_model(qwen3 / "1"), PROMPT, 12)
    assert qwen3_replica.generate([request("r")])[0].token_ids.tolist() == tokens


def test_a_replica_is_probed_between_its_commit_and_its_first_request(qwen3, qwen3_replica):
    """The trainer's side is transformers: 1e-4 is FP32, summed in another order."""
    ranks = [Rank(qwen3 / "2", 0, 1)]
    models = {name: load_model(qwen3 / name) for name in ("1", "2")}

    def probe(model: str) -> Probe:
        return Probe(
            [np.arange(3, 40), np.arange(50, 90)],
            trainer=lambda prompts: [scores(models[model], ids) for ids in prompts],
            replica=lambda _, prompts: qwen3_replica.prompt_logprobs(prompts),
            every=1,
            max_error=1e-4,
        )

    report = connected(qwen3_replica, ranks, probe=probe("2")).sync(3)
    assert report.probe_error < 1e-5
    with pytest.raises(SyncError, match="computes something else"):
        connected(qwen3_replica, ranks, probe=probe("1")).sync(4)


@pytest.mark.parametrize("pause", ["recompute", "drain", "keep"])
def test_requests_go_on_through_a_sync_and_tell_the_versions_apart(
    qwen3, qwen3_replica, pause, monkeypatch
):
    if pause == "keep":  # else refused: its pages would be found by later requests
        cache = qwen3_replica.engine._engine.vllm_config.cache_config
        monkeypatch.setattr(cache, "enable_prefix_caching", False)
    ranks = [Rank(qwen3 / "1", 0, 1)]
    sync = connected(qwen3_replica, ranks, pause=pause)
    sync.sync(1)
    ranks[0].load(qwen3 / "2")
    found = []
    count = 100
    step = qwen3_replica.engine.step

    def slow_step():
        time.sleep(0.02)  # else a busy machine is through before the sync begins
        return step()

    monkeypatch.setattr(qwen3_replica.engine, "step", slow_step)

    def generate() -> None:
        found.extend(qwen3_replica.generate([request("long", count, temperature=1.0)]))

    thread = threading.Thread(target=generate)
    steps = qwen3_replica.health()["progress"]
    thread.start()
    while qwen3_replica.health()["progress"] < steps + 3:
        pass
    sync.sync(2)
    thread.join(60)
    spans = found[0].version_spans.tolist()
    versions = [version for _, version in spans]
    assert versions == ([1] if pause == "drain" else [1, 2]), spans
    assert len(found[0].token_ids) == len(found[0].logprobs)

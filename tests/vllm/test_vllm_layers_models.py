"""Layer by layer into replicas of several ranks, of experts and of M3."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm")

from m3rl.rollout.vllm_replica import VllmReplica
from m3rl.types import GenerationRequest, SamplingSettings
from m3rl.weight_sync import transport as transport_module
from tests.m3rl.weight_sync.sync_fakes import store_without_sockets
from tests.vllm.conftest import M3_LEN, settings
from tests.vllm.syncing import Rank, connected
from tests.vllm.tiny_hf import greedy, load_model, write_qwen3_moe

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


def generated(replica: VllmReplica):
    sampling = SamplingSettings(0.0, 1.0, 0, 0.0, 12)
    return replica.generate(
        [GenerationRequest("r", "r", 0, 0, np.array(PROMPT, np.int32), 7, sampling)]
    )[0]


def sync_and_compare(replica: VllmReplica, folder) -> None:
    """Both checkpoints, one after the other; transformers is the oracle."""
    ranks = [Rank(folder / "1", r, 2) for r in range(2)]
    sync = connected(replica, ranks)
    for version, name in enumerate(["1", "2", "1"], start=1):
        for rank in ranks:
            rank.load(folder / name)
        assert sync.sync(version).checksum_ok is True
        tokens, logprobs = greedy(load_model(folder / name), PROMPT, 12)
        found = generated(replica)
        assert found.token_ids.tolist() == tokens
        np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-5)


def test_ranks_that_pass_on_to_one_another_are_in_time(qwen3):
    """What is passed on comes a round later, beside the next layer's."""
    replica = VllmReplica(
        settings(qwen3 / "1", staging="layers", tensor_parallel_size=2, kv_cache_gib=0.05)
    )
    try:
        sync_and_compare(replica, qwen3)
    finally:
        replica.engine.close()


@pytest.mark.usefixtures("_store_without_sockets")
def test_experts_are_loaded_with_their_layer(tmp_path):
    for seed in (1, 2):
        write_qwen3_moe(tmp_path / str(seed), seed)
    replica = VllmReplica(settings(tmp_path / "1", staging="layers"))
    try:
        sync_and_compare(replica, tmp_path)
    finally:
        replica.engine.close()


@pytest.mark.usefixtures("_store_without_sockets")
def test_m3_computes_the_same_as_with_weights_that_came_whole(m3, m3_replica):
    replica = VllmReplica(settings(m3 / "1", max_model_len=M3_LEN, staging="layers"))
    try:
        for version, name in enumerate(["1", "2"], start=1):
            sync = connected(replica, [Rank(m3 / name, 0, 1)])
            assert sync.sync(version).checksum_ok is True
            m3_replica.load(str(m3 / name), version)
            here, there = generated(replica), generated(m3_replica)
            assert here.token_ids.tolist() == there.token_ids.tolist()
            np.testing.assert_array_equal(here.logprobs, there.logprobs)
    finally:
        replica.engine.close()

"""Layer by layer into replicas of several ranks, of experts and of M3."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

from m3rl.rollout.backend import BackendError
from m3rl.rollout.vllm_replica import VllmReplica
from m3rl.rollout.vllm_staging import run_of_experts
from m3rl.rollout.vllm_worker import experts_of
from m3rl.types import GenerationRequest, SamplingSettings
from m3rl.weight_sync import transport as transport_module
from tests.m3rl.weight_sync.sync_fakes import store_without_sockets
from tests.vllm.bundled_m3 import in_its_own_process
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


def synced_to_two_ranks(folder: Path) -> None:
    replica = VllmReplica(
        settings(folder / "1", staging="layers", tensor_parallel_size=2, kv_cache_gib=0.05)
    )
    try:
        sync_and_compare(replica, folder)
    finally:
        replica.engine.close()


def test_ranks_that_pass_on_to_one_another_are_in_time(qwen3):
    """What is passed on comes a round later, beside the next layer's.

    In a process of its own: vLLM reads on which cores its workers run once.
    """
    in_its_own_process(synced_to_two_ranks, qwen3)


def synced_with_experts(folder: Path) -> dict[int, frozenset[int]]:
    """The experts of each layer, once the weights are compared."""
    replica = VllmReplica(settings(folder / "1", staging="layers"))
    try:
        sync_and_compare(replica, folder)
        worker = replica.engine._core.model_executor.driver_worker.worker
        return experts_of(worker.model_runner.get_model())
    finally:
        replica.engine.close()


def test_experts_are_loaded_with_their_layer(tmp_path):
    """In a process of its own: vLLM has groups for experts only where a first engine had some."""
    for seed in (1, 2):
        write_qwen3_moe(tmp_path / str(seed), seed)
    experts = in_its_own_process(synced_with_experts, tmp_path)
    assert experts == {0: frozenset(range(4)), 1: frozenset(range(4))}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_knows_its_experts_of_each_layer(rank):
    """As vLLM shares out 5 experts over 2 ranks, in runs; `run_of_experts` says so before."""
    alone = FusedMoEParallelConfig.make_no_parallel()
    manager = ExpertMapManager(
        max_num_batched_tokens=8,
        top_k=2,
        global_num_experts=5,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=dataclasses.replace(alone, ep_size=2, ep_rank=rank, use_ep=True),
        placement_strategy="linear",
        enable_eplb=False,
    )
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(3))
    model.layers[1].experts = torch.nn.Module()
    model.layers[1].experts.expert_map_manager = manager
    found = experts_of(torch.nn.ModuleDict({"model": model}))
    assert found == {1: run_of_experts(5, rank, 2)}


def test_a_tensor_that_no_worker_wants_keeps_an_engine_from_starting(qwen3_replica, monkeypatch):
    engine = qwen3_replica.engine
    (worker,) = engine.workers
    layout = worker.call("weight_layout")
    monkeypatch.setattr(worker, "call", lambda method: layout[:-1])
    with pytest.raises(BackendError, match=f"1 tensors of .* no worker of vLLM: {layout[-1].name}"):
        engine._require_whole()


@pytest.mark.usefixtures("_store_without_sockets")
def test_m3_computes_the_same_as_with_weights_that_came_whole(m3, m3_replica):
    # Not closed here: the end of one engine ends the groups of all in the process.
    replica = VllmReplica(settings(m3 / "1", max_model_len=M3_LEN, staging="layers"))
    for version, name in enumerate(["1", "2"], start=1):
        sync = connected(replica, [Rank(m3 / name, 0, 1)])
        assert sync.sync(version).checksum_ok is True
        m3_replica.load(str(m3 / name), version)
        here, there = generated(replica), generated(m3_replica)
        assert here.token_ids.tolist() == there.token_ids.tolist()
        np.testing.assert_array_equal(here.logprobs, there.logprobs)

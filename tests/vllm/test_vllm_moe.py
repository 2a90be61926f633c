"""Experts in vLLM's own layers, whose CPU build packs them when they are first loaded."""

from __future__ import annotations

import dataclasses

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
from tests.vllm.conftest import settings
from tests.vllm.tiny_hf import greedy, load_model, write_qwen3_moe

PROMPTS = [[5, 6, 7, 8], [9] * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    for seed in (1, 2):
        write_qwen3_moe(folder / str(seed), seed)
    return folder


@pytest.fixture(scope="module")
def qwen3_moe_replica(folder):
    replica = VllmReplica(settings(folder / "1"))
    yield replica
    replica.engine.close()


def test_a_worker_knows_its_experts_of_each_layer():
    """As vLLM shares out 5 experts over 2 ranks, in runs; `run_of_experts` says so before."""
    for rank in range(2):
        parallel = FusedMoEParallelConfig.make_no_parallel()
        parallel = dataclasses.replace(parallel, ep_size=2, ep_rank=rank, use_ep=True)
        manager = ExpertMapManager(
            max_num_batched_tokens=8,
            top_k=2,
            global_num_experts=5,
            num_redundant_experts=0,
            num_expert_group=None,
            moe_parallel_config=parallel,
            placement_strategy="linear",
            enable_eplb=False,
        )
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(3))
        model.layers[1].experts = torch.nn.Module()
        model.layers[1].experts.expert_map_manager = manager
        assert experts_of(torch.nn.ModuleDict({"model": model})) == {1: run_of_experts(5, rank, 2)}


def test_every_layer_of_experts_is_found(folder, qwen3_moe_replica):
    worker = qwen3_moe_replica.engine._core.model_executor.driver_worker.worker
    model = worker.model_runner.get_model()
    assert experts_of(model) == {0: frozenset(range(4)), 1: frozenset(range(4))}


def test_a_tensor_that_no_worker_wants_keeps_the_engine_from_starting(
    qwen3_moe_replica, monkeypatch
):
    engine = qwen3_moe_replica.engine
    (worker,) = engine.workers
    layout = worker.call("weight_layout")
    monkeypatch.setattr(worker, "call", lambda method: layout[:-1])
    with pytest.raises(BackendError, match=f"1 tensors of .* no worker of vLLM: {layout[-1].name}"):
        engine._require_whole()


def test_experts_are_those_of_the_newest_weights(folder, qwen3_moe_replica):
    """A kernel that takes plain weights for packed ones would compute something else."""
    sampling = SamplingSettings(0.0, 1.0, 0, 0.0, 12)
    requests = [
        GenerationRequest(f"r{i}", "g", i, 0, np.array(ids, np.int32), i, sampling)
        for i, ids in enumerate(PROMPTS)
    ]
    for version, name in enumerate(["1", "2", "1"], start=1):
        qwen3_moe_replica.load(str(folder / name), version)
        model = load_model(folder / name)
        for ids, found in zip(PROMPTS, qwen3_moe_replica.generate(requests), strict=True):
            tokens, logprobs = greedy(model, ids, 12)
            assert found.token_ids.tolist() == tokens
            np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-5)

"""Experts in vLLM's own layers, whose CPU build packs them when they are first loaded."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm")

from m3rl.rollout.vllm_replica import VllmReplica
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


def test_experts_are_those_of_the_newest_weights(folder):
    """A kernel that takes plain weights for packed ones would compute something else."""
    replica = VllmReplica(settings(folder / "1"))
    try:
        sampling = SamplingSettings(0.0, 1.0, 0, 0.0, 12)
        requests = [
            GenerationRequest(f"r{i}", "g", i, 0, np.array(ids, np.int32), i, sampling)
            for i, ids in enumerate(PROMPTS)
        ]
        for version, name in enumerate(["1", "2", "1"], start=1):
            replica.load(str(folder / name), version)
            model = load_model(folder / name)
            for ids, found in zip(PROMPTS, replica.generate(requests), strict=True):
                tokens, logprobs = greedy(model, ids, 12)
                assert found.token_ids.tolist() == tokens
                np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-5)
    finally:
        replica.engine.close()

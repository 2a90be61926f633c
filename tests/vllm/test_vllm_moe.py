"""Experts in vLLM's own layers, whose CPU build packs them when they are first loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from m3rl.rollout.vllm_replica import VllmReplica
from m3rl.types import GenerationRequest, SamplingSettings
from tests.vllm.bundled_m3 import in_its_own_process
from tests.vllm.conftest import settings
from tests.vllm.tiny_hf import greedy, load_model, write_qwen3_moe

PROMPTS = [[5, 6, 7, 8], [9] * 20]
LOADS = ("1", "2", "1")


def generate(folder: Path) -> list[list[tuple[list[int], np.ndarray]]]:
    """Greedy tokens and their log-probabilities of each prompt, after each of LOADS."""
    replica = VllmReplica(settings(folder / "1"))
    sampling = SamplingSettings(0.0, 1.0, 0, 0.0, 12)
    requests = [
        GenerationRequest(f"r{i}", "g", i, 0, np.array(ids, np.int32), i, sampling)
        for i, ids in enumerate(PROMPTS)
    ]
    found = []
    for version, name in enumerate(LOADS, start=1):
        replica.load(str(folder / name), version)
        found.append([(r.token_ids.tolist(), r.logprobs) for r in replica.generate(requests)])
    replica.engine.close()
    return found


def test_experts_are_those_of_the_newest_weights(tmp_path):
    """A kernel that takes plain weights for packed ones would compute something else.

    In a process of its own: vLLM has groups for experts only where a first engine had some.
    """
    for name in set(LOADS):
        write_qwen3_moe(tmp_path / name, int(name))
    for name, found in zip(LOADS, in_its_own_process(generate, tmp_path), strict=True):
        model = load_model(tmp_path / name)
        for ids, (tokens, logprobs) in zip(PROMPTS, found, strict=True):
            expected, expected_logprobs = greedy(model, ids, 12)
            assert tokens == expected
            np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)

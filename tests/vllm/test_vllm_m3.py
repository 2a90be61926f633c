"""M3 in vLLM's CPU build and in the bundled runtime compute the same function."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm")

from m3rl.rollout.backend import BackendError
from m3rl.rollout.vllm_settings import make_config
from m3rl.types import GenerationRequest, SamplingSettings
from tests.vllm.bundled_m3 import answer, in_its_own_process
from tests.vllm.conftest import M3_LEN, settings

PROMPTS = [np.array(ids, np.int32) for ids in ([5, 6, 7, 8], [9] * 17, list(range(3, 43)))]
MAX_TOKENS = 12


def vllm_greedy(replica):
    sampling = SamplingSettings(0.0, 1.0, 0, 0.0, MAX_TOKENS)
    return replica.generate(
        [GenerationRequest(f"r{i}", "g", i, 0, ids, i, sampling) for i, ids in enumerate(PROMPTS)]
    )


def test_both_runtimes_agree_before_and_after_weights_change(m3, m3_replica):
    """1e-4: FP32 on both sides, summed in other orders."""
    expected = {f: in_its_own_process(answer, m3 / f, PROMPTS, MAX_TOKENS) for f in ("1", "2")}
    for version, folder in enumerate(["1", "2", "1"], start=1):
        m3_replica.load(str(m3 / folder), version)
        found, there = vllm_greedy(m3_replica), expected[folder]
        assert [each.token_ids.tolist() for each in found] == there.token_ids
        assert [each.finish_reason for each in found] == there.finish_reasons
        assert [each.version_spans.tolist() for each in found] == [[[0, version]]] * len(PROMPTS)
        scores = m3_replica.prompt_logprobs(PROMPTS)
        for here, logprobs in zip([*found, *scores], [*there.logprobs, *there.scores], strict=True):
            here = getattr(here, "logprobs", here)
            np.testing.assert_allclose(here, logprobs, atol=1e-4)


def test_a_prompt_is_scored_up_to_what_sparse_attention_keeps(m3_replica):
    assert m3_replica.prompt_lengths() == (M3_LEN, M3_LEN - 1)


def test_more_than_sparse_attention_keeps_is_refused(m3):
    with pytest.raises(BackendError, match=r"exact up to 64 tokens .*index_topk_blocks=4"):
        make_config(settings(m3 / "1", max_model_len=M3_LEN + 1))


def test_the_index_branch_alone_is_exempt(m3, m3_replica):
    check = m3_replica.engine._core.model_executor.driver_worker.worker._m3rl_weights.check
    kinds = {name.split(".")[-2] for name in check.exempt}
    assert kinds == {"index_q_proj", "index_k_proj", "index_q_norm", "index_k_norm"}
    assert len(check.exempt) == 4 * 2  # of two sparse layers

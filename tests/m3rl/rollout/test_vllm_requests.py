"""What is made of vLLM's outputs; needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from m3rl.rollout.vllm_requests import generated, prompt_scores
from m3rl.types import GenerationRequest, SamplingSettings


def request(**sampling) -> GenerationRequest:
    settings = SamplingSettings(1.0, 1.0, 0, 0.0, 8, **sampling)
    return GenerationRequest("r", "g", 0, 0, np.array([5, 6, 7], np.int32), 1, settings)


def flat(logprobs, num_each: int = 2) -> SimpleNamespace:
    """As vLLM's FlatLogprobs: of each token the sampled one's first, and others."""
    values = [value for each in logprobs for value in [each, *[-9.0] * (num_each - 1)]]
    return SimpleNamespace(logprobs=values, start_indices=[*range(0, len(values), num_each)])


def completion(tokens, logprobs, spans, reason: str = "length", routed=None) -> SimpleNamespace:
    versions = [SimpleNamespace(version=str(v), start=a, end=b) for v, a, b in spans]
    return SimpleNamespace(
        token_ids=tokens,
        logprobs=flat(logprobs),
        finish_reason=reason,
        weight_versions=versions,
        routed_experts=routed,
    )


def test_tokens_carry_the_sampled_logprobs_and_the_versions_that_sampled_them():
    made = completion([8, 9, 10], [-0.1, -0.2, -0.3], [(4, 0, 2), (5, 2, 3)])
    result = generated(request(), made, num_cached_tokens=2, version=5)
    assert result.token_ids.tolist() == [8, 9, 10]
    assert result.logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert result.version_spans.tolist() == [[0, 4], [2, 5]]
    assert (result.finish_reason, result.num_cached_tokens, result.seed) == ("length", 2, 1)


def test_a_request_that_was_aborted_before_its_first_token_has_none():
    made = completion([], [], [], reason="abort")
    result = generated(request(capture_routing=True), made, num_cached_tokens=0, version=5)
    assert (len(result.token_ids), len(result.logprobs)) == (0, 0)
    assert result.version_spans.shape == (0, 2)
    assert (result.finish_reason, result.routing) == ("abort", None)


def test_a_token_that_is_not_finite_ends_the_completion_before_it():
    made = completion([8, 9, 10], [-0.1, float("nan"), -0.3], [(4, 0, 1), (5, 1, 3)], "stop")
    result = generated(request(), made, num_cached_tokens=0, version=5)
    assert result.token_ids.tolist() == [8]
    assert result.version_spans.tolist() == [[0, 4]]
    assert result.finish_reason == "error"
    assert "completion token 1 with policy version 5" in (result.error or "")


def test_routing_is_that_of_moe_layers_and_of_tokens_that_had_a_forward_pass():
    recorded = np.arange(6 * 4 * 2).reshape(6, 4, 2)
    made = completion([8, 9, 10], [-0.1] * 3, [(4, 0, 3)], routed=recorded)
    asked = request(capture_routing=True)
    result = generated(asked, made, num_cached_tokens=0, version=4, moe_layers=[1, 3])
    assert result.routing.dtype == np.uint8
    assert result.routing.tolist() == recorded[:5, [1, 3]].tolist()
    assert generated(request(), made, num_cached_tokens=0, version=4).routing is None


def test_routing_that_lacks_tokens_is_no_record():
    made = completion([8, 9, 10], [-0.1] * 3, [(4, 0, 3)], routed=np.zeros((4, 2, 2)))
    with pytest.raises(RuntimeError, match="experts of 4 tokens, and 5 had"):
        generated(request(capture_routing=True), made, num_cached_tokens=0, version=4)


def test_the_first_token_of_a_scored_prompt_has_no_score():
    """vLLM has an empty entry for it."""
    scores = SimpleNamespace(logprobs=[-1.0, -2.0, -3.0], start_indices=[0, 0, 1, 2])
    assert prompt_scores(scores, 4).tolist() == [-1.0, -2.0, -3.0]

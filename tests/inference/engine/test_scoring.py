"""Scoring given tokens: the oracle's log-probabilities, and nobody else is disturbed."""

import numpy as np
import pytest
import torch

from inference.engine import EngineStateError, Request
from inference.engine.scoring import prompt_logprobs
from tests.inference.engine.engines import (
    assert_same,
    empty_engine,
    greedy,
    make_engine,
    oracle_logits,
    prompt,
    run_alone,
    step_to_end,
)


def expected(ids: list[int], seed: int = 0) -> np.ndarray:
    logits = oracle_logits(ids, seed)[:-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("num_decodes", [0, 1, 5])
@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("length", [7, 8, 9, 40])
def test_every_token_has_the_logprob_of_transformers(length, chunk, num_decodes):
    """In one chunk or several, as prefills or as decodes, within the sums of FP32."""
    engine, ids = make_engine(max_tokens_per_step=chunk), prompt(length)
    found = prompt_logprobs(engine, ids, num_decodes=num_decodes)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(ids), rtol=0, atol=1e-5)
    engine._scheduler.check()


def test_what_the_prefix_cache_holds_of_older_weights_is_not_used():
    engine, ids = make_engine(), prompt(30)
    prompt_logprobs(engine, ids)
    engine.load_weights(make_engine(1)._worker.weights.views.items(), 1)
    np.testing.assert_allclose(prompt_logprobs(engine, ids), expected(ids, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_pages", [128, 14])
def test_running_requests_go_on_as_if_nothing_had_been_scored(num_pages):
    """14 pages of 4 tokens: two requests have 6 of them, 48 tokens take 12."""
    engine = make_engine(num_pages=num_pages)
    for name in "ab":
        engine.add(Request(name, prompt(9, seed=ord(name)), greedy(9)))
    for _ in range(3):
        engine.step()
    engine.pause("keep")
    prompt_logprobs(engine, prompt(48))
    assert engine.stats()["preemptions"] == (0 if num_pages == 128 else 2)
    engine._scheduler.check()
    engine.resume()
    for name, output in step_to_end(engine).items():
        assert_same(output, run_alone(prompt(9, seed=ord(name)), greedy(9)))


def test_what_cannot_be_scored_is_refused_with_the_reason():
    with pytest.raises(EngineStateError, match="whole weights"):
        prompt_logprobs(empty_engine(), prompt(5))
    engine = make_engine(async_scheduling=True)
    engine.add(Request("a", prompt(5), greedy(5)))
    engine.step()
    with pytest.raises(EngineStateError, match="between two steps"):
        prompt_logprobs(engine, prompt(5))
    engine.pause("keep")
    prompt_logprobs(engine, prompt(5))
    with pytest.raises(ValueError, match="num_decodes=4"):
        prompt_logprobs(engine, prompt(5), num_decodes=4)
    with pytest.raises(ValueError, match="above max_model_len"):
        prompt_logprobs(engine, prompt(512))
    engine._scheduler.check()

"""Adding, aborting, pausing, failing: what the engine says and what it keeps."""

import logging

import numpy as np
import pytest
import torch

from inference.engine import EngineStateError, Request, SamplingParams
from tests.inference.engine.engines import (
    assert_same,
    char_tokenizer,
    empty_engine,
    greedy,
    make_engine,
    prompt,
    run,
    run_alone,
    sampled,
    step_to_end,
    weights,
)


def add_all(engine, count, max_tokens=10, steps=0):
    for i in range(count):
        engine.add(Request(f"r{i}", prompt(6, seed=i), sampled(max_tokens, seed=i)))
    for _ in range(steps):
        assert engine.step() == []


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            Request("r", [5] * 20, SamplingParams(max_tokens=13)),
            r"'r': a prompt of 20 tokens and max_tokens=13 make 33, above max_model_len=32 "
            r"\(num_pages=8 of 4 tokens",
        ),
        (Request("r", [5, 97]), "'r': token id 97 is outside the vocabulary of 97"),
        (
            Request("r", [5], SamplingParams(stop_token_ids=(1000,))),
            "token id 1000 is outside the vocabulary",
        ),
        (
            Request("r", [5], SamplingParams(stop=("x",))),
            r"stop=\('x',\) needs a tokenizer; .* stop_token_ids",
        ),
        (Request("r", [5], SamplingParams(routing=True)), "capture_routing=True"),
        (Request("r", [5], SamplingParams(blocks=True)), "capture_blocks=True"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_with_the_reason(request_, message):
    engine = make_engine(num_pages=8)
    with pytest.raises(ValueError, match=message):
        engine.add(request_)
    assert not engine.has_work


def test_the_largest_request_that_fits_is_served():
    (output,) = run(make_engine(num_pages=8), [Request("r", [5] * 20, greedy(12))])
    assert len(output.token_ids) == 12


def test_an_id_is_in_the_engine_only_once_at_a_time():
    engine = make_engine()
    engine.add(Request("r", [5], greedy(1)))
    with pytest.raises(ValueError, match="'r' is in the engine already"):
        engine.add(Request("r", [5], greedy(1)))
    step_to_end(engine)
    engine.add(Request("r", [5], greedy(1)))


def test_nothing_is_taken_or_computed_before_the_first_weights():
    engine = empty_engine()
    assert engine.version is None
    with pytest.raises(EngineStateError, match="the engine is EMPTY; commit the weights"):
        engine.add(Request("r", [5]))
    with pytest.raises(EngineStateError, match="EMPTY"):
        engine.step()
    with pytest.raises(EngineStateError, match="EMPTY"):
        engine.resume()
    with pytest.raises(EngineStateError, match="EMPTY"):
        engine.weights_hash()


def test_arrays_come_out_and_only_what_was_asked_for():
    (output,) = run(make_engine(), [Request("r", prompt(5), greedy(3, logprobs=False))])
    assert output.prompt_ids.dtype == output.token_ids.dtype == np.int32
    assert output.version_spans.tolist() == [[0, 0]]
    assert (output.logprobs, output.raw_logprobs, output.text) == (None, None, None)
    assert (output.routing, output.blocks, output.error) == (None, None, None)
    (output,) = run(make_engine(), [Request("r", prompt(5), greedy(3, raw_logprobs=True))])
    assert output.logprobs.dtype == np.float32
    assert output.logprobs.tolist() == output.raw_logprobs.tolist()


def test_text_is_decoded_without_special_tokens():
    engine = make_engine(tokenizer=char_tokenizer())
    (output,) = run(engine, [Request("r", prompt(9), greedy(8))])
    assert output.text == engine.tokenizer.decode(output.token_ids.tolist())
    assert len(output.text) == 8


def test_stats_count_what_was_computed():
    engine = make_engine(max_tokens_per_step=8)
    add_all(engine, 2, max_tokens=3)
    assert engine.stats() | {"waiting": 2, "running": 0, "steps": 0} == engine.stats()
    outputs = [engine.step()]
    # The second prompt of 6 tokens begins with the 2 tokens left of the budget of 8.
    stats = engine.stats()
    assert (stats["running"], stats["prefill_tokens"], stats["generated_tokens"]) == (2, 8, 1)
    assert stats["kv_usage"] == pytest.approx((2 + 2) / 128)
    while engine.has_work:
        outputs.append(engine.step())
    stats = engine.stats()
    assert stats["steps"] == len(outputs) == 4
    assert (stats["prefill_tokens"], stats["generated_tokens"]) == (12, 6)
    # Decodes of the four steps: 0, 1, 2, 1.
    assert stats["decode_batch_mean"] == pytest.approx(4 / 3)


def test_the_prefix_hit_rate_is_a_share_of_prompt_tokens():
    engine = make_engine()
    for i in range(2):
        run(engine, [Request(f"r{i}", prompt(10), greedy(1))])
    assert engine.stats()["prefix_hit_rate"] == pytest.approx(8 / 20)


# BR-017
def test_aborting_everything_returns_every_request_with_the_tokens_it_has():
    engine = make_engine(max_running_requests=8)
    add_all(engine, 10, steps=3)
    assert engine.abort() == 10
    outputs = engine.step()
    assert [output.finish_reason for output in outputs] == ["abort"] * 10
    assert [len(output.token_ids) for output in outputs] == [3] * 8 + [0] * 2
    expected = run_alone(prompt(6), sampled(10, seed=0))
    assert outputs[0].token_ids.tolist() == expected.token_ids.tolist()[:3]
    assert len(outputs[0].logprobs) == 3
    assert not engine.has_work
    assert engine.stats()["kv_usage"] == 0


# BR-017
def test_an_unknown_id_aborts_nothing_and_is_logged(caplog):
    engine = make_engine()
    add_all(engine, 2)
    with caplog.at_level(logging.WARNING):
        assert engine.abort(["r1", "elsewhere", "r1"]) == 1
    assert "no such request: 'elsewhere'" in caplog.text
    assert {output.request_id for output in engine.step()} == {"r1"}
    assert set(step_to_end(engine)) == {"r0"}


def broken_engine(token):
    """Its embedding of `token` is NaN: any request with it in the prompt has NaN logits."""
    engine = empty_engine()
    tensors = dict(weights(0))
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][token] = torch.nan
    engine.load_weights(tensors.items(), 4)
    return engine


# BR-070
def test_nan_logits_are_an_error_of_their_request_alone():
    healthy = Request("healthy", prompt(9), greedy(12))
    expected = run_alone(prompt(9), greedy(12))
    token = next(t for t in range(3, 97) if t not in {*prompt(9), *expected.token_ids.tolist()})
    engine = broken_engine(token)
    broken = Request("broken", [*prompt(6, seed=1), token, 5], greedy(12))
    outputs = run(engine, [broken, healthy])
    assert outputs[0].finish_reason == "error"
    assert "completion token 0 with policy version 4" in outputs[0].error
    assert len(outputs[0].token_ids) == len(outputs[0].logprobs) == 0
    assert engine.stats()["nonfinite_logits"] == 1
    assert_same(outputs[1], expected)
    (again,) = run(engine, [broken])
    assert (again.finish_reason, again.num_cached_tokens) == ("error", 0)


def test_pages_with_nan_are_reused_without_leaking():
    engine = broken_engine(50)
    run(engine, [Request(f"broken{i}", [50] * 60, greedy(4)) for i in range(8)])
    clean = [t for t in prompt(40) if t != 50]
    expected = run_alone(clean, greedy(1))
    (output,) = run(engine, [Request("r", clean, greedy(1))])
    assert_same(output, expected)


def test_a_failed_forward_pass_loses_no_request():
    engine = make_engine()
    add_all(engine, 3, steps=2)
    forward = engine._worker.forward

    def fail(batch):
        for layer in engine._worker.pages:
            layer.k_pages.fill_(torch.nan)
        raise RuntimeError("device lost")

    engine._worker.forward = fail
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    engine._scheduler.check()
    engine._worker.forward = forward
    outputs = step_to_end(engine)
    for i in range(3):
        assert_same(outputs[f"r{i}"], run_alone(prompt(6, seed=i), sampled(10, seed=i)))


def test_a_failed_launch_loses_no_request_that_ended_before_it():
    engine = make_engine(num_pages=4, async_scheduling=True)
    engine.add(Request("ends", prompt(8, seed=0), sampled(2, seed=0)))
    engine.add(Request("goes on", prompt(3, seed=1), sampled(6, seed=1)))
    assert engine.step() == engine.step() == []
    launch = engine._worker.launch

    def fail(rows, schedule):
        raise RuntimeError("device lost")

    # No page is left, so the step under way is settled first: one request ends.
    engine._worker.launch = fail
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    engine._worker.launch = launch
    outputs = step_to_end(engine)
    assert_same(outputs["ends"], run_alone(prompt(8, seed=0), sampled(2, seed=0)))
    assert_same(outputs["goes on"], run_alone(prompt(3, seed=1), sampled(6, seed=1)))


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_pause_without_new_weights_changes_nothing(mode):
    engine = make_engine()
    add_all(engine, 3, steps=4)
    engine.pause(mode)
    engine.pause(mode)
    assert not engine.has_work
    assert engine.step() == []
    engine.add(Request("late", prompt(6, seed=9), sampled(10, seed=9)))
    engine.resume()
    outputs = step_to_end(engine)
    for name, i in (("r0", 0), ("r1", 1), ("r2", 2), ("late", 9)):
        assert_same(outputs[name], run_alone(prompt(6, seed=i), sampled(10, seed=i)))
        assert outputs[name].version_spans.tolist() == [[0, 0]]


def test_a_drain_finishes_what_has_begun_and_takes_no_more():
    engine = make_engine(max_running_requests=2, num_pages=9)
    add_all(engine, 4, max_tokens=12, steps=3)
    engine.pause("drain")
    with pytest.raises(EngineStateError, match="drained"):
        engine.add(Request("late", [5]))
    drained = engine.step()
    assert {output.request_id for output in drained} == {"r0", "r1"}
    assert not engine.has_work
    assert engine.stats()["waiting"] == 2
    engine.load_weights(weights(1).items(), 7)
    engine.resume()
    outputs = step_to_end(engine)
    assert {name: output.version_spans.tolist() for name, output in outputs.items()} == {
        "r2": [[0, 7]],
        "r3": [[0, 7]],
    }
    assert_same(outputs["r2"], run_alone(prompt(6, seed=2), sampled(12, seed=2), seed=1))


def test_a_pause_has_one_of_three_modes_at_a_time():
    engine = make_engine()
    with pytest.raises(ValueError, match=r"'stop'; use one of \['drain', 'keep', 'recompute'\]"):
        engine.pause("stop")
    engine.pause("keep")
    with pytest.raises(EngineStateError, match="paused already, to 'keep'"):
        engine.pause("recompute")

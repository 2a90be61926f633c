"""Tokens and logprobs are those of transformers, whichever way the engine got to them."""

import dataclasses

import numpy as np
import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine, Request, SamplingParams
from tests.inference.engine.engines import (
    EOS,
    RAW,
    assert_same,
    greedy,
    make_engine,
    oracle,
    oracle_logits,
    prompt,
    run,
    run_alone,
    sampled,
    step_to_end,
    weights,
)
from tests.tiny_models import model_config

LENGTHS = [1, 3, 4, 5, 7, 8, 9, 25]
"""Around a block of 4 and around top-k x block = 8, and far beyond."""


def test_greedy_decoding_is_that_of_transformers_token_for_token():
    requests = [Request(f"r{n}", prompt(n, seed=n), greedy(20)) for n in LENGTHS]
    for request, output in zip(requests, run(make_engine(), requests), strict=True):
        expected = oracle().generate(
            torch.tensor(request.prompt_ids[None].astype(np.int64)),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output.token_ids.tolist() == expected[0, len(request.prompt_ids) :].tolist()
        assert output.finish_reason == "length"


# BR-020
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_logprobs_are_those_of_the_logits_divided_by_the_temperature(temperature):
    params = SamplingParams(
        temperature=temperature, max_tokens=12, seed=3, raw_logprobs=True, ignore_eos=True
    )
    (output,) = run(make_engine(), [Request("r", prompt(9), params)])
    ids = torch.tensor(output.token_ids, dtype=torch.int64)
    logits = oracle_logits(np.concatenate([output.prompt_ids, output.token_ids]))[8:-1]
    chosen = ids[:, None]
    expected = (logits / temperature).log_softmax(-1).gather(1, chosen)[:, 0]
    raw = logits.log_softmax(-1).gather(1, chosen)[:, 0]
    np.testing.assert_allclose(output.logprobs, expected, rtol=0, atol=1e-5 / temperature)
    np.testing.assert_allclose(output.raw_logprobs, raw, rtol=0, atol=1e-5)


# BR-020
def test_logits_2_1_0_at_temperature_one_half_report_the_sampling_distribution():
    engine = make_engine()
    logits = torch.full((97,), -1e9)
    logits[:3] = torch.tensor([2.0, 1.0, 0.0])
    engine._worker.forward = lambda batch: logits.repeat(len(batch.last_token_S), 1)
    params = SamplingParams(
        temperature=0.5, max_tokens=60, seed=0, raw_logprobs=True, ignore_eos=True
    )
    (output,) = run(engine, [Request("r", [5], params)])
    is_zero = output.token_ids == 0
    assert 40 <= is_zero.sum() < 60  # of 60 at probability 0.867: mean 52, deviation 2.6
    np.testing.assert_allclose(output.logprobs[is_zero], -0.1429, atol=5e-5)
    np.testing.assert_allclose(output.raw_logprobs[is_zero], -0.4076, atol=5e-5)


def test_truncated_sampling_reports_the_renormalised_distribution():
    params = SamplingParams(top_k=1, max_tokens=8, seed=1, raw_logprobs=True, ignore_eos=True)
    (output,) = run(make_engine(), [Request("r", prompt(9), params)])
    likeliest = run_alone(prompt(9), greedy(8))
    assert output.token_ids.tolist() == likeliest.token_ids.tolist()
    assert output.logprobs.tolist() == [0.0] * 8
    np.testing.assert_allclose(output.raw_logprobs, likeliest.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 3, 5, 8])
def test_a_prefill_in_chunks_is_a_whole_prefill(budget):
    (output,) = run(
        make_engine(max_tokens_per_step=budget), [Request("r", prompt(23), sampled(8, seed=5))]
    )
    assert_same(output, run_alone(prompt(23), sampled(8, seed=5)))


# BR-063
@pytest.mark.parametrize("cached", range(1, 14))
def test_a_request_on_a_cached_prefix_is_a_cold_one(cached):
    """The first request leaves `cached` of the 16 tokens behind; full pages of them are reused."""
    engine = make_engine()
    shared = prompt(16)
    run(engine, [Request("warm", shared[:cached], greedy(1))])
    (output,) = run(engine, [Request("r", shared, sampled(6, seed=5))])
    assert output.num_cached_tokens == cached // 4 * 4
    assert_same(output, run_alone(shared, sampled(6, seed=5)))


# BR-061
@pytest.mark.parametrize("new", [1, 4, 5])
def test_new_tokens_after_cached_pages_see_them_in_dense_layers_too(new):
    engine = make_engine()
    shared = prompt(8)
    run(engine, [Request("warm", [*shared, 3], greedy(1))])
    ids = shared + prompt(new, seed=9)
    (output,) = run(engine, [Request("r", ids, greedy(6))])
    assert output.num_cached_tokens == 8
    assert_same(output, run_alone(ids, greedy(6)))


def test_the_next_turn_reuses_prompt_and_completion_and_keeps_the_sampled_ids():
    engine = make_engine()
    (first,) = run(engine, [Request("turn-1", prompt(7), sampled(9, seed=2))])
    ids = [*first.prompt_ids.tolist(), *first.token_ids.tolist(), 40, 41]
    (second,) = run(engine, [Request("turn-2", ids, sampled(5, seed=3))])
    assert second.num_cached_tokens == 12  # 7 + 8 computed tokens: the 9th had no forward pass
    assert second.prompt_ids.tolist() == ids
    assert_same(second, run_alone(ids, sampled(5, seed=3)))


def test_preempted_requests_are_undisturbed_ones():
    engine = make_engine(num_pages=14, enable_prefix_cache=False)
    requests = [Request(f"r{i}", prompt(5, seed=i), sampled(25, seed=i)) for i in range(4)]
    outputs = run(engine, requests)
    assert engine.stats()["preemptions"] >= 2
    for request, output in zip(requests, outputs, strict=True):
        assert_same(output, run_alone(request.prompt_ids.tolist(), request.params))


@pytest.mark.parametrize("budget", [7, 1000])
def test_members_of_a_group_are_requests_of_their_own(budget):
    engine = make_engine(max_tokens_per_step=budget, enable_prefix_cache=False)
    requests = [Request(f"r{i}", prompt(14), sampled(7, seed=i), "group") for i in range(4)]
    outputs = run(engine, requests)
    assert [output.num_cached_tokens for output in outputs] == [0, 12, 12, 12]
    for request, output in zip(requests, outputs, strict=True):
        assert output.group_id == "group"
        assert_same(output, run_alone(prompt(14), request.params))


def test_the_same_requests_give_the_same_bits():
    def once():
        engine = make_engine(num_pages=24, max_tokens_per_step=20)
        requests = [Request(f"r{i}", prompt(6, seed=i // 3), sampled(12, seed=i)) for i in range(9)]
        return run(engine, requests)

    for one, other in zip(once(), once(), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_a_new_version_of_the_same_weights_gives_the_same_bits():
    engine = make_engine()
    requests = [Request(f"r{i}", prompt(9, seed=i), sampled(12, seed=i)) for i in range(5)]
    before = run(engine, requests)
    engine.load_weights(weights(0).items(), 1)
    for one, other in zip(before, run(engine, requests), strict=True):
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


# BR-025
def test_samples_of_one_prompt_differ_and_repeat_with_their_seeds():
    def samples(seeds):
        requests = [
            Request(f"r{i}", prompt(5), SamplingParams(max_tokens=12, seed=seed, ignore_eos=True))
            for i, seed in enumerate(seeds)
        ]
        return [tuple(output.token_ids.tolist()) for output in run(make_engine(), requests)]

    seeded = samples(range(7, 15))
    assert len(set(seeded)) >= 7
    assert samples(range(7, 15)) == seeded
    assert samples([None] * 8) != samples([None] * 8)


def test_a_drawn_seed_is_reported_and_repeats_the_completion():
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (output,) = run(make_engine(), [Request("r", prompt(5), params)])
    again = run_alone(prompt(5), dataclasses.replace(params, seed=output.seed))
    assert_same(again, output)


# BR-064
def test_the_engine_computes_sparse_attention_and_not_dense():
    ids = prompt(21)
    dense_config = dataclasses.replace(model_config(RAW), index_topk_blocks=128)
    dense = Engine(dense_config, EngineConfig(num_pages=32))
    dense.load_weights(weights(0).items(), 0)
    for length, is_equal in ((8, True), (21, False)):
        request = Request("r", ids[:length], greedy(1))
        gap = run(dense, [request])[0].logprobs - run_alone(ids[:length], greedy(1)).logprobs
        assert bool(abs(gap[0]) < 1e-5) is is_equal
    expected = oracle_logits(ids)[-1].log_softmax(-1).max()
    assert run_alone(ids, greedy(1)).logprobs[0] == pytest.approx(float(expected), abs=1e-5)


# BR-039
def test_eos_ends_the_completion_and_stays_in_its_ids():
    base = run_alone(prompt(9), greedy(20)).token_ids.tolist()
    stop_at = base.index(base[5])
    engine = make_engine()
    engine.config = dataclasses.replace(engine.config, eos_token_ids=(EOS, base[5]))
    ignoring = greedy(20)
    stopping = dataclasses.replace(ignoring, ignore_eos=False)
    by_id = dataclasses.replace(ignoring, stop_token_ids=(base[5],))
    exact = dataclasses.replace(stopping, max_tokens=stop_at + 1)
    outputs = run(
        engine,
        [
            Request(name, prompt(9), params)
            for name, params in zip("abcd", (ignoring, stopping, by_id, exact), strict=True)
        ],
    )
    assert [output.finish_reason for output in outputs] == ["length", "stop", "stop", "stop"]
    assert outputs[0].token_ids.tolist() == base
    for output in outputs[1:]:
        assert output.token_ids.tolist() == base[: stop_at + 1]


def test_any_history_gives_each_request_what_it_gets_alone():
    """Random prompts with shared heads, groups, budgets, pools; aborts in between."""
    rng = np.random.default_rng(0)
    for trial in range(6):
        engine = make_engine(
            num_pages=int(rng.integers(16, 40)),
            max_tokens_per_step=int(rng.integers(6, 40)),
            max_running_requests=int(rng.integers(2, 9)),
            enable_prefix_cache=bool(trial % 3),
        )
        requests, outputs = [], {}
        for i in range(14):
            head, group = int(rng.integers(0, 3)), bool(rng.integers(0, 2))
            ids = prompt(24, seed=head)[: int(rng.integers(1, 25))]
            group_id = f"{head}-{len(ids)}" if group else None
            requests.append(
                Request(f"r{i}", ids, sampled(int(rng.integers(1, 12)), seed=i), group_id)
            )
            engine.add(requests[-1])
            for _ in range(int(rng.integers(0, 4))):
                outputs |= {output.request_id: output for output in engine.step()}
                engine._scheduler.check()
            if i % 5 == 4:
                engine.abort([f"r{i - 1}"])
        outputs |= step_to_end(engine)
        assert engine.stats()["kv_usage"] == 0
        for request in requests:
            output = outputs[request.request_id]
            expected = run_alone(request.prompt_ids.tolist(), request.params)
            if output.finish_reason == "abort":
                count = len(output.token_ids)
                assert output.token_ids.tolist() == expected.token_ids.tolist()[:count]
            else:
                assert_same(output, expected)


def test_fp8_pages_move_logprobs_a_little():
    asked = [Request("r", prompt(40), greedy(20))]
    (exact,) = run(make_engine(), asked)
    (rounded,) = run(make_engine(kv_dtype="float8_e4m3fn", index_dtype="float8_e4m3fn"), asked)
    count = int((exact.token_ids == rounded.token_ids).cumprod().sum())
    assert count > 0
    delta = np.abs(exact.logprobs - rounded.logprobs)[:count]
    assert 1e-4 < delta.mean() < 0.3

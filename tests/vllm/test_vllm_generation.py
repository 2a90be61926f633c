"""What a replica of vLLM makes of requests: the meaning of every sampling setting is the bundled
runtime's."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tokenizers import Tokenizer

pytest.importorskip("vllm")

from m3rl.rollout.backend import BackendError
from m3rl.types import GenerationRequest, SamplingSettings
from tests.vllm.tiny_hf import EOS, VOCAB, greedy, load_model, scores

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def replica(qwen3, qwen3_replica):
    qwen3_replica.load(str(qwen3 / "1"), 1)
    return qwen3_replica


@pytest.fixture(scope="module")
def oracle(qwen3):
    return load_model(qwen3 / "1")


def request(
    name: str, ids=PROMPT, *, ordinal: int = 0, seed: int = 7, **sampling
) -> GenerationRequest:
    options = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 8}
    settings = SamplingSettings(**options | sampling)
    return GenerationRequest(name, name, ordinal, 0, np.array(ids, np.int32), seed, settings)


def logprobs_of(oracle, ids, count: int) -> np.ndarray:
    """[count, V] log-probabilities at temperature 1, of the tokens after the prompt."""
    import torch

    with torch.no_grad():
        logits = oracle(torch.tensor([list(ids)])).logits[0]
    return logits[-count - 1 : -1].log_softmax(-1).double().numpy()


def test_greedy_tokens_carry_their_log_probability_at_temperature_one(replica, oracle):
    prompts = [[i, i + 1] for i in range(3, 15)]
    found = replica.generate(
        [request(f"r{i}", ids, temperature=0.0, max_tokens=32) for i, ids in enumerate(prompts)]
    )
    for ids, each in zip(prompts, found, strict=True):
        tokens, logprobs = greedy(oracle, ids, 32)
        assert each.token_ids.tolist() == tokens
        np.testing.assert_allclose(each.logprobs, logprobs, atol=1e-5)
        assert each.finish_reason == ("stop" if tokens[-1] == EOS else "length")
    assert {each.finish_reason for each in found} == {"stop", "length"}


def test_greedy_log_probabilities_do_not_change_beside_sampled_requests(replica):
    alone = replica.generate([request("a", temperature=0.0)])[0]
    beside = replica.generate(
        [request("a", temperature=0.0), request("b", temperature=0.5, top_k=3)]
    )[0]
    np.testing.assert_allclose(alone.logprobs, beside.logprobs, atol=1e-5)
    assert alone.token_ids.tolist() == beside.token_ids.tolist()


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 0.9, "min_p": 0.2},
    ],
    ids=lambda sampling: "-".join(sampling),
)
def test_log_probabilities_are_those_of_the_distribution_sampled_from(replica, oracle, sampling):
    """By hand, in FP64; 1e-4 for the FP32 of the engine."""
    (found,) = replica.generate([request("r", **sampling)])
    count = len(found.token_ids)
    rows = logprobs_of(oracle, [*PROMPT, *found.token_ids], count)
    for row, token, logprob in zip(rows, found.token_ids, found.logprobs, strict=True):
        row = row / sampling["temperature"]
        probs = np.exp(row - np.logaddexp.reduce(row))
        order = np.argsort(-probs)
        kept = np.ones(VOCAB, bool)
        if "top_k" in sampling:
            kept[order[sampling["top_k"] :]] = False
        if "top_p" in sampling:
            before = np.cumsum(probs[order]) - probs[order]
            kept[order[before >= sampling["top_p"]]] = False
        if "min_p" in sampling:
            kept &= probs >= sampling["min_p"] * probs.max()
        assert kept[token]
        assert abs(np.log(probs[token] / probs[kept].sum()) - logprob) < 1e-4


def test_a_seed_gives_the_same_tokens_in_any_company(replica):
    (alone,) = replica.generate([request("a", seed=11)])
    crowd = replica.generate([request(f"r{i}", seed=9 + i) for i in range(4)])
    assert crowd[2].token_ids.tolist() == alone.token_ids.tolist()
    assert len({tuple(each.token_ids) for each in crowd}) == 4
    assert [each.seed for each in crowd] == [9, 10, 11, 12]


def test_scored_prompts_are_the_oracles(replica, oracle):
    prompts = [np.arange(3, 12), np.array([9] * 40), np.arange(3, 5)]
    for ids, found in zip(prompts, replica.prompt_logprobs(prompts), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, scores(oracle, ids), atol=1e-5)
    assert replica.prompt_lengths() == (127, 127)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ids": []}, "the prompt is empty"),
        ({"ids": [5, VOCAB]}, "vocabulary of 97"),
        ({"ids": [-1]}, "token ids -1 to -1"),
        ({"max_tokens": 125}, "make 129, above max_model_len=128"),
        ({"capture_blocks": True}, "vLLM does not give"),
        ({"capture_routing": True}, "rollout.capture_routing"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_numbers(replica, changes, words):
    with pytest.raises(ValueError, match=words):
        replica.generate([request("fine"), request("bad", **changes)])
    assert replica.generate([request("fine")])[0].finish_reason in ("stop", "length")


def test_a_stop_string_ends_the_completion_and_stays_in_its_tokens(qwen3, replica):
    """Each token is a character; the string is what comes as fourth and fifth."""
    tokenizer = Tokenizer.from_file(str(qwen3 / "1" / "tokenizer.json"))
    (whole,) = replica.generate([request("r", seed=3, max_tokens=30)])
    stop = tokenizer.decode(whole.token_ids[3:5].tolist())
    (found,) = replica.generate([request("r", seed=3, max_tokens=30, stop=("never", stop))])
    assert found.token_ids.tolist() == whole.token_ids[:5].tolist()
    assert len(found.logprobs) == 5
    assert found.finish_reason == "stop"
    assert replica.engine._scheduler.has_unfinished_requests() is False


def test_a_stop_string_without_a_tokenizer_is_refused(m3, m3_replica):
    m3_replica.load(str(m3 / "1"), 1)
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        m3_replica.generate([request("r", stop=("x",))])


def test_a_name_twice_is_refused(replica):
    with pytest.raises(ValueError, match="in the engine already"):
        replica.generate([request("twice"), request("twice")])


def test_a_prompt_that_was_seen_is_found_again_and_not_after_a_new_version(qwen3, replica, oracle):
    """Pages of 32 tokens; a prompt of 100 has whole ones."""
    ids = [3 + i % 90 for i in range(100)]
    first, second = (replica.generate([request("r", ids, temperature=0.0)])[0] for _ in range(2))
    unread = replica.generate([request("r", ids, temperature=0.0, use_prefix_cache=False)])[0]
    replica.load(str(qwen3 / "2"), 2)
    third = replica.generate([request("r", ids, temperature=0.0)])[0]
    cached = [each.num_cached_tokens for each in (first, second, unread, third)]
    assert cached[0] == cached[2] == cached[3] == 0 < cached[1] < 100
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5)
    tokens, _ = greedy(load_model(qwen3 / "2"), ids, 8)
    assert third.token_ids.tolist() == tokens


def start(replica, *requests: GenerationRequest) -> tuple[threading.Thread, list]:
    """Generate in the background; returns when three steps are done."""
    found: list = []
    thread = threading.Thread(target=lambda: found.extend(replica.generate(requests)))
    steps = replica.health()["progress"]
    thread.start()
    deadline = time.monotonic() + 20
    while replica.health()["progress"] < steps + 3 and time.monotonic() < deadline:
        time.sleep(0.002)
    return thread, found


def test_an_aborted_request_comes_out_with_the_tokens_it_has(replica):
    thread, found = start(replica, request("long", max_tokens=120), request("also", max_tokens=120))
    assert replica.abort(["long", "also", "unknown"]) == 2
    thread.join(20)
    for each in found:
        assert each.finish_reason == "abort"
        assert 0 < len(each.token_ids) < 120
        assert len(each.logprobs) == len(each.token_ids)
        assert each.version_spans.tolist() == [[0, 1]]


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_a_paused_request_goes_on_as_if_nothing_had_been(replica, mode):
    """Prompts are scored meanwhile, and disturb nothing."""
    undisturbed = replica.generate([request("r", temperature=0.0, max_tokens=60)])[0]
    thread, found = start(replica, request("r", temperature=0.0, max_tokens=60))
    replica.pause(mode)
    replica.pause(mode)  # twice is once
    steps = replica.health()["progress"]
    before = replica.prompt_logprobs([np.arange(3, 60)])
    assert not found
    assert replica.health()["progress"] == steps
    replica.resume()
    thread.join(20)
    assert found[0].token_ids.tolist() == undisturbed.token_ids.tolist()
    np.testing.assert_allclose(found[0].logprobs, undisturbed.logprobs, atol=1e-4)
    np.testing.assert_allclose(before[0], replica.prompt_logprobs([np.arange(3, 60)])[0], atol=1e-5)


def test_a_running_request_gives_its_pages_to_a_prompt_that_is_scored(replica, monkeypatch):
    undisturbed = replica.generate([request("r", temperature=0.0, max_tokens=60)])[0]
    thread, found = start(replica, request("r", temperature=0.0, max_tokens=60))
    replica.pause("keep")
    scheduler = replica.engine._scheduler
    pool = scheduler.kv_cache_manager.block_pool
    assert len(scheduler.running) == 1
    free = pool.get_num_free_blocks
    monkeypatch.setattr(pool, "get_num_free_blocks", lambda: 0 if scheduler.running else free())
    replica.prompt_logprobs([np.arange(3, 60)])
    assert not scheduler.running
    assert len(scheduler.waiting) == 1
    monkeypatch.undo()
    replica.resume()
    thread.join(20)
    assert found[0].token_ids.tolist() == undisturbed.token_ids.tolist()


def test_a_prompt_that_finds_no_pages_is_refused(replica, monkeypatch):
    pool = replica.engine._scheduler.kv_cache_manager.block_pool
    monkeypatch.setattr(pool, "get_num_free_blocks", lambda: 1)
    with pytest.raises(ValueError, match="57 tokens needs 2 pages of 32, and 1 are free"):
        replica.prompt_logprobs([np.arange(3, 60)])


def test_drain_ends_what_has_begun_and_takes_nothing_new(replica):
    """Of six requests four run at a time."""
    names = [f"r{i}" for i in range(6)]
    thread, found = start(replica, *(request(n, temperature=0.0, max_tokens=40) for n in names))
    replica.pause("drain")
    scheduler = replica.engine._scheduler
    assert not scheduler.running
    assert len(scheduler.waiting) == 2
    with pytest.raises(RuntimeError, match="resume"):
        replica.generate([request("new")])
    with pytest.raises(RuntimeError, match="paused already, to 'drain'"):
        replica.pause("keep")
    replica.resume()
    thread.join(20)
    assert [each.request_id for each in found] == names


def test_keeping_keys_and_a_prefix_cache_at_once_is_refused_at_the_commit(qwen3, replica):
    thread, _ = start(replica, request("r", temperature=0.0, max_tokens=100))
    replica.pause("keep")
    with pytest.raises(BackendError, match="enable_prefix_caching: false"):
        replica.load(str(qwen3 / "2"), 2)
    assert replica.health()["version"] is None
    with pytest.raises(RuntimeError, match="cannot resume"):
        replica.resume()
    replica.abort(["r"])
    thread.join(20)
    replica.load(str(qwen3 / "2"), 2)
    replica.resume()
    assert replica.health()["version"] == 2


@pytest.mark.parametrize("is_caching", [True, False])
def test_keys_kept_outside_the_engine_are_dropped_whether_or_not_prefixes_are_cached(
    qwen3, replica, monkeypatch, is_caching
):
    engine = replica.engine
    monkeypatch.setattr(
        engine._engine.vllm_config.cache_config, "enable_prefix_caching", is_caching
    )
    with monkeypatch.context() as kept:
        kept.setattr(engine._scheduler, "reset_connector_cache", lambda: False)
        with pytest.raises(BackendError, match="version 2: vLLM kept keys outside the engine"):
            replica.load(str(qwen3 / "2"), 2)
    assert replica.health()["version"] is None
    replica.load(str(qwen3 / "2"), 2)
    assert replica.health()["version"] == 2


def test_weights_are_not_replaced_under_running_requests(qwen3, replica):
    thread, _ = start(replica, request("r", max_tokens=100))
    with pytest.raises(RuntimeError, match="pause the replica first"):
        replica.load(str(qwen3 / "2"), 2)
    replica.abort(["r"])
    thread.join(20)


def test_non_finite_weights_end_requests_with_an_error(qwen3, replica, monkeypatch):
    weights = replica.engine._core.model_executor.driver_worker.worker._m3rl_weights
    write = weights.write

    def damaged(name: str, bounds, tensor) -> None:
        write(name, bounds, tensor * float("inf") if name == "model.norm.weight" else tensor)

    monkeypatch.setattr(weights, "write", damaged)
    replica.load(str(qwen3 / "1"), 5)
    (found,) = replica.generate([request("r", temperature=0.0)])
    assert found.finish_reason == "error"
    assert "policy version 5" in found.error
    assert replica.stats()["nonfinite_logits"] >= 1


def test_stats_have_the_names_of_the_bundled_runtime(replica):
    from inference.engine.stats import Counters

    before = replica.stats()
    replica.generate([request("r", temperature=0.0, max_tokens=4, ids=[9, 9, 9])])
    after = replica.stats()
    assert after["generated_tokens"] - before["generated_tokens"] == 4
    assert after["prefill_tokens"] - before["prefill_tokens"] == 3
    assert after["steps"] > before["steps"]
    assert (after["running"], after["waiting"]) == (0, 0)
    names = Counters.stats.__code__.co_consts
    assert set(after) <= {name for each in names if isinstance(each, tuple) for name in each}

"""A step launched before the last one's tokens are known changes no token of any request."""

from __future__ import annotations

import numpy as np
import pytest

from inference.engine import Request, SamplingParams
from tests.inference.engine.engines import EOS, make_engine

SETTINGS = {
    "plain": {},
    "chunked prefill": {"max_tokens_per_step": 5},
    "preemption": {"num_pages": 14, "max_running_requests": 6},
    "no prefix cache": {"enable_prefix_cache": False},
    "few rows": {"max_running_requests": 2},
}


def requests(rng: np.random.Generator) -> list[Request]:
    """Groups and single requests; some end by length, some by EOS, some at their first token."""
    made = []
    for prompt in range(5):
        ids = rng.integers(3, 60, int(rng.integers(2, 14))).tolist()
        for sample in range(int(rng.integers(1, 4))):
            params = SamplingParams(
                max_tokens=int(rng.integers(1, 12)),
                seed=100 * prompt + sample,
                temperature=float(rng.choice([0.0, 1.0, 3.0])),
                top_k=int(rng.choice([0, 5])),
                stop_token_ids=tuple(range(3, 12)),
                routing=True,
                blocks=True,
            )
            group = f"g{prompt}" if prompt % 2 else None
            made.append(Request(f"{prompt}.{sample}", ids, params, group))
    return made


def run(seed: int, *, abort_at: int | None = None, **options):
    engine = make_engine(capture_routing=True, capture_blocks=True, **options)
    rng = np.random.default_rng(seed)
    waiting, outputs, step = requests(rng), {}, 0
    while waiting or engine.has_work:
        for _ in range(int(rng.integers(0, 3))):
            if waiting:
                engine.add(waiting.pop(0))
        outputs |= {output.request_id: output for output in engine.step()}
        engine._scheduler.check()
        step += 1
        if step == abort_at:
            engine.abort()
            waiting.clear()
    assert engine.stats()["running"] == engine.stats()["kv_usage"] == 0
    return outputs


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_every_request_gets_what_it_gets_without(setting, seed):
    plain = run(seed, async_scheduling=False, **SETTINGS[setting])
    ahead = run(seed, async_scheduling=True, **SETTINGS[setting])
    assert plain.keys() == ahead.keys()
    assert {o.finish_reason for o in plain.values()} == {"stop", "length"}
    for name, output in ahead.items():
        wanted = plain[name]
        assert output.token_ids.tolist() == wanted.token_ids.tolist()
        assert output.finish_reason == wanted.finish_reason
        np.testing.assert_allclose(output.logprobs, wanted.logprobs, atol=1e-5)
        assert output.routing.shape == wanted.routing.shape
        assert output.blocks.tolist() == wanted.blocks.tolist()
        assert len(output.blocks) == len(output.prompt_ids) + len(output.token_ids) - 1


def test_an_abort_between_steps_gives_the_tokens_known_by_then():
    whole = run(0, async_scheduling=True)
    for step in (1, 2, 5, 9):
        for name, output in run(0, async_scheduling=True, abort_at=step).items():
            count = len(output.token_ids)
            assert output.token_ids.tolist() == whole[name].token_ids[:count].tolist()


def test_an_end_that_is_found_late_gives_no_token_more():
    engine = make_engine(async_scheduling=True)
    prompt = [5, 6, 7]
    first = Request("first", prompt, SamplingParams(max_tokens=8, seed=1, ignore_eos=True))
    engine.add(first)
    tokens = []
    while engine.has_work:
        tokens += [output.token_ids.tolist() for output in engine.step()]
    (wanted,) = tokens
    stop = SamplingParams(max_tokens=8, seed=1, stop_token_ids=(wanted[2],), ignore_eos=True)
    engine.add(Request("second", prompt, stop))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    first_stop = wanted.index(wanted[2])
    assert outputs[0].token_ids.tolist() == wanted[: first_stop + 1]
    assert outputs[0].finish_reason == "stop"
    assert engine.stats()["generated_tokens"] == len(wanted) + first_stop + 1
    assert EOS not in wanted[:first_stop]

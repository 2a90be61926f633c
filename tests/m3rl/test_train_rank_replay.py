"""TrainRank beside the runtime: the same log-probabilities, and its recorded choices replayed."""

from dataclasses import replace

import numpy as np
import pytest

from inference.config import EngineConfig
from inference.engine.engine import Engine
from inference.engine.request import Request, SamplingParams
from m3rl.types import TrainBatch
from tests.m3rl.rank_cases import CONFIG, SETTINGS, random_batch, start
from tests.tiny_models import random_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


# BR-020
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_computes_the_logprobs_that_the_runtime_sampled_with(model, temperature):
    # 12 + 28 tokens: far beyond topk x block = 8, so blocks are dropped on both sides.
    options = EngineConfig(num_pages=64, capture_routing=True, capture_blocks=True)
    engine = Engine.from_pretrained(model, options)
    rng = np.random.default_rng(0)
    for i in range(4):
        params = SamplingParams(
            temperature=temperature,
            max_tokens=28,
            ignore_eos=True,
            seed=i,
            routing=True,
            blocks=True,
        )
        engine.add(Request(str(i), rng.integers(3, 97, 12).tolist(), params))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    outputs.sort(key=lambda output: output.request_id)
    mask = np.broadcast_to(np.arange(40) >= 12, (4, 40)).copy()
    batch = TrainBatch(
        sample_ids=[(i, 0) for i in range(4)],
        ids_BS=np.stack([np.concatenate([o.prompt_ids, o.token_ids]) for o in outputs], dtype=int),
        length_B=np.full(4, 40),
        loss_mask_BS=mask,
        behaviour_logprobs_BS=np.zeros((4, 40), np.float32),
        advantages_B=rng.normal(size=4).astype(np.float32),
        temperature=temperature,
        denominator=float(mask.sum()),
        routing=[output.routing for output in outputs],
        blocks=[output.blocks for output in outputs],
    )
    batch.behaviour_logprobs_BS[:, 12:] = np.stack([output.logprobs for output in outputs])
    metrics = start(model).update(batch)
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-5
    assert metrics["m3/router_agreement"] == metrics["m3/block_agreement"] == 1.0
    replayed = start(model, replace(SETTINGS, replay_routing=True, replay_blocks=True))
    again = replayed.update(batch)
    assert again["policy/loss"] == metrics["policy/loss"]
    assert again["m3/block_replay_coverage"] > 0.95


def test_recorded_routing_is_compared_and_replayed(model):
    batch = random_batch(16)
    shape = (2, 2)  # MoE layers, experts per token
    rng = np.random.default_rng(0)
    batch.routing = [
        np.stack([rng.permutation(8)[:2] for _ in range((n - 1) * 2)]).reshape(n - 1, *shape)
        for n in batch.length_B
    ]
    batch.routing = [r.astype(np.uint8) for r in batch.routing]
    compared = start(model).update(batch)
    assert 0 < compared["m3/router_agreement"] < 0.6
    assert compared["m3/router_replay_coverage"] == 0.0
    rank = start(model, replace(SETTINGS, replay_routing=True))
    replayed = rank.update(batch)
    assert replayed["policy/loss"] != compared["policy/loss"]
    total = int(batch.length_B.sum())
    assert replayed["m3/router_replay_coverage"] == pytest.approx(1 - 7 / total)
    batch.routing[3] = None
    partly = start(model, replace(SETTINGS, replay_routing=True)).update(batch)
    assert partly["m3/router_replay_coverage"] < replayed["m3/router_replay_coverage"]

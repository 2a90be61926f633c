"""A trainer rank with each switch of the algorithm: gradients by packing, KL, entropy."""

from dataclasses import replace

import numpy as np
import pytest

from tests.m3rl.rank_cases import (
    CONFIG,
    SETTINGS,
    WIDTH,
    distance,
    gradients,
    on_policy,
    random_batch,
    start,
    with_loss,
)
from tests.tiny_models import random_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


SWITCHES = {
    "grpo": {"aggregation": "sequence_mean", "kl_coef": 0.1},
    "dr_grpo": {"aggregation": "constant", "constant_length": 20},
    "gspo": {"ratio": "sequence", "aggregation": "sequence_mean"},
    "cispo": {"objective": "cispo"},
    "dppo_tv": {"objective": "dppo_tv"},
    "pg": {"objective": "pg", "kl_coef": 0.1, "kl_unbiased": True},
    "entropy": {"entropy_coef": 0.1, "aggregation": "sequence_mean"},
}


def near_policy(rank, seed):
    """A batch sampled by a policy a little off, so that ratios differ from 1."""
    batch = on_policy(rank, random_batch(seed))
    noise = np.random.default_rng(seed).normal(0, 0.1, batch.ids_BS.shape)
    batch.behaviour_logprobs_BS += np.where(batch.loss_mask_BS, noise, 0).astype(np.float32)
    return batch


@pytest.mark.parametrize("name", SWITCHES)
def test_gradients_do_not_depend_on_the_packing(model, name):
    settings = replace(with_loss(**SWITCHES[name]), dtype="float64", micro_batch_tokens=7 * WIDTH)
    whole = start(model, settings)
    batch = near_policy(whole, 20)
    expected = gradients(whole, batch)
    for tokens in (WIDTH, 2 * WIDTH):
        packed = start(model, replace(settings, micro_batch_tokens=tokens))
        assert distance(gradients(packed, batch), expected) <= 1e-12


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"aggregation": "sequence_mean"}),
        ({}, {"ratio": "sequence"}),
        ({}, {"objective": "cispo"}),
        ({}, {"objective": "pg"}),
        ({"kl_coef": 0.5, "kl_estimator": "k2"}, {"kl_coef": 0.5, "kl_unbiased": True}),
        ({}, {"entropy_coef": 0.5}),
    ],
)
def test_a_switch_reaches_the_gradient(model, one, other):
    first, second = start(model, with_loss(**one)), start(model, with_loss(**other))
    for rank in (first, second):
        rank.update(random_batch(21))  # away from the reference
    batch = near_policy(first, 22)
    assert distance(gradients(second, batch), gradients(first, batch)) > 1e-3


def test_constant_aggregation_is_the_token_mean_on_another_scale(model):
    batch = near_policy(start(model), 23)
    mean = gradients(start(model), batch)
    constant = with_loss(aggregation="constant", constant_length=20)
    scaled = gradients(start(model, constant), batch)
    factor = batch.loss_mask_BS.sum() / (20 * len(batch.sample_ids))
    assert distance({k: g / factor for k, g in scaled.items()}, mean) < 1e-6


def test_rows_without_a_trained_token_are_no_sequences(model):
    settings = with_loss(aggregation="sequence_mean")
    batch = near_policy(start(model), 24)
    rows = np.arange(1, len(batch.sample_ids))
    without = gradients(start(model, settings), batch, rows)
    batch.loss_mask_BS[0] = False
    assert distance(gradients(start(model, settings), batch), without) < 1e-6


def test_an_entropy_bonus_makes_the_policy_less_sure(model):
    rank = start(model, with_loss(entropy_coef=1.0))
    batch = on_policy(rank, random_batch(25))
    batch.advantages_B[:] = 0
    metrics = [rank.update(batch) for _ in range(4)]
    entropies = [m["policy/entropy"] for m in metrics]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0]
    assert metrics[0]["policy/loss"] == metrics[0]["policy/entropy_loss"] < 0


def test_a_batch_brings_its_own_kl_coefficient(model):
    rank = start(model, with_loss(kl_coef=0.1))
    batch = near_policy(rank, 26)
    rank.update(batch)
    twice = replace(batch, kl_coef=0.2)
    plain, doubled = gradients(rank, batch), gradients(rank, twice)
    assert distance(doubled, plain) > 1e-3
    same = gradients(rank, replace(batch, kl_coef=0.1))
    assert distance(same, plain) == 0.0


def test_reference_logprobs_are_those_of_the_initial_weights(model):
    rank = start(model, with_loss(kl_coef=0.1, kl_in_reward=True))
    batch = random_batch(27)
    initial = rank.logprobs(batch)
    metrics = rank.update(batch)
    # The KL acts through the rewards: the loss has no term, and needs no pass of the reference.
    assert "policy/kl_loss" not in metrics
    np.testing.assert_array_equal(rank.reference_logprobs(batch), initial)
    assert np.abs(rank.logprobs(batch) - initial).max() > 1e-4


def test_without_a_coefficient_there_is_no_reference_to_ask(model):
    with pytest.raises(AssertionError, match="keeps a reference"):
        start(model, SETTINGS).reference_logprobs(random_batch(28))

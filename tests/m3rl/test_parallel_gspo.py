"""A run of GSPO whose sequences are cut over ranks, against one rank that has them whole."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.m3rl.parallel_process import batch_of, on_ranks, run
from tests.m3rl.rank_cases import CONFIG, SETTINGS, start
from tests.tiny_models import random_checkpoint

GSPO = replace(
    SETTINGS,
    dtype="float64",
    updates_per_batch=2,
    loss=replace(
        SETTINGS.loss,
        clip_low=3e-2,
        clip_high=4e-2,
        importance_cap=None,
        ratio="sequence",
        aggregation="sequence_mean",
    ),
    # See test_parallel.
    optimizer=replace(SETTINGS.optimizer, eps=1e-4),
)
LOSSES = ("policy/loss", "policy/pg_loss", "policy/ratio_mean", "policy/ppo_kl", "optim/grad_norm")
CLIPPED = ("policy/clip_frac_low", "policy/clip_frac_high")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


@pytest.fixture(scope="module")
def batches(model):
    """Old log-probabilities near the policy's, so that some sequences are clipped and most are
    not."""
    rank, noise = start(model, GSPO), np.random.default_rng(0)
    found = [batch_of(seed) for seed in (30, 31, 32)]
    for batch in found:
        off_B1 = noise.normal(0, 3e-2, (len(batch.sample_ids), 1))
        moved_BS = rank.logprobs(batch) + off_B1
        batch.behaviour_logprobs_BS = np.where(batch.loss_mask_BS, moved_BS, 0).astype(np.float32)
    return found


@pytest.fixture(scope="module")
def alone(model, batches):
    rank = start(model, GSPO)
    metrics = [rank.update(batch) for batch in batches]
    return metrics, {name: tensor.clone() for name, tensor in rank.policy.export("float64")}


@pytest.mark.parametrize(("num_ranks", "cp"), [(2, 2), (4, 2)])
def test_a_run_of_gspo_is_the_same_where_ranks_share_the_tokens_of_a_sequence(
    model, batches, alone, num_ranks, cp
):
    told = on_ranks(run, num_ranks, model, replace(GSPO, cp=cp), batches)
    metrics, weights = alone
    assert any(line[name] > 0 for line in metrics for name in CLIPPED)
    assert all(line[name] < 1 for line in metrics for name in CLIPPED)
    for rank in told:
        assert [line["policy/version"] for line in rank["metrics"]] == [2, 4, 6]
        for line, expected in zip(rank["metrics"], metrics, strict=True):
            for name in LOSSES:
                assert line[name] == pytest.approx(expected[name], rel=1e-12, abs=1e-12), name
            assert all(line[n] == pytest.approx(expected[n], abs=1e-12) for n in CLIPPED)
    for name, weight in weights.items():
        torch.testing.assert_close(
            torch.from_numpy(told[0]["weights"][name]), weight, rtol=0, atol=1e-12, msg=name
        )


def test_sequences_move_their_tokens_together(model, batches, alone):
    """The run above tells ratios of sequences from those of tokens."""
    rank = start(model, replace(GSPO, loss=replace(GSPO.loss, ratio="token")))
    first = rank.update(batches[0])
    assert abs(first["policy/loss"] - alone[0][0]["policy/loss"]) > 1e-4

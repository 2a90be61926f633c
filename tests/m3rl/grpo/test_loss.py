import math

import numpy as np
import pytest
import torch

from m3rl.grpo.loss import LossTotals, StepCounts, cross_entropy, grpo_loss, over_steps
from m3rl.grpo.mismatch import mismatch_metrics
from tests.m3rl.grpo.loss_cases import inputs, loss_and_grad, settings


def test_ppo_clip_by_hand_for_every_corner():
    # (ratio, advantage) -> loss, d loss / d log π; a clipped token has no gradient.
    cases = [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 1.0, -1.2, -1.2),
        (1.5, 1.0, -1.28, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (1.5, -1.0, 1.5, 1.5),
        (0.5, -1.0, 0.8, 0.0),
    ]
    ratios, advantages, losses, grads = zip(*cases, strict=True)
    output, grad = loss_and_grad(inputs(ratios, advantages), settings(), tokens=10.0)
    assert output.loss.item() == pytest.approx(sum(losses) / 10)
    torch.testing.assert_close(grad, torch.tensor(grads, dtype=torch.float64) / 10)
    assert output.sums["policy/clip_frac_high"].item() == pytest.approx(0.1)
    assert output.sums["policy/clip_frac_low"].item() == pytest.approx(0.1)
    assert output.sums["policy/clip_frac"].item() == pytest.approx(0.2)
    assert output.sums["policy/ratio_mean"].item() == pytest.approx(sum(ratios) / 10)
    assert output.maxima["policy/ratio_max"].item() == pytest.approx(1.5)


def test_dual_clip_bounds_only_negative_advantages():
    given = inputs([5.0, 5.0, 2.0], [-1.0, 1.0, -1.0])
    output, grad = loss_and_grad(given, settings(dual_clip=3.0), tokens=1.0)
    assert output.loss.item() == pytest.approx(3.0 - 1.28 + 2.0)
    torch.testing.assert_close(grad, torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64))


def test_truncated_importance_weighs_the_policy_term_without_gradient_of_its_own():
    given = inputs([1.0, 1.0], [1.0, 1.0], rho=[0.5, 7.0])
    output, grad = loss_and_grad(given, settings(importance_cap=2.0), tokens=1.0)
    assert output.loss.item() == pytest.approx(-0.5 - 2.0)
    torch.testing.assert_close(grad, torch.tensor([-0.5, -2.0], dtype=torch.float64))


def test_behaviour_as_old_policy_is_not_corrected_a_second_time():
    given = inputs([1.1, 0.7], [1.0, -2.0])
    with_tis = grpo_loss(given, settings(importance_cap=2.0), StepCounts(2.0, 2.0))
    without = grpo_loss(given, settings(), StepCounts(2.0, 2.0))
    assert torch.equal(with_tis.loss, without.loss)


# BR-037
def test_a_nan_is_not_clamped_into_a_number():
    given = inputs([1.0, 1.0], [1.0, 1.0], ref=[float("nan"), 0.0])
    assert torch.isnan(grpo_loss(given, settings(kl_coef=0.1), StepCounts(2.0, 2.0)).loss)
    broken = inputs([float("nan"), 1.0], [1.0, 1.0])
    output, grad = loss_and_grad(broken, settings(dual_clip=3.0, importance_cap=2.0), tokens=2.0)
    assert torch.isnan(output.loss)
    # The clamp's gradient is zero there: whoever decides about the step must look at the loss too.
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("ranks", [(1.0, math.nan), (math.nan, 1.0), (1.0, math.nan, 3.0)])
def test_a_nan_of_any_rank_or_step_is_the_maximum(ranks):
    total = LossTotals()
    for value in ranks:
        total.add(LossTotals(maxima={"policy/ratio_max": value}))
    assert math.isnan(total.maxima["policy/ratio_max"])
    assert math.isnan(over_steps([{"policy/ratio_max": v} for v in ranks])["policy/ratio_max"])
    total = LossTotals(maxima={"policy/ratio_max": 1.0})
    total.add(LossTotals(maxima={"policy/ratio_max": 2.0}))
    assert total.maxima == {"policy/ratio_max": 2.0}


def test_no_token_gives_zero_loss():
    output = grpo_loss(inputs([], []), settings(), StepCounts(5.0, 2.0))
    assert output.loss.item() == 0.0
    assert output.maxima == {}


def test_zero_advantages_without_kl_give_exactly_zero_loss_and_gradient():
    given = inputs([1.0, 0.7, 1.4], [0.0, 0.0, 0.0])
    output, grad = loss_and_grad(given, settings(dual_clip=3.0, importance_cap=2.0), tokens=3.0)
    assert output.loss.item() == 0.0
    assert grad.tolist() == [0.0, 0.0, 0.0]


def test_cross_entropy_is_the_mean_over_the_global_denominator():
    assert cross_entropy(torch.tensor([-1.0, -3.0]), 8.0).item() == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_low": 0.0}, "clip_low=0.0"),
        ({"clip_high": 0.0}, "clip_high=0.0"),
        ({"dual_clip": 1.0}, "must be above 1"),
        ({"kl_coef": -1.0}, "must not be negative"),
        ({"kl_estimator": "k4"}, "use one of"),
        ({"importance_cap": 0.0}, "importance.cap"),
        ({"entropy_coef": -0.1}, "must not be negative"),
        ({"constant_length": 0}, "at least 1"),
        ({"objective": "ppo"}, "use one of"),
        ({"ratio": "batch"}, "use one of"),
        ({"aggregation": "mean"}, "use one of"),
        ({"objective": "dppo_tv", "ratio": "sequence"}, "bounds single tokens"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        settings(**change)


def test_mismatch_by_hand():
    pi = np.log(np.array([0.5, 0.2], np.float64))
    mu = np.log(np.array([0.25, 0.4], np.float64))  # weights 2 and 1/2
    metrics = mismatch_metrics(pi, mu, cap=1.5)
    assert metrics["mismatch/kl_k1"] == pytest.approx(0.0)
    assert metrics["mismatch/kl_k3"] == pytest.approx((1 - np.log(2) + np.log(2) - 0.5) / 2)
    assert metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx(np.log(2))
    assert metrics["mismatch/logprob_abs_diff_max"] == pytest.approx(np.log(2))
    assert metrics["mismatch/prob_mult_error"] == pytest.approx(2.0)
    assert metrics["mismatch/is_weight_mean"] == pytest.approx(1.25)
    assert metrics["mismatch/is_weight_max"] == pytest.approx(2.0)
    assert metrics["mismatch/is_truncated_frac"] == 0.5
    assert metrics["mismatch/pearson"] == pytest.approx(-1.0)


def test_equal_logprobs_have_no_mismatch_and_a_shift_by_one_shows():
    logprobs = np.log(np.random.default_rng(0).uniform(0.01, 1, 200)).astype(np.float32)
    same = mismatch_metrics(logprobs, logprobs, cap=None)
    assert same["mismatch/kl_k3"] == 0.0
    assert same["mismatch/logprob_abs_diff_max"] == 0.0
    assert same["mismatch/pearson"] == pytest.approx(1.0)
    shifted = mismatch_metrics(logprobs[1:], logprobs[:-1], cap=None)
    assert shifted["mismatch/logprob_abs_diff_mean"] > 0.8
    assert mismatch_metrics(logprobs[:0], logprobs[:0], cap=None) == {}

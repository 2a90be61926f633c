"""Surrogates and aggregations by hand."""

import math

import pytest
import torch

from m3rl.grpo.loss import StepCounts, grpo_loss
from tests.m3rl.grpo.loss_cases import inputs, loss_and_grad, settings

HALF = math.log(0.5)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_cispo_cuts_the_weight_above_and_keeps_the_gradient_of_every_token():
    # min(r, 1.28) · A · log 0.5; no lower bound: 0.1 stays 0.1 (MiniMax-M1).
    given = inputs([0.1, 1.2, 5.0, 5.0], [2.0, 1.0, 1.0, -1.0])
    output, grad = loss_and_grad(given, settings(objective="cispo"), tokens=1.0)
    close(grad, [-0.2, -1.2, -1.28, 1.28])
    assert output.loss.item() == pytest.approx(-HALF * (0.2 + 1.2 + 1.28 - 1.28))
    assert output.sums["policy/clip_frac_high"].item() == 2.0
    assert output.sums["policy/clip_frac_low"].item() == 0.0


def test_dppo_tv_leaves_a_token_alone_only_where_the_update_leads_out_of_the_region():
    # π = 1/2; μ = 1/2 / ratio: 0.25, 0.25, 0.78125, 0.78125, 0.4545. Region 0.2 below, 0.2 above.
    given = inputs([2.0, 2.0, 0.64, 0.64, 1.1], [1.0, -1.0, 1.0, -1.0, 1.0])
    options = settings(objective="dppo_tv", clip_low=0.2, clip_high=0.2)
    output, grad = loss_and_grad(given, options, tokens=1.0)
    close(grad, [0.0, 2.0, -0.64, 0.0, -1.1])
    assert output.loss.item() == pytest.approx(2.0 - 0.64 - 1.1)
    assert output.sums["policy/clip_frac_high"].item() == 1.0
    assert output.sums["policy/clip_frac_low"].item() == 1.0


def test_dppo_tv_goes_by_probabilities_not_by_ratios():
    # A rare token may triple: 0.01 -> 0.03 is a move of 0.02.
    given = inputs([3.0], [1.0], p=0.03)
    _, grad = loss_and_grad(given, settings(objective="dppo_tv"), tokens=1.0)
    close(grad, [-3.0])


def test_dppo_tv_measures_from_the_policy_that_sampled_not_from_the_old_one():
    # π_old = π = 0.5 and μ = 0.125: the trust region is around μ.
    given = inputs([1.0], [1.0], rho=[4.0])
    _, grad = loss_and_grad(given, settings(objective="dppo_tv"), tokens=1.0)
    close(grad, [0.0])


def test_the_plain_policy_gradient_does_not_look_at_the_ratio():
    given = inputs([0.1, 1.0, 9.0], [1.0, -2.0, 3.0])
    output, grad = loss_and_grad(given, settings(objective="pg"), tokens=2.0)
    close(grad, [-0.5, 1.0, -1.5])
    assert output.loss.item() == pytest.approx(-HALF * (1 - 2 + 3) / 2)


def test_gspos_ratio_is_the_geometric_mean_over_a_sequence():
    # Ratios 1.21 and 1: s = 1.1. Alone 0.5: s = 0.5, clipped to 0.8 for A < 0.
    given = inputs([1.21, 1.0, 0.5], [1.0, 1.0, -1.0], sequence=[0, 0, 1])
    options = settings(ratio="sequence", aggregation="sequence_mean")
    output, grad = loss_and_grad(given, options, tokens=3.0, sequences=2.0)
    assert output.loss.item() == pytest.approx((-1.1 + 0.8) / 2)
    # d s / d log π_t = s / 2 for each of the two tokens.
    close(grad, [-1.1 / 2 / 2, -1.1 / 2 / 2, 0.0])
    assert output.sums["policy/ratio_mean"].item() == pytest.approx((1.1 + 1.1 + 0.5) / 3)
    assert output.maxima["policy/ratio_max"].item() == pytest.approx(1.1)
    assert output.sums["policy/clip_frac_low"].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("aggregation", "loss", "weights"),
    # Two sequences of 3 and 1 tokens, token losses -1, -1, -1 and -4.
    [
        ("token_mean", -7 / 4, [1 / 4] * 4),
        ("sequence_mean", -(1 + 4) / 2, [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        ("constant", -7 / (2 * 10), [1 / 20] * 4),
    ],
)
def test_aggregations_by_hand(aggregation, loss, weights):
    advantages = [1.0, 1.0, 1.0, 4.0]
    given = inputs([1.0] * 4, advantages, sequence=[0, 0, 0, 1])
    options = settings(aggregation=aggregation, constant_length=10)
    output, grad = loss_and_grad(given, options, tokens=4.0, sequences=2.0)
    assert output.loss.item() == pytest.approx(loss)
    assert output.sums["policy/pg_loss"].item() == pytest.approx(loss)
    close(grad, [-w * a for w, a in zip(weights, advantages, strict=True)])
    # Descriptions of tokens are means over tokens, whatever the loss is.
    assert output.sums["policy/ratio_mean"].item() == pytest.approx(1.0)


def test_the_entropy_bonus_by_hand():
    entropy = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
    given = inputs([1.0, 1.0], [1.0, 1.0], entropy=entropy)
    output = grpo_loss(given, settings(entropy_coef=0.1), StepCounts(2.0, 2.0))
    assert output.loss.item() == pytest.approx(-1.0 - 0.1 * 1.0)
    assert output.sums["policy/entropy_loss"].item() == pytest.approx(-0.1)
    assert output.sums["policy/entropy"].item() == pytest.approx(1.0)
    (grad,) = torch.autograd.grad(output.loss, entropy)
    close(grad, [-0.05, -0.05])


def test_an_entropy_without_gradient_cannot_be_rewarded():
    given = inputs([1.0, 1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="pass entropy_grad=True"):
        grpo_loss(given, settings(entropy_coef=0.1), StepCounts(2.0, 2.0))


def test_the_default_is_the_clipped_token_mean_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    logprobs, old, adv = (torch.randn(101, generator=generator) for _ in range(3))
    given = inputs([1.0] * 101, [0.0] * 101)
    given = type(given)(
        logprobs.requires_grad_(), old, old, adv, torch.zeros(101), None, given.sequence_T, 101
    )
    output = grpo_loss(given, settings(), StepCounts(101.0, 101.0))
    ratio = (logprobs - old).exp()
    by_hand = -torch.minimum(ratio * adv, ratio.clamp(1 - 0.2, 1 + 0.28) * adv)
    assert torch.equal(output.loss, by_hand.sum() / 101.0)

import math

import pytest
import torch

from m3rl.grpo.kl import KlController, clamped_log_ratio, k3, kl_to_reference
from m3rl.grpo.loss import LossInputs
from tests.m3rl.grpo.loss_cases import inputs, loss_and_grad, settings


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    # d = log π_ref - log π = 0.5: k1 = -d, k2 = d²/2, k3 = e^d - 1 - d; slopes by log π.
    [("k1", -0.5, 1.0), ("k2", 0.125, -0.5), ("k3", math.exp(0.5) - 1.5, 1 - math.exp(0.5))],
)
def test_kl_estimators_by_hand(estimator, value, slope):
    given = inputs([1.0], [0.0], ref=[math.log(0.5) + 0.5])
    options = settings(kl_coef=0.1, kl_estimator=estimator)
    output, grad = loss_and_grad(given, options, tokens=1.0)
    assert output.loss.item() == pytest.approx(0.1 * value)
    assert grad.item() == pytest.approx(0.1 * slope)
    assert output.sums["policy/kl_loss"].item() == pytest.approx(0.1 * value)
    assert output.sums["policy/kl_ref_k1"].item() == pytest.approx(-0.5)
    assert output.sums["policy/kl_ref_k3"].item() == pytest.approx(math.exp(0.5) - 1.5)


# BR-037
@pytest.mark.parametrize(
    "options",
    [{}, {"kl_unbiased": True}, {"ratio": "sequence"}, {"objective": "cispo"}],
    ids=str,
)
def test_a_log_ratio_of_a_hundred_neither_overflows_nor_breaks_the_gradient(options):
    logprobs = torch.tensor([-100.0], requires_grad=True)
    ratio = clamped_log_ratio(torch.tensor([0.0]), logprobs)
    assert k3(ratio).item() == pytest.approx(4.851652e8, rel=1e-6)
    kl = kl_to_reference(logprobs, torch.tensor([0.0]), "k3")
    assert kl.item() == 10.0
    (grad,) = torch.autograd.grad(kl.sum(), logprobs)
    assert torch.isfinite(grad).all()

    given = LossInputs(
        logprobs_T=torch.tensor([0.0, -100.0], requires_grad=True),
        old_logprobs_T=torch.tensor([-100.0, 0.0]),
        behaviour_logprobs_T=torch.tensor([-100.0, 0.0]),
        advantages_T=torch.tensor([-1.0, -1.0]),
        entropy_T=torch.zeros(2),
        ref_logprobs_T=torch.tensor([-100.0, 0.0]),
        sequence_T=torch.tensor([0, 1]),
        num_sequences=2,
    )
    output, grad = loss_and_grad(given, settings(kl_coef=1.0, **options), tokens=2.0)
    assert torch.isfinite(output.loss)
    assert torch.isfinite(grad).all()


def test_the_unbiased_form_weighs_by_the_ratio_with_gradient_through_both():
    # r = 1.5, d = log π_ref - log π = 0.5: value r·k3, slope r·(k3 + 1 - e^d) = -r·d.
    given = inputs([1.5], [0.0], ref=[math.log(0.5) + 0.5])
    options = settings(kl_coef=0.1, kl_unbiased=True)
    output, grad = loss_and_grad(given, options, tokens=1.0)
    assert output.loss.item() == pytest.approx(0.1 * 1.5 * (math.exp(0.5) - 1.5))
    assert grad.item() == pytest.approx(0.1 * 1.5 * -0.5)
    # The plain mean, not the weighed one, is what is reported as the divergence.
    assert output.sums["policy/kl_ref_k3"].item() == pytest.approx(math.exp(0.5) - 1.5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_forms_gradient_is_that_of_the_divergence_under_another_sampler(estimator):
    logits = torch.tensor([0.3, -0.7, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    reference = torch.tensor([0.25, 0.4, 0.15, 0.2], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    # Expectation over tokens drawn from the sampler, which is π_old.
    logprobs = logits.log_softmax(0)
    ratio = (logprobs - sampler.log()).exp()
    expected = (sampler * ratio * kl_to_reference(logprobs, reference, estimator)).sum()
    (grad,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(grad, exact)
    logprobs = logits.log_softmax(0)
    plain = (sampler * kl_to_reference(logprobs, reference, estimator)).sum()
    (off,) = torch.autograd.grad(plain, logits)
    assert (off - exact).norm() > 0.1 * exact.norm()


def test_the_coefficient_follows_the_divergence_by_at_most_a_fifth_of_the_gain():
    control = KlController(0.5, target=0.1, gain=0.5)
    control.update(0.11)  # 10 % above the target
    assert control.coef == pytest.approx(0.5 * 1.05)
    control.update(3.0)  # far above: as 20 %
    assert control.coef == pytest.approx(0.5 * 1.05 * 1.1)
    control.update(0.0)
    assert control.coef == pytest.approx(0.5 * 1.05 * 1.1 * 0.9)


@pytest.mark.parametrize("measured", [None, float("nan"), float("inf")])
def test_an_update_without_a_measured_divergence_leaves_the_coefficient(measured):
    control = KlController(0.5, target=0.1, gain=0.5)
    control.update(measured)
    assert control.coef == 0.5


def test_without_a_target_the_coefficient_is_fixed():
    control = KlController(0.5, target=None, gain=0.1)
    control.update(9.0)
    assert control.coef == 0.5

"""Settings and tokens for the tests of the loss."""

import math

import torch

from m3rl.grpo.loss import LossInputs, LossSettings, StepCounts, grpo_loss


def settings(**changes):
    defaults = {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": None,
        "kl_coef": 0.0,
        "kl_estimator": "k3",
        "importance_cap": None,
    }
    return LossSettings(**(defaults | changes))


def inputs(ratios, advantages, *, rho=None, ref=None, sequence=None, p=0.5, entropy=None):
    """Tokens with π / π_old = ratios and π_old / μ = rho, at π = p; each a sequence of its own."""
    logprobs = torch.full((len(ratios),), math.log(p), dtype=torch.float64, requires_grad=True)
    old = logprobs.detach() - torch.tensor(ratios, dtype=torch.float64).log()
    behaviour = old if rho is None else old - torch.tensor(rho, dtype=torch.float64).log()
    sequence = list(range(len(ratios))) if sequence is None else sequence
    return LossInputs(
        logprobs_T=logprobs,
        old_logprobs_T=old,
        behaviour_logprobs_T=behaviour,
        advantages_T=torch.tensor(advantages, dtype=torch.float64),
        entropy_T=torch.zeros(len(ratios), dtype=torch.float64) if entropy is None else entropy,
        ref_logprobs_T=None if ref is None else torch.tensor(ref, dtype=torch.float64),
        sequence_T=torch.tensor(sequence, dtype=torch.int64),
        num_sequences=max(sequence, default=-1) + 1,
    )


def loss_and_grad(given, options, *, tokens, sequences=1.0):
    output = grpo_loss(given, options, StepCounts(tokens, sequences))
    (grad,) = torch.autograd.grad(output.loss, given.logprobs_T)
    return output, grad

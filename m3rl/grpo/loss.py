"""GRPO's token loss and what describes it: pure functions of per-token log-probabilities.

Three policies, on the tokens the rollout sampled (`T`, all rows of a micro-batch flattened):
μ sampled them (recorded by the engine), π_old is what the clip compares with, π is being trained.

    r = π / π_old                   how far this update has moved
    ρ = π_old / μ                   how far trainer and engine disagree at the same weights
    l = -f(ρ) · min(r·A, clip(r, 1-low, 1+high)·A) + β·KL(π, π_ref)

With π_old = μ ("behaviour") ρ is exactly 1 and the correction f does nothing; the ratio r then
carries the mismatch, and correcting for it again would count it twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]
KL_ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3")

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this before exp(): clipping after an overflow gives 0 · inf = NaN."""
MAX_KL = 10.0
"""No token's KL term counts for more than this."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Everything that changes the loss."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    """Bound c on r for negative advantages, l <= -c·A (arXiv:1912.09729); None: no bound."""
    kl_coef: float
    """β; 0: no reference policy."""
    kl_estimator: KlEstimator
    importance_cap: float | None
    """C of truncated importance sampling, f(ρ) = min(ρ, C); None: f = 1."""

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"clip_low={self.clip_low} must be above 0 and at most 1")
        if self.clip_high <= 0:
            raise ValueError(f"clip_high={self.clip_high} must be above 0")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip={self.dual_clip} must be above 1")
        if self.kl_coef < 0:
            raise ValueError(f"kl.coef={self.kl_coef} must not be negative")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ValueError(
                f"kl.estimator={self.kl_estimator!r} is unknown; use one of {KL_ESTIMATORS}"
            )
        if self.importance_cap is not None and self.importance_cap <= 0:
            raise ValueError(f"importance.cap={self.importance_cap} must be above 0")


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Trained tokens only: padding and masked tokens never enter. All [T] and float."""

    logprobs_T: Tensor
    """log π, with gradient."""
    old_logprobs_T: Tensor
    behaviour_logprobs_T: Tensor
    advantages_T: Tensor
    entropy_T: Tensor
    ref_logprobs_T: Tensor | None
    """log π_ref; None exactly when `kl_coef` is 0."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What one micro-batch adds to the step."""

    loss: Tensor
    """Scalar: summed token losses over the global denominator. Sum over micro-batches and ranks."""
    sums: dict[str, Tensor]
    """Detached metrics over the same denominator: SUM them over micro-batches and ranks."""
    maxima: dict[str, Tensor]
    """Detached metrics to be reduced by MAX."""


@dataclass(slots=True)
class LossTotals:
    """What the outputs of micro-batches add up to, over ranks too."""

    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, other: LossTotals) -> None:
        self.loss += other.loss
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)

    def add_output(self, output: LossOutput) -> None:
        sums = {name: float(value) for name, value in output.sums.items()}
        maxima = {name: float(value) for name, value in output.maxima.items()}
        self.add(LossTotals(float(output.loss.detach()), sums, maxima))

    def metrics(self) -> dict[str, float]:
        return self.sums | self.maxima


def grpo_loss(inputs: LossInputs, settings: LossSettings, denominator: float) -> LossOutput:
    """Token-mean GRPO loss of one micro-batch (clip-higher, optional dual clip, TIS and KL).

    Args:
        denominator: trained tokens of the whole optimizer step, over all micro-batches and ranks.
    """
    log_ratio_T = clamped_log_ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    ratio_T = log_ratio_T.exp()
    adv_T = inputs.advantages_T
    clipped_T = ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    objective_T = torch.minimum(ratio_T * adv_T, clipped_T * adv_T)
    if settings.dual_clip is not None:
        bounded_T = torch.maximum(objective_T, settings.dual_clip * adv_T)
        objective_T = torch.where(adv_T < 0, bounded_T, objective_T)
    importance_T = clamped_log_ratio(inputs.old_logprobs_T, inputs.behaviour_logprobs_T).exp()
    if settings.importance_cap is not None:
        objective_T = objective_T * importance_T.clamp(max=settings.importance_cap).detach()
    pg_T = -objective_T
    loss_T = pg_T

    per_token = {
        "policy/pg_loss": pg_T,
        "policy/entropy": inputs.entropy_T,
        "policy/ppo_kl": -log_ratio_T,
        "policy/ratio_mean": ratio_T,
        "policy/clip_frac_low": (adv_T < 0) & (ratio_T < 1 - settings.clip_low),
        "policy/clip_frac_high": (adv_T > 0) & (ratio_T > 1 + settings.clip_high),
    }
    if inputs.ref_logprobs_T is not None:
        kl_T = kl_to_reference(inputs.logprobs_T, inputs.ref_logprobs_T, settings.kl_estimator)
        loss_T = loss_T + settings.kl_coef * kl_T
        with torch.no_grad():
            for k in ("k1", "k3"):
                per_token[f"policy/kl_ref_{k}"] = kl_to_reference(
                    inputs.logprobs_T, inputs.ref_logprobs_T, k
                )
        per_token["policy/kl_loss"] = settings.kl_coef * kl_T
    sums = {name: (t.detach().sum() / denominator) for name, t in per_token.items()}
    sums["policy/clip_frac"] = sums["policy/clip_frac_low"] + sums["policy/clip_frac_high"]
    loss = loss_T.sum() / denominator
    sums["policy/loss"] = loss.detach()
    maxima = {"policy/ratio_max": ratio_T.detach().max()} if len(ratio_T) else {}
    return LossOutput(loss, sums, maxima)


def over_steps(steps: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of an update from those of its optimizer steps.

    Maxima (`*_max`) stay maxima, skipped steps are counted, everything else is averaged.
    """
    if not steps:
        return {"policy/loss": 0.0, "optim/grad_norm": 0.0, "optim/update_skipped": 0.0}
    metrics = {}
    for name in steps[0]:
        values = [step[name] for step in steps]
        if name == "optim/update_skipped":
            metrics[name] = sum(values)
        elif name.endswith("_max"):
            metrics[name] = max(values)
        else:
            metrics[name] = sum(values) / len(values)
    return metrics


def cross_entropy(logprobs_T: Tensor, denominator: float) -> Tensor:
    """Mean negative log-probability over the global denominator: the loss of supervised steps."""
    return -logprobs_T.sum() / denominator


def clamped_log_ratio(log_a_T: Tensor, log_b_T: Tensor) -> Tensor:
    """log(a / b) within ±MAX_LOG_RATIO; NaN stays NaN, so that a broken input is seen."""
    return (log_a_T - log_b_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_to_reference(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(π ‖ π_ref) on tokens sampled by π, each within ±MAX_KL.

    With d = log π_ref - log π: k1 = -d (unbiased, may be negative), k2 = d²/2 (its gradient is that
    of the KL when on-policy), k3 = e^d - 1 - d (unbiased and never negative).
    """
    d_T = clamped_log_ratio(ref_logprobs_T, logprobs_T)
    if estimator == "k1":
        kl_T = -d_T
    elif estimator == "k2":
        kl_T = d_T.square() / 2
    else:
        kl_T = k3(d_T)
    return kl_T.clamp(-MAX_KL, MAX_KL)


def k3(log_ratio_T: Tensor) -> Tensor:
    """e^d - 1 - d of a clamped log ratio d; `expm1` keeps it exact for small d."""
    return torch.expm1(log_ratio_T) - log_ratio_T

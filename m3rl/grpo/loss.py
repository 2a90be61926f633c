"""The losses of the GRPO family and what describes them: pure functions of per-token
log-probabilities.

Three policies, on the tokens the rollout sampled (`T`, all rows of a micro-batch flattened):
μ sampled them (recorded by the engine), π_old is what the ratio compares with, π is being trained.

    r = π / π_old                   how far this update has moved; or its mean over a sequence
    ρ = π_old / μ                   how far trainer and engine disagree at the same weights
    l = -f(ρ) · objective(r, A) + β · KL(π, π_ref) - entropy_coef · H
    L = Σ w · l / denominator       over the tokens of all micro-batches and ranks

With π_old = μ ("behaviour") ρ is exactly 1 and the correction f does nothing; the ratio r then
carries the mismatch, and correcting for it again would count it twice. The plain policy gradient
has no r: with it nothing corrects.

    aggregation      w                       denominator
    token_mean       1                       trained tokens                          (DAPO)
    sequence_mean    1 / tokens of its own   sequences                               (GRPO, GSPO)
    constant         1                       sequences · constant length             (Dr. GRPO)

Denominators are of the whole optimizer step, so a sum over micro-batches and ranks is the loss,
however the rows were packed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from m3rl.grpo.kl import KL_ESTIMATORS, KlEstimator, clamped_log_ratio, kl_to_reference
from m3rl.grpo.objective import (
    OBJECTIVES,
    ObjectiveKind,
    Surrogate,
    cispo,
    dppo_tv,
    policy_gradient,
    ppo_clip,
    sequence_mean,
    sequence_weight,
)

RatioLevel = Literal["token", "sequence"]
RATIO_LEVELS: tuple[RatioLevel, ...] = ("token", "sequence")
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", "constant")


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Everything that changes the loss."""

    clip_low: float
    """Of the ratio below 1; with dppo_tv of the probability below that of μ."""
    clip_high: float
    dual_clip: float | None
    """Bound c on r for negative advantages, l <= -c·A (arXiv:1912.09729); None: no bound."""
    kl_coef: float
    """β; 0: no reference policy."""
    kl_estimator: KlEstimator
    importance_cap: float | None
    """C of truncated importance sampling, f(ρ) = min(ρ, C); None: f = 1."""
    objective: ObjectiveKind = "ppo_clip"
    ratio: RatioLevel = "token"
    aggregation: Aggregation = "token_mean"
    constant_length: int = 1
    """Tokens that `constant` takes for every sequence's length."""
    kl_in_reward: bool = False
    """The KL was taken off the rewards: no term of the loss."""
    kl_unbiased: bool = False
    """Weigh the KL of a token by r, with gradient (arXiv:2512.02556): its gradient is that of
    KL(π ‖ π_ref) also where π_old sampled."""
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"clip_low={self.clip_low} must be above 0 and at most 1")
        if self.clip_high <= 0:
            raise ValueError(f"clip_high={self.clip_high} must be above 0")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip={self.dual_clip} must be above 1")
        if self.kl_coef < 0:
            raise ValueError(f"kl.coef={self.kl_coef} must not be negative")
        if self.importance_cap is not None and self.importance_cap <= 0:
            raise ValueError(f"importance.cap={self.importance_cap} must be above 0")
        if self.entropy_coef < 0:
            raise ValueError(f"entropy_coef={self.entropy_coef} must not be negative")
        if self.constant_length < 1:
            raise ValueError(f"constant_length={self.constant_length} must be at least 1")
        kinds: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("kl.estimator", self.kl_estimator, KL_ESTIMATORS),
            ("objective", self.objective, OBJECTIVES),
            ("ratio", self.ratio, RATIO_LEVELS),
            ("aggregation", self.aggregation, AGGREGATIONS),
        )
        for name, value, known in kinds:
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown; use one of {known}")
        if self.objective == "dppo_tv" and self.ratio == "sequence":
            raise ValueError("objective='dppo_tv' bounds single tokens; use ratio='token'")

    def with_kl_coef(self, kl_coef: float | None) -> LossSettings:
        """These settings with another β; None: with their own."""
        return self if kl_coef is None else replace(self, kl_coef=kl_coef)


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What one optimizer step trains on, over all its micro-batches and ranks."""

    tokens: float
    sequences: float
    """Those with at least one trained token."""

    @classmethod
    def of(cls, loss_mask_BS: np.ndarray) -> StepCounts:
        """Counts of the rows of one step."""
        return cls(float(loss_mask_BS.sum()), float(loss_mask_BS.any(1).sum()))


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Trained tokens only: padding and masked tokens never enter. All [T] and float, but
    `sequence_T`."""

    logprobs_T: Tensor
    """log π, with gradient."""
    old_logprobs_T: Tensor
    behaviour_logprobs_T: Tensor
    advantages_T: Tensor
    entropy_T: Tensor
    """With gradient where `entropy_coef` is above 0."""
    ref_logprobs_T: Tensor | None
    """log π_ref; None exactly when the loss has no KL term."""
    sequence_T: Tensor
    """int64: which sequence each token is of, below `num_sequences`; every one is here whole."""
    num_sequences: int
    """A bound of the ids alone: there may be fewer sequences."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What one micro-batch adds to the step."""

    loss: Tensor
    """Scalar: summed token losses over the global denominator. Sum over micro-batches and ranks."""
    sums: dict[str, Tensor]
    """Detached metrics over global denominators: SUM them over micro-batches and ranks."""
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
            self.maxima[name] = _larger(self.maxima.get(name, value), value)

    def add_output(self, output: LossOutput) -> None:
        sums = {name: float(value) for name, value in output.sums.items()}
        maxima = {name: float(value) for name, value in output.maxima.items()}
        self.add(LossTotals(float(output.loss.detach()), sums, maxima))

    def metrics(self) -> dict[str, float]:
        return self.sums | self.maxima


def grpo_loss(inputs: LossInputs, settings: LossSettings, step: StepCounts) -> LossOutput:
    """One micro-batch's part of the loss and of the `policy/*` metrics.

    `policy/{loss,pg_loss,kl_loss,entropy_loss}` are aggregated as the loss is, all others are
    means over tokens.

    Raises:
        ValueError: an entropy bonus on an entropy without gradient.
    """
    log_ratio_T = clamped_log_ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    ratio_T = log_ratio_T.exp()
    if settings.ratio == "sequence":
        ratio_T = sequence_mean(log_ratio_T, inputs.sequence_T, inputs.num_sequences).exp()
    surrogate = _surrogate(inputs, settings, ratio_T)
    objective_T = surrogate.value_T
    importance_T = clamped_log_ratio(inputs.old_logprobs_T, inputs.behaviour_logprobs_T).exp()
    if settings.importance_cap is not None:
        objective_T = objective_T * importance_T.clamp(max=settings.importance_cap).detach()
    pg_T = -objective_T
    loss_T = pg_T

    aggregated = {"policy/pg_loss": pg_T}
    per_token = {
        "policy/entropy": inputs.entropy_T,
        "policy/ppo_kl": -log_ratio_T,
        "policy/ratio_mean": ratio_T,
        "policy/clip_frac_low": surrogate.is_cut_low_T,
        "policy/clip_frac_high": surrogate.is_cut_high_T,
    }
    if inputs.ref_logprobs_T is not None:
        kl_T = kl_to_reference(inputs.logprobs_T, inputs.ref_logprobs_T, settings.kl_estimator)
        if settings.kl_unbiased:
            kl_T = log_ratio_T.exp() * kl_T
        loss_T = loss_T + settings.kl_coef * kl_T
        aggregated["policy/kl_loss"] = settings.kl_coef * kl_T
        with torch.no_grad():
            for k in ("k1", "k3"):
                per_token[f"policy/kl_ref_{k}"] = kl_to_reference(
                    inputs.logprobs_T, inputs.ref_logprobs_T, k
                )
    if settings.entropy_coef > 0:
        bonus_T = _entropy_bonus(inputs, settings)
        loss_T = loss_T - bonus_T
        aggregated["policy/entropy_loss"] = -bonus_T
    return _aggregate(loss_T, aggregated, per_token, ratio_T, inputs, settings, step)


def _surrogate(inputs: LossInputs, settings: LossSettings, ratio_T: Tensor) -> Surrogate:
    adv_T, low, high = inputs.advantages_T, settings.clip_low, settings.clip_high
    if settings.objective == "ppo_clip":
        return ppo_clip(ratio_T, adv_T, low=low, high=high, dual=settings.dual_clip)
    if settings.objective == "cispo":
        return cispo(ratio_T, inputs.logprobs_T, adv_T, high=high)
    if settings.objective == "dppo_tv":
        return dppo_tv(
            ratio_T, inputs.logprobs_T, inputs.behaviour_logprobs_T, adv_T, low=low, high=high
        )
    return policy_gradient(inputs.logprobs_T, adv_T)


def _entropy_bonus(inputs: LossInputs, settings: LossSettings) -> Tensor:
    if inputs.logprobs_T.requires_grad and not inputs.entropy_T.requires_grad:
        raise ValueError(
            f"entropy_coef={settings.entropy_coef} needs the gradient of the entropy, and it was "
            "computed without; pass entropy_grad=True to the policy"
        )
    return settings.entropy_coef * inputs.entropy_T


def _aggregate(
    loss_T: Tensor,
    aggregated: dict[str, Tensor],
    per_token: dict[str, Tensor],
    ratio_T: Tensor,
    inputs: LossInputs,
    settings: LossSettings,
    step: StepCounts,
) -> LossOutput:
    denominator = step.tokens
    if settings.aggregation == "sequence_mean":
        weight_T = sequence_weight(loss_T, inputs.sequence_T, inputs.num_sequences)
        loss_T = loss_T * weight_T
        aggregated = {name: t * weight_T for name, t in aggregated.items()}
        denominator = step.sequences
    elif settings.aggregation == "constant":
        denominator = step.sequences * settings.constant_length
    sums = {name: t.detach().sum() / step.tokens for name, t in per_token.items()}
    sums |= {name: t.detach().sum() / denominator for name, t in aggregated.items()}
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
            metrics[name] = reduce(_larger, values)
        else:
            metrics[name] = sum(values) / len(values)
    return metrics


def _larger(a: float, b: float) -> float:
    """The maximum; NaN if either is, whereas `max` would keep the first."""
    return a if a > b or math.isnan(a) else b


def cross_entropy(logprobs_T: Tensor, denominator: float) -> Tensor:
    """Mean negative log-probability over the global denominator: the loss of supervised steps."""
    return -logprobs_T.sum() / denominator

"""KL divergence from the policy to its reference: estimators, and a coefficient that adapts."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]
KL_ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3")

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this before exp(): clipping after an overflow gives 0 · inf = NaN."""
MAX_KL = 10.0
"""No token's KL term counts for more than this."""
MAX_KL_ERROR = 0.2
"""Largest relative error that the adaptive coefficient answers to in one update."""


def clamped_log_ratio(log_a_T: Tensor, log_b_T: Tensor) -> Tensor:
    """log(a / b) within ±MAX_LOG_RATIO; NaN stays NaN, so that a broken input is seen."""
    return (log_a_T - log_b_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_to_reference(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(π ‖ π_ref) on tokens sampled by π, each within ±MAX_KL.

    With d = log π_ref - log π: k1 = -d (unbiased, may be negative; its gradient is 0 on average),
    k2 = d²/2 (its gradient is that of the KL when on-policy), k3 = e^d - 1 - d (unbiased and never
    negative). Schulman, "Approximating KL Divergence", 2020.
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


class KlController:
    """The coefficient β of a KL term, steered so that the KL stays near a target.

    Each update multiplies it by 1 + gain · clip(KL / target - 1, ±0.2) (arXiv:1909.08593, section
    2.2). Without a target it never changes.

    Args:
        coef: β of the first update, above 0 if there is a target.
        target: of the mean KL a token (k3, `policy/kl_ref_k3`), in nats; None: fixed β.
    """

    def __init__(self, coef: float, target: float | None, gain: float) -> None:
        self.coef = coef
        self._target = target
        self._gain = gain

    def update(self, measured: float | None) -> None:
        """Answer to the KL of an update; None or not finite (nothing was trained): no change."""
        if self._target is None or measured is None or not math.isfinite(measured):
            return
        error = min(max(measured / self._target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
        self.coef *= 1 + self._gain * error

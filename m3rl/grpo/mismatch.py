"""How far the trainer's log-probabilities are from those the rollout engine recorded."""

from __future__ import annotations

import numpy as np

from m3rl.grpo.kl import MAX_LOG_RATIO


def mismatch_metrics(
    trainer_logprobs_T: np.ndarray, behaviour_logprobs_T: np.ndarray, *, cap: float | None
) -> dict[str, float]:
    """Compare log π with log μ of the same tokens at the same weights (`mismatch/*`).

    With d = log π - log μ: k1 = mean(-d) and k3 = mean(e^d - 1 - d) estimate KL(μ ‖ π);
    `prob_mult_error` is mean(e^|d|), `pearson` correlates the probabilities, `is_weight` is ρ = e^d
    before truncation. A shift by one token shows as a mean |d| near 1 or more.

    Args:
        trainer_logprobs_T: [T] float, trained tokens only.
        behaviour_logprobs_T: [T] float, of the same tokens.
        cap: C of truncated importance sampling, or None: `is_truncated_frac` is then absent.

    Returns:
        Floats; none when there is no token. `pearson` is absent when either side is constant.
    """
    if len(trainer_logprobs_T) == 0:
        return {}
    pi = trainer_logprobs_T.astype(np.float64)
    mu = behaviour_logprobs_T.astype(np.float64)
    d = np.clip(pi - mu, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    abs_d = np.abs(pi - mu)
    weight = np.exp(d)
    metrics = {
        "mismatch/kl_k1": float(-d.mean()),
        "mismatch/kl_k3": float((np.expm1(d) - d).mean()),
        "mismatch/logprob_abs_diff_mean": float(abs_d.mean()),
        "mismatch/logprob_abs_diff_p99": float(np.percentile(abs_d, 99)),
        "mismatch/logprob_abs_diff_max": float(abs_d.max()),
        "mismatch/prob_mult_error": float(np.exp(np.abs(d)).mean()),
        "mismatch/is_weight_mean": float(weight.mean()),
        "mismatch/is_weight_max": float(weight.max()),
    }
    if cap is not None:
        metrics["mismatch/is_truncated_frac"] = float((weight > cap).mean())
    p, q = np.exp(pi), np.exp(mu)
    if p.std() > 0 and q.std() > 0:
        metrics["mismatch/pearson"] = float(np.corrcoef(p, q)[0, 1])
    return metrics

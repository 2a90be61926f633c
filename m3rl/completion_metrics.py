"""The `reward/*`, `gen/*`, `data/staleness_*`, `perf/*` and `eval/*` numbers of a step.

Lengths are counts of the engine's own tokens, never read from a mask. Rewards that could not be
scored are left out of every mean and have shares of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from m3rl.stopwatch import Stopwatch
from m3rl.types import SOLVED, Completion, Group, TrainBatch

REPEATED_NGRAM = 4
REPEATED_SHARE = 0.5


def completion_metrics(
    groups: Sequence[Group], *, version: int, think_end_id: int | None = None
) -> dict[str, float]:
    """All numbers about the completions of one training step.

    Args:
        groups: what was collected, truncated and masked completions included.
        version: policy version that the step trains (0 before the first update).
        think_end_id: id of the marker that ends the thinking, to count thinking tokens.
    """
    completions = [c for group in groups for c in group.completions]
    if not completions:
        return {}
    return {
        **reward_metrics(groups),
        **generation_metrics(completions, think_end_id),
        **staleness_metrics(completions, version),
    }


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Distribution of rewards, shares of solved and mixed groups, failures of the scorer."""
    completions = [c for group in groups for c in group.completions]
    by_name: dict[str, list[float]] = defaultdict(list)
    solved_frac = []
    for group in groups:
        scored = [c for c in group.completions if c.reward_status == "ok"]
        for c in scored:
            by_name[f"by_env/{group.prompt.environment}"].append(c.reward)
            for part, value in c.reward_parts.items():
                by_name[f"part/{part}"].append(value)
        if scored:
            solved_frac.append(np.mean([c.reward == SOLVED for c in scored]))
    out = {f"reward/{name}/mean": float(np.mean(values)) for name, values in by_name.items()}
    rewards = np.array([c.reward for c in completions if c.reward_status == "ok"])
    if len(rewards):
        out |= {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/min": float(rewards.min()),
            "reward/max": float(rewards.max()),
            "reward/solved_frac": float(np.mean(rewards == SOLVED)),
        }
    if solved_frac:
        shares = np.array(solved_frac)
        out |= {
            "reward/solve_all_frac": float(np.mean(shares == 1)),
            "reward/solve_none_frac": float(np.mean(shares == 0)),
            "reward/mixed_frac": float(np.mean((shares > 0) & (shares < 1))),
        }
    status = [c.reward_status for c in completions]
    failed = status.count("error") + status.count("nonfinite")
    out["reward/verifier_error_frac"] = failed / len(status)
    out["reward/verifier_timeout_frac"] = status.count("timeout") / len(status)
    return out


def generation_metrics(
    completions: Sequence[Completion], think_end_id: int | None = None
) -> dict[str, float]:
    """Lengths in tokens (the end token counts) and how completions ended."""
    lengths = np.array([len(c.completion_ids) for c in completions])
    reasons = np.array([c.finish_reason for c in completions])
    out = {
        "gen/response_len_mean": float(lengths.mean()),
        "gen/response_len_p50": float(np.percentile(lengths, 50)),
        "gen/response_len_p95": float(np.percentile(lengths, 95)),
        "gen/response_len_min": float(lengths.min()),
        "gen/response_len_max": float(lengths.max()),
        "gen/truncated_frac": float(np.mean(reasons == "length")),
        "gen/stop_frac": float(np.mean(reasons == "stop")),
        "gen/prompt_len_mean": float(np.mean([len(c.prompt_ids) for c in completions])),
        "gen/turns_mean": float(np.mean([len(c.turn_starts) for c in completions])),
        "gen/loss_tokens": float(sum(int(c.loss_mask.sum()) for c in completions)),
        "gen/empty_frac": float(np.mean([not c.text.strip() for c in completions])),
        "gen/repetition_frac": float(np.mean([_repeats(c.completion_ids) for c in completions])),
    }
    if (reasons == "stop").any():
        out["gen/finished_len_mean"] = float(lengths[reasons == "stop"].mean())
    if think_end_id is not None:
        thinking = [_thinking_len(c.completion_ids, think_end_id) for c in completions]
        out["gen/thinking_len_mean"] = float(np.mean(thinking))
    return out


def staleness_metrics(completions: Sequence[Completion], version: int) -> dict[str, float]:
    """How many versions old the sampled tokens are: mean over tokens, and the largest."""
    total, tokens, largest = 0, 0, 0
    for c in completions:
        starts, versions = c.version_spans[:, 0], c.version_spans[:, 1]
        counts = np.diff(np.append(starts, len(c.completion_ids)))
        ages = version - versions
        total += int((ages * counts).sum())
        tokens += int(counts.sum())
        largest = max(largest, int(ages.max(initial=0)))
    if not tokens:
        return {}
    return {"data/staleness_mean": total / tokens, "data/staleness_max": float(largest)}


def eval_metrics(name: str, groups: Sequence[Group]) -> dict[str, float]:
    """`eval/<name>/*`: accuracy is the share of scored completions with reward 1.0.

    With several completions a prompt, `avg_at_k` is the same number under its usual name, and
    `pass_at_k` the share of prompts with any solution.
    """
    completions = [c for group in groups for c in group.completions]
    scored = [c for c in completions if c.reward_status == "ok"]
    if not completions:
        return {}
    prefix = f"eval/{name}/"
    lengths = [len(c.completion_ids) for c in completions]
    out = {
        f"{prefix}num_prompts": float(len(groups)),
        f"{prefix}response_len_mean": float(np.mean(lengths)),
        f"{prefix}truncated_frac": float(
            np.mean([c.finish_reason == "length" for c in completions])
        ),
        f"{prefix}verifier_error_frac": 1 - len(scored) / len(completions),
    }
    if scored:
        solved = [c.reward == SOLVED for c in scored]
        out[f"{prefix}accuracy"] = float(np.mean(solved))
        out[f"{prefix}reward_mean"] = float(np.mean([c.reward for c in scored]))
    k = max(len(group.completions) for group in groups)
    if scored and k > 1:
        any_solved = [any(c.reward == SOLVED for c in group.completions) for group in groups]
        out[f"{prefix}avg_at_{k}"] = out[f"{prefix}accuracy"]
        out[f"{prefix}pass_at_{k}"] = float(np.mean(any_solved))
    return out


def _repeats(ids: np.ndarray) -> bool:
    """More than half of the 4-grams occurred before in the same completion."""
    if len(ids) <= REPEATED_NGRAM:
        return False
    windows = np.lib.stride_tricks.sliding_window_view(ids, REPEATED_NGRAM)
    return len(np.unique(windows, axis=0)) < (1 - REPEATED_SHARE) * len(windows)


def _thinking_len(ids: np.ndarray, think_end_id: int) -> int:
    """Tokens up to the marker that ends the thinking, 0 without one."""
    places = np.flatnonzero(ids == think_end_id)
    return int(places[0]) + 1 if len(places) else 0


def throughput(groups: Sequence[Group], batch: TrainBatch, watch: Stopwatch) -> dict[str, float]:
    """`perf/*`: generated tokens and trained row tokens a second of their phase."""
    generated = sum(len(c.completion_ids) for group in groups for c in group.completions)
    return {
        "perf/gen_tokens_per_s": generated / max(watch.seconds("time/generate"), 1e-9),
        "perf/train_tokens_per_s": int(batch.length_B.sum())
        / max(watch.seconds("time/train"), 1e-9),
    }

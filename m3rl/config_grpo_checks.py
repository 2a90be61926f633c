"""Switches of the algorithm that exclude or idle one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m3rl.config import Config
    from m3rl.config_grpo import GRPOConfig

MIN_MISMATCH_CLIP = 1e-2
"""Bounds of a sequence's ratio that the mismatch of trainer and runtime stays within: a mean of
0.03 a token, as MXFP8 may have, leaves about 4e-3 in the mean over 100 tokens."""


def grpo_conflicts(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Message and keys of each contradiction."""
    grpo, max_tokens = config.grpo, config.rollout.max_tokens
    if grpo.objective == "dppo_tv" and grpo.ratio == "sequence":
        yield (
            "grpo.ratio: sequence has one ratio for a completion, and grpo.objective: dppo_tv "
            "bounds the probability of single tokens; set ratio: token, or objective: ppo_clip",
            ("grpo.ratio", "grpo.objective"),
        )
    if grpo.objective == "pg":
        yield from _pg_conflicts(grpo)
    elif grpo.ratio == "sequence" and grpo.old_logprobs == "behaviour":
        yield from _sequence_conflicts(grpo)
    if grpo.kl.unbiased and grpo.kl.estimator == "k2":
        yield (
            "grpo.kl.unbiased: k2 weighed by the ratio does not have the gradient of the KL; set "
            "grpo.kl.estimator: k3 or k1",
            ("grpo.kl.unbiased", "grpo.kl.estimator"),
        )
    if grpo.kl.target is not None and grpo.kl.coef == 0:
        yield (
            f"grpo.kl.target: {grpo.kl.target:g} is reached by multiplying grpo.kl.coef, which is "
            "0; set the coefficient to begin with",
            ("grpo.kl.target", "grpo.kl.coef"),
        )
    if grpo.refill_rounds > 0 and not grpo.skip_zero_variance:
        yield (
            f"grpo.refill_rounds: {grpo.refill_rounds} replaces groups of equal rewards, and "
            "grpo.skip_zero_variance: false trains on them; set it to true, or refill_rounds: 0",
            ("grpo.refill_rounds", "grpo.skip_zero_variance"),
        )
    if grpo.overlong.buffer > max_tokens:
        yield (
            f"grpo.overlong.buffer: {grpo.overlong.buffer} is longer than rollout.max_tokens: "
            f"{max_tokens}, so the shortest completion would be punished; lower it",
            ("grpo.overlong.buffer", "rollout.max_tokens"),
        )
    if grpo.advantage == "maxrl":
        yield from _maxrl_conflicts(grpo)


def _pg_conflicts(grpo: GRPOConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    if grpo.old_logprobs == "behaviour" and grpo.importance.kind != "none":
        yield (
            f"grpo.importance.kind: {grpo.importance.kind} does nothing with old_logprobs: "
            "behaviour, and grpo.objective: pg has no ratio that would carry the mismatch in its "
            "place; set old_logprobs: recompute, or importance.kind: none to leave it uncorrected",
            ("grpo.importance.kind", "grpo.objective", "grpo.old_logprobs"),
        )
    if grpo.updates_per_batch > 1:
        yield (
            f"grpo.updates_per_batch: {grpo.updates_per_batch} moves the policy away from the one "
            "that sampled, and grpo.objective: pg has no ratio to correct for it; set "
            "updates_per_batch: 1, or objective: ppo_clip",
            ("grpo.updates_per_batch", "grpo.objective"),
        )


def _sequence_conflicts(grpo: GRPOConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    names = ("clip_high",) if grpo.objective == "cispo" else ("clip_low", "clip_high")
    narrow = [name for name in names if getattr(grpo, name) < MIN_MISMATCH_CLIP]
    if narrow:
        yield (
            f"grpo.{narrow[0]}: {getattr(grpo, narrow[0]):g} is below {MIN_MISMATCH_CLIP:g}: with "
            "old_logprobs: behaviour the ratio of a sequence differs from 1 by about as much "
            "before any step, by what trainer and runtime disagree, and would be clipped; set "
            "old_logprobs: recompute, or wider bounds",
            (f"grpo.{narrow[0]}", "grpo.ratio", "grpo.old_logprobs"),
        )


def _maxrl_conflicts(grpo: GRPOConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    shaped = "makes rewards negative, and grpo.advantage: maxrl divides by their mean"
    if grpo.overlong.buffer > 0:
        yield (
            f"grpo.overlong.buffer: {grpo.overlong.buffer} {shaped}; set truncated: mask in its "
            "place, or another advantage",
            ("grpo.overlong.buffer", "grpo.advantage"),
        )
    if grpo.kl.place == "reward" and grpo.kl.coef > 0:
        yield (
            f"grpo.kl.place: reward {shaped}; set place: loss, or another advantage",
            ("grpo.kl.place", "grpo.advantage"),
        )


def idle_grpo_keys(grpo: GRPOConfig) -> Iterator[tuple[str, bool, str]]:
    """Key, whether it does nothing, and why and what to do."""
    has_no_clip = grpo.objective == "pg"
    pg_has_none = "grpo.objective: pg has no ratio; set another objective, or leave it out"
    yield "grpo.ratio", has_no_clip and grpo.ratio == "sequence", pg_has_none
    yield "grpo.clip_high", has_no_clip, pg_has_none
    yield (
        "grpo.clip_low",
        grpo.objective in ("pg", "cispo"),
        f"grpo.objective: {grpo.objective} has no lower bound; leave it out",
    )
    yield (
        "grpo.dual_clip",
        grpo.dual_clip is not None and grpo.objective != "ppo_clip",
        f"grpo.objective: {grpo.objective} is not clipped so; set ppo_clip, or leave it out",
    )
    yield (
        "grpo.constant_length",
        grpo.constant_length is not None and grpo.aggregation != "constant",
        f"grpo.aggregation: {grpo.aggregation} divides by real lengths; set constant, or leave it "
        "out",
    )
    yield (
        "grpo.overlong.penalty",
        grpo.overlong.buffer == 0,
        "grpo.overlong.buffer: 0 punishes no length; set a buffer, or leave it out",
    )
    carries = "the ratio itself carries the mismatch"
    if has_no_clip:
        carries = "it is always 1"
    for name in ("kind", "cap"):
        yield (
            f"grpo.importance.{name}",
            grpo.old_logprobs == "behaviour",
            f"with grpo.old_logprobs: behaviour {carries}; set old_logprobs: recompute, or leave "
            "it out",
        )
    yield from _idle_kl_keys(grpo)


def _idle_kl_keys(grpo: GRPOConfig) -> Iterator[tuple[str, bool, str]]:
    kl = grpo.kl
    for name in ("estimator", "place", "unbiased"):
        is_default = getattr(kl, name) == type(kl).model_fields[name].default
        yield (
            f"grpo.kl.{name}",
            kl.coef == 0 and not is_default,
            "grpo.kl.coef: 0 adds no KL term; set a coefficient, or leave it out",
        )
    yield (
        "grpo.kl.unbiased",
        kl.coef > 0 and kl.unbiased and kl.place == "reward",
        "grpo.kl.place: reward has no term in the loss; set place: loss, or leave it out",
    )
    yield (
        "grpo.kl.coef",
        kl.coef > 0 and kl.estimator == "k1" and kl.place == "loss" and not kl.unbiased,
        "the gradient of k1 in the loss is 0 on average; set estimator: k3 or k2, or place: "
        "reward, or unbiased: true",
    )
    yield (
        "grpo.kl.gain",
        kl.target is None,
        "grpo.kl.target: null keeps the coefficient; set a target, or leave it out",
    )

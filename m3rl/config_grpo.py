"""Settings of the algorithm: small switches that combine freely, and presets of them.

A preset stands for the values that a paper trained with. Every key that is written anywhere wins
over it, wherever the preset is named, and a resolved configuration shows what came out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from m3rl.config_file import Bool, Float, Int, Origins, Raw, Section, at_most, flatten

PresetName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]

PRESETS: dict[PresetName, Raw] = {
    # DeepSeekMath, arXiv:2402.03300
    "grpo": {
        "advantage": "grpo",
        "aggregation": "sequence_mean",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl": {"coef": 0.04, "estimator": "k3"},
    },
    # arXiv:2503.20783
    "dr_grpo": {
        "advantage": "dr_grpo",
        "aggregation": "constant",
        "clip_low": 0.2,
        "clip_high": 0.2,
    },
    # arXiv:2503.14476; its punishment of long completions needs a length: overlong.buffer
    "dapo": {
        "advantage": "grpo",
        "aggregation": "token_mean",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "refill_rounds": 10,
    },
    # arXiv:2507.18071
    "gspo": {
        "advantage": "grpo",
        "ratio": "sequence",
        "aggregation": "sequence_mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        # Against the runtime's a ratio leaves bounds that narrow before any step.
        "old_logprobs": "recompute",
    },
    # MiniMax-M1, arXiv:2506.13585, which gives no number for its bound
    "cispo": {
        "advantage": "grpo",
        "objective": "cispo",
        "aggregation": "token_mean",
        "clip_high": 0.28,
    },
    # arXiv:2402.14740: REINFORCE on whole completions, KL in the reward
    "rloo": {
        "advantage": "rloo",
        "objective": "pg",
        "aggregation": "constant",
        "kl": {"coef": 0.05, "estimator": "k1", "place": "reward"},
        "old_logprobs": "recompute",  # for `importance`: pg has no ratio to carry the mismatch
    },
}


class KLConfig(Section):
    coef: Float = Field(default=0.0, ge=0)
    """Weight of the KL term against the initial policy; 0 keeps no reference."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence (Schulman 2020)."""
    place: Literal["loss", "reward"] = "loss"
    """A term of each token's loss, or taken off the reward of each completion, summed over its
    tokens, before rewards are compared."""
    unbiased: Bool = False
    """Weigh the term of the loss by the ratio (arXiv:2512.02556): then its gradient is that of the
    KL also when older weights sampled; for k1 and k3."""
    target: Annotated[Float, Field(gt=0)] | None = None
    """Mean KL a token, in nats (k3, policy/kl_ref_k3), that the coefficient is steered to after
    every batch (arXiv:1909.08593); null: it stays."""
    gain: Annotated[Float, Field(gt=0)] = 0.1
    """How fast: the coefficient changes by at most gain / 5 of itself a batch."""


class ImportanceConfig(Section):
    kind: Literal["tis", "none"] = "tis"
    """Correction for sampling by the runtime: truncated importance sampling, or none. Acts with
    old_logprobs: recompute; with behaviour the ratio of the objective carries the mismatch (pg has
    none, so there it needs recompute)."""
    cap: Float = Field(default=2.0, gt=0)
    """Largest importance weight of a token."""


class OverlongConfig(Section):
    buffer: Int = Field(default=0, ge=0)
    """The last tokens before rollout.max_tokens over which a completion's reward falls, evenly, by
    up to `penalty` (soft punishment, arXiv:2503.14476); 0: none."""
    penalty: Float = Field(default=1.0, gt=0)
    """What a completion of full length loses."""


class GRPOConfig(Section):
    preset: PresetName | None = None
    """Values of a paper for the keys here that are written nowhere; null: the defaults below."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "batch_std", "maxrl"] = "grpo"
    """Rewards of a group become advantages: over their deviation, only centred, leave-one-out, over
    the deviation of the batch (REINFORCE++-baseline), or over their mean (MaxRL)."""
    objective: Literal["ppo_clip", "cispo", "dppo_tv", "pg"] = "ppo_clip"
    """Clipped ratio, CISPO's cut weight, the ratio within a trust region of probabilities around
    the runtime's (DPPO-TV), or the plain policy gradient."""
    ratio: Literal["token", "sequence"] = "token"
    """New over old probability of each token, or their geometric mean over a completion (GSPO)."""
    clip_low: Float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low; with dppo_tv, how far the probability of a bad
    token may have fallen before it is left alone."""
    clip_high: Float = Field(default=0.28, gt=0)
    """The ratio is clipped above at 1 + clip_high (clip-higher, arXiv:2503.14476); with dppo_tv,
    how far the probability of a good token may have risen."""
    dual_clip: Annotated[Float, Field(gt=1)] | None = None
    """Bound of the loss at negative advantages (arXiv:1912.09729); null for none."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over all tokens, mean over completions of their means, or sum over tokens divided by
    completions times constant_length (Dr. GRPO)."""
    constant_length: Annotated[Int, Field(ge=1)] | None = None
    """With aggregation constant, the length of every completion; null: rollout.max_tokens."""
    kl: KLConfig = KLConfig()
    entropy_coef: Annotated[
        Float, Field(ge=0), at_most(1, "a bonus that large leaves the rewards no say")
    ] = 0.0
    """Weight of the entropy bonus in the loss."""
    old_logprobs: Literal["behaviour", "recompute"] = "behaviour"
    """Denominator of the ratio: the runtime's logprobs, or the trainer's own before the update."""
    updates_per_batch: Int = Field(default=1, ge=1)
    """Optimizer steps on each batch of completions."""
    skip_zero_variance: Bool = True
    """Leave groups whose rewards are all equal out of the loss and of its denominator."""
    refill_rounds: Annotated[Int, Field(ge=0), at_most(1000, "each generates anew")] = 0
    """Rounds in which, at most, new prompts take the place of groups that teach nothing (equal
    rewards, no completion to train on) in a step (dynamic sampling, arXiv:2503.14476); 0: never."""
    truncated: Literal["keep", "mask"] = "keep"
    """Completions cut by max_tokens: train on them, or mask their tokens."""
    overlong: OverlongConfig = OverlongConfig()
    importance: ImportanceConfig = ImportanceConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping) or raw.get("preset") not in list(PRESETS):
            return raw  # what is no preset is refused like any other value
        return _laid_under(raw, PRESETS[raw["preset"]])


def _laid_under(written: Mapping[str, Any], preset: Raw) -> Raw:
    """`written` with the values of `preset` where it has none."""
    out = copy.deepcopy(preset)
    for key, value in written.items():
        inner = out.get(key)
        if isinstance(inner, dict) and isinstance(value, Mapping):
            out[key] = _laid_under(value, inner)
        else:
            out[key] = value
    return out


def preset_origins(raw: Raw) -> Origins:
    """`grpo.preset: NAME` for every dotted key of a checked configuration that its preset set."""
    written = raw.get("grpo", {})
    name = written.get("preset") if isinstance(written, Mapping) else None
    if name is None:
        return {}
    keys = flatten(PRESETS[name]).keys() - flatten(dict(written)).keys()
    return {f"grpo.{key}": f"grpo.preset: {name}" for key in keys}

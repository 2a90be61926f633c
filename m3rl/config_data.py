"""Settings of where prompts come from and how completions are judged."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from m3rl.config_file import Bool, Fraction, Int, Processes, Seconds, Section, Seed, Text


class ReasoningGymConfig(Section):
    kind: Literal["reasoning_gym"]
    name: Text
    """Generator of the reasoning-gym package, for example spell_backward."""
    size: Int = Field(ge=1)
    """How many items to generate."""
    seed: Seed = 0
    """Seed of the generator; train and eval need different ones."""
    params: dict[str, Any] = Field(default={})
    """Further arguments of the generator."""


class FileDatasetConfig(Section):
    kind: Literal["file"]
    path: Text
    """A .jsonl or .parquet file, one item a row."""
    prompt_key: Text = "question"
    """Column with the user's message."""
    answer_key: Text | None = "answer"
    """Column with the expected answer; null when the reward needs none."""


DatasetConfig = Annotated[ReasoningGymConfig | FileDatasetConfig, Field(discriminator="kind")]


class DataConfig(Section):
    train: DatasetConfig
    eval: DatasetConfig | None = None
    """Held-out prompts; those that also occur in train are removed from train."""
    max_prompt_tokens: Int = Field(default=1024, ge=1)
    """Longest prompt, chat template included."""
    overlong: Literal["error", "drop"] = "error"
    """What to do with longer prompts: stop, or drop and count them."""
    shuffle: Bool = True
    """A fresh seeded order each epoch; false keeps the dataset's own."""


class RewardConfig(Section):
    kind: Literal["dataset", "function", "exact"] = "dataset"
    """Scorer: the dataset's own, a Python function, or equality with the answer."""
    target: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    """For kind function: 'package.module:function', called with (payload, completion text)."""
    partial_credit: Bool = True
    """False: a score below 1.0 counts as 0 (the scorer's own is kept as the part 'score')."""
    timeout_s: Seconds = 5.0
    """Longest time for one completion; then its worker is killed and it counts as a timeout."""
    workers: Processes = 2
    """Scoring processes."""
    max_error_frac: Fraction = 0.5
    """A larger share of failed scores in a step stops the run."""

    @model_validator(mode="after")
    def _target_fits_kind(self) -> Self:
        if (self.kind == "function") != (self.target is not None):
            raise ValueError(
                f"kind is {self.kind!r} and target is {self.target!r}; "
                "give `kind: function` and `target: package.module:function` together"
            )
        return self

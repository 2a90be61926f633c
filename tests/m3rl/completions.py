"""Hand-made groups of completions."""

from __future__ import annotations

from typing import Any

import numpy as np

from m3rl.types import Completion, Group, Prompt


def completion(length: int = 3, **fields: Any) -> Completion:
    """A scored completion of `length` distinct tokens; `fields` replace any of its attributes."""
    values: dict[str, Any] = {
        "prompt_ordinal": 0,
        "sample_index": 0,
        "group_id": "0",
        "prompt_ids": np.zeros(2, np.int32),
        "completion_ids": np.arange(length, dtype=np.int32),
        "text": "text",
        "logprobs": np.zeros(length, np.float32),
        "loss_mask": np.ones(length, np.bool_),
        "finish_reason": "stop",
        "version_spans": np.array([[0, 0]], np.int64),
        "seed": 0,
        "reward": 0.0,
        "reward_status": "ok",
    }
    return Completion(**(values | fields))


def group(*completions: Completion, environment: str = "env", **payload: Any) -> Group:
    prompt = Prompt(0, np.zeros(2, np.int32), "question", environment, payload)
    return Group(prompt, list(completions))


def group_of_rewards(*rewards: float, environment: str = "env") -> Group:
    return group(*[completion(reward=r) for r in rewards], environment=environment)

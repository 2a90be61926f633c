"""What is only for MiniMax-M3, refused for a model of another architecture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from m3rl.model_layout import is_m3, read_model_config

if TYPE_CHECKING:
    from m3rl.config import Config

Conflict = tuple[str, tuple[str, ...]]


def architecture_conflicts(
    config: Config, path: Path, *, generates: bool = True
) -> Iterator[Conflict]:
    """Message and keys of each setting that the architecture of the model at `path` rules out.

    Args:
        generates: whether replicas are started.

    Raises:
        ModelLayoutError: there is no config.json.
    """
    if is_m3(path):
        return
    kind = read_model_config(path).get("model_type")
    if generates and config.rollout.backend.kind == "m3":
        yield (
            f"rollout.backend.kind: m3 generates with MiniMax-M3 alone, and {path} is a model of "
            f"type {kind}; set rollout.backend.kind: vllm",
            ("rollout.backend.kind", "model.path"),
        )
    policy, parallel = config.policy, config.train.parallel
    wanted = (
        ("policy.lora", policy.lora is not None, "null"),
        ("policy.index_loss.coef", policy.index_loss.coef > 0, "0"),
        ("policy.index_drift_every", policy.index_drift_every > 0, "0"),
        ("policy.replay_routing", policy.replay_routing, "false"),
        ("policy.replay_blocks", policy.replay_blocks, "false"),
        ("train.parallel.ep", parallel.ep > 1, "1"),
        ("train.parallel.cp", parallel.cp > 1, "1"),
    )
    for key, is_on, off in wanted:
        if is_on:
            yield (
                f"{key}: is for MiniMax-M3, and {path} is a model of type {kind}; set {off}",
                (key, "model.path"),
            )

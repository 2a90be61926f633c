"""What is only for MiniMax-M3, refused for a model of another architecture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from m3rl.model_layout import is_m3, read_model_config

if TYPE_CHECKING:
    from m3rl.config import Config

Conflict = tuple[str, tuple[str, ...]]
MAX_HEAD_DIM = 128
"""Of `inference.kernels.dense_varlen` on CUDA."""


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
    yield from _kernel_conflicts(config, path)
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


def _kernel_conflicts(config: Config, path: Path) -> Iterator[Conflict]:
    """What attention over packed samples takes on a GPU."""
    content = read_model_config(path)
    heads = content.get("num_attention_heads")
    head_dim = content.get("head_dim") or (heads and content.get("hidden_size", 0) // heads)
    if config.train.device != "cuda" or not head_dim:
        return
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        yield (
            f"train.device: cuda trains heads of a multiple of 8 up to {MAX_HEAD_DIM} channels, "
            f"and those of {path} have {head_dim}; set cpu",
            ("train.device", "model.path"),
        )

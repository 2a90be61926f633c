"""What a configuration that works should make one know."""

from __future__ import annotations

from m3rl.config import Config
from m3rl.config_checks import idle_keys
from m3rl.config_vllm_checks import vllm_notices


def config_notices(config: Config) -> list[str]:
    """Keys that do nothing, and what one may not expect of settings that are fine."""
    rollout = config.rollout
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    cut = [key for key, value in off.items() if getattr(rollout, key) != value]
    notices = [*idle_keys(config), *vllm_notices(config)]
    if cut:
        notices.append(
            f"rollout.{cut[0]}: {getattr(rollout, cut[0])} truncates the sampling distribution, "
            "which is for `m3rl rollout`; training needs the whole one"
        )
    if config.policy.lora is not None and not config.weight_sync.delta:
        notices.append(
            "weight_sync.delta: false, so each sync sends all weights, and policy.lora changes "
            "those of its targets alone; with delta: true only these travel"
        )
    backend = rollout.backend
    if backend.device == "cuda" and backend.gpu_memory_gib is None:
        notices.append(
            "rollout.backend.gpu_memory_gib: null, so nobody looks whether a replica fits a GPU"
        )
    if config.eval.at_start or config.eval.at_end or config.eval.every:
        name = getattr(config.data.eval, "size", None)
        if name is not None and name < config.eval.num_prompts:
            notices.append(
                f"eval.num_prompts: {config.eval.num_prompts} is more than data.eval.size: {name}; "
                "all of them are used"
            )
    return notices

"""Settings that are fine alone and impossible together: value, conflict and cure of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m3rl.config import Config


def conflicts(config: Config) -> list[str]:
    """One message for each contradiction between the sections of `config`."""
    return [f"{message} ({_places(config, keys)})" for message, keys in _find(config)]


def _places(config: Config, keys: tuple[str, ...]) -> str:
    return ", ".join(f"{key} from {config.origin(key)}" for key in keys)


def _find(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    data, rollout, reward = config.data, config.rollout, config.reward
    replicas, engine = rollout.backend.num_replicas, rollout.backend.engine
    row = data.max_prompt_tokens + rollout.max_tokens
    row_is = f"data.max_prompt_tokens + rollout.max_tokens = {row} tokens"
    if config.weight_sync.min_replicas > replicas:
        yield (
            f"weight_sync.min_replicas: {config.weight_sync.min_replicas} is more than "
            f"rollout.backend.num_replicas: {replicas}; lower the one or raise the other",
            ("weight_sync.min_replicas", "rollout.backend.num_replicas"),
        )
    if config.weight_sync.transport == "nccl":
        yield from _nccl_conflicts(config)
    if config.weight_sync.delta and not config.weight_sync.verify:
        yield (
            "weight_sync.delta: what a replica holds after it is known by its hash alone; set "
            "weight_sync.verify: true, or delta: false",
            ("weight_sync.delta", "weight_sync.verify"),
        )
    if rollout.backend.gpu_memory_gib is not None and rollout.backend.device == "cpu":
        yield (
            f"rollout.backend.gpu_memory_gib: {rollout.backend.gpu_memory_gib} is of a GPU, and "
            "rollout.backend.device: cpu uses none; set device: cuda or leave it out",
            ("rollout.backend.gpu_memory_gib", "rollout.backend.device"),
        )
    if config.policy.micro_batch_tokens < row:
        yield (
            f"policy.micro_batch_tokens: {config.policy.micro_batch_tokens} cannot hold one row of "
            f"{row_is}; raise it to at least {row}",
            ("policy.micro_batch_tokens", "data.max_prompt_tokens", "rollout.max_tokens"),
        )
    if engine.max_model_len is not None and engine.max_model_len < row:
        yield (
            f"rollout.backend.engine.max_model_len: {engine.max_model_len} is less than {row_is}; "
            "raise it or shorten the others",
            ("rollout.backend.engine.max_model_len", "rollout.max_tokens"),
        )
    if engine.quantization != "none" and config.policy.dtype != "bfloat16":
        yield (
            f"rollout.backend.engine.quantization: {engine.quantization} is made from BF16 weights "
            f"alone, and policy.dtype: {config.policy.dtype} is what the weight sync carries; set "
            "policy.dtype: bfloat16",
            ("rollout.backend.engine.quantization", "policy.dtype"),
        )
    if config.policy.replay_routing and not rollout.capture_routing:
        yield (
            "policy.replay_routing: true needs what rollout.capture_routing: false does not "
            "record; set rollout.capture_routing: true",
            ("policy.replay_routing", "rollout.capture_routing"),
        )
    for key, dataset in (("data.train", data.train), ("data.eval", data.eval)):
        if dataset is None or dataset.kind != "file":
            continue
        if reward.kind == "dataset":
            yield (
                "reward.kind: 'dataset' needs a dataset with a scorer of its own, and "
                f"{key}.kind: 'file' has none; set reward.kind to exact or function",
                ("reward.kind", f"{key}.kind"),
            )
        if reward.kind == "exact" and dataset.answer_key is None:
            yield (
                f"reward.kind: 'exact' compares with the answer, and {key}.answer_key is null; "
                "name the column or choose another reward",
                ("reward.kind", f"{key}.answer_key"),
            )
    wanted = [key for key in ("every", "at_start", "at_end") if getattr(config.eval, key)]
    if data.eval is None and wanted:
        yield (
            f"eval.{wanted[0]}: {getattr(config.eval, wanted[0])} needs held-out prompts, and "
            "data.eval is missing; add it or set eval: {every: 0, at_start: false, at_end: false}",
            (f"eval.{wanted[0]}", "data.eval"),
        )
    if data.eval is not None and data.eval == data.train:
        yield (
            "data.eval: holds the same items as data.train; give it another seed or file",
            ("data.eval", "data.train"),
        )


def _nccl_conflicts(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """NCCL wants all weights on GPUs, and each rank on one of its own (Ray sees to that)."""
    # True as long as there is no key that gives trainer ranks GPUs.
    yield (
        "weight_sync.transport: nccl carries weights between GPUs, and trainer ranks compute on "
        "the CPU so far; set auto or gloo",
        ("weight_sync.transport",),
    )
    if config.rollout.backend.device == "cpu":
        yield (
            "weight_sync.transport: nccl carries weights between GPUs, and "
            "rollout.backend.device: cpu keeps those of the replicas in the host's memory; set "
            "device: cuda, or transport: gloo",
            ("weight_sync.transport", "rollout.backend.device"),
        )

"""Settings that are fine alone and impossible together: value, conflict and cure of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from m3rl.config_backend import M3BackendConfig
from m3rl.config_grpo_checks import grpo_conflicts, idle_grpo_keys
from m3rl.config_policy import lora_conflicts
from m3rl.config_vllm_checks import idle_vllm_keys, vllm_conflicts

if TYPE_CHECKING:
    from m3rl.config import Config


def conflicts(config: Config) -> list[str]:
    """One message for each contradiction between the sections of `config`."""
    return [f"{message} ({_places(config, keys)})" for message, keys in _find(config)]


def is_of_the_run(key: str) -> bool:
    """A dotted key that says how long a run is, where it lives or how it is saved."""
    keys = ("train.steps", "rollout.num_prompts", "run.dir", "run.name")
    return key in keys or key.startswith("checkpoint.")


def is_free(key: str) -> bool:
    """A dotted key that may change while a run's results stay what they are: how weights travel and
    are verified, and patience. (A pause does change them: requests go on with other pages.)"""
    is_sync = key.startswith("weight_sync.") and key != "weight_sync.pause"
    return is_sync or key in ("rollout.timeout_s", "train.timeout_s")


def idle_keys(config: Config) -> Iterator[str]:
    """A message for each key that was written and does nothing, because of another one."""
    for key, is_idle, why in (*_idle(config), *idle_grpo_keys(config.grpo)):
        origin = config.origin(key)
        if is_idle and origin != "default" and not origin.startswith("grpo.preset"):
            yield f"{key} does nothing: {why} ({origin})"


def _idle(config: Config) -> Iterator[tuple[str, bool, str]]:
    """Key, whether it does nothing, and why and what to do."""
    sync, backend = config.weight_sync, config.rollout.backend
    if backend.kind == "m3":
        yield (
            "weight_sync.wire",
            sync.wire == "mxfp8" and backend.engine.quantization == "none",
            "mxfp8 is for weights that replicas hold so, and rollout.backend.engine.quantization: "
            "none holds none; set quantization: mxfp8, or leave it out",
        )
    else:
        yield from idle_vllm_keys(backend)
    yield (
        "weight_sync.delta",
        sync.delta and config.policy.dtype == "float32" and config.policy.lora is None,
        "with policy.dtype: float32 every weight changes in a step, so all are sent each time; set "
        "policy.dtype: bfloat16, or delta: false",
    )
    yield (
        "weight_sync.delta_full_every",
        not sync.delta,
        "with weight_sync.delta: false all is sent each time; set delta: true, or leave it out",
    )
    for name in ("prompts", "max_error"):
        yield (
            f"weight_sync.probe.{name}",
            sync.probe.every == 0,
            "weight_sync.probe.every: 0 never probes; set every: 1 or more, or leave it out",
        )
    yield (
        "optimizer.warmup_steps",
        config.optimizer.warmup_steps > config.train.steps,
        f"{config.optimizer.warmup_steps} is more than train.steps: {config.train.steps}, so the "
        "learning rate never comes up to optimizer.lr; lower it",
    )


def _places(config: Config, keys: tuple[str, ...]) -> str:
    return ", ".join(f"{key} from {config.origin(key)}" for key in keys)


def _find(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    data, rollout, reward = config.data, config.rollout, config.reward
    replicas, max_model_len = rollout.backend.num_replicas, rollout.backend.max_model_len
    row = data.max_prompt_tokens + rollout.max_tokens
    row_is = f"data.max_prompt_tokens + rollout.max_tokens = {row} tokens"
    if config.weight_sync.min_replicas > replicas:
        yield (
            f"weight_sync.min_replicas: {config.weight_sync.min_replicas} is more than "
            f"rollout.backend.num_replicas: {replicas}; lower the one or raise the other",
            ("weight_sync.min_replicas", "rollout.backend.num_replicas"),
        )
    yield from grpo_conflicts(config)
    yield from lora_conflicts(config)
    yield from vllm_conflicts(config)
    if rollout.backend.kind == "m3":
        yield from _m3_conflicts(config, rollout.backend)
    if config.train.device == "cuda" and config.policy.dtype == "float32":
        yield (
            "policy.dtype: float32 is for train.device: cpu; the kernels of train.device: cuda "
            "compute in BF16: set policy.dtype: bfloat16",
            ("policy.dtype", "train.device"),
        )
    for name in ("ep", "cp"):
        parts, ranks = getattr(config.train.parallel, name), config.train.num_ranks
        if ranks % parts:
            yield (
                f"train.parallel.{name}: {parts} does not divide train.num_ranks: {ranks}; use one "
                f"of {[n for n in range(1, ranks + 1) if ranks % n == 0]}",
                (f"train.parallel.{name}", "train.num_ranks"),
            )
    if config.weight_sync.transport in ("ipc", "nccl"):
        yield from _gpu_transport_conflicts(config)
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
    if max_model_len is not None and max_model_len < row:
        yield (
            f"rollout.backend.engine.max_model_len: {max_model_len} is less than {row_is}; "
            "raise it or shorten the others",
            ("rollout.backend.engine.max_model_len", "rollout.max_tokens"),
        )
    if config.policy.replay_routing and not rollout.capture_routing:
        yield (
            "policy.replay_routing: true needs what rollout.capture_routing: false does not "
            "record; set rollout.capture_routing: true",
            ("policy.replay_routing", "rollout.capture_routing"),
        )
    if config.policy.replay_blocks and not rollout.capture_blocks:
        yield (
            "policy.replay_blocks: true needs what rollout.capture_blocks: false does not "
            "record; set rollout.capture_blocks: true",
            ("policy.replay_blocks", "rollout.capture_blocks"),
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


def _m3_conflicts(
    config: Config, backend: M3BackendConfig
) -> Iterator[tuple[str, tuple[str, ...]]]:
    quantization = backend.engine.quantization
    if quantization != "none" and config.policy.dtype != "bfloat16":
        yield (
            f"rollout.backend.engine.quantization: {quantization} is made from BF16 weights "
            f"alone, and policy.dtype: {config.policy.dtype} is what the weight sync carries; set "
            "policy.dtype: bfloat16",
            ("rollout.backend.engine.quantization", "policy.dtype"),
        )


def _gpu_transport_conflicts(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What moves bytes between GPUs wants all weights there."""
    transport = config.weight_sync.transport
    for owner, key, device in (
        ("trainer ranks", "train.device", config.train.device),
        ("replicas", "rollout.backend.device", config.rollout.backend.device),
    ):
        if device == "cpu":
            yield (
                f"weight_sync.transport: {transport} carries weights between GPUs, and {key}: cpu "
                f"keeps those of the {owner} in the host's memory; set {key}: cuda, or transport: "
                "gloo",
                ("weight_sync.transport", key),
            )

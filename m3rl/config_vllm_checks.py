"""What vLLM as the backend cannot give or does not promise: refused, or said, before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from m3rl.config_vllm import VllmBackendConfig, VllmEngineOptions

if TYPE_CHECKING:
    from m3rl.config import Config

Conflict = tuple[str, tuple[str, ...]]

OR_M3 = "or rollout.backend.kind: m3"


def vllm_conflicts(config: Config) -> Iterator[Conflict]:
    """Message and keys of each contradiction that the configuration alone tells."""
    backend = config.rollout.backend
    if backend.kind != "vllm":
        return
    yield from _not_offered(config)
    if backend.device == "cpu":
        yield from _not_on_cpu(config, backend.engine)
    if backend.engine.staging == "layers":
        yield from _not_by_layers(config)
    if config.weight_sync.pause == "keep" and backend.engine.enable_prefix_caching:
        yield (
            "weight_sync.pause: keep lets requests run on through a weight sync, and vLLM cannot "
            "drop its prefix cache (rollout.backend.engine.enable_prefix_caching: true), which "
            "is of the old weights, while their blocks are in use; set pause: recompute or drain, "
            "or enable_prefix_caching: false",
            ("weight_sync.pause", "rollout.backend.engine.enable_prefix_caching"),
        )


def _not_by_layers(config: Config) -> Iterator[Conflict]:
    if config.weight_sync.delta:
        yield (
            "weight_sync.delta: sends what changed in the weights that a replica received last, "
            "and with rollout.backend.engine.staging: layers it keeps none as they were sent; set "
            "delta: false, or staging: whole",
            ("weight_sync.delta", "rollout.backend.engine.staging"),
        )


def _not_offered(config: Config) -> Iterator[Conflict]:
    if config.rollout.capture_blocks:
        yield (
            "rollout.capture_blocks: true needs the key blocks that attention chose, which vLLM "
            "does not tell; set false, and policy.replay_blocks: false, " + OR_M3,
            ("rollout.capture_blocks", "rollout.backend.kind"),
        )
    if config.weight_sync.wire == "mxfp8":
        yield (
            "weight_sync.wire: mxfp8 is for weights that the bundled runtime quantises, and vLLM's "
            f"are in policy.dtype; set bf16, {OR_M3} with engine.quantization: mxfp8",
            ("weight_sync.wire", "rollout.backend.kind"),
        )


def _not_on_cpu(config: Config, engine: VllmEngineOptions) -> Iterator[Conflict]:
    if config.rollout.capture_routing:
        yield (
            "rollout.capture_routing: true needs the experts that vLLM chose, which its CPU build "
            "does not tell; set false, and policy.replay_routing: false, " + OR_M3,
            ("rollout.capture_routing", "rollout.backend.device"),
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    length = longest if engine.max_model_len is None else engine.max_model_len
    if engine.max_num_batched_tokens < length:
        yield (
            f"rollout.backend.engine.max_num_batched_tokens: {engine.max_num_batched_tokens} is "
            f"less than a sequence may have, {length} tokens, and vLLM's CPU build cannot cut the "
            f"prompt of a request that has a seed; set {length} or more",
            ("rollout.backend.engine.max_num_batched_tokens", "rollout.max_tokens"),
        )
    if engine.extra.get("long_prefill_token_threshold", 0):
        yield (
            "rollout.backend.engine.extra.long_prefill_token_threshold: cuts longer prompts, and "
            "vLLM's CPU build cannot cut the prompt of a request that has a seed; leave it out",
            ("rollout.backend.engine.extra", "rollout.backend.device"),
        )
    for key, is_on in (
        ("index_loss.coef", config.policy.index_loss.coef > 0),
        ("index_drift_every", config.policy.index_drift_every > 0),
    ):
        if is_on:
            yield (
                f"policy.{key}: is about the index branch, which vLLM's CPU build leaves out: it "
                f"attends to every key; set 0, {OR_M3}",
                (f"policy.{key}", "rollout.backend.device"),
            )


def idle_vllm_keys(backend: VllmBackendConfig) -> Iterator[tuple[str, bool, str]]:
    """Key, whether it does nothing, and why and what to do."""
    engine = "rollout.backend.engine"
    yield (
        f"{engine}.gpu_memory_utilization",
        backend.device == "cpu",
        "rollout.backend.device: cpu takes kv_cache_gib; set that, or leave it out",
    )
    yield (
        f"{engine}.enforce_eager",
        backend.device == "cpu",
        "rollout.backend.device: cpu never compiles; leave it out",
    )
    yield (
        f"{engine}.kv_cache_gib",
        backend.device == "cuda",
        "rollout.backend.device: cuda takes what gpu_memory_utilization leaves beside the weights; "
        "set that, or leave it out",
    )
    yield (
        f"{engine}.enable_expert_parallel",
        backend.engine.enable_expert_parallel and backend.ranks_per_replica == 1,
        "one rank holds all experts; set tensor_parallel_size, or leave it out",
    )


def vllm_notices(config: Config) -> Iterator[str]:
    """What vLLM does not promise and the bundled runtime does."""
    backend = config.rollout.backend
    if backend.kind != "vllm":
        return
    yield (
        "rollout.backend.kind: vllm, so a batch's shape may change the bits of its "
        "log-probabilities (no strict agreement with the trainer; see mismatch/* and "
        "train.max_mismatch), and a resumed run may sample other completions than an "
        "uninterrupted one"
    )
    if backend.engine.staging == "whole":
        yield (
            "rollout.backend.kind: vllm, so a replica takes new weights while it is paused, not by "
            "a flip between two copies: one that fails within is poisoned and started again"
        )
    else:
        yield (
            "rollout.backend.engine.staging: layers, so a replica is paused while the weights of a "
            "sync travel, and one whose sync breaks off is poisoned and started again"
        )

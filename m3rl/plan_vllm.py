"""What a model's files tell of vLLM's replicas: whether it can serve the model, and its memory.

Reads config.json alone; imports neither vllm nor torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from inference.config import ModelConfig
from inference.memory import MemoryPlan, size_text
from inference.parallel.config import ParallelConfig
from m3rl.config import Config
from m3rl.config_vllm import VllmBackendConfig, VllmEngineOptions
from m3rl.rollout.backend import BackendError
from m3rl.rollout.vllm_staging import bytes_of_buckets, num_buckets_staged
from m3rl.rollout.vllm_version import installed_version
from m3rl.types import TensorSlot

MAX_POSITIONS = "max_position_embeddings"


def missing_vllm(config: Config) -> str | None:
    """Why this machine cannot start the replicas that are wanted; vLLM is not imported for it."""
    if config.rollout.backend.kind != "vllm":
        return None
    try:
        installed_version()
    except BackendError as error:
        return str(error)
    return None


def longest_row(config: Config) -> int:
    """Tokens of the longest prompt and completion that a run asks for."""
    return config.data.max_prompt_tokens + config.rollout.max_tokens


def vllm_model_len(config: Config) -> int:
    """Longest sequence that vLLM's replicas are told to serve."""
    written = config.rollout.backend.max_model_len
    return longest_row(config) if written is None else written


def vllm_model_problems(config: Config, raw: Mapping[str, Any]) -> Iterator[str]:
    """What stands between a model and vLLM's replicas.

    Args:
        raw: content of the model's config.json.
    """
    backend = config.rollout.backend
    text = raw.get("text_config") or raw
    length, longest = vllm_model_len(config), text.get(MAX_POSITIONS)
    if isinstance(longest, int) and length > longest:
        yield (
            f"rollout.max_tokens: a replica is to serve {length} tokens ({_length_keys(config)}), "
            f"and the model has {MAX_POSITIONS} {longest}; shorten them"
        )
    ranks = backend.ranks_per_replica
    for key in ("num_attention_heads", "num_key_value_heads"):
        if not isinstance(text.get(key), int | None):
            yield f"model.path: config.json has {key} {text[key]!r}, no number"
            return
    heads: int = text.get("num_attention_heads", ranks)
    kv_heads: int = text.get("num_key_value_heads") or heads
    if not _divides(ranks, heads, kv_heads):
        fine = [n for n in range(1, heads + 1) if _divides(n, heads, kv_heads)]
        yield (
            f"rollout.backend.engine.tensor_parallel_size: {ranks} "
            f"({config.origin('rollout.backend.engine.tensor_parallel_size')}) does not split "
            f"{heads} heads and {kv_heads} KV heads evenly; use one of {fine}"
        )


def _divides(ranks: int, heads: int, kv_heads: int) -> bool:
    """vLLM copies KV heads where there are fewer than ranks."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _length_keys(config: Config) -> str:
    if config.rollout.backend.max_model_len is not None:
        return "rollout.backend.engine.max_model_len"
    return "data.max_prompt_tokens + rollout.max_tokens"


def vllm_m3_problems(config: Config, model: ModelConfig) -> Iterator[str]:
    """What vLLM's CPU build cannot do with a MiniMax-M3: attention over chosen blocks."""
    if config.rollout.backend.device != "cpu":
        return
    ranks = config.rollout.backend.ranks_per_replica
    if ranks > 1:
        yield (
            f"rollout.backend.engine.tensor_parallel_size: {ranks}, and vLLM's CPU build runs "
            "MiniMax-M3 on one rank; set 1, and rollout.backend.num_replicas for more"
        )
    exact, length = model.index_topk_blocks * model.index_block_size, vllm_model_len(config)
    if length > exact:
        yield (
            f"rollout.backend: vLLM's CPU build computes MiniMax-M3 with attention over all keys, "
            f"which is the model's own up to {exact} tokens ({model.index_topk_blocks} chosen "
            f"blocks of {model.index_block_size}), and {_length_keys(config)} = {length}; shorten "
            "them, take a model that keeps more blocks, or set rollout.backend.kind: m3"
        )


def vllm_m3_notices(config: Config) -> Iterator[str]:
    if config.rollout.backend.device == "cpu" and config.policy.dtype == "bfloat16":
        yield (
            "policy.dtype: bfloat16 on vLLM's CPU build moves M3's log-probabilities by 0.1 and "
            "more (its experts are chosen by other roundings); float32 agrees within 1e-4"
        )


def vllm_memory(
    backend: VllmBackendConfig,
    weights: Mapping[str, int],
    slots: Collection[TensorSlot],
    gpu_bytes: int | None,
) -> tuple[MemoryPlan, str | None]:
    """One rank of a replica, and why it does not fit a GPU.

    Args:
        weights: bytes of the whole model in policy.dtype, by class.
        slots: its tensors, as a weight sync sends them.
        gpu_bytes: what a process may have of its GPU; None: not known, or no GPU.
    """
    ranks, engine = backend.ranks_per_replica, backend.engine
    own = {name: -(-size // ranks) for name, size in weights.items()}
    cache: dict[str, int] = {}
    if backend.device == "cpu":
        cache["KV cache"] = int(engine.kv_cache_gib * (1 << 30))
    elif gpu_bytes is not None:
        taken = int(engine.gpu_memory_utilization * gpu_bytes)
        cache["KV cache, activations, graphs"] = max(0, taken - sum(own.values()))
    plan = MemoryPlan(
        parallel=ParallelConfig(tp=ranks),
        weights=own,
        cache=cache,
        buffers=_staged(slots, ranks, engine),
        gpu_bytes=gpu_bytes,
        max_num_pages=None,
    )
    return plan, None if gpu_bytes is None else _refusal(plan, engine, slots)


def received(
    slots: Collection[TensorSlot], ranks: int, engine: VllmEngineOptions
) -> dict[str, int]:
    """Bytes of a sync to the rank that receives the most, by bucket."""
    shares = engine.enable_expert_parallel and ranks > 1
    return bytes_of_buckets(slots, num_ranks=ranks, shares_experts=shares)


def _staged(slots: Collection[TensorSlot], ranks: int, engine: VllmEngineOptions) -> dict[str, int]:
    """What a rank receives a sync into."""
    buckets = received(slots, ranks, engine)
    if engine.staging == "whole":
        return {"weights of a sync, whole": sum(buckets.values())}
    largest = max(buckets.values(), default=0)
    return {
        "layers of a sync": num_buckets_staged(ranks) * largest,
        "a layer that is loaded": largest,
    }


def _refusal(
    plan: MemoryPlan, engine: VllmEngineOptions, slots: Collection[TensorSlot]
) -> str | None:
    gpu_bytes, utilization = plan.gpu_bytes, engine.gpu_memory_utilization
    assert gpu_bytes is not None, "nobody looks where it is not known"
    staged, own = sum(plan.buffers.values()), sum(plan.weights.values())
    taken = int(utilization * gpu_bytes)
    if own <= taken and taken + staged <= gpu_bytes:
        return None
    most = (gpu_bytes - staged) / gpu_bytes
    cure = (
        f"set rollout.backend.engine.gpu_memory_utilization between {own / gpu_bytes:.2f} and "
        f"{most:.2f}"
        if own < gpu_bytes - staged
        else _smaller_staging(plan, engine, slots)
    )
    return (
        f"rollout.backend: a GPU of {size_text(gpu_bytes)} holds {size_text(own)} of weights, "
        f"within the {size_text(taken)} that vLLM may take "
        f"(gpu_memory_utilization {utilization:g}), and beside these {size_text(staged)} that a "
        f"weight sync is received into; {cure}"
    )


def _smaller_staging(
    plan: MemoryPlan, engine: VllmEngineOptions, slots: Collection[TensorSlot]
) -> str:
    """The first change after which there is room for a sync beside the weights."""
    ranks, own, gpu_bytes = plan.parallel.tp, sum(plan.weights.values()), plan.gpu_bytes
    assert gpu_bytes is not None, "nobody looks where it is not known"
    for changes in (
        {"enable_expert_parallel": True},
        {"staging": "layers"},
        {"enable_expert_parallel": True, "staging": "layers"},
    ):
        other = engine.model_copy(update=changes)
        staged = sum(_staged(slots, ranks, other).values())
        if own < gpu_bytes - staged:
            written = {
                "enable_expert_parallel": "enable_expert_parallel: true (a rank receives "
                "its own experts alone)",
                "staging": "staging: layers",
            }
            keys = " and ".join(
                f"rollout.backend.engine.{written[name]}"
                for name in changes
                if getattr(engine, name) != getattr(other, name)
            )
            return (
                f"set {keys}, which is {size_text(staged)}, and gpu_memory_utilization between "
                f"{own / gpu_bytes:.2f} and {(gpu_bytes - staged) / gpu_bytes:.2f}"
            )
    return (
        "staging: layers and enable_expert_parallel: true do not make room enough; raise "
        "rollout.backend.engine.tensor_parallel_size, or set rollout.backend.kind: m3"
    )

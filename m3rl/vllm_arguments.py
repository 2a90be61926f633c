"""Which engine arguments of vLLM 0.32 a configuration may add, and why not the others.

Asked by the check of a configuration and again by a replica, before vLLM is imported.
"""

from __future__ import annotations

import difflib

KEY = "rollout.backend.engine.extra"

ALLOWED = frozenset(
    {
        "all2all_backend",
        "async_scheduling",
        "attention_backend",
        "block_size",
        "compilation_config",
        "cudagraph_capture_sizes",
        "disable_chunked_mm_input",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "enable_flashinfer_autotune",
        "kernel_config",
        "kv_cache_dtype",
        "limit_mm_per_prompt",
        "linear_backend",
        "long_prefill_token_threshold",
        "max_cudagraph_capture_size",
        "mm_processor_cache_gb",
        "moe_backend",
        "num_gpu_blocks_override",
        "optimization_level",
        "performance_mode",
        "skip_mm_profiling",
        "trust_remote_code",
    }
)
"""These change speed and memory, not the policy that samples; `kv_cache_dtype` rounds its keys, for
which FP8 the limits on a mismatch with the trainer are wider."""

_IDS = "prompts and completions are token ids; set model.path"
_DTYPE = "the weight sync writes and hashes what the trainer sends, in policy.dtype"
_SYNCED = "weights come from the weight sync alone"
_LOGPROBS = (
    "training needs the log-probability of each sampled token under the sampling distribution"
)
_SAMPLING = "every sampling parameter is in rollout: and eval:"
_DRAFTS = "the weights of a draft model are not synced"
_KEPT_KEYS = "keys kept outside the engine would be those of the old policy after a weight sync"
_MODEL = "a replica must compute the model that the trainer trains; set model.path"
_WORKER = "the weight sync has its own worker extension"
_REPLICAS = "a replica is one engine; set rollout.backend.num_replicas for more of them"
_ONE_HOST = "the ranks of a replica are on one host; set tensor_parallel_size"
_SPLIT = "the weight sync knows replicas split by tensor_parallel_size alone"
_WANDERING = "experts that wander would be written to the wrong rank"
_SLEEP = "a sleeping replica would lose the weights of its version"
_ORDER = "requests come out in the order in which they were put in"
_OFFLOADED = "the weight sync writes to weights on the device of the replica"
_ADAPTERS = "adapters come merged into the weights; set policy.lora"

_OWN_KEYS = (
    "tensor_parallel_size",
    "enable_expert_parallel",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "enforce_eager",
)
REFUSED = {
    **{name: f"set rollout.backend.engine.{name}" for name in _OWN_KEYS},
    "model": "set model.path",
    "model_weights": _SYNCED,
    "model_impl": _MODEL,
    "model_class_overrides": _MODEL,
    "hf_config_path": _MODEL,
    "hf_overrides": _MODEL,
    "config_format": _MODEL,
    "disable_sliding_window": _MODEL,
    "revision": "set model.path to a folder",
    "tokenizer": _IDS,
    "tokenizer_mode": _IDS,
    "tokenizer_revision": _IDS,
    "skip_tokenizer_init": "a tokenizer is there where rollout.stop needs one",
    "runner": "a replica generates",
    "convert": "a replica generates",
    "dtype": "set policy.dtype, which trainer, weight sync and replicas share",
    "quantization": _DTYPE,
    "quantization_config": _DTYPE,
    "seed": "every request has its own, from run.seed",
    "load_format": _SYNCED,
    "model_loader_extra_config": _SYNCED,
    "weight_transfer_config": _SYNCED,
    "enable_ep_weight_filter": _SYNCED,
    "logprobs_mode": _LOGPROBS,
    "max_logprobs": _LOGPROBS,
    "return_sampling_mask": _LOGPROBS,
    "logits_processors": _LOGPROBS,
    "watermark_config": _LOGPROBS,
    "generation_config": _SAMPLING,
    "override_generation_config": _SAMPLING,
    "worker_cls": _WORKER,
    "worker_extension_cls": _WORKER,
    "distributed_executor_backend": "m3rl places the ranks of a replica",
    "enable_return_routed_experts": "set rollout.capture_routing",
    "enable_lora": _ADAPTERS,
    "enable_sleep_mode": _SLEEP,
    "speculative_config": _DRAFTS,
    "spec_method": _DRAFTS,
    "spec_model": _DRAFTS,
    "spec_tokens": _DRAFTS,
    "kv_transfer_config": _KEPT_KEYS,
    "kv_offloading_size": _KEPT_KEYS,
    "kv_offloading_backend": _KEPT_KEYS,
    "ec_transfer_config": "outputs of encoders kept outside the engine would be those of the old "
    "policy after a weight sync",
    "cpu_offload_gb": _OFFLOADED,
    "offload_backend": _OFFLOADED,
    "pipeline_parallel_size": _SPLIT,
    "prefill_context_parallel_size": _SPLIT,
    "decode_context_parallel_size": _SPLIT,
    "enable_eplb": _WANDERING,
    "enable_elastic_ep": _WANDERING,
    "kv_cache_memory_bytes": "set rollout.backend.engine.kv_cache_gib on the CPU; on a GPU "
    "gpu_memory_utilization says it",
    "scheduling_policy": _ORDER,
    "scheduler_cls": _ORDER,
    "nnodes": _ONE_HOST,
    "node_rank": _ONE_HOST,
    "enable_chunked_prefill": "on the CPU vLLM cannot cut the prompt of a request that has a seed; "
    "on a GPU it always may",
    "disable_log_stats": "stats of the engine become metrics",
}
"""Why those that people try are not the user's; all of data parallelism is refused, too."""


def refusal(name: str, value: object) -> str | None:
    """Why `extra` must not hold an engine argument, and what to do; None: it may."""
    plain = name.replace("-", "_")
    if name in ALLOWED:
        return _refused_value(name, value)
    if plain.startswith("data_parallel_"):
        return _REPLICAS
    if why := REFUSED.get(plain):
        return why
    near = difflib.get_close_matches(plain, sorted(ALLOWED), 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}it may hold what changes speed and memory alone: {', '.join(sorted(ALLOWED))}"


def _refused_value(name: str, value: object) -> str | None:
    if name == "kv_cache_dtype" and value != "auto" and not str(value).startswith("fp8"):
        return "keys are kept in the dtype of the policy or in 8 bits; set auto or fp8"
    return None

"""Settings of vLLM as the generation backend, under vLLM's own names."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from m3rl.config_backend import BackendConfig, Ranks
from m3rl.config_file import Bool, Float, Fraction, Int, Seconds, Section
from m3rl.vllm_arguments import refusal


class VllmEngineOptions(Section):
    absent: ClassVar[dict[str, str]] = {
        "num_pages": "vLLM sizes its KV cache by gpu_memory_utilization (device: cuda) or "
        "kv_cache_gib (device: cpu)",
        "max_running_requests": "vLLM calls it max_num_seqs",
        "max_tokens_per_step": "vLLM calls it max_num_batched_tokens",
        "enable_prefix_cache": "vLLM calls it enable_prefix_caching",
        "kv_dtype": "vLLM calls it kv_cache_dtype; set extra: {kv_cache_dtype: fp8}",
        "index_dtype": "vLLM chooses it itself; leave it out",
        "quantization": "vLLM's replicas hold policy.dtype, which is what the weight sync writes "
        "and hashes; leave it out, or set kind: m3",
        "shadow_weights": "vLLM takes new weights while it is paused, not by a flip between two "
        "copies; leave it out, or set kind: m3",
    }
    """Of the bundled runtime; told to who writes them here."""
    tensor_parallel_size: Ranks = 1
    """Ranks that split the layers of the same requests, on one host; a GPU each with device:
    cuda."""
    enable_expert_parallel: Bool = False
    """Whether these ranks share the routed experts out whole, instead of splitting each; a rank
    receives in a weight sync none but its own then."""
    staging: Literal["whole", "layers"] = "whole"
    """What a rank receives a weight sync into, beside its part of the model: whole, all that it is
    sent, while the replica serves; layers, two layers of it, or four with several ranks, which are
    loaded as they come, while the replica is paused. A sync that breaks off then leaves it without
    weights, and a lost replica takes them from the trainer, not from another."""
    max_model_len: Annotated[Int, Field(ge=2)] | None = None
    """Longest sequence; null: data.max_prompt_tokens + rollout.max_tokens, the longest of a run."""
    max_num_seqs: Int = Field(default=256, ge=1)
    """Requests that decode together."""
    max_num_batched_tokens: Int = Field(default=8192, ge=1)
    """Tokens of one engine step. With device: cuda longer prefills are done in chunks; with device:
    cpu none is, so it must hold a sequence."""
    gpu_memory_utilization: Annotated[Fraction, Field(gt=0)] = 0.9
    """Share of a GPU's memory that a rank takes with device: cuda, what a weight sync is received
    into not counted, see staging."""
    kv_cache_gib: Float = Field(default=1.0, gt=0)
    """GiB of the KV cache of a rank with device: cpu."""
    enable_prefix_caching: Bool = False
    """Keep the KV blocks of prompts for later ones. vLLM drops them at a new version only while no
    request runs, so weight_sync.pause must be drain or recompute."""
    enforce_eager: Bool = False
    """With device: cuda, compile nothing and capture no graphs: starts sooner, decodes slower. With
    device: cpu nothing is compiled anyway."""
    start_timeout_s: Seconds = 900.0
    """Longest start of a replica: imports, compilation, profiling of memory."""
    extra: dict[str, Any] = Field(default={})
    """Further engine arguments of vLLM (`EngineArgs`) that change speed and memory alone, see
    `m3rl.vllm_arguments`; their values are checked by vLLM at the start."""

    @field_validator("extra")
    @classmethod
    def _leaves_the_policy_alone(cls, extra: dict[str, Any]) -> dict[str, Any]:
        for name, value in extra.items():
            if why := refusal(name, value):
                raise ValueError(f"should not hold {name!r}: {why}")
        return extra


class VllmBackendConfig(BackendConfig):
    """vLLM 0.32: any architecture that it shares with transformers."""

    kind: Literal["vllm"]
    engine: VllmEngineOptions = VllmEngineOptions()

    @property
    def ranks_per_replica(self) -> int:
        return self.engine.tensor_parallel_size

    @property
    def max_running(self) -> int:
        return self.engine.max_num_seqs

    @property
    def max_model_len(self) -> int | None:
        return self.engine.max_model_len

    @property
    def has_fp8(self) -> bool:
        return "fp8" in str(self.engine.extra.get("kv_cache_dtype", "auto"))

"""What a vLLM replica is built from: its settings, the environment and the arguments of vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from m3rl.model_layout import is_m3, read_model_config
from m3rl.rollout import vllm_m3
from m3rl.rollout.backend import BackendError
from m3rl.rollout.vllm_staging import Staging, num_buckets_staged
from m3rl.vllm_arguments import KEY, refusal

GIB = 1 << 30
WORKER_EXTENSION = "m3rl.rollout.vllm_worker.WorkerExtension"


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What a replica's process needs to build its engine; names as vLLM's own arguments."""

    model_path: str
    dtype: str
    """Of weights and computation, 'float32' or 'bfloat16'; the wire's."""
    device: Literal["cpu", "cuda"]
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    """Experts are shared out over the ranks of tensor parallelism, whole ones to each."""
    max_model_len: int | None = None
    """Most tokens of a request, completion included; None: the model's own limit."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    """Share of a GPU that weights, staging memory not counted, and keys may fill."""
    kv_cache_gib: float = 1.0
    """Memory for keys and values, on the CPU."""
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    staging: Staging = "whole"
    """Whether a worker has room for all that it is sent in a sync, or for a few layers of it."""
    num_threads: int = 1
    capture_routing: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs`."""
    timeout_s: float = 120.0
    """Longest wait for a worker: a step, and any call of a weight sync."""

    @property
    def num_staged(self) -> int | None:
        """Buckets of a sync that a worker has room for; None: all."""
        ranks = self.tensor_parallel_size
        return num_buckets_staged(ranks) if self.staging == "layers" else None

    @property
    def uses_dense_m3(self) -> bool:
        """Whether the model is M3 as vLLM's CPU build computes it, see `vllm_m3`."""
        return self.device == "cpu" and is_m3(Path(self.model_path))


def set_environment(settings: VllmSettings) -> None:
    """For the process that is to import vLLM, before it does."""
    threads = str(settings.num_threads)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the replica steps the engine in its own process
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(max(1, round(settings.timeout_s))),
        "OMP_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
    }
    # Of its warnings some are false here: that weights fail to load, at every sync.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if settings.device == "cpu":
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        if settings.tensor_parallel_size > 1:
            # By itself vLLM wants a NUMA node for each worker.
            cores = "|".join(str(core) for core in range(settings.tensor_parallel_size))
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)


def engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`.

    Raises:
        BackendError: one of `extra` that is not to be chosen, or a model that cannot be run this
            way.
    """
    check_extra(settings.extra)
    path = Path(settings.model_path)
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "skip_tokenizer_init": not (path / "tokenizer.json").is_file(),
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_expert_parallel": settings.enable_expert_parallel,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enforce_eager": settings.enforce_eager,
        "enable_return_routed_experts": settings.capture_routing,
        "disable_log_stats": False,
    }
    if settings.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    if settings.device == "cpu":
        if settings.enable_expert_parallel:
            raise BackendError(
                "rollout.backend.engine.enable_expert_parallel: true, and the experts of vLLM's "
                "CPU build crash when they are not all there; set false, or device: cuda"
            )
        arguments["kv_cache_memory_bytes"] = round(settings.kv_cache_gib * GIB)
        arguments["enforce_eager"] = True
        # After a part of a prompt vLLM winds a request's generator back, which a CPU's cannot do.
        arguments["enable_chunked_prefill"] = False
    if is_m3(path):
        arguments |= _m3_arguments(settings)
    return arguments | dict(settings.extra)


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raises BackendError where one is not to be chosen."""
    for name, value in extra.items():
        if why := refusal(name, value):
            raise BackendError(f"{KEY}.{name}={value!r}: {why}")


def _m3_arguments(settings: VllmSettings) -> dict[str, Any]:
    if not settings.uses_dense_m3:
        return {"hf_overrides": vllm_m3.TextOnly(settings.model_path, is_dense=False)}
    if settings.tensor_parallel_size > 1:
        raise BackendError(
            f"rollout.backend.engine.tensor_parallel_size={settings.tensor_parallel_size}: vLLM's "
            "CPU build runs M3 on one worker; set 1"
        )
    if settings.capture_routing:
        raise BackendError(
            "rollout.capture_routing: vLLM's CPU build runs M3's own router, whose choices it does "
            "not record; set rollout.backend.kind: m3"
        )
    if settings.max_model_len is not None:
        vllm_m3.require_dense_is_exact(settings.model_path, settings.max_model_len)
    return {"hf_overrides": vllm_m3.TextOnly(settings.model_path, is_dense=True)}


def make_config(settings: VllmSettings) -> Any:
    """vLLM's own configuration of an engine.

    Raises:
        BackendError: vLLM has not this architecture, or refuses a setting; says what it says.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    arguments = engine_arguments(settings)
    if current_platform.is_cpu() != (settings.device == "cpu"):
        raise BackendError(
            f"rollout.backend.device: {settings.device}, and the vLLM that is installed runs on "
            f"{current_platform.device_type}; install its other build, or set device"
        )
    if settings.uses_dense_m3:
        vllm_m3.register_dense_m3()
    try:
        config = EngineArgs(**arguments).create_engine_config()
    except (ValueError, TypeError, NotImplementedError) as error:
        _require_known(settings)
        raise BackendError(
            f"vLLM does not take {settings.model_path} with these settings of rollout.backend: "
            f"{_in_one_line(error, settings.extra)}"
        ) from error
    if settings.uses_dense_m3:
        vllm_m3.require_dense_is_exact(settings.model_path, config.model_config.max_model_len)
    return config


def _require_known(settings: VllmSettings) -> None:
    """Raises BackendError where the model is why vLLM refused, so that no setting is blamed."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm import __version__
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    found = read_model_config(Path(settings.model_path))
    model_type = found.get("model_type")
    has_code = bool(settings.extra.get("trust_remote_code")) and "auto_map" in found
    if model_type in CONFIG_MAPPING or model_type in _CONFIG_REGISTRY or has_code:
        return
    raise BackendError(
        f"model.path {settings.model_path}: vLLM {__version__} and transformers "
        f"{transformers.__version__} do not know model_type {model_type!r}; set a model.path of an "
        "architecture that they know"
    )


def _in_one_line(error: Exception, extra: Mapping[str, Any]) -> str:
    """Also of pydantic's errors, which are ValueErrors with the reasons inside."""
    reasons = [str(error)]
    if hasattr(error, "errors"):
        reasons = [_reason(each, extra) for each in error.errors()]
    return " ".join("; ".join(reasons).split())


def _reason(found: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    """One error of pydantic, with the key that it is about: vLLM's configurations are nested
    otherwise than its arguments."""
    where, value, message = found["loc"], found["input"], found["msg"]
    if not where:
        return message
    path = ".".join(map(str, where))
    for name, given in extra.items():
        if name == where[0]:
            return f"{KEY}.{path}={value!r}: {message}"
        if isinstance(given, Mapping) and where[0] in given:
            return f"{KEY}.{name}.{path}={value!r}: {message}"
        if name.endswith(f"_{where[0]}") and given == value:
            return f"{KEY}.{name}={value!r}: {message}"
    return f"{path}={value!r}: {message}"

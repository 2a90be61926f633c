"""Settings of what generates: those of every backend, and those of the bundled runtime."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from m3rl.config_file import Bool, Float, Int, Processes, Section, Threads, at_most

Ranks = Annotated[Int, Field(ge=1), at_most(1024, "a replica has at most so many")]


class BackendConfig(Section, ABC):
    """What every kind of backend is told. The keys here survive a change of `kind` in a file that
    inherits or on the command line (config_file.SHARED_BY_KINDS)."""

    kind: str
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: each rank of a replica takes one GPU of the cluster."""
    gpu_memory_gib: Annotated[Float, Field(gt=0)] | None = None
    """GiB of a GPU that a process can have (139 of an H200): a replica that needs more is refused
    before anything starts; null: not known, nobody looks."""
    num_replicas: Processes = 1
    """Complete copies of the model that generate."""
    num_threads: Threads = 1
    """CPU threads of each rank of a replica."""
    max_restarts: Int = Field(default=2, ge=0)
    """How often dead replicas are started again, in the whole run."""

    @property
    @abstractmethod
    def ranks_per_replica(self) -> int:
        """Ranks that one replica consists of; a GPU each with device: cuda."""

    @property
    @abstractmethod
    def max_running(self) -> int:
        """Requests that decode together in a replica."""

    @property
    @abstractmethod
    def max_model_len(self) -> int | None:
        """Longest sequence as it was written; None: the backend chooses."""

    @property
    @abstractmethod
    def has_fp8(self) -> bool:
        """Whether replicas hold weights or keys and values in FP8."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.num_replicas * self.ranks_per_replica if self.device == "cuda" else 0


class EngineOptions(Section):
    absent: ClassVar[dict[str, str]] = {
        "max_num_seqs": "the bundled runtime calls it max_running_requests",
        "max_num_batched_tokens": "the bundled runtime calls it max_tokens_per_step",
        "enable_prefix_caching": "the bundled runtime calls it enable_prefix_cache",
        "gpu_memory_utilization": "the bundled runtime has num_pages KV pages",
        "kv_cache_gib": "the bundled runtime has num_pages KV pages",
        "tensor_parallel_size": "set rollout.backend.parallel.tp",
        "enable_expert_parallel": "set rollout.backend.parallel.ep",
    }
    """Of vLLM; told to who writes them here."""

    num_pages: Int = Field(default=512, ge=1)
    """KV pages of a replica."""
    max_model_len: Annotated[Int, Field(ge=2)] | None = None
    """Longest sequence; null: what the model's positions and the pages allow."""
    max_running_requests: Int = Field(default=128, ge=1)
    """Requests that decode together."""
    max_tokens_per_step: Int = Field(default=2048, ge=1)
    """Tokens of one engine step; longer prefills are done in chunks."""
    enable_prefix_cache: Bool = True
    """Keep the pages of finished prompts for later ones, within one policy version."""
    kv_dtype: Literal["auto", "float8_e4m3fn"] = "auto"
    """Of key and value pages; auto: as policy.dtype. FP8 halves them and their traffic, and moves
    the runtime away from the trainer (see mismatch/*)."""
    index_dtype: Literal["auto", "float8_e4m3fn"] = "auto"
    """Of index-key pages, likewise."""
    quantization: Literal["none", "mxfp8", "mxfp8_released"] = "none"
    """Weights that the runtime holds in MXFP8, quantised as they arrive: mxfp8, the routed experts;
    mxfp8_released, also attention, dense MLPs and shared experts. Halves them, and moves the
    runtime away from the trainer (see mismatch/*)."""
    shadow_weights: Bool = False
    """Hold all weights twice, so that a replica generates while a weight sync streams into the
    second copy, and pauses for milliseconds only."""


class ParallelOptions(Section):
    tp: Ranks = 1
    """Ranks that split the layers of the same requests; a GPU each with device: cuda."""
    dp: Ranks = 1
    """Groups of tp ranks that share the requests out and hold the same attention weights."""
    ep: Ranks | None = None
    """Groups of ranks that split the routed experts, dp times a divisor of tp; null: every rank is
    one."""


class M3BackendConfig(BackendConfig):
    """The bundled runtime: MiniMax-M3 alone, with everything that m3rl can do."""

    kind: Literal["m3"] = "m3"
    parallel: ParallelOptions = ParallelOptions()
    """How a replica is split over ranks, each a process."""
    engine: EngineOptions = EngineOptions()

    @property
    def ranks_per_replica(self) -> int:
        return self.parallel.tp * self.parallel.dp

    @property
    def max_running(self) -> int:
        return self.engine.max_running_requests

    @property
    def max_model_len(self) -> int | None:
        return self.engine.max_model_len

    @property
    def has_fp8(self) -> bool:
        engine = self.engine
        return engine.quantization != "none" or {engine.kv_dtype, engine.index_dtype} != {"auto"}

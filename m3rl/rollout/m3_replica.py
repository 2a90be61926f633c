"""One replica of the bundled runtime: its engine, on the thread of `engine_replica`.

    a receiver's caller ──▶ memory that nothing computes with; begin, commit and abort are commands

The bytes of a weight sync come on another thread than the engine's: into a shadow, while the engine
steps, or into the weights themselves, between a begin and a commit, when it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from m3rl.rollout.backend import Generated
from m3rl.rollout.engine_replica import EngineReplica
from m3rl.rollout.receiver_seat import ReceiverSeat
from m3rl.sync_transport import gpu_of
from m3rl.types import GenerationRequest, Receiver, TensorSlot

if TYPE_CHECKING:
    from inference.engine.engine import Engine
    from inference.engine.request import RequestOutput
    from inference.parallel.groups import ParallelGroups

SCORED_DECODES = 8
"""Last tokens of a scored prompt that are computed as decode steps do."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What a replica process needs to build its engine."""

    model_path: str
    engine: dict[str, Any]
    """Keyword arguments of `inference.config.EngineConfig`."""
    num_threads: int = 1
    parallel: dict[str, int] = field(default_factory=dict)
    """Keyword arguments of `inference.parallel.config.ParallelConfig`."""
    timeout_s: float = 120.0
    """How long the ranks of a replica wait for one another."""

    @property
    def num_ranks(self) -> int:
        """Processes of a replica."""
        return self.parallel.get("tp", 1) * self.parallel.get("dp", 1)


class EngineTarget:
    """A `WeightTarget` for a receiver on any thread.

    What changes which version serves runs on the engine thread, between two steps. The rest runs at
    once: it works on memory that belongs to the open load, which nothing computes with.
    """

    def __init__(self, engine: Engine, run: Callable[[Callable[[], Any]], Any]) -> None:
        """`run`: run a command on the engine thread."""
        self._run = run
        self._begin, self._commit, self._abort = engine.begin_load, engine.commit, engine.abort_load
        self.has_shadow = engine.has_shadow
        self.weight_layout = engine.weight_layout
        self.plan_load = engine.plan_load
        self.write, self.written = engine.write, engine.written
        self.weights_hash = engine.weights_hash
        self._engine = engine

    @property
    def version(self) -> int | None:
        return self._engine.version

    def serving_places(self) -> list[Any]:
        slots = self._engine.weight_layout()
        memory = self._engine.plan_load([(slot.name, slot.bounds) for slot in slots]).memory
        return [memory.views[slot.name] for slot in slots]

    def begin_load(self, version: int, plan: Any = None) -> None:
        self._run(lambda: self._begin(version, plan))

    def commit(self) -> None:
        self._run(self._commit)

    def abort_load(self) -> None:
        self._run(self._abort)


class M3Replica(EngineReplica["Engine"]):
    """One engine of the bundled runtime and the thread that steps it."""

    def __init__(self, settings: ReplicaSettings, groups: ParallelGroups | None = None) -> None:
        import torch

        from inference.config import EngineConfig, ModelConfig
        from inference.engine.engine import Engine, load_tokenizer

        torch.set_num_threads(settings.num_threads)
        config = ModelConfig.from_pretrained(settings.model_path)
        tokenizer = load_tokenizer(settings.model_path)  # for stop strings
        engine = Engine(config, EngineConfig(**settings.engine), tokenizer, groups)
        self._seat = ReceiverSeat()
        super().__init__(lambda: engine)  # it may be made here, where a caller has set its device

    def weight_layout(self) -> list[TensorSlot]:
        return [
            TensorSlot(
                slot.name,
                slot.dtype,
                tuple(slot.shape),
                tuple(slot.bounds),
                slot.bucket,
                slot.storage,
            )
            for slot in self.engine.weight_layout()
        ]

    def load(self, path: str, version: int) -> None:
        from inference.config import ModelConfig
        from inference.models.weights import read_checkpoint

        config = ModelConfig.from_pretrained(path)
        tensors = read_checkpoint(path, config, allow_mxfp8=True)
        self._run(lambda: self.engine.load_weights(tensors, version))

    def gpu(self) -> str | None:
        """`gpu_of` its weights."""
        import torch

        return gpu_of(torch.device(self.engine.engine_config.device))

    def prompt_lengths(self) -> tuple[int, int]:
        """Of a prompt: tokens of which block selection keeps all, and the most there can be."""
        model, options = self.engine.config, self.engine.engine_config
        assert options.max_model_len is not None, "the engine resolves it"
        return model.index_topk_blocks * model.index_block_size, options.max_model_len - 1

    def prompt_logprobs(self, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Of each prompt, [n - 1] float32: log-probability of every token but the first.

        Computed at once, on the engine thread, also while it is paused; see
        `inference.engine.scoring`.
        """
        from inference.engine.scoring import prompt_logprobs

        def score() -> list[np.ndarray]:
            return [
                prompt_logprobs(self.engine, ids, num_decodes=min(SCORED_DECODES, len(ids) - 2))
                for ids in prompts
            ]

        return self._run_alike(score)

    def attach(self, receiver: Receiver) -> None:
        self._seat.attach(receiver, EngineTarget(self.engine, self._run))

    def receiver_call(self, method: str, *args: Any) -> Any:
        """Call a method of the receiver, one call at a time, beside the engine's steps."""
        return self._seat.call(method, *args)

    def _add(self, request: GenerationRequest) -> None:
        from inference.engine.request import Request, SamplingParams

        sampling = request.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
            seed=request.seed,
            routing=sampling.capture_routing,
            blocks=sampling.capture_blocks,
        )
        self.engine.add(
            Request(
                request.request_id,
                request.prompt_ids,
                params,
                group_id=request.group_id,
                use_prefix_cache=sampling.use_prefix_cache,
            )
        )

    def _generated(self, output: RequestOutput) -> Generated:
        return Generated(
            request_id=output.request_id,
            token_ids=np.asarray(output.token_ids, np.int32),
            logprobs=np.asarray(output.logprobs, np.float32),
            finish_reason=output.finish_reason,
            version_spans=np.asarray(output.version_spans, np.int64),
            seed=output.seed,
            num_cached_tokens=output.num_cached_tokens,
            routing=output.routing,
            blocks=output.blocks,
            error=output.error,
        )

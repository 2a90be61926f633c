"""One replica of the bundled runtime: an engine and the thread that steps it. Knows nothing of Ray.

    callers ──▶ command queue ──▶ engine thread: commands, step, deliver
    a receiver's caller ──▶ memory that nothing computes with; begin, commit and abort are commands

The engine thread owns the engine: whatever touches it (submissions, aborts, pauses, the version
that serves) is a command that runs between two steps, so nothing can see half an update. The bytes
of a weight sync come on another thread: into a shadow, while the engine steps, or into the weights
themselves, between a begin and a commit, when it does not.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from m3rl.rollout.backend import Generated, PauseMode
from m3rl.sync_transport import gpu_of
from m3rl.types import GenerationRequest, Receiver, TensorSlot

if TYPE_CHECKING:
    from inference.engine.engine import Engine
    from inference.engine.request import RequestOutput
    from inference.parallel.groups import ParallelGroups

logger = logging.getLogger(__name__)

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


class M3Replica:
    """One engine and the thread that steps it; lives in its own process, knows nothing of Ray."""

    def __init__(self, settings: ReplicaSettings, groups: ParallelGroups | None = None) -> None:
        import torch

        from inference.config import EngineConfig, ModelConfig
        from inference.engine.engine import Engine, load_tokenizer

        torch.set_num_threads(settings.num_threads)
        config = ModelConfig.from_pretrained(settings.model_path)
        tokenizer = load_tokenizer(settings.model_path)  # for stop strings
        self.engine = Engine(config, EngineConfig(**settings.engine), tokenizer, groups)
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._waiting: dict[str, Future[RequestOutput]] = {}
        self._receiver: Receiver | None = None
        self._receiving = threading.Lock()
        self._progress = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generated]:
        """Submit all requests before the next step and wait for all of them, in order."""
        futures = self._run_alike(lambda: self._submit_all(requests))
        return [_generated(future.result()) for future in futures]

    def abort(self, request_ids: Sequence[str]) -> int:
        return self._run_alike(lambda: self.engine.abort(request_ids))

    def pause(self, mode: PauseMode) -> None:
        self._run_alike(lambda: self.engine.pause(mode))

    def resume(self) -> None:
        self._run_alike(self.engine.resume)

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
        with self._receiving:
            receiver.bind(EngineTarget(self.engine, self._run))
            self._receiver = receiver

    def receiver_call(self, method: str, *args: Any) -> Any:
        """Call a method of the receiver, one call at a time, beside the engine's steps."""
        with self._receiving:
            if self._receiver is None:
                raise RuntimeError(f"receiver.{method}: no receiver is attached to this replica")
            return getattr(self._receiver, method)(*args)

    def stats(self) -> dict[str, float]:
        return self._run(self.engine.stats)

    def health(self) -> dict[str, Any]:
        """Answers from another thread, so a long step or sync does not make it silent."""
        return {
            "pid": os.getpid(),
            "version": self.engine.version,
            "progress": self._progress,
            "failure": repr(self._failure) if self._failure is not None else "",
        }

    def _submit_all(self, requests: Sequence[GenerationRequest]) -> list[Future[RequestOutput]]:
        """All or none: when one is refused, those before it are taken back."""
        taken: list[str] = []
        try:
            for request in requests:
                self._submit(request)
                taken.append(request.request_id)
        except Exception:
            self.engine.abort(taken)
            for request_id in taken:
                del self._waiting[request_id]
            raise
        return [self._waiting[request_id] for request_id in taken]

    def _submit(self, request: GenerationRequest) -> None:
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
        self._waiting[request.request_id] = Future()

    def alike(self, number: int, method: str, *args: Any) -> Any:
        """Call a method that all ranks of a replica are given under one number."""
        return getattr(self, method)(*args)

    def _run_alike(self, command: Callable[[], Any]) -> Any:
        """Run a command that all ranks of a replica run between the same two steps."""
        return self._run(command)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine of this replica has failed: {self._failure!r}")

    def _run(self, command: Callable[[], Any]) -> Any:
        """Run a command on the engine thread between two steps and return its result."""
        self._raise_failure()
        future: Future[Any] = Future()
        self._commands.put((command, future))
        if self._failure is not None:  # it failed since: nobody else empties the queue
            self._fail_all(self._failure)
        return future.result()

    def _serve(self) -> None:
        try:
            while True:
                if not self._run_commands(wait=not self.engine.has_work):
                    return
                if self.engine.has_work:
                    self._deliver(self.engine.step())
                    self._progress += 1
        except BaseException as error:  # outermost loop of the engine thread: hand the fault on
            self._failure = error
            logger.exception("the engine thread ended")
            self._fail_all(error)

    def _run_commands(self, wait: bool) -> bool:
        """Run what is queued (waiting for a first command if `wait`); False when told to end."""
        while True:
            try:
                item = self._commands.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if item is None:
                return False
            command, future = item
            try:
                future.set_result(command())
            except Exception as error:  # a caller's fault belongs to the caller, not to the loop
                future.set_exception(error)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            future = self._waiting.pop(output.request_id, None)
            if future is not None:  # None: taken back by _submit_all
                future.set_result(output)

    def _fail_all(self, error: BaseException) -> None:
        for future in self._waiting.values():
            future.set_exception(RuntimeError(f"the engine of this replica has failed: {error!r}"))
        self._waiting.clear()
        while True:
            try:
                item = self._commands.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[1].set_exception(RuntimeError(f"the engine has failed: {error!r}"))


def _generated(output: RequestOutput) -> Generated:
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

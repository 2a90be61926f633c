"""The bundled runtime as a generation backend: one engine per Ray actor, watched by the driver.

    driver                              replica process
    generate(requests) ── submit ────▶  command queue ─▶ engine thread: commands, step, deliver
    receiver(r).call("stream") ──────▶  same queue: weights change only between two steps

The engine thread owns the engine: whatever touches it (submissions, aborts, pauses, weight sync) is
a command that runs between two steps, so there is no lock and nothing can see half an update.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from m3rl.rollout.backend import (
    BackendError,
    Generated,
    GenerationOutcome,
    PauseMode,
    ReplicaHealth,
)
from m3rl.rollout.placement import worker_options
from m3rl.types import GenerationRequest, Receiver, RemoteReceiver, TensorSlot

if TYPE_CHECKING:
    from inference.engine.request import RequestOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What a replica process needs to build its engine."""

    model_path: str
    engine: dict[str, Any]
    """Keyword arguments of `inference.config.EngineConfig`."""
    num_threads: int = 1


class M3Replica:
    """One engine and the thread that steps it; lives in its own process, knows nothing of Ray."""

    def __init__(self, settings: ReplicaSettings) -> None:
        import torch

        from inference.config import EngineConfig, ModelConfig
        from inference.engine.engine import Engine

        torch.set_num_threads(settings.num_threads)
        config = ModelConfig.from_pretrained(settings.model_path)
        self.engine = Engine(config, EngineConfig(**settings.engine))
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._waiting: dict[str, Future[RequestOutput]] = {}
        self._receiver: Receiver | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generated]:
        """Submit all requests before the next step and wait for all of them, in order."""
        futures = self._run(lambda: self._submit_all(requests))
        return [_generated(future.result()) for future in futures]

    def abort(self, request_ids: Sequence[str]) -> int:
        return self._run(lambda: self.engine.abort(request_ids))

    def pause(self, mode: PauseMode) -> None:
        self._run(lambda: self.engine.pause(mode))

    def resume(self) -> None:
        self._run(self.engine.resume)

    def weight_layout(self) -> list[TensorSlot]:
        return [
            TensorSlot(slot.name, slot.dtype, tuple(slot.shape), tuple(slot.bounds), slot.bucket)
            for slot in self.engine.weight_layout()
        ]

    def load(self, path: str, version: int) -> None:
        from inference.config import ModelConfig
        from inference.models.weights import read_checkpoint

        config = ModelConfig.from_pretrained(path)
        self._run(lambda: self.engine.load_weights(read_checkpoint(path, config), version))

    def attach(self, receiver: Receiver) -> None:
        receiver.bind(self.engine)
        self._receiver = receiver

    def receiver_call(self, method: str, *args: Any) -> Any:
        if self._receiver is None:
            raise RuntimeError(f"receiver.{method}: no receiver is attached to this replica")
        bound = getattr(self._receiver, method)
        return self._run(lambda: bound(*args))

    def stats(self) -> dict[str, float]:
        return self._run(self.engine.stats)

    def health(self) -> dict[str, Any]:
        """Answers from another thread, so a long step or sync does not make it silent."""
        return {
            "pid": os.getpid(),
            "version": self.engine.version,
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

        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            max_tokens=request.max_tokens,
            stop=request.stop,
            seed=request.seed,
            routing=request.capture_routing,
            blocks=request.capture_blocks,
        )
        self.engine.add(
            Request(
                request.request_id,
                request.prompt_ids,
                params,
                group_id=request.group_id,
                use_prefix_cache=request.use_prefix_cache,
            )
        )
        self._waiting[request.request_id] = Future()

    def _run(self, command: Callable[[], Any]) -> Any:
        """Run a command on the engine thread between two steps and return its result."""
        if self._failure is not None:
            raise RuntimeError(f"the engine of this replica has failed: {self._failure!r}")
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


class _RemoteReceiver:
    """`RemoteReceiver` over a Ray actor."""

    def __init__(self, backend: M3Backend, replica: int) -> None:
        self._backend = backend
        self._replica = replica

    def attach(self, receiver: Receiver) -> None:
        ray.get(self._backend.actor(self._replica).attach.remote(receiver))

    def call(self, method: str, *args: Any) -> Future[Any]:
        return self._backend.actor(self._replica).receiver_call.remote(method, *args).future()


class M3Backend:
    """A pool of `num_replicas` engines, each a Ray actor with its own resources.

    The constructor returns while the processes still start; `wait_started` ends that.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        num_replicas: int,
        *,
        num_gpus: int = 0,
        start_timeout_s: float = 120.0,
        replica_class: type[M3Replica] = M3Replica,
    ) -> None:
        self.num_replicas = num_replicas
        self._settings = settings
        self._start_timeout_s = start_timeout_s
        options = worker_options(settings.num_threads, num_gpus, max_concurrency=8)
        self._factory = ray.remote(replica_class).options(**options)
        self._actors: list[Any] = [self._factory.remote(settings) for _ in range(num_replicas)]

    def wait_started(self) -> None:
        """Return when every replica process answers.

        Raises:
            BackendError: one could not start (says why) or did not in time.
        """
        self._await_start(self.alive)

    def actor(self, replica: int) -> Any:
        actor = self._actors[replica]
        if actor is None:
            raise BackendError(f"replica {replica} is gone; restart it before calling it")
        return actor

    @property
    def alive(self) -> list[int]:
        return [replica for replica, actor in enumerate(self._actors) if actor is not None]

    def generate(
        self, requests: Sequence[GenerationRequest], *, timeout_s: float
    ) -> GenerationOutcome:
        alive = self.alive
        if not alive:
            raise BackendError("no replica is left to generate on; see the log for why each ended")
        shares: dict[int, list[GenerationRequest]] = {replica: [] for replica in alive}
        for request in sorted(requests, key=lambda r: (r.prompt_ordinal, r.sample_index)):
            shares[alive[request.prompt_ordinal % len(alive)]].append(request)
        pending = {
            self.actor(replica).generate.remote(share): replica
            for replica, share in shares.items()
            if share
        }
        outcome = GenerationOutcome()
        deadline = time.monotonic() + timeout_s
        while pending:
            done, _ = ray.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                break
            replica = pending.pop(done[0])
            try:
                results = ray.get(done[0])
            except (RayActorError, RayTaskError) as error:
                self._give_up(replica, shares[replica], outcome, _cause(error))
                continue
            outcome.generated.update({result.request_id: result for result in results})
        for replica in pending.values():
            reason = f"no answer within rollout.timeout_s={timeout_s:g} s"
            self._give_up(replica, shares[replica], outcome, reason)
        return outcome

    def abort(self, request_ids: Sequence[str]) -> int:
        return sum(ray.get([self.actor(r).abort.remote(list(request_ids)) for r in self.alive]))

    def pause(self, mode: PauseMode, replica: int | None = None) -> None:
        ray.get([self.actor(r).pause.remote(mode) for r in self._selected(replica)])

    def resume(self, replica: int | None = None) -> None:
        ray.get([self.actor(r).resume.remote() for r in self._selected(replica)])

    def weight_layout(self, replica: int) -> list[list[TensorSlot]]:
        return [ray.get(self.actor(replica).weight_layout.remote())]

    def receiver(self, replica: int) -> RemoteReceiver:
        return _RemoteReceiver(self, replica)

    def load(self, path: str, version: int, replicas: Sequence[int] | None = None) -> None:
        chosen = self.alive if replicas is None else replicas
        ray.get([self.actor(r).load.remote(path, version) for r in chosen])

    def drop(self, replica: int) -> None:
        if self._actors[replica] is not None:
            ray.kill(self._actors[replica])
            self._actors[replica] = None

    def restart(self, replica: int) -> None:
        self.drop(replica)
        self._actors[replica] = self._factory.remote(self._settings)
        self._await_start([replica])

    def stats(self) -> dict[str, float]:
        per_replica = ray.get([self.actor(r).stats.remote() for r in self.alive])
        return {
            f"engine/{key}": float(np.mean([stats[key] for stats in per_replica]))
            for key in (per_replica[0] if per_replica else {})
        }

    def health(self, timeout_s: float = 10.0) -> list[ReplicaHealth]:
        return [self._health(replica, timeout_s) for replica in range(self.num_replicas)]

    def close(self) -> None:
        for replica in self.alive:
            self.drop(replica)

    def _health(self, replica: int, timeout_s: float) -> ReplicaHealth:
        if self._actors[replica] is None:
            return ReplicaHealth(replica, False, None, "not running")
        try:
            report = ray.get(self._actors[replica].health.remote(), timeout=timeout_s)
        except GetTimeoutError:
            return ReplicaHealth(replica, False, None, f"no answer within {timeout_s:g} s")
        except RayActorError as error:
            return ReplicaHealth(replica, False, None, _cause(error))
        return ReplicaHealth(replica, not report["failure"], report["version"], report["failure"])

    def _await_start(self, replicas: Sequence[int] | range) -> None:
        refs = [self.actor(replica).health.remote() for replica in replicas]
        try:
            ray.get(refs, timeout=self._start_timeout_s)
        except GetTimeoutError:
            raise BackendError(
                f"replicas {list(replicas)} did not start within {self._start_timeout_s:g} s; "
                "is there room for them on the cluster (`ray status`)?"
            ) from None
        except RayActorError as error:
            raise BackendError(f"a replica could not start: {_cause(error)}") from error

    def _selected(self, replica: int | None) -> list[int]:
        return self.alive if replica is None else [replica]

    def _give_up(
        self,
        replica: int,
        share: Sequence[GenerationRequest],
        outcome: GenerationOutcome,
        reason: str,
    ) -> None:
        logger.error("replica %d is given up: %s", replica, reason)
        outcome.failures[replica] = reason
        outcome.lost.extend(share)
        self.drop(replica)


def _cause(error: BaseException) -> str:
    """The innermost line of a Ray error, without its remote traceback."""
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[-1] if lines else cause!r}"

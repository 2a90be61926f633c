"""The bundled runtime as a generation backend: a pool of replicas, each a Ray actor of its own.

The driver shares requests out, watches every replica against a deadline, gives up those that die or
stay silent, and starts others in their place; what a replica does is in `m3_replica.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from m3rl.rollout.backend import BackendError, GenerationOutcome, PauseMode, ReplicaHealth
from m3rl.rollout.m3_replica import M3Replica, ReplicaSettings
from m3rl.rollout.placement import worker_options
from m3rl.types import GenerationRequest, Receiver, RemoteReceiver, TensorSlot

logger = logging.getLogger(__name__)


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

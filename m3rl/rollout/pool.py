"""The driver's side of a generation backend: a pool of replicas, each of one Ray actor or more.

It shares requests out, watches every replica against a deadline, gives up those that die or stay
silent, and starts others in their place. What a replica computes with, and how its actors are made
and met, is its kind's affair: a subclass of `ReplicaPool`, and what its actors do, most of which
`engine_replica.py` does for every kind.
"""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from m3rl.rollout.backend import BackendError, GenerationOutcome, PauseMode, ReplicaHealth
from m3rl.rollout.placement import cause_of, future_of
from m3rl.types import GenerationRequest, Receiver, RemoteReceiver, TensorSlot

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 120.0
"""Longest wait for a replica to pause, resume or load."""
STATS_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
"""Longest wait for replicas to end in order before they are killed."""


class _RemoteReceiver:
    """`RemoteReceiver` over the actors of a replica, whichever are there when it is called."""

    def __init__(self, pool: ReplicaPool, replica: int, rank: int) -> None:
        self._pool = pool
        self._replica = replica
        self._rank = rank

    def attach(self, receiver: Receiver) -> None:
        future_of(self._pool._attach(self._replica, self._rank, receiver)).result()

    def call(self, method: str, *args: Any) -> Future[Any]:
        return future_of(self._pool._receiver_call(self._replica, self._rank, method, *args))


def _require_gpus(wanted: int) -> None:
    """Say at once what Ray would wait for without end."""
    found = int(ray.cluster_resources().get("GPU", 0)) if wanted else 0
    if found < wanted:
        raise BackendError(
            f"rollout.backend: the replicas need {wanted} GPUs and the cluster has {found}; set "
            "rollout.backend.device: cpu, fewer num_replicas, or fewer ranks of each "
            "(engine.tensor_parallel_size; with kind: m3 parallel)"
        )


class ReplicaPool(ABC):
    """`num_replicas` replicas, each of one Ray actor or more; the first speaks for the replica.

    The constructor returns while the processes still start; `wait_started` ends that.

    A kind overrides `_new_workers`, and where it differs the other hooks at the end of this class.
    Its actors have the methods of `EngineReplica`, and `load`, `weight_layout`, `gpu`,
    `prompt_lengths`, `prompt_logprobs`, `attach` and `receiver_call`.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        num_ranks: int,
        num_gpus: int,
        start_timeout_s: float,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """A kind sets what its hooks read before it calls this.

        Args:
            num_ranks: workers of a replica that hold weights, and so receivers.
            num_gpus: of a replica, over all its ranks.
            start_timeout_s: longest wait for replicas that start together, until they have engines.
            call_timeout_s: longest wait for them to pause, resume or load.

        Raises:
            BackendError: the cluster has fewer GPUs than the replicas need.
        """
        self.num_replicas = num_replicas
        self._num_ranks = num_ranks
        self._start_timeout_s = start_timeout_s
        self._call_timeout_s = call_timeout_s
        _require_gpus(num_replicas * num_gpus)
        self._numbers = itertools.count()
        """Of calls that all actors of a replica are given alike."""
        self._workers: list[list[Any]] = [[] for _ in range(num_replicas)]
        """The actors of each replica, in rank order; none of one that is gone."""
        for replica in range(num_replicas):
            self._workers[replica] = self._new_workers(replica)

    def wait_started(self) -> None:
        """Return when every replica process answers.

        Raises:
            BackendError: one could not start (says why) or did not in time.
        """
        self._await_start(self.alive)

    def workers(self, replica: int) -> list[Any]:
        """The actors of a replica, in rank order."""
        if not self._workers[replica]:
            raise BackendError(f"replica {replica} is gone; restart it before calling it")
        return self._workers[replica]

    def actor(self, replica: int) -> Any:
        """That of its first rank, which speaks for the replica."""
        return self.workers(replica)[0]

    @property
    def alive(self) -> list[int]:
        return [replica for replica, workers in enumerate(self._workers) if workers]

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        timeout_s: float,
        replicas: Collection[int] | None = None,
    ) -> GenerationOutcome:
        alive = [r for r in self.alive if replicas is None or r in replicas]
        if not alive:
            raise BackendError("no replica is left to generate on; see the log for why each ended")
        shares: dict[int, list[GenerationRequest]] = {replica: [] for replica in alive}
        for request in sorted(requests, key=lambda r: (r.prompt_ordinal, r.sample_index)):
            shares[alive[request.prompt_ordinal % len(alive)]].append(request)
        pending = {
            ref: replica
            for replica, share in shares.items()
            if share
            for ref in self._call(replica, "generate", share)
        }
        outcome = GenerationOutcome()
        watch = _ProgressWatch(timeout_s)
        while pending:
            done, _ = ray.wait(list(pending), timeout=watch.poll_s)
            lost: dict[int, str] = {}
            for ref in done:
                replica = pending.pop(ref)
                try:
                    fault = self._take(ref, outcome)
                except BackendError:
                    self._abandon(pending, shares)
                    raise
                if fault is not None:
                    lost.setdefault(replica, fault)
            waited_for = set(pending.values()) - lost.keys()
            for replica in watch.silent({r: self.actor(r).health.remote() for r in waited_for}):
                lost[replica] = f"no progress within rollout.timeout_s={timeout_s:g} s"
            for replica, fault in lost.items():
                self._give_up(replica, shares[replica], outcome, fault)
            pending = {ref: replica for ref, replica in pending.items() if replica not in lost}
        return outcome

    def abort(self, request_ids: Sequence[str]) -> int:
        return sum(sum(counts) for counts in self._ask_all(self.alive, "abort", list(request_ids)))

    def pause(self, mode: PauseMode, replica: int | None = None) -> None:
        self._ask(self.alive if replica is None else [replica], "pause", mode)

    def resume(self, replica: int | None = None) -> None:
        self._ask(self.alive if replica is None else [replica], "resume")

    def weight_layout(self, replica: int) -> list[list[TensorSlot]]:
        return self._by_rank(self._ask_all([replica], "weight_layout")[0])

    def gpus(self) -> dict[str, str | None]:
        found = zip(self.alive, self._ask_all(self.alive, "gpu"), strict=True)
        return {
            f"replica {replica} rank {rank}": gpu
            for replica, gpus in found
            for rank, gpu in enumerate(self._by_rank(gpus))
        }

    def prompt_lengths(self) -> tuple[int, int]:
        lengths: tuple[int, int] = self._ask(self.alive[:1], "prompt_lengths")[0]
        return lengths

    def prompt_logprobs(self, replica: int, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        scores: list[np.ndarray] = self._ask([replica], "prompt_logprobs", list(prompts))[0]
        return scores

    def receivers(self, replica: int) -> list[RemoteReceiver]:
        return [_RemoteReceiver(self, replica, rank) for rank in range(self._num_ranks)]

    def load(self, path: str, version: int, replicas: Sequence[int] | None = None) -> None:
        self._ask(self.alive if replicas is None else replicas, "load", path, version)

    def drop(self, replica: int) -> None:
        self._drop([replica])

    def restart(self, replica: int) -> None:
        self.drop(replica)
        self._workers[replica] = self._new_workers(replica)
        self._await_start([replica])

    def stats(self) -> dict[str, float]:
        """Of the replicas that answer; a silent one is found and replaced when it should work."""
        refs = [worker.stats.remote() for r in self.alive for worker in self.workers(r)]
        done, _ = (
            ray.wait(refs, num_returns=len(refs), timeout=STATS_TIMEOUT_S) if refs else ([], [])
        )
        per_replica = []
        for ref in done:
            try:
                per_replica.append(ray.get(ref))
            except (RayActorError, RayTaskError) as error:
                logger.warning("a replica gave no figures: %s", cause_of(error))
        return {
            f"engine/{key}": float(np.mean([stats[key] for stats in per_replica]))
            for key in (per_replica[0] if per_replica else {})
        }

    def health(self, timeout_s: float = 10.0) -> list[ReplicaHealth]:
        return [self._health(replica, timeout_s) for replica in range(self.num_replicas)]

    def close(self) -> None:
        self._drop(self.alive)

    def _drop(self, replicas: Sequence[int]) -> None:
        """End replicas, in order those that can within `CLOSE_TIMEOUT_S`."""
        closing = [ref for r in replicas if self._workers[r] for ref in self._begin_close(r)]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        for replica in replicas:
            for worker in self._workers[replica]:
                ray.kill(worker)
            self._workers[replica] = []
            self._free(replica)

    def _health(self, replica: int, timeout_s: float) -> ReplicaHealth:
        if not self._workers[replica]:
            return ReplicaHealth(replica, False, None, "not running")
        try:
            reports = ray.get(
                [worker.health.remote() for worker in self._workers[replica]], timeout=timeout_s
            )
        except GetTimeoutError:
            return ReplicaHealth(replica, False, None, f"no answer within {timeout_s:g} s")
        except RayActorError as error:
            return ReplicaHealth(replica, False, None, cause_of(error))
        failure = next((report["failure"] for report in reports if report["failure"]), "")
        return ReplicaHealth(replica, not failure, reports[0]["version"], failure)

    def _await_start(self, replicas: Sequence[int] | range) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        try:
            self._meet(replicas)
            refs = [worker.health.remote() for r in replicas for worker in self.workers(r)]
            ray.get(refs, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError:
            raise BackendError(
                f"replicas {list(replicas)} did not start within {self._start_timeout_s:g} s; "
                "is there room for them on the cluster (`ray status`)?"
            ) from None
        except (RayActorError, RayTaskError) as error:
            raise BackendError(f"a replica could not start: {cause_of(error)}") from error

    def _call(self, replica: int, method: str, *args: Any) -> list[Any]:
        """Begin a call on all actors of a replica; one that must be alike is so by its number."""
        number = next(self._numbers)
        return [worker.alike.remote(number, method, *args) for worker in self.workers(replica)]

    def _ask(self, replicas: Sequence[int], method: str, *args: Any) -> list[Any]:
        """As `_ask_all`, of the first actor of each replica."""
        return [results[0] for results in self._ask_all(replicas, method, *args)]

    def _ask_all(self, replicas: Sequence[int], method: str, *args: Any) -> list[list[Any]]:
        """Results of a call on each of `replicas`, by actor.

        Raises:
            BackendError: one is gone, refuses, or is silent for `call_timeout_s`.
        """
        refs = [self._call(replica, method, *args) for replica in replicas]
        timeout_s = self._call_timeout_s
        try:
            found = iter(ray.get([ref for each in refs for ref in each], timeout=timeout_s))
            return [[next(found) for _ in each] for each in refs]
        except GetTimeoutError:
            raise BackendError(
                f"{method}: replicas {list(replicas)} did not all answer in {timeout_s:g} s"
            ) from None
        except RayActorError as error:
            raise BackendError(f"{method}: a replica is gone: {cause_of(error)}") from error
        except RayTaskError as error:
            raise BackendError(f"{method}: {error.cause}") from error

    def _abandon(self, pending: dict[Any, int], shares: dict[int, list[GenerationRequest]]) -> None:
        """End what other replicas still do for a call that failed."""
        for replica in set(pending.values()):
            self._ask([replica], "abort", [request.request_id for request in shares[replica]])
        if pending:
            ray.wait(list(pending), num_returns=len(pending), timeout=self._call_timeout_s)

    def _take(self, ref: Any, outcome: GenerationOutcome) -> str | None:
        """Put the results of one replica into `outcome`; its fault, if it is lost instead.

        Raises:
            BackendError: a request was refused. It would be by every replica, so none is lost.
        """
        try:
            results = ray.get(ref)
        except RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise BackendError(f"the runtime refused a request: {error.cause}") from error
            return cause_of(error)
        except RayActorError as error:
            return cause_of(error)
        outcome.generated.update({result.request_id: result for result in results})
        return None

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

    # The hooks of a kind. Here, but for the first: every rank is an actor of its own.

    @abstractmethod
    def _new_workers(self, replica: int) -> list[Any]:
        """Begin to start the actors of a replica; they are returned in rank order."""

    def _meet(self, replicas: Sequence[int]) -> None:
        """Have the actors of each of `replicas`, which all still start, meet one another. Ray's
        errors are raised as they come."""
        return

    def _begin_close(self, replica: int) -> list[Any]:
        """Begin to end a replica in order, if its kind has anything to put in order; the calls."""
        return []

    def _free(self, replica: int) -> None:
        """Give back what a replica had beside its actors; these are gone, if it had any."""
        return

    def _by_rank(self, answers: list[Any]) -> list[Any]:
        """`weight_layout` or `gpu` of each rank, from what the actors of a replica answered."""
        return answers

    def _attach(self, replica: int, rank: int, receiver: Receiver) -> Any:
        """The Ray call that ships a receiver to a rank."""
        return self.workers(replica)[rank].attach.remote(receiver)

    def _receiver_call(self, replica: int, rank: int, method: str, *args: Any) -> Any:
        """The Ray call of a method of a rank's receiver."""
        return self.workers(replica)[rank].receiver_call.remote(method, *args)


class _ProgressWatch:
    """Tells which replicas have not moved for `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self.poll_s = min(1.0, timeout_s / 4)
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._last: dict[int, tuple[int, float]] = {}
        """Replica -> (engine steps, when that number was first seen)."""

    def silent(self, asked: dict[int, Any]) -> set[int]:
        """Replicas of `asked` (replica -> reference to its health) that moved too long ago."""
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=self.poll_s)
        now = time.monotonic()
        for replica, ref in asked.items():
            progress = _progress(ref)
            steps, _ = self._last.get(replica, (-1, self._began))
            if progress is not None and progress != steps:
                self._last[replica] = (progress, now)
        return {r for r in asked if now - self._last.get(r, (-1, self._began))[1] > self._timeout_s}


def _progress(ref: Any) -> int | None:
    """Engine steps of a replica; None when it has not answered."""
    try:
        return int(ray.get(ref, timeout=0)["progress"])
    except (GetTimeoutError, RayActorError):  # a death is told by the call that waits for results
        return None

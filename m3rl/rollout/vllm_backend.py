"""vLLM as a generation backend: one Ray actor a replica, with the GPUs of all its workers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from m3rl.rollout.placement import Place, cause_of, run_on_node, worker_options
from m3rl.rollout.pool import ReplicaPool
from m3rl.rollout.vllm_files import EngineFiles
from m3rl.rollout.vllm_replica import VllmReplica
from m3rl.rollout.vllm_settings import VllmSettings
from m3rl.types import Receiver

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""Importing vLLM and building an engine; on GPUs also compiling it and capturing graphs."""
REMOVE_TIMEOUT_S = 30.0
"""Of files, on a node that may have to start a process for it."""


def _files(replica: VllmReplica) -> tuple[str, EngineFiles]:
    return Place.here().node, replica.engine.files


class VllmBackend(ReplicaPool):
    """A pool of vLLM replicas. The ranks of a replica are vLLM's own processes behind one actor."""

    def __init__(
        self,
        settings: VllmSettings,
        num_replicas: int,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        replica_class: type[VllmReplica] = VllmReplica,
    ) -> None:
        """
        Raises:
            BackendError: the cluster has fewer GPUs than the replicas need.
        """
        self._settings = settings
        self._class: Any = ray.remote(replica_class)
        self._files: dict[int, tuple[str, EngineFiles]] = {}
        """Replica -> the node it is on, and what it has there."""
        num_ranks = settings.tensor_parallel_size
        self._gpus_of_a_replica = num_ranks if settings.device == "cuda" else 0
        super().__init__(
            num_replicas,
            num_ranks=num_ranks,
            num_gpus=self._gpus_of_a_replica,
            start_timeout_s=start_timeout_s,
            call_timeout_s=settings.timeout_s,
        )

    def _new_workers(self, replica: int) -> list[Any]:
        options = worker_options(
            self._settings.num_threads,
            self._gpus_of_a_replica,
            # A call waits for each rank while weights arrive, and others come meanwhile.
            max_concurrency=8 + 2 * self._settings.tensor_parallel_size,
        )
        return [self._class.options(**options).remote(self._settings)]

    def _meet(self, replicas: Sequence[int]) -> None:
        asked = [self.actor(replica).__ray_call__.remote(_files) for replica in replicas]
        found = ray.get(asked, timeout=self._start_timeout_s)
        self._files |= dict(zip(replicas, found, strict=True))

    def _begin_close(self, replica: int) -> list[Any]:
        return [worker.close.remote() for worker in self.workers(replica)]

    def _free(self, replica: int) -> None:
        if replica not in self._files:
            return
        node, files = self._files.pop(replica)
        try:
            run_on_node(node, files.remove, timeout_s=REMOVE_TIMEOUT_S)
        except (OSError, RayError) as error:  # what it was to serve is gone: the run goes on
            logger.warning("replica %d left files behind: %s", replica, cause_of(error))

    def _by_rank(self, answers: list[Any]) -> list[Any]:
        (of_the_replica,) = answers
        return of_the_replica

    def _attach(self, replica: int, rank: int, receiver: Receiver) -> Any:
        return self.actor(replica).attach.remote(rank, receiver)

    def _receiver_call(self, replica: int, rank: int, method: str, *args: Any) -> Any:
        return self.actor(replica).receiver_call.remote(rank, method, *args)

"""The bundled runtime as a generation backend: how the actors of its replicas are made and meet.

What every kind of replica needs of the driver is in `pool.py`; what a replica does is in
`m3_replica.py`, how the ranks of one keep in step in `m3_ranks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from m3rl.rendezvous import Meeting, Rendezvous
from m3rl.rollout.m3_ranks import RankReplica
from m3rl.rollout.m3_replica import M3Replica, ReplicaSettings
from m3rl.rollout.placement import (
    Place,
    gpus_to_see,
    node_address,
    see_gpus,
    side_by_side,
    worker_options,
)
from m3rl.rollout.pool import ReplicaPool


class RankActor(RankReplica):
    """A rank with its place in the cluster."""

    def place(self) -> Place:
        return Place.here()

    def join(self, rank: int, meeting: Meeting, gpus: list[str]) -> None:
        see_gpus(gpus)
        self.start(rank, meeting, node_address())


class M3Backend(ReplicaPool):
    """A pool of replicas of the bundled runtime, of which each rank is a Ray actor with its own
    resources."""

    def __init__(
        self,
        settings: ReplicaSettings,
        num_replicas: int,
        *,
        num_gpus: int = 0,  # of each rank
        start_timeout_s: float = 120.0,
        replica_class: type[M3Replica] = M3Replica,
    ) -> None:
        """
        Raises:
            BackendError: the cluster has fewer GPUs than the replicas need.
        """
        self._settings = settings
        self._gpus_of_a_rank = num_gpus
        self._class: Any = ray.remote(replica_class if settings.num_ranks == 1 else RankActor)
        self._rendezvous: Rendezvous | None = None
        """Of the ranks of each replica; none where every replica is one process."""
        if settings.num_ranks > 1:
            self._rendezvous = Rendezvous(node_address(), start_timeout_s)
        self._rooms: dict[int, Any] = {}
        super().__init__(
            num_replicas,
            num_ranks=settings.num_ranks,
            num_gpus=settings.num_ranks * num_gpus,
            start_timeout_s=start_timeout_s,
        )

    def _new_workers(self, replica: int) -> list[Any]:
        settings = self._settings
        options = worker_options(settings.num_threads, self._gpus_of_a_rank, max_concurrency=8)
        places: list[dict[str, Any]] = [{}]
        if settings.num_ranks > 1:
            self._rooms[replica], places = side_by_side(settings.num_ranks, self._gpus_of_a_rank)
        return [self._class.options(**options, **place).remote(settings) for place in places]

    def _meet(self, replicas: Sequence[int]) -> None:
        """All replicas at the same time."""
        if self._rendezvous is None:
            return
        asked = [[worker.place.remote() for worker in self.workers(r)] for r in replicas]
        joining = []
        for replica, refs in zip(replicas, asked, strict=True):
            gpus = gpus_to_see(ray.get(refs, timeout=self._start_timeout_s))
            meeting = self._rendezvous.new_meeting()
            joining += [
                worker.join.remote(rank, meeting, gpus[rank])
                for rank, worker in enumerate(self.workers(replica))
            ]
        ray.get(joining, timeout=self._start_timeout_s)

    def _free(self, replica: int) -> None:
        if replica in self._rooms:
            remove_placement_group(self._rooms.pop(replica))

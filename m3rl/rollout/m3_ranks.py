"""A replica of several ranks, seen from one of them: its engine steps in lockstep with the others.

    calls for all ranks, numbered ─▶ leader chooses: call n, step, nothing ─▶ all ranks do the same

Each rank is a process with an engine of its own (`inference.parallel`), whose collectives meet only
if all ranks do the same between the same two steps. What requests and steps depend on is therefore
called on all ranks under one number, and the leader, rank 0, says before every step what comes
next; a call that has not come to a rank yet is waited for. The bytes of a weight sync, its begin,
commit and abort are each rank's own affair: they come while all ranks are paused, or into a shadow.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from m3rl.rollout.backend import Generated
from m3rl.rollout.m3_replica import M3Replica, ReplicaSettings
from m3rl.types import GenerationRequest

if TYPE_CHECKING:
    from inference.parallel.groups import ParallelGroups
    from m3rl.rendezvous import Meeting

logger = logging.getLogger(__name__)

NOTHING, STEP, FIRST_CALL = 0, 1, 2
"""What the leader says; call n as n + FIRST_CALL."""


class RankReplica(M3Replica):
    """One rank of a replica; knows nothing of Ray. `start` makes the engine."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings

    def start(self, rank: int, meeting: Meeting, host: str) -> None:
        """Meet the other ranks, and begin to serve.

        Args:
            meeting: of the ranks of this replica.
            host: of this rank, as the others reach it.

        Raises:
            RuntimeError: one did not come.
            ParallelError: one is configured otherwise, or did not stay.
        """
        import torch.distributed as dist

        from inference.parallel.config import ParallelConfig
        from inference.parallel.groups import ParallelGroups as Groups

        settings = self._settings
        config = ParallelConfig(**settings.parallel)
        # Every rank is a client of the store: torch's own tcp:// would have rank 0 listen, on a
        # port that another program may have taken since it was found free.
        dist.init_process_group(
            "gloo",
            store=meeting.store(),
            rank=rank,
            world_size=config.world,
            timeout=timedelta(seconds=meeting.timeout_s),
        )
        groups = Groups.create(
            config,
            timeout_s=settings.timeout_s,
            address=host,
            backend="gloo" if settings.engine["device"] == "cpu" else "nccl",
        )
        self._groups: ParallelGroups = groups
        self._engine_lock = threading.Lock()
        """Held by the engine thread while it works, and by whoever else touches the engine."""
        self._here = threading.local()
        self._calls: dict[int, tuple[Callable[[], Any], Future[Any]]] = {}
        self._arrived = threading.Condition()
        self._order: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Numbers of the calls that have come to the leader."""
        self._must_step = False
        super().__init__(settings, groups)

    def alike(self, number: int, method: str, *args: Any) -> Any:
        """Call a method that all ranks are to run at the same point, under the same number."""
        self._here.number = number
        return getattr(self, method)(*args)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generated]:
        """Of all requests those of this rank's dp group; the results only on its first rank."""
        config, rank = self._groups.config, self._groups.rank
        mine = [r for r in requests if r.prompt_ordinal % config.dp == config.dp_rank(rank)]
        results = super().generate(mine)
        return results if config.tp_rank(rank) == 0 else []

    def abort(self, request_ids: Sequence[str]) -> int:
        """How many of them this rank's dp group knew; 0 on ranks that only mirror its first."""
        count = super().abort(request_ids)
        return count if self._groups.config.tp_rank(self._groups.rank) == 0 else 0

    def _run_alike(self, command: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        number = self._here.number
        with self._arrived:
            self._raise_failure()
            self._calls[number] = command, future
            self._arrived.notify_all()
        if self._groups.rank == 0:
            self._order.put(number)
        return future.result()

    def _run(self, command: Callable[[], Any]) -> Any:
        """Run a command of this rank alone between two steps."""
        self._raise_failure()
        with self._engine_lock:
            return command()

    def _serve(self) -> None:
        try:
            while True:
                self._do(self._groups.agree([self._choice()], "what comes next")[0])
        except BaseException as error:  # outermost loop of the engine thread: hand the fault on
            logger.exception("the engine thread ended")
            with self._arrived:
                self._failure = error
            for _, future in self._calls.values():
                future.set_exception(RuntimeError(f"the engine has failed: {error!r}"))
            self._fail_all(error)
            self._groups.close(error)

    def _choice(self) -> int:
        """What the leader wants next; other ranks leave it to it."""
        if self._groups.rank != 0:
            return NOTHING
        try:
            # Ranks that wait for the leader's word do so no longer than their groups' timeout.
            idle_s = self._groups.timeout_s / 4
            return FIRST_CALL + self._order.get(block=not self._has_work, timeout=idle_s)
        except queue.Empty:
            return STEP if self._has_work else NOTHING

    @property
    def _has_work(self) -> bool:
        return self.engine.has_work or self._must_step

    def _do(self, choice: int) -> None:
        if choice == STEP:
            with self._engine_lock:
                self._must_step = False
                self._deliver(self.engine.step())
            self._progress += 1
        elif choice != NOTHING:
            command, future = self._call(choice - FIRST_CALL)
            with self._engine_lock:
                try:
                    future.set_result(command())
                except Exception as error:  # a caller's fault belongs to the caller
                    future.set_exception(error)
            # With several dp groups the others may have been given requests.
            self._must_step = self._groups.config.dp > 1 and self.engine.version is not None

    def _call(self, number: int) -> tuple[Callable[[], Any], Future[Any]]:
        with self._arrived:
            if not self._arrived.wait_for(lambda: number in self._calls, self._groups.timeout_s):
                raise RuntimeError(
                    f"rank {self._groups.rank}: call {number} came to rank 0 and not here within "
                    f"{self._groups.timeout_s:g} s"
                )
            return self._calls.pop(number)

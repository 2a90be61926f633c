"""Trainer ranks as Ray actors: started, addressed by rank, ended.

The work itself is `train_rank.TrainRank`; its end of a weight sync is `weight_sync.send.Sender`.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from m3rl.errors import M3rlError
from m3rl.rank_settings import RankSettings
from m3rl.rendezvous import Rendezvous
from m3rl.rollout.placement import cause_of, future_of, node_address, put, worker_options
from m3rl.sync_transport import gpu_of
from m3rl.weight_sync.send import Sender

if TYPE_CHECKING:
    from m3rl.train_rank import TrainRank

logger = logging.getLogger(__name__)


class RankError(M3rlError):
    """Trainer ranks could not start, or one died: the run ends, and goes on from its checkpoint."""


WARN_EVERY_S = 60.0
"""Of a call on ranks that takes longer: a rank that stalls is named."""
ANSWER_S = 10.0
"""Longest wait for processes that are asked whether they are there."""


def sync_threads(num_replicas: int) -> int:
    """Calls of a rank's sender that can be open at the same time: for each replica one may wait for
    hashes and one for the end of the sending, while others are answered."""
    return 2 * num_replicas + 2


class RankProcess:
    """Body of the actor: one rank and its sender.

    The rank computes on one thread (torch's modes and glibc's memory arenas belong to threads);
    its sender has threads of its own, since a sync waits for several replicas at once.
    """

    def __init__(self, num_threads: int) -> None:
        import torch

        torch.set_num_threads(num_threads)
        self._rank: TrainRank | None = None
        self._sender: Sender | None = None

    def build(self, settings: RankSettings, rank: int, world_size: int, meet_at: str) -> None:
        """Returns when all ranks have come to the driver's store at `meet_at`, tcp://host:port."""
        from m3rl.train_rank import TrainRank  # transformers, which the driver can do without

        self._rank = TrainRank(settings, rank, world_size, meet_at)

    def call(self, method: str, *args: Any) -> Any:
        """A method of the rank."""
        assert self._rank is not None, "build() comes before call()"
        return getattr(self._rank, method)(*args)

    def make_sender(self) -> None:
        """Once the rank has weights."""
        assert self._rank is not None, "build() comes before make_sender()"
        policy = self._rank.policy
        self._sender = Sender(
            self._rank.rank,
            policy.layout(),
            policy.wire_view,
            stays=policy.wire_stays,
            fixed=policy.fixed_names,
        )

    def gpu(self) -> str | None:
        """`gpu_of` its weights."""
        assert self._rank is not None, "build() comes before gpu()"
        return gpu_of(self._rank.device)

    @ray.method(concurrency_group="sync")
    def answer(self) -> None:
        """To see whether the process is there."""

    @ray.method(concurrency_group="sync")
    def sync_call(self, method: str, *args: Any) -> Any:
        """A method of the rank's sender."""
        assert self._sender is not None, "make_sender() comes before a sync"
        return getattr(self._sender, method)(*args)


class TrainerRanks:
    """The driver's handle on all trainer ranks (a `SenderGroup` for weight sync)."""

    def __init__(
        self,
        settings: RankSettings,
        num_ranks: int,
        *,
        num_threads: int,
        num_replicas: int = 0,
        start_timeout_s: float = 120.0,
    ) -> None:
        """
        Args:
            num_replicas: as many are synced at the same time.

        Raises:
            RankError: one could not start (says why) or did not in time.
        """
        self.num_ranks = num_ranks
        self._start_timeout_s = start_timeout_s
        self._timeout_s = settings.timeout_s
        remote: Any = ray.remote  # its annotations leave concurrency_groups out
        actor_class = remote(concurrency_groups={"sync": sync_threads(num_replicas)})(RankProcess)
        num_gpus = int(settings.device == "cuda")
        factory = actor_class.options(**worker_options(num_threads, num_gpus))
        self._actors: list[Any] = [factory.remote(num_threads) for _ in range(num_ranks)]
        # Of this process, and open from here on: a port that is only found free can be lost again
        # before a rank listens on it.
        self._meeting = Rendezvous(node_address(), start_timeout_s)
        meet_at = f"tcp://{self._meeting.host}:{self._meeting.port}"
        building = [
            actor.build.remote(settings, rank, num_ranks, meet_at)
            for rank, actor in enumerate(self._actors)
        ]
        self._started(building, "is there room for them on the cluster (`ray status`)?")

    def make_senders(self) -> None:
        """Ready the ranks for weight syncs, once they have weights."""
        self._started([actor.make_sender.remote() for actor in self._actors], "make_sender")

    def gpus(self) -> dict[str, str | None]:
        """`gpu_of` the weights of each rank, by name."""
        gpus = self._started([actor.gpu.remote() for actor in self._actors], "gpu")
        return {f"trainer rank {rank}": gpu for rank, gpu in enumerate(gpus)}

    def require_answers(self, timeout_s: float) -> None:
        """Returns when every process answers; what its rank computes does not keep it from that.

        Raises:
            RankError: one is gone, or silent for `timeout_s`.
        """
        asked = [actor.answer.remote() for actor in self._actors]
        _, late = ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
        if late:
            raise RankError(f"trainer rank {asked.index(late[0])} is silent for {timeout_s:g} s")
        self._get(asked, "answer")

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        """A method of a rank's sender (`SenderGroup`)."""
        return future_of(self._actors[rank].sync_call.remote(method, *args))

    def one(self, rank: int, method: str, *args: Any) -> Any:
        """Result of a call on one rank, errors as they were raised there."""
        return self._get([self._actors[rank].call.remote(method, *args)], method, rank)[0]

    def all(self, method: str, *args: Any) -> list[Any]:
        """Results of the same call on all ranks, which run it at the same time (collectives inside
        are fine)."""
        shared = [put(arg) for arg in args]
        return self._get([actor.call.remote(method, *shared) for actor in self._actors], method)

    def save(self, path: Path) -> None:
        """Every rank writes its part of a checkpoint into `path`."""
        self.all("save", str(path))

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _started(self, refs: list[Any], hint: str) -> list[Any]:
        """Results of calls on all ranks while they start; the first fault ends the wait.

        Raises:
            RankError: one failed, in a line, or is late.
        """
        try:
            return ray.get(refs, timeout=self._start_timeout_s)
        except GetTimeoutError:
            raise RankError(
                f"{self.num_ranks} trainer ranks did not start within "
                f"{self._start_timeout_s:g} s; {hint}"
            ) from None
        except (RayActorError, RayTaskError) as error:
            raise RankError(f"a trainer rank could not start: {cause_of(error)}") from error

    def _get(self, refs: list[Any], method: str, first_rank: int = 0) -> list[Any]:
        """Like ray.get, but the death of one rank is told at once, also while its peers wait for it
        in a collective; and who is waited for, every minute.

        Raises:
            RankError: a rank died, or they have not all answered within train.timeout_s.
        """
        rank_of = {ref: first_rank + i for i, ref in enumerate(refs)}
        pending, begin = list(refs), time.monotonic()
        while pending:
            left_s = max(0.0, begin + self._timeout_s - time.monotonic())
            done, pending = ray.wait(pending, timeout=min(WARN_EVERY_S, left_s))
            if not done:
                late = [rank_of[ref] for ref in pending]
                waited_s = time.monotonic() - begin
                if waited_s >= self._timeout_s:
                    raise RankError(f"{method}: {self._stalled(late)}")
                logger.warning(
                    "%s: no answer from trainer rank %s for %.0f s", method, _listed(late), waited_s
                )
            try:
                ray.get(done)
            except RayActorError as error:
                raise RankError(
                    f"trainer rank {rank_of[done[0]]} died: {cause_of(error)}"
                ) from error
        return ray.get(refs)

    def _stalled(self, late: list[int]) -> str:
        """Which ranks have not answered, and which of these do not even say that they are there."""
        asked = {self._actors[rank].answer.remote(): rank for rank in late}
        _, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        found = (
            f"no answer from trainer rank {_listed(late)} within train.timeout_s="
            f"{self._timeout_s:g} s; "
        )
        if silent:
            return found + (
                f"the process of rank {_listed([asked[ref] for ref in silent])} is stopped, or its "
                "machine does not answer, and others may wait for it"
            )
        return found + (
            "all their processes are there: they hang, or wait for one another, or there is more "
            "to do than that time allows: then raise train.timeout_s"
        )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))

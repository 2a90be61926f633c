"""The process groups of one replica, and collectives that name rank and operation when they fail.

The caller has initialised torch.distributed with one process a rank; a group's timeout bounds every
collective of a process that is alive, `watch.py` notices one that is not.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from inference.parallel import peer_memory
from inference.parallel.config import ParallelConfig
from inference.parallel.peer_memory import PeerMemory
from inference.parallel.peers import can_share, make_memory, reachable_ranks
from inference.parallel.watch import ParallelError, Watch, first_line

logger = logging.getLogger(__name__)

# Renamed between torch 2.11 and 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

POLL_S = 20e-6
"""Between two looks at a device that is not done: little beside a step, and lets threads run."""
ABORT_AFTER_S = 2.0
"""From trouble to the abort of NCCL's work: who can say what is wrong has said it by then."""


@dataclass(slots=True)
class Pending:
    """A collective under way; its tensors stay untouched until `wait` returns."""

    works: list[Any]
    what: str
    watch: Watch
    kept: tuple[Tensor, ...] = field(default=())
    """Held until then."""

    def wait(self) -> None:
        """The current stream (on the CPU: the host) continues when the collective is complete.

        Raises:
            ParallelError: it is not, in time; says whose fault that is.
        """
        for work in self.works:
            if not self.kept[0].is_cuda:
                self._wait_on_host(work)
            try:
                work.wait()
            except RuntimeError as error:
                raise self.watch.explain(self.what, error) from error
        self.kept = ()

    def _wait_on_host(self, work: Any) -> None:
        """Until the work is over or another rank is in trouble, which may mean that it never is."""
        changed, future = self.watch.changed, work.get_future()

        def wake(_: object) -> None:
            with changed:
                changed.notify_all()

        future.add_done_callback(wake)
        with changed:
            changed.wait_for(lambda: future.done() or self.watch.is_trouble)
        if not future.done():
            raise self.watch.explain(self.what, None)


@dataclass(slots=True)
class ParallelGroups:
    """One rank's place among the ranks of its replica, and how it talks with them.

    Every collective starts at once and returns a `Pending`. What fails raises ParallelError, after
    which the groups are good for nothing but `close(error)`, and the process should end: with
    os._exit on CUDA, where a kernel may still wait for a rank that is gone.
    """

    config: ParallelConfig
    rank: int
    watch: Watch
    timeout_s: float
    """Longest wait for the others."""
    tp_group: dist.ProcessGroup
    """The ranks that hold this one's requests."""
    world_group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    """All ranks, gloo: what the hosts agree on before a step."""
    tp_memory: PeerMemory | None = None
    """Small collectives of `tp_group` go through it; None: through `tp_group`, like large ones."""
    world_memory: PeerMemory | None = None
    """The same of `world_group`."""
    is_aborting: bool = False

    @classmethod
    def create(
        cls,
        config: ParallelConfig,
        *,
        timeout_s: float,
        address: str = "127.0.0.1",
        backend: str | None = None,
        use_peer_memory: bool = True,
    ) -> ParallelGroups:
        """Make the groups; every rank of the default group calls this with the same arguments.

        With CUDA the current device is the rank's.

        Args:
            timeout_s: longest wait for the others in a collective.
            address: of this machine, as the other ranks reach it (each machine its own).
            backend: of the device's collectives; None: NCCL where there is CUDA, else gloo.
            use_peer_memory: small collectives over NCCL's ranks go through memory that all of them
                read, where their GPUs reach one another; `describe` says whether they do.

        Raises:
            ParallelError: the default group has another size, ranks ask for different splits, or
                one did not come in time.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        if world != config.world:
            raise ParallelError(
                f"tp={config.tp}, dp={config.dp} need {config.world} ranks, {world} are there"
            )
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        timeout = timedelta(seconds=timeout_s)
        # NCCL's own watchdog ends the process: it comes behind `wait_for_device`, which says why.
        device_timeout = timeout if backend == "gloo" else 2 * timeout
        everyone = list(range(world))
        try:
            host_group = dist.new_group(everyone, timeout, "gloo")
        except RuntimeError as error:
            raise _not_all_came(error) from error
        _expect_alike(config, "the split", host_group)
        _expect_alike((backend, use_peer_memory), "what they talk through", host_group)
        watch = Watch(rank, world, address, lambda own: _gather(own, host_group), timeout_s)
        world_group = dist.new_group(everyone, device_timeout, backend)
        tp_group = world_group
        if config.dp > 1:
            # Every rank makes every group, its own or not.
            members = [everyone[first : first + config.tp] for first in range(0, world, config.tp)]
            tp_groups = [dist.new_group(ranks, device_timeout, backend) for ranks in members]
            tp_group = tp_groups[config.dp_rank(rank)]
        groups = cls(config, rank, watch, timeout_s, tp_group, world_group, host_group)
        watch.on_trouble = groups.abort_later
        if backend == "nccl" and use_peer_memory:
            groups._map_memory()
        logger.info("rank %d of %d: %s", rank, world, groups.describe())
        return groups

    def _map_memory(self) -> None:
        """Make what memory the ranks can have in common; every rank calls this."""
        reachable = reachable_ranks(self.rank, lambda own: _gather(own, self.host_group))
        tp, dp = self.config.tp, self.config.dp
        if can_share(range(self.config.world), reachable) and dp > 1:
            self.world_memory = make_memory(self.world_group)
        # All or none: the ranks of another tp group may reach one another though these do not.
        firsts = range(0, self.config.world, tp)
        if all(can_share(range(first, first + tp), reachable) for first in firsts):
            self.tp_memory = make_memory(self.tp_group)
        self.expect_alike((self.tp_memory is None, self.world_memory is None), "memory of peers")

    def describe(self) -> str:
        """What the ranks talk through, for logs."""
        ways = {"tp": self.tp_memory, "all ranks": self.world_memory}
        small = [name for name, memory in ways.items() if memory is not None]
        through = f", small ones over {' and '.join(small)} in common memory" if small else ""
        return f"collectives by {dist.get_backend(self.world_group)}{through}"

    def expect_alike(self, value: object, what: str) -> None:
        """Compare `value`, which can be pickled, over all ranks; waits for them.

        Raises:
            ParallelError: not all ranks have the same.
        """
        _expect_alike(value, what, self.host_group)

    @property
    def is_nccl(self) -> bool:
        """Whether collectives want tensors on a CUDA device."""
        return dist.get_backend(self.world_group) == "nccl"

    def all_reduce(self, x: Tensor, what: str = "all-reduce") -> Pending:
        """Sum over the tp ranks, in place; equal bits on all of them."""
        memory = self.tp_memory
        if memory is not None and peer_memory.fits(memory, x):
            self.watch.check(what)
            peer_memory.all_reduce(memory, x)
            return Pending([], what, self.watch)
        return self._start(
            what, (x,), lambda: dist.all_reduce(x, group=self.tp_group, async_op=True)
        )

    def gather_over_tp(self, x: Tensor, what: str) -> Tensor:
        """[tp · n, ...]: the x [n, ...] of the tp ranks in order; `x` is contiguous."""
        memory = self.tp_memory
        if memory is not None and peer_memory.fits(memory, x):
            self.watch.check(what)
            return peer_memory.gather(memory, [x])[0]
        out = x.new_empty((self.config.tp * len(x), *x.shape[1:]))
        self._start(
            what, (out, x), lambda: _all_gather(out, x, group=self.tp_group, async_op=True)
        ).wait()
        return out

    def show_to_all(self, x: Sequence[Tensor], what: str) -> tuple[list[Tensor], Pending]:
        """Each x [n, ...] becomes [world · n, ...], those of all ranks in order; contiguous."""
        memory = self.world_memory
        if memory is not None and peer_memory.fits(memory, *x):
            self.watch.check(what)
            return peer_memory.gather(memory, x), Pending([], what, self.watch)
        world, group = self.config.world, self.world_group
        out = [t.new_empty((world * len(t), *t.shape[1:])) for t in x]

        def gather() -> list[Any]:
            pairs = zip(out, x, strict=True)
            return [_all_gather(o, t, group=group, async_op=True) for o, t in pairs]

        def send() -> list[Any]:
            # Straight to each rank, all in one kernel: for large x faster than NCCL's all-gather.
            with _coalescing_manager(group, x[0].device, async_ops=True) as together:
                for o, t in zip(out, x, strict=True):
                    parts = list(o.view(world, *t.shape).unbind(0))
                    dist.all_to_all(parts, [t] * world, group=group, async_op=True)
            return list(together.works)

        return out, self._start(what, (*out, *x), send if x[0].is_cuda else gather)

    def add_parts(self, parts_RC: Tensor, y_SC: Tensor, what: str) -> bool:
        """y_SC += what all ranks have for this one, if that is small; returns whether it is.

        `parts_RC` has n ≥ S rows for each rank in order. FP32, in ascending rank order, y last.
        """
        memory = self.world_memory
        part_RC = parts_RC[: len(parts_RC) // self.config.world]
        if memory is None or not peer_memory.fits(memory, part_RC):
            return False
        self.watch.check(what)
        peer_memory.add_parts(memory, parts_RC, y_SC)
        return True

    def agree(self, numbers: Sequence[int], what: str) -> list[int]:
        """The largest of each number over all ranks, known to all hosts; waits for them."""
        most = torch.tensor(numbers, dtype=torch.int64)
        self._start(
            what,
            (most,),
            lambda: dist.all_reduce(most, dist.ReduceOp.MAX, self.host_group, async_op=True),
        ).wait()
        return most.tolist()

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        what: str,
        out_rows: list[int] | None = None,
        rows: list[int] | None = None,
    ) -> Pending:
        """Rows of `x` go to the ranks in order, `rows[r]` to rank r; theirs come into `out`.

        Both are contiguous; None: equal parts.
        """
        return self._start(
            what,
            (out, x),
            lambda: dist.all_to_all_single(
                out, x, out_rows, rows, group=self.world_group, async_op=True
            ),
        )

    def to_host(self, numbers: Tensor, what: str) -> list[Any]:
        """The values of a tensor that comes out of a collective; raises as `wait_for_device`."""
        if not numbers.is_cuda:
            return numbers.tolist()
        copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copy.copy_(numbers, non_blocking=True)
        event = torch.cuda.current_stream().record_event()
        self.wait_for_device(event, what)
        return copy.tolist()

    def wait_for_device(self, event: torch.cuda.Event, what: str) -> None:
        """Wait until the device has passed `event`, for work with collectives in it.

        Nobody else notices that a replayed CUDA graph waits for a rank that is gone.

        Raises:
            ParallelError: a rank is in trouble, or `timeout_s` are over.
        """
        is_past: Callable[[], bool] = event.query
        end = time.monotonic() + self.timeout_s
        while not is_past():
            if self.watch.is_trouble or time.monotonic() > end:
                self.abort_later()
                raise self.watch.explain(what, None)
            time.sleep(POLL_S)
        self.watch.check(what)

    def abort_later(self) -> None:
        """Have what waits on the device end in a while, for a thread that waits for it elsewhere.

        The abort of NCCL may hang, so nobody waits for it; NCCL's watchdog ends the process then.
        """
        if self.is_aborting or not self.is_nccl:
            return
        self.is_aborting = True
        threading.Thread(target=self._abort, name="abort", daemon=True).start()

    def _abort(self) -> None:
        time.sleep(ABORT_AFTER_S)
        for memory in (self.tp_memory, self.world_memory):
            if memory is not None:
                memory.release()
        for group in {self.world_group, self.tp_group}:
            with contextlib.suppress(RuntimeError):  # aborted already
                group.abort()

    def close(self, error: BaseException | None = None) -> None:
        """Leave; with this rank's own `error` the others are told of it and fail too.

        After an error the groups stay as they are: taking them down would wait for what broke.
        """
        if error is not None and not isinstance(error, ParallelError):
            self.watch.fail(f"{type(error).__name__}: {error}")
        self.watch.close()
        if error is not None:
            return
        for group in {self.tp_group, self.world_group, self.host_group}:
            dist.destroy_process_group(group)

    def _start(self, what: str, kept: Iterable[Tensor], begin: Callable[[], Any]) -> Pending:
        self.watch.check(what)
        try:
            work = begin()
        except RuntimeError as error:
            raise self.watch.explain(what, error) from error
        works = work if isinstance(work, list) else [work]
        return Pending(works, what, self.watch, tuple(kept))


def _gather(own: Any, group: dist.ProcessGroup) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(everyone, own, group)
    except RuntimeError as error:
        raise _not_all_came(error) from error
    return everyone


def _expect_alike(value: object, what: str, group: dist.ProcessGroup) -> None:
    first, *others = _gather(value, group)
    if others := [rank for rank, other in enumerate(others, 1) if other != first]:
        raise ParallelError(
            f"rank {dist.get_rank()}: {what} must be the same on all ranks; that of rank 0 is "
            f"{first}, of rank {others[0]} another one"
        )


def _not_all_came(error: RuntimeError) -> ParallelError:
    return ParallelError(f"rank {dist.get_rank()}: not all ranks came ({first_line(error)})")

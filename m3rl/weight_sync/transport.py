"""A process group of its own for each replica: all trainer ranks, then the replica's workers.

    group rank   0 .. S-1          S .. S+W-1
                 trainer ranks     workers of one replica

Built directly from a TCPStore, never the default group (accelerate owns that one), so a replica
that dies takes one small group with it and the others go on. On the wire every tensor is a flat run
of bytes; sizes follow from the plan that both ends have checked, so no header travels.

This file has what every kind of group shares, and gloo, which moves bytes between hosts' memory;
`nccl.py` moves them between GPUs, `ipc.py` between GPUs of one host.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from m3rl.weight_sync.errors import TransportError
from m3rl.weight_sync.lane import POLL_S

BACKENDS = ("gloo", "nccl", "ipc")
WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def worker_ranks(num_senders: int, mesh: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Group rank of each worker: row-major over the mesh, after all trainer ranks.

    Args:
        mesh: sizes of the dimensions that number the workers, `(engines, data parallel, tensor
            parallel)` say; every dimension that multiplies workers belongs here.
    """
    places = product(*(range(size) for size in mesh))
    return {place: num_senders + i for i, place in enumerate(places)}


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Everything a rank needs to join the group of one replica; travels to every member."""

    replica: int
    num_senders: int
    num_workers: int
    host: str
    port: int
    """Of the driver's TCPStore."""
    key: str
    """Prefix in the store, new for every attempt to connect."""
    timeout_s: float
    """Longest wait for the members to join, and for all transfers of one sync."""
    backend: str = "gloo"

    @property
    def world_size(self) -> int:
        return self.num_senders + self.num_workers

    def worker_rank(self, worker: int) -> int:
        return worker_ranks(self.num_senders, (self.num_workers,))[(worker,)]

    def member(self, rank: int) -> str:
        """The name of a group rank in messages."""
        if rank < self.num_senders:
            return f"trainer rank {rank}"
        return worker_name(self.replica, rank - self.num_senders)


def worker_name(replica: int, worker: int) -> str:
    """The name of a worker in messages."""
    return f"replica {replica} worker {worker}"


class Deadline:
    """A moment in the future that several waits share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._begin = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    @property
    def left_s(self) -> float:
        """Seconds left, at least a millisecond: zero would mean no limit to torch."""
        return max(1e-3, self.seconds - self.elapsed_s)

    @property
    def is_over(self) -> bool:
        return self.elapsed_s >= self.seconds - 0.01  # a wait may end a little early


def in_background(call: Callable[[], Any], name: str) -> Future[Any]:
    """Run a call that may hang on a daemon thread; its result or error ends the future."""
    with _threads_lock:
        thread = _idle_threads.pop() if _idle_threads else None
    if thread is None:
        thread = _Thread()
    future: Future[Any] = Future()
    thread.calls.put((call, name, future))
    return future


class _Thread:
    """Runs one call after the other: a start costs as much as a small message."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[Callable[[], Any], str, Future[Any]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            call, threading.current_thread().name, future = self.calls.get()
            result, error = None, None
            try:
                result = call()
            except (
                BaseException
            ) as raised:  # outermost frame of the call: the error belongs to the waiter
                error = raised
            del call
            with _threads_lock:
                _idle_threads.append(self)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del future, result, error  # they may keep a group's sockets open


_threads_lock = threading.Lock()
_idle_threads: list[_Thread] = []


class Transfer(NamedTuple):
    """One message of a group."""

    wire: Tensor
    """[bytes] uint8, contiguous; stays untouched until the transfer is waited for."""
    peer: int
    """Group rank of the other end."""
    tag: int
    """Number of the message between these two ranks in this sync."""
    what: object
    """Shown in errors."""


@dataclass(eq=False, slots=True)
class Posted:
    """Transfers under way."""

    transfers: list[Transfer] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)


def wire_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bits as [bytes] uint8; a view when it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Transport:
    """This rank's membership in the group of one replica; here over gloo.

    The group object is a `torch.distributed` backend, whichever its kind: `send([tensor], rank,
    tag)`, `recv([tensor], rank, tag)`, each returning a work.
    """

    def __init__(self, group: Any, spec: GroupSpec, rank: int, store: Store) -> None:
        self.spec = spec
        self.rank = rank
        self._group = group
        self._store = store
        self._under_way: list[Posted] = []

    @staticmethod
    def join(spec: GroupSpec, rank: int, device: torch.device) -> Transport:
        """Meet the other members.

        Args:
            device: where this rank's weights lie.

        Raises:
            TransportError: an unknown backend or one that cannot reach the device, or a member that
                did not come in time (named).
        """
        if spec.backend not in BACKENDS:
            raise TransportError(
                f"weight sync cannot travel over {spec.backend!r}; use one of {list(BACKENDS)}"
            )
        timeout = timedelta(seconds=spec.timeout_s)
        try:
            tcp_store = TCPStore(spec.host, spec.port, None, False, timeout)
        except RuntimeError as error:
            raise TransportError(
                f"{spec.member(rank)} cannot reach the driver's store at {spec.host}:{spec.port}: "
                f"{_first_line(error)}"
            ) from error
        store = PrefixStore(spec.key, tcp_store)
        store.set(here_key(rank), "1")
        try:
            if spec.backend == "gloo":
                return Transport(_gloo(spec, rank, store, timeout), spec, rank, store)
            if spec.backend == "ipc":
                from m3rl.weight_sync.ipc import IpcTransport

                return IpcTransport.meet(spec, rank, store, device)
            # Only here: it needs a build of torch with NCCL.
            from m3rl.weight_sync.nccl import NcclTransport

            return NcclTransport.meet(spec, rank, store, device)
        except TransportError:
            raise
        except (RuntimeError, TimeoutError) as error:
            late = [m for m in range(spec.world_size) if not store.check([here_key(m)])]
            names = ", ".join(spec.member(m) for m in late) or "all came, but a connection failed"
            raise TransportError(
                f"{spec.member(rank)} could not join the group of replica {spec.replica} within "
                f"{spec.timeout_s:g} s; not there: {names} ({_first_line(error)})"
            ) from error

    is_ordered = False
    """Whether transfers begin when all posted before them are complete."""

    @property
    def device(self) -> torch.device:
        """Where the buffers of transfers lie."""
        return torch.device("cpu")

    def post(self, *, sends: Sequence[Transfer] = (), receives: Sequence[Transfer] = ()) -> Posted:
        """Begin all transfers of a round at once; returns without waiting for them.

        On CUDA they begin when the current stream comes to this point.
        """
        posted = Posted()
        self._under_way.append(posted)
        begin = Deadline(self.spec.timeout_s)
        for direction, transfers in (("send", sends), ("recv", receives)):
            for transfer in transfers:
                begin_one = getattr(self._member(), direction)
                try:
                    posted.works.append(begin_one([transfer.wire], transfer.peer, transfer.tag))
                except RuntimeError as error:
                    raise self._broken(transfer, begin, error) from error
                posted.transfers.append(transfer)
        return posted

    def wait(self, posted: Posted, deadline: Deadline) -> None:
        """Continue (on CUDA: have the current stream continue) when the transfers are complete.

        Sent buffers may change then, received ones be read.

        Raises:
            TransportError: one was not in time, or its other end is gone; the group is dead then.
        """
        for i, transfer in enumerate(posted.transfers):
            try:
                posted.works[i].wait(timedelta(seconds=deadline.left_s))
            except RuntimeError as error:
                raise self._broken(transfer, deadline, error) from error
            self._member()
        posted.works.clear()
        self._under_way.remove(posted)

    def wait_for_device(self, event: torch.cuda.Event | None, deadline: Deadline) -> None:
        """Wait on the host until the device has passed `event` (None: it has).

        Raises:
            TransportError: not in time, or this rank has left the group meanwhile.
        """
        while event is not None and not event.query():
            self._member()
            if deadline.is_over:
                raise self._late(deadline)
            time.sleep(POLL_S)

    def note(self, what: str) -> None:
        """Let the others know where this rank is, for whoever must say which one is late."""

    def interrupt(self) -> None:
        """Where another thread's wait can be ended, end it; this rank then leaves the group."""

    def close(self) -> None:
        """Leave the group: its sockets close, so a peer that waits for this rank learns at once."""
        self._group = None
        # A work keeps the group's sockets open, also one that only a traceback still refers to.
        for posted in self._under_way:
            posted.works.clear()
        self._under_way.clear()

    def _member(self) -> Any:
        if self._group is None:
            raise TransportError(f"{self._name} has left the group of replica {self.spec.replica}")
        return self._group

    def _late(self, deadline: Deadline) -> TransportError:
        return TransportError(
            f"{self._name}: after {deadline.elapsed_s:.1f} s of {deadline.seconds:g} s its device "
            "has not done its part; nothing more is known"
        )

    def _broken(
        self, transfer: Transfer, deadline: Deadline, error: RuntimeError
    ) -> TransportError:
        peer = self.spec.member(transfer.peer)
        fault = "is late" if deadline.is_over else "is gone or has left the group"
        return TransportError(
            f"{self._name}: {peer} {fault}: after {deadline.elapsed_s:.1f} s of "
            f"{deadline.seconds:g} s, {transfer.what} was not transferred ({_first_line(error)})"
        )

    @property
    def _name(self) -> str:
        return self.spec.member(self.rank)


def _gloo(spec: GroupSpec, rank: int, store: Store, timeout: timedelta) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # The address through which this machine reaches the driver, not whatever its host name says.
    device = ProcessGroupGloo.create_device(hostname=_own_address(spec.host, spec.port))
    options._devices = [device]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, spec.world_size, options)


def _own_address(host: str, port: int) -> str:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def here_key(rank: int) -> str:
    return f"here/{rank}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

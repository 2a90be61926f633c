"""Rounds between GPUs: the transfers of a round are one NCCL group, on a stream of its own.

NCCL does not notice that a peer is gone: its kernel waits for ever, and torch's watchdog would end
the process with it. So the watchdog is told to leave this group alone, the host looks at the device
until the sync's deadline, and `close` aborts what still waits. Who is late the members tell one
another through the store: each says when it begins, when it is done, and when it waits for long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from m3rl.weight_sync.errors import TransportError
from m3rl.weight_sync.lane import POLL_S
from m3rl.weight_sync.transport import (
    Deadline,
    GroupSpec,
    Posted,
    Transfer,
    Transport,
    here_key,
    in_background,
)

logger = logging.getLogger(__name__)

UNWATCHED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Read when a group is made: neither torch's watchdog nor its heartbeat ends the process."""
NEVER = timedelta(days=7)
"""The watchdog's timeout; deadlines are kept here."""
ABORT_S = 5.0
"""Longest wait for an abort, which may hang itself."""
LONG_WAIT_S = 1.0
"""A member that waits for longer says so."""

_environment_lock = threading.Lock()


class NcclTransport(Transport):
    """This rank's membership in a group that moves bytes between GPUs."""

    is_ordered = True

    def __init__(
        self, group: Any, spec: GroupSpec, rank: int, store: Store, device: torch.device
    ) -> None:
        super().__init__(group, spec, rank, store)
        self._device = device
        self._num_syncs = 0

    @classmethod
    def meet(cls, spec: GroupSpec, rank: int, store: Store, device: torch.device) -> NcclTransport:
        """Connect to the members, once all are here.

        Raises:
            RuntimeError, TimeoutError: a member did not come in time, or there is no such device.
        """
        if device.type != "cuda":
            raise TransportError(
                f"{spec.member(rank)} keeps its weights on {device}, NCCL moves bytes between "
                "GPUs; use backend='gloo'"
            )
        deadline = Deadline(spec.timeout_s)
        store.wait([here_key(m) for m in range(spec.world_size)], timedelta(seconds=spec.timeout_s))
        with _unwatched():
            group = _make_group(spec, rank, store)

        def connect() -> None:
            torch.cuda.set_device(device)
            group.eager_connect_single_device(device)

        in_background(connect, f"nccl-replica-{spec.replica}").result(deadline.left_s)
        return cls(group, spec, rank, store, device)

    @property
    def device(self) -> torch.device:
        return self._device

    def post(self, *, sends: Sequence[Transfer] = (), receives: Sequence[Transfer] = ()) -> Posted:
        posted = Posted([*sends, *receives])
        group = self._member()
        try:
            group._start_coalescing()
            for transfer in sends:
                group.send([transfer.wire], transfer.peer, transfer.tag)
            for transfer in receives:
                group.recv([transfer.wire], transfer.peer, transfer.tag)
            posted.works.append(group._end_coalescing())
        except RuntimeError as error:
            raise self._failed(posted, error) from error
        return posted

    def wait(self, posted: Posted, deadline: Deadline) -> None:
        self._member()
        try:
            for work in posted.works:
                work.wait()
        except RuntimeError as error:
            raise self._failed(posted, error) from error
        posted.works.clear()

    def wait_for_device(self, event: torch.cuda.Event | None, deadline: Deadline) -> None:
        begin, is_noted = time.monotonic(), False
        while event is not None and not event.query():
            self._member()
            if deadline.is_over:
                raise self._late(deadline)
            if not is_noted and time.monotonic() - begin > LONG_WAIT_S:
                self.note("waits")
                is_noted = True
            time.sleep(POLL_S)
        self._member()  # an abort, too, lets the device go on
        if is_noted:
            self.note("goes on")

    def note(self, what: str) -> None:
        self._num_syncs += what == "begins"
        key = self._note_key(self.rank)
        if what == "done":  # nobody waits for it
            in_background(lambda: self._store.set(key, what), "sync-note")
        else:
            self._store.set(key, what)

    def close(self) -> None:
        """Leave the group and abort what still waits there; returns within ABORT_S."""
        group, self._group = self._group, None
        if group is None:
            return
        aborting = in_background(group.abort, f"abort-replica-{self.spec.replica}")
        wait([aborting], ABORT_S)
        if not aborting.done():
            logger.error("%s: NCCL has not aborted after %g s", self._name, ABORT_S)

    def interrupt(self) -> None:
        self.close()

    def _note_key(self, rank: int) -> str:
        return f"sync/{self._num_syncs}/{rank}"

    def _failed(self, posted: Posted, error: RuntimeError) -> TransportError:
        what = posted.transfers[0].what if posted.transfers else "nothing"
        return TransportError(
            f"{self._name}: a round of {len(posted.transfers)} transfers from {what} on was not "
            f"begun ({str(error).splitlines()[0][:200]})"
        )

    def _late(self, deadline: Deadline) -> TransportError:
        others = [m for m in range(self.spec.world_size) if m != self.rank]
        try:
            behind = [self.spec.member(m) for m in others if self._is_behind(m)]
            fault = (
                f"{', '.join(behind)} late or gone" if behind else "all others wait, or are done"
            )
        except RuntimeError as error:
            fault = f"somebody is late, the driver's store does not say who ({error})"
        return TransportError(
            f"{self._name}: {fault}: after {deadline.elapsed_s:.1f} s of {deadline.seconds:g} s "
            "its transfers are not complete"
        )

    def _is_behind(self, member: int) -> bool:
        """Neither done nor waiting: it has not begun, does something else, or is dead."""
        key = self._note_key(member)
        return not self._store.check([key]) or self._store.get(key) not in (b"waits", b"done")


def _make_group(spec: GroupSpec, rank: int, store: Store) -> Any:
    from torch.distributed import ProcessGroupNCCL

    # Of high priority: what was just received is hashed beside the next round, not ahead of it.
    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = NEVER
    return ProcessGroupNCCL(store, rank, spec.world_size, options)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    with _environment_lock:
        before = {name: os.environ.get(name) for name in UNWATCHED}
        os.environ.update(UNWATCHED)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

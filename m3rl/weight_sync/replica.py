"""The driver's view of one replica: its state, and its way through one sync.

    EMPTY ──────┐
    READY(old) ─┴─ prepare ─▶ SYNCING ─ pause, stream, verify, commit, resume ─▶ READY(version)
                     │           │         ▲        │
                     │           │         └─ once ─┘ a tensor differs
                     │           └─ any fault ─▶ POISONED: group closed, engine left paused
                     └─ refused: the state stays, no byte has moved

With a shadow, stream and verify come before the pause; the state stays until then, and a fault
leaves the replica what it was, with its group closed.

Only READY(version) serves. Out of POISONED, and to a closed group, leads `connect`, which begins
anew with EMPTY.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from m3rl.types import RemoteReceiver, SenderGroup, TensorSlot
from m3rl.weight_sync.errors import RefusedError, SyncError, VerificationError
from m3rl.weight_sync.layout import Layout, layout_digest
from m3rl.weight_sync.plan import CopyOp, Plan, ops_digest
from m3rl.weight_sync.prepare import Prepare
from m3rl.weight_sync.receive import EngineReceiver
from m3rl.weight_sync.transport import GroupSpec, in_background, worker_name
from m3rl.weight_sync.verify import HashSums

Phase = Literal["prepare", "pause", "stream", "verify", "commit", "resume"]
PHASES: tuple[Phase, ...] = ("prepare", "pause", "stream", "verify", "commit", "resume")

GRACE_S = 3.0
"""How much longer the driver waits than the ranks do: their better-worded errors come first."""


class ReplicaState(Enum):
    EMPTY = "EMPTY"
    SYNCING = "SYNCING"
    READY = "READY"
    POISONED = "POISONED"


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """A phase of a sync that a replica entered."""

    replica: int
    phase: Phase
    version: int


@dataclass(slots=True)
class SyncRecord:
    """What one sync did to one replica."""

    seconds: dict[Phase, float] = field(default_factory=dict)
    """Of each phase entered, all attempts together."""
    paused_s: float = 0.0
    num_bytes: int = 0
    """Sent, all attempts together."""
    mismatches: list[str] = field(default_factory=list)
    """Tensors that differed, all attempts together."""
    wire_hash: int | None = None
    """Of the model's wire bits; None unless verified."""


@dataclass(frozen=True, slots=True)
class Driver:
    """What all replicas of a WeightSync share."""

    senders: SenderGroup
    pause: Callable[[int], object]
    resume: Callable[[int], object]
    timeout_s: float
    verify: bool
    events: list[SyncEvent]


@dataclass(frozen=True, slots=True)
class _Share:
    """The part of the plan that one member does."""

    ops: tuple[CopyOp, ...]
    ops_digest: str
    layout_digest: str


class Replica:
    """One complete copy of the model: its workers, its group, its state."""

    def __init__(self, number: int, workers: Sequence[RemoteReceiver], driver: Driver) -> None:
        self.number = number
        self.workers = tuple(workers)
        self.state = ReplicaState.EMPTY
        self.version: int | None = None
        self.record = SyncRecord()
        self.plan: Plan | None = None
        self.grains = 0
        """Stands for how the plan cuts columns: wire hashes of equal ones compare."""
        self._sums: HashSums | None = None
        self._driver = driver
        self._has_shadow = False
        self._shares: dict[str, _Share] = {}
        """What each member, by name, has to do in a sync."""
        self._ops_known = False

    @property
    def status(self) -> str:
        """State as messages show it: 'READY(3)', 'EMPTY', ..."""
        is_ready = self.state is ReplicaState.READY
        return f"READY({self.version})" if is_ready else self.state.value

    @property
    def is_connected(self) -> bool:
        return self.plan is not None

    def attach(self) -> list[tuple[TensorSlot, ...]]:
        """Put a fresh receiver into every worker; returns what each worker holds."""
        self.state, self.version, self._ops_known = ReplicaState.EMPTY, None, False
        attached = {
            name: in_background(_attaching(worker, self.number, i), f"attach {name}")
            for i, (name, worker) in enumerate(self._workers().items())
        }
        self._gather("attach", attached)
        self._has_shadow = all(self._gather("attach", self._on_workers("has_shadow")))
        return self._gather("layout", self._on_workers("layout"))

    def join(
        self, spec: GroupSpec, plan: Plan, senders: Sequence[Layout], workers: Sequence[Layout]
    ) -> None:
        """Build the group of this replica, on all members at the same time."""
        connecting = self._on_workers("connect", spec) | self._on_senders("sync_connect", spec)
        self._gather("connect", connecting)
        sends = zip(self._senders(), senders, map(plan.sends, range(len(senders))), strict=True)
        receives = zip(
            self._workers(), workers, map(plan.receives, range(len(workers))), strict=True
        )
        self._shares = {
            name: _Share(ops, ops_digest(ops), layout_digest(layout))
            for name, layout, ops in (*sends, *receives)
        }
        self.plan = plan
        self._sums = HashSums(plan, len(workers))
        self.grains = hash(frozenset((op.name, op.grain) for op in plan.ops))

    def run(self, version: int, serial: int) -> None:
        """Bring the replica to READY(version).

        Raises:
            RefusedError: refused before a byte moved; the state is unchanged.
            SyncError: failed: POISONED, or with a shadow what it was; or whatever else a call on a
                member raised. `disconnect` comes next.
        """
        self.record = SyncRecord()
        if self.plan is None:
            raise RefusedError(f"not connected; call connect({self.number}) first")
        is_done = False
        try:
            self._bring(self.plan, version, serial)
            is_done = True
        except RefusedError:
            is_done = True
            raise
        finally:
            serves_old = self._has_shadow and self.state is not ReplicaState.SYNCING
            if not is_done and not serves_old:
                self.state, self.version = ReplicaState.POISONED, None

    def disconnect(self) -> list[str]:
        """Close the group on all members, whatever their state; returns what trainer ranks report.

        After it no trainer rank reads weights for this replica any more.
        """
        self.plan = None
        timeout_s = self._driver.timeout_s
        workers = {
            name: in_background(_closing(worker, timeout_s), f"close {name}")
            for name, worker in self._workers().items()
        }
        # A sending thread may wait until its own deadline for a replica that is stuck.
        senders = self._on_senders("sync_close", self.number)
        wait(senders.values(), timeout_s + GRACE_S)
        wait(workers.values(), GRACE_S)
        return [
            complaint for name, future in senders.items() if (complaint := _complaint(name, future))
        ]

    def _bring(self, plan: Plan, version: int, serial: int) -> None:
        with self._phase("prepare", version):
            self._prepare(version, serial)
        if self._has_shadow:
            self._stream_until_equal(plan, version)
        self.state = ReplicaState.SYNCING
        paused_at = time.monotonic()
        with self._phase("pause", version):
            self._bounded("pause", self._driver.pause)
        if not self._has_shadow:
            self._stream_until_equal(plan, version)
        with self._phase("commit", version):
            self._gather("commit", self._on_workers("commit"))
        with self._phase("resume", version):
            self._bounded("resume", self._driver.resume)
        self.state, self.version = ReplicaState.READY, version
        self.record.paused_s = time.monotonic() - paused_at

    def _stream_until_equal(self, plan: Plan, version: int) -> None:
        """Stream and verify; once more when a tensor differs, for a fault that does not repeat."""
        for _attempt in range(2):
            with self._phase("stream", version):
                hashes = self._stream(plan)
            if not self._driver.verify:
                return
            with self._phase("verify", version):
                differing = self._verify(hashes)
            if not differing:
                return
            self.record.mismatches += differing
        raise VerificationError(
            f"replica {self.number} holds other bits than the trainer in {len(differing)} tensors "
            f"after two full attempts: {', '.join(differing[:3])}; restart the replica"
        )

    def _prepare(self, version: int, serial: int) -> None:
        asked: dict[str, Future[Any]] = {}
        for rank, name in enumerate(self._senders()):
            prepare = self._announcement(name, version, serial)
            asked[name] = self._driver.senders.call(rank, "sync_prepare", self.number, prepare)
        for name, worker in self._workers().items():
            asked[name] = worker.call("prepare", self._announcement(name, version, serial))
        self._gather("prepare", asked)
        self._ops_known = True

    def _announcement(self, member: str, version: int, serial: int) -> Prepare:
        share = self._shares[member]
        return Prepare(
            version=version,
            serial=serial,
            layout_digest=share.layout_digest,
            ops_digest=share.ops_digest,
            ops=None if self._ops_known else share.ops,
            verify=self._driver.verify,
        )

    def _stream(self, plan: Plan) -> dict[str, Future[Any]]:
        """Move all bytes; returns the trainer ranks' hashes, computed meanwhile."""
        receiving = self._on_workers("stream")
        self._gather("stream", self._on_senders("sync_stream", self.number))
        hashes = self._on_senders("sync_hashes", self.number) if self._driver.verify else {}
        received = self._gather("stream", receiving)
        sent = self._gather("stream", self._on_senders("sync_finish", self.number))
        self.record.num_bytes += sum(sent)
        if not sum(sent) == sum(received) == plan.nbytes:
            raise SyncError(
                f"replica {self.number}: {sum(sent)} bytes sent, {sum(received)} received, "
                f"{plan.nbytes} planned"
            )
        return hashes

    def _verify(self, hashes: Mapping[str, Future[Any]]) -> list[str]:
        by_sender = self._gather("verify", hashes)
        assert self._sums is not None, "join() comes first"
        expected = self._sums.expected(by_sender)
        self.record.wire_hash = expected.wire
        verifying = {
            name: worker.call("verify", expected.by_worker[i])
            for i, (name, worker) in enumerate(self._workers().items())
        }
        return sorted({name for names in self._gather("verify", verifying) for name in names})

    def _bounded(self, phase: Phase, call: Callable[[int], object]) -> None:
        name = f"{phase}({self.number})"
        self._gather(phase, {name: in_background(lambda: _settled(call(self.number)), name)})

    @contextmanager
    def _phase(self, phase: Phase, version: int) -> Iterator[None]:
        self._driver.events.append(SyncEvent(self.number, phase, version))
        begin = time.monotonic()
        yield
        seconds = self.record.seconds
        seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - begin

    def _gather(self, phase: str, asked: Mapping[str, Future[Any]]) -> list[Any]:
        """Results of all calls, in order; the first fault or the deadline ends the wait."""
        limit_s = self._driver.timeout_s + GRACE_S
        _, late = wait(asked.values(), limit_s, return_when=FIRST_EXCEPTION)
        errors = {
            name: error
            for name, future in asked.items()
            if future.done() and (error := future.exception()) is not None
        }
        if errors:
            is_refusal = all(isinstance(error, RefusedError) for error in errors.values())
            kind = RefusedError if is_refusal and phase == "prepare" else SyncError
            told = "; ".join(f"{who}: {_cause(error)}" for who, error in errors.items())
            raise kind(f"{phase}: {told}") from next(iter(errors.values()))
        if late:
            names = ", ".join(name for name, future in asked.items() if future in late)
            raise SyncError(f"{phase}: no answer from {names} within {limit_s:g} s")
        return [future.result() for future in asked.values()]

    def _senders(self) -> list[str]:
        return [f"trainer rank {rank}" for rank in range(self._driver.senders.num_ranks)]

    def _workers(self) -> dict[str, RemoteReceiver]:
        return {worker_name(self.number, i): worker for i, worker in enumerate(self.workers)}

    def _on_senders(self, method: str, *args: Any) -> dict[str, Future[Any]]:
        call = self._driver.senders.call
        return {name: call(rank, method, *args) for rank, name in enumerate(self._senders())}

    def _on_workers(self, method: str, *args: Any) -> dict[str, Future[Any]]:
        return {name: worker.call(method, *args) for name, worker in self._workers().items()}


def _attaching(worker: RemoteReceiver, replica: int, number: int) -> Callable[[], None]:
    return lambda: worker.attach(EngineReceiver(replica, number))


def _closing(worker: RemoteReceiver, timeout_s: float) -> Callable[[], None]:
    return lambda: worker.call("close").result(timeout_s)


def _settled(result: object) -> object:
    return result.result() if isinstance(result, Future) else result


def _complaint(name: str, closing: Future[Any]) -> str | None:
    if not closing.done():
        return f"{name} has not let go of the connection"
    error = closing.exception()
    text = _cause(error) if error is not None else closing.result()
    return f"{name}: {text}" if text else None


def _cause(error: BaseException) -> str:
    """An error as one line; what Ray wraps around a remote error is left out."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1] if str(cause) else ''}"

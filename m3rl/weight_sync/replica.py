"""The driver's view of one replica: its state, and its way through one sync.

    EMPTY ──────┐
    READY(old) ─┴─ prepare ─▶ SYNCING ─ pause, stream, verify, commit, resume ─▶ READY(version)
                     │           │         ▲        │
                     │           │         └─ once ─┘ a tensor differs
                     │           └─ any fault ─▶ POISONED: group closed, engine left paused
                     └─ any fault: the state stays, no byte has moved; the group is closed unless
                        it was refused

    a delta that cannot be had (`delta_driver.py`), or is refused, is a full sync from `prepare` on

Where a probe is due it comes between commit and resume (`probe.py`).

With a shadow, stream and verify come before the pause; the state stays until then, and a fault
leaves the replica what it was, with its group closed. So does a commit that fails while every
worker serves the old version still; the engine is resumed then.

Only READY(version) serves. Out of POISONED, and to a closed group, leads `connect`, which begins
anew with EMPTY.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import numpy as np

from m3rl.types import RemoteReceiver, TensorSlot
from m3rl.weight_sync.calls import all_answer, cause, closing, complaint, gather, settled
from m3rl.weight_sync.delta import Changes
from m3rl.weight_sync.delta_driver import Offer
from m3rl.weight_sync.driver import Driver, ReplicaState
from m3rl.weight_sync.errors import RefusedError, SyncError, VerificationError
from m3rl.weight_sync.hand_over import WorkerReceiver
from m3rl.weight_sync.layout import Layout
from m3rl.weight_sync.messages import Limits, arrange
from m3rl.weight_sync.plan import Plan
from m3rl.weight_sync.prepare import Prepare, Served, Share
from m3rl.weight_sync.relay import check_passes, largest_part, relayed
from m3rl.weight_sync.report import Phase, SyncEvent, SyncRecord
from m3rl.weight_sync.transport import GroupSpec, in_background, worker_name
from m3rl.weight_sync.turns import Turn, take_turns
from m3rl.weight_sync.verify import Expected, HashSums, differing_tensors

logger = logging.getLogger(__name__)

LIMITS = Limits()
GRACE_S = 3.0
"""How much longer the driver waits than the ranks do: their better-worded errors come first."""


class Replica:
    """One complete copy of the model: its workers, its group, its state."""

    def __init__(self, number: int, workers: Sequence[RemoteReceiver], driver: Driver) -> None:
        self.number = number
        self.workers = tuple(workers)
        self.state = ReplicaState.EMPTY
        self.version: int | None = None
        self.record = SyncRecord()
        self.plan: Plan | None = None
        self.base: int | None = None
        """Serial of the sync whose weights it holds and the trainer ranks remember; None: none."""
        self.grains = 0
        """Stands for how the plan cuts columns: wire hashes of equal ones compare."""
        self._sums: HashSums | None = None
        self._driver = driver
        self._has_shadow = False
        self.gives = False
        """Whether another replica can take its weights from here; known once it is attached."""
        self._shares: dict[str, Share] = {}
        """What each member, by name, has to do in a sync."""
        self._ops_known = False
        self._nodes: list[int] = []
        """Of each worker; equal ones are near to each other."""
        self._num_bytes = 0, 0
        """Of a full sync: sent by trainer ranks, received by workers."""
        self._planned = 0, 0
        """The same of the stream under way."""
        self._finishing: dict[str, Future[Any]] = {}
        self._num_received = 0
        self.served: Served | None = None
        self._expected: Expected | None = None
        """Hashes of the sync under way, once they are known."""

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
        self.base = self.served = None
        attached = {
            name: in_background(_attaching(worker, self.number, i), f"attach {name}")
            for i, (name, worker) in enumerate(self._workers().items())
        }
        self._gather("attach", attached)
        self._has_shadow = all(self._gather("attach", self._on_workers("has_shadow")))
        self.gives = all(self._gather("attach", self._on_workers("gives")))
        names = self._gather("attach", self._on_workers("node"))
        self._nodes = [names.index(name) for name in names]
        return self._gather("layout", self._on_workers("layout"))

    def join(
        self, spec: GroupSpec, plan: Plan, senders: Sequence[Layout], workers: Sequence[Layout]
    ) -> None:
        """Build the group of this replica, on all members at the same time."""
        connecting = self._on_workers("connect", spec) | self._on_senders("sync_connect", spec)
        self._gather("connect", connecting)
        # With deltas replicas alike share a plan, and what the trainer ranks remember for it.
        turn = Turn() if self._driver.keeps else Turn(self.number, self._driver.num_replicas)
        plan = take_turns(relayed(plan, self._nodes), senders, turn)
        check_passes(plan, senders, workers)
        sends = zip(self._senders(), senders, map(plan.sends, range(len(senders))), strict=True)
        receives = zip(
            self._workers(), workers, map(plan.receives, range(len(workers))), strict=True
        )
        self._shares = {name: Share.of(ops, layout) for name, layout, ops in (*sends, *receives)}
        self.plan = plan
        self._num_bytes = plan.nbytes, sum(op.nbytes for op in plan.ops)
        self._sums = HashSums(plan, len(workers))
        self.grains = hash(frozenset((op.name, op.grain) for op in plan.ops))

    def run(self, version: int, serial: int, offer: Offer | None = None) -> None:
        """Bring the replica to READY(version).

        Args:
            offer: of what changed since the sync `base`.

        Raises:
            RefusedError: refused before a byte moved; the state is unchanged.
            SyncError: failed: POISONED, or what it was where that serves on; or whatever else a
                call on a member raised. `disconnect` comes next.
        """
        self.record, self._expected, self._finishing = SyncRecord(), None, {}
        if self.plan is None:
            raise RefusedError(f"not connected; call connect({self.number}) first")
        base, self.base = self.base, None
        try:
            self._bring(version, serial, base, offer)
            self.base = serial if self._driver.keeps else None
        finally:
            if self.state is ReplicaState.SYNCING:
                self.lose()

    def lose(self) -> None:
        """What it holds is not known any more."""
        self.state, self.version = ReplicaState.POISONED, None
        self.base = self.served = None

    def disconnect(self) -> list[str]:
        """Close the group on all members, whatever their state; returns what trainer ranks report.

        After it no trainer rank reads weights for this replica any more.
        """
        self.plan = None
        timeout_s = self._driver.timeout_s
        workers = {
            name: in_background(closing(worker, timeout_s), f"close {name}")
            for name, worker in self._workers().items()
        }
        # A sending thread may wait until its own deadline for a replica that is stuck.
        senders = self._on_senders("sync_close", self.number)
        wait(senders.values(), timeout_s + GRACE_S)
        wait(workers.values(), GRACE_S)
        return [text for name, future in senders.items() if (text := complaint(name, future))]

    def _bring(self, version: int, serial: int, base: int | None, offer: Offer | None) -> None:
        with self._phase("prepare", version):
            # Others of the plan wait, too: the ranks compare before they remember what is new.
            changes = None if offer is None else self._accepted(offer, base)
            changes = self._prepare_either(version, serial, changes)
        if self._has_shadow:
            self._stream_until_equal(version, changes)
        self.state = ReplicaState.SYNCING
        paused_at = time.monotonic()
        with self._phase("pause", version):
            self._bounded("pause", self._driver.pause)
        if not self._has_shadow:
            self._stream_until_equal(version, changes)
        sums = None if self._expected is None else tuple(self._expected.by_worker)
        try:
            with self._phase("commit", version):
                self._commit(sums)
        except SyncError:
            self._go_back(version)
            raise
        self._begin_to_serve(version, Served(self._worker_shares(), sums))
        self.record.paused_s = time.monotonic() - paused_at

    def _accepted(self, offer: Offer, base: int | None) -> Changes | None:
        """The delta of an offer, if it pays and is one to what this replica holds."""
        limit_s = self._driver.timeout_s + GRACE_S
        wait([offer.changes], limit_s)
        if offer.base != base:
            return None
        if not offer.changes.done():
            self._fall_back(f"no comparison by the trainer ranks within {limit_s:g} s")
        elif (error := offer.changes.exception()) is not None:
            self._fall_back(cause(error))
        else:
            return offer.changes.result()
        return None

    def _prepare_either(self, version: int, serial: int, changes: Changes | None) -> Changes | None:
        """Prepare for a delta, or for all where there is none or it is refused; what it is."""
        if changes is not None:
            try:
                self._prepare(version, serial, changes.base)
            except RefusedError as error:
                self._fall_back(str(error))
            else:
                return changes
        self._prepare(version, serial, None)
        return None

    def _fall_back(self, fault: str) -> None:
        logger.warning("replica %d takes all instead of a delta: %s", self.number, fault)
        self.record.delta_fault = fault

    def _go_back(self, version: int) -> None:
        """After a commit that failed: READY(old) where every worker surely serves that still."""
        if not self._has_shadow or self.version in (None, version):
            return
        limit_s = self._driver.timeout_s + GRACE_S
        if all_answer(self._on_workers("serving").values(), self.version, limit_s):
            self._bounded("resume", self._driver.resume)
            self.state = ReplicaState.READY

    def _stream_until_equal(self, version: int, changes: Changes | None) -> None:
        """Stream and verify; once more, and all, if a fault or a wrong base left a difference."""
        for attempt in (changes, None):
            with self._phase("stream", version):
                sent, held = self._stream(attempt)
            self.record.is_delta = attempt is not None
            if not self._driver.verify:
                return
            with self._phase("verify", version):
                differing = self._differing(sent, held)
            if not differing:
                return
            self.record.mismatches += differing
        raise VerificationError(
            f"replica {self.number} holds other bits than the trainer in {len(differing)} tensors "
            f"after two full attempts: {', '.join(differing[:3])}; restart the replica"
        )

    def _prepare(self, version: int, serial: int, base: int | None) -> None:
        asked: dict[str, Future[Any]] = {}
        for rank, name in enumerate(self._senders()):
            prepare = self._announcement(name, version, serial, base)
            asked[name] = self._driver.senders.call(rank, "sync_prepare", self.number, prepare)
        for name, worker in self._workers().items():
            asked[name] = worker.call("prepare", self._announcement(name, version, serial, base))
        spots = self._gather("prepare", asked)
        if not self._ops_known:
            assert self.plan is not None, "run() checks it"
            num_senders = self._driver.senders.num_ranks
            sides = spots[:num_senders], spots[num_senders:]
            chunk_bytes = largest_part(self.plan.ops)
            sends, receives = arrange(self.plan.ops, *sides, chunk_bytes, LIMITS)
            told = {
                name: self._driver.senders.call(rank, "sync_arrange", self.number, sends[rank])
                for rank, name in enumerate(self._senders())
            }
            for (name, worker), arranged in zip(self._workers().items(), receives, strict=True):
                told[name] = worker.call("arrange", *arranged)
            self._gather("prepare", told)
        self._ops_known = True

    def _announcement(self, member: str, version: int, serial: int, base: int | None) -> Prepare:
        options = {"verify": self._driver.verify, "keeps": self._driver.keeps, "base": base}
        share, is_known = self._shares[member], self._ops_known
        return share.announce(version, serial, is_known=is_known, **options)

    def _stream(self, changes: Changes | None) -> tuple[list[np.ndarray], list[bytes]]:
        """Move the bytes; returns the hashes of trainer ranks and of workers, if verified."""
        self._finish()
        self._planned = self._num_bytes if changes is None else (changes.nbytes,) * 2
        senders, workers = ({}, {}) if changes is None else changes.deltas()
        call = self._driver.senders.call
        streaming = {
            name: call(rank, "sync_stream", self.number, senders.get(rank))
            for rank, name in enumerate(self._senders())
        }
        for i, (name, worker) in enumerate(self._workers().items()):
            streaming[name] = worker.call("stream", workers.get(i))
        hashing = self._on_senders("sync_hashes", self.number) if self._driver.verify else {}
        hashing = {f"hashes of {name}": future for name, future in hashing.items()}
        answers = self._gather("stream", streaming | hashing)
        self._finishing = self._on_senders("sync_finish", self.number)
        received = answers[self._driver.senders.num_ranks : len(streaming)]
        self._num_received = sum(num_bytes for num_bytes, _ in received)
        return answers[len(streaming) :], [hashes for _, hashes in received]

    def _finish(self) -> None:
        """Hear of the trainer ranks that the last stream has ended as it should."""
        if self._finishing:
            sent = sum(self._gather("stream", self._finishing))
            self._finishing = {}
            self.record.num_bytes += sent
            if (sent, self._num_received) != self._planned:
                raise SyncError(
                    f"replica {self.number}: {sent} bytes sent and {self._num_received} received, "
                    f"{self._planned} planned"
                )

    def _differing(self, sent: list[np.ndarray], held: list[bytes]) -> list[str]:
        """Names of the tensors whose bits differ from the trainer's."""
        assert self._sums is not None, "join() comes first"
        self._expected = expected = self._sums.expected(sent)
        self.record.wire_hash = expected.wire
        each = zip(self._sums.names, held, expected.by_worker, strict=True)
        return sorted({name for ends in each for name in differing_tensors(*ends)})

    def _commit(self, expected: Sequence[Any] | None) -> None:
        committing = {
            name: worker.call("commit", None if expected is None else expected[i])
            for i, (name, worker) in enumerate(self._workers().items())
        }
        self._gather("commit", committing)
        self._finish()

    def _bounded(self, phase: Phase, call: Callable[[int], object]) -> None:
        name = f"{phase}({self.number})"
        self._gather(phase, {name: in_background(lambda: settled(call(self.number)), name)})

    def _begin_to_serve(self, version: int, served: Served) -> None:
        probe, name = self._driver.probe, f"probe({self.number})"
        if probe is not None and probe.is_due(version):
            with self._phase("probe", version), probe.counted(self.number):
                asked = {name: in_background(lambda: probe.error(self.number), name)}
                self.record.probe_error = self._gather("probe", asked)[0]
        with self._phase("resume", version):
            self._bounded("resume", self._driver.resume)
        self.state, self.version, self.served = ReplicaState.READY, version, served

    @contextmanager
    def _phase(self, phase: Phase, version: int) -> Iterator[None]:
        self._driver.events.append(SyncEvent(self.number, phase, version))
        begin = time.monotonic()
        yield
        seconds = self.record.seconds
        seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - begin

    def _gather(self, phase: str, asked: Mapping[str, Future[Any]]) -> list[Any]:
        """See `calls.gather`."""
        return gather(phase, asked, self._driver.timeout_s + GRACE_S)

    def _senders(self) -> list[str]:
        return [f"trainer rank {rank}" for rank in range(self._driver.senders.num_ranks)]

    def _workers(self) -> dict[str, RemoteReceiver]:
        return {worker_name(self.number, i): worker for i, worker in enumerate(self.workers)}

    def _worker_shares(self) -> tuple[Share, ...]:
        return tuple(self._shares[name] for name in self._workers())

    def _on_senders(self, method: str, *args: Any) -> dict[str, Future[Any]]:
        call = self._driver.senders.call
        return {name: call(rank, method, *args) for rank, name in enumerate(self._senders())}

    def _on_workers(self, method: str, *args: Any) -> dict[str, Future[Any]]:
        return {name: worker.call(method, *args) for name, worker in self._workers().items()}


def _attaching(worker: RemoteReceiver, replica: int, number: int) -> Callable[[], None]:
    return lambda: worker.attach(WorkerReceiver(replica, number))

"""Brings the replicas of the rollout pool to the trainer's weights, bit for bit or not at all.

    PREPARE ─▶ PAUSE ─▶ STREAM ─▶ VERIFY ─▶ COMMIT ─▶ RESUME    each replica on its own, all at once
       │                   ▲         │
       ▼                   └─ once ──┘ a tensor differs
    refused: nothing moved

With a shadow: PREPARE, STREAM, VERIFY, PAUSE, COMMIT, RESUME. Where a probe is due it comes between
COMMIT and RESUME.

Trainer ranks own a `Sender` (send.py), workers are given an `EngineReceiver` (receive.py), this
driver tells both what to do. The states of a replica are drawn in replica.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from m3rl.errors import M3rlError
from m3rl.rendezvous import Rendezvous
from m3rl.types import RemoteReceiver, SenderGroup
from m3rl.weight_sync.calls import gather
from m3rl.weight_sync.carriers import join_over
from m3rl.weight_sync.delta_driver import Deltas, Offer
from m3rl.weight_sync.driver import Driver, ReplicaState
from m3rl.weight_sync.errors import BusyError, NotReadyError, RefusedError, SyncError
from m3rl.weight_sync.join import JoiningReplica, PeerError
from m3rl.weight_sync.layout import Layout, layout_digest
from m3rl.weight_sync.plan import Plan, check_plan, make_plan
from m3rl.weight_sync.probe import Probe, ProbeError
from m3rl.weight_sync.replica import Replica
from m3rl.weight_sync.report import SyncEvent, SyncReport
from m3rl.weight_sync.transport import GroupSpec, in_background

logger = logging.getLogger(__name__)

Workers = RemoteReceiver | Sequence[RemoteReceiver]


class WeightSync:
    """The driver of all weight syncs of a run."""

    def __init__(
        self,
        senders: SenderGroup,
        replicas: Mapping[int, Workers],
        *,
        pause: Callable[[int], object],
        resume: Callable[[int], object],
        host: str,
        timeout_s: float,
        min_replicas: int,
        verify: bool,
        chunk_bytes: int = 256 << 20,
        backend: str = "gloo",
        fallbacks: Sequence[str] = (),
        wire: str = "bf16",
        delta_full_every: int = 1,
        probe: Probe | None = None,
    ) -> None:
        """
        Args:
            senders: trainer ranks; `call(rank, 'sync_...', ...)` reaches the Sender of a rank.
            replicas: number of each replica -> its worker, or its workers in rank order.
            pause: called with a replica's number; when it returns (or its Future ends) no forward
                pass is under way there and none begins.
            resume: called once a replica is committed.
            host: address of this machine that trainer ranks and workers can reach.
            timeout_s: longest wait in any phase, for any replica.
            min_replicas: fewer replicas with the new version are an error.
            verify: compare hashes before every commit.
            chunk_bytes: most that a member stages for a round; two rounds are in flight.
            backend: transport of the groups: 'nccl' between GPUs, 'ipc' between those of one host,
                'gloo' through hosts' memory.
            fallbacks: taken in their order, for all replicas that connect from then on, when one
                connects whose members cannot map one another's memory.
            wire: 'bf16', or 'mxfp8': trainer ranks quantise what replicas hold in MXFP8, to the
                same bytes; half as many travel.
            delta_full_every: of so many syncs one sends all, and others only what changed, where
                that pays (`delta.py`); 1: all do. Needs `verify`.
            probe: what a replica is asked before it serves a new version.
        """
        self.events: list[SyncEvent] = []
        """Every phase that a replica entered, oldest first."""
        self._senders = senders
        if delta_full_every > 1 and not verify:
            raise ValueError(
                f"delta_full_every={delta_full_every} without verify: what a delta changes is not "
                "known to be what the trainer changed; verify, or set it to 1"
            )
        keeps = delta_full_every > 1
        shared = (senders, pause, resume, timeout_s, verify, self.events, probe, keeps)
        self._driver = Driver(*shared, num_replicas=len(replicas))
        self._deltas = Deltas(senders, delta_full_every, chunk_bytes, timeout_s)
        self._replicas = {
            number: JoiningReplica(number, _as_workers(workers), self._driver)
            for number, workers in sorted(replicas.items())
        }
        self._min_replicas = min_replicas
        self._chunk_bytes = chunk_bytes
        self._backends: Sequence[str] = (backend, *fallbacks)
        self._wire = wire
        self._rendezvous = Rendezvous(host, timeout_s)
        self._sender_layouts: list[Layout] = []
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._serial = 0
        self._lock = threading.Lock()
        self._holder = ""

    def connect(self, replica: int, workers: Workers | None = None) -> None:
        """Give the replica receivers, plan for what it holds and build its group; it is EMPTY then.

        Args:
            workers: handles on the restarted replica; None: those it had.

        Raises:
            BusyError: a sync is open.
            SyncError: a member is late or failed, or the layouts do not fit together (names the
                tensor).
        """
        with self._hold(f"connect({replica})"):
            one = self._replica(replica)
            if one.is_connected:
                one.disconnect()
            if workers is not None:
                one = self._replicas[replica] = JoiningReplica(
                    replica, _as_workers(workers), self._driver
                )
            is_done = False
            try:
                self._backends = join_over(self._backends, one, self._join)
                is_done = True
            finally:
                if not is_done:
                    one.disconnect()

    def sync(self, version: int, replicas: Sequence[int] | None = None) -> SyncReport:
        """Bring replicas to the trainer's present weights, which are policy version `version`.

        The trainer's weights must not change before it returns. A replica that fails is reported
        and left POISONED, the others go on.

        Args:
            replicas: those to bring there; None: all.

        Raises:
            BusyError: another sync is open (names its holder).
            SyncError: fewer than `min_replicas` replicas are READY(version) afterwards (says why
                for each).
        """
        with self._hold(f"sync to version {version}"):
            numbers = sorted(self._replicas) if replicas is None else sorted(set(replicas))
            begin = time.monotonic()
            self._serial += 1
            self._begin_probe(version)
            chosen = [self._replica(number) for number in numbers]
            offers = self._deltas.begin(self._serial, chosen)
            running = {
                one.number: self._start(one, version, offers.get(one.number)) for one in chosen
            }
            failed = {
                number: fault for number, future in running.items() if (fault := future.result())
            }
            self._deltas.end(self._serial, chosen, offers)
            report = self._report(version, numbers, failed, time.monotonic() - begin)
        num_ready = len(self.ready(version))
        if num_ready < self._min_replicas:
            reasons = "; ".join(f"replica {number}: {fault}" for number, fault in failed.items())
            raise SyncError(
                f"{num_ready} replicas hold policy version {version} after the sync, "
                f"{self._min_replicas} are needed (weight_sync.min_replicas): "
                f"{reasons or 'the others were not synced'}"
            )
        return report

    def bring(self, replica: int, version: int, workers: Workers | None = None) -> None:
        """Bring a replica that comes late, or back, to a version that is current already.

        It takes it from a replica that is READY(version) and holds the same, and serves on; where
        there is none, or that fails, from the trainer. A replica that is found to hold other bits
        than it was brought to is lost, whatever comes of this: see `poisoned`.

        Args:
            workers: as for `connect`.

        Raises:
            BusyError: a sync is open.
            SyncError: it could not be brought there; says why.
        """
        self.connect(replica, workers)
        source = self._take_from_peer(replica, version)
        if source is None:
            fault = self.sync(version, [replica]).failed.get(replica)
            if fault is not None:
                raise SyncError(fault)
        logger.info("replica %d has version %d from %s", replica, version, source or "the trainer")

    def lose(self, replicas: Iterable[int]) -> None:
        """These are gone, or not to be trusted: they are POISONED, count nowhere and give nothing
        away until `connect`. To be told of all of them before the first is brought back."""
        with self._hold("lose"):
            for number in set(replicas) & self._replicas.keys():
                self._lose(self._replicas[number])

    def forget(self, replica: int) -> None:
        """Leave the group of a replica that is gone for good; it counts nowhere any more."""
        with self._hold(f"forget({replica})"):
            one = self._replica(replica)
            if one.is_connected:
                one.disconnect()
            del self._replicas[replica]
            if self._driver.probe is not None:
                self._driver.probe.forget(replica)

    def gives_up(self, replica: int) -> str | None:
        """Why another restart of the replica is of no use; None: it may be."""
        return None if self._driver.probe is None else self._driver.probe.gives_up(replica)

    def condemns(self) -> str | None:
        """Why the weights of the trainer, or a bound, are at fault, and not the replicas; None:
        that is not known."""
        probe = self._driver.probe
        return None if probe is None else probe.condemns(self._replicas.keys())

    def ready(self, version: int) -> list[int]:
        """Replicas that may serve this policy version."""
        return [
            number for number, one in self._replicas.items() if one.status == f"READY({version})"
        ]

    def poisoned(self) -> list[int]:
        """Replicas that failed or were lost, and wait for being brought back or forgotten."""
        return [n for n, one in self._replicas.items() if one.state is ReplicaState.POISONED]

    def require_ready(self, version: int) -> list[int]:
        """Like `ready`, for the moment before the version is used.

        Raises:
            NotReadyError: fewer than `min_replicas`; says what each replica holds.
        """
        ready = self.ready(version)
        if len(ready) < self._min_replicas:
            states = ", ".join(f"replica {n} is {status}" for n, status in self.states().items())
            raise NotReadyError(
                f"policy version {version} is not in the replicas ({states}); {self._min_replicas} "
                f"are needed: call sync({version}) before rollouts begin"
            )
        return ready

    def states(self) -> dict[int, str]:
        """State of every replica: 'EMPTY', 'SYNCING', 'READY(3)', 'POISONED'."""
        return {number: one.status for number, one in self._replicas.items()}

    def plan(self, replica: int) -> Plan | None:
        """The plan of a connected replica."""
        return self._replica(replica).plan

    def close(self) -> None:
        """Leave all groups."""
        with self._hold("close"):
            for one in self._replicas.values():
                if one.is_connected:
                    one.disconnect()

    def _lose(self, one: JoiningReplica) -> None:
        one.lose()
        if one.is_connected:
            one.disconnect()

    def _take_from_peer(self, replica: int, version: int) -> str | None:
        """Who gave the replica the version; None: nobody did, and the replica is connected."""
        others = {number: one for number, one in self._replicas.items() if number != replica}
        while True:
            with self._hold(f"bring({replica}) to version {version}"):
                one = self._replica(replica)
                peer = one.peer_of(others.values(), version)
                if peer is None:
                    return None
                self._begin_probe(version)
                self._serial += 1
                group = self._group(one, f"from{peer.number}", self._backends[0])
                try:
                    one.take_from(peer, version, group, self._chunk_bytes)
                except PeerError as error:
                    logger.error("replica %d is lost: %s", peer.number, error)
                    del others[peer.number]
                    self._lose(peer)
                except M3rlError as error:  # a peer may be gone that nobody has missed yet
                    if isinstance(error, ProbeError) and self._driver.verify:
                        self._lose(one)  # the same bits from elsewhere would be probed alike
                        raise
                    logger.warning(
                        "replica %d does not take from replica %d: %s", replica, peer.number, error
                    )
                    del others[peer.number]
                else:
                    return f"replica {peer.number}"
            self.connect(replica)

    def _begin_probe(self, version: int) -> None:
        probe = self._driver.probe
        if probe is not None and probe.is_due(version):
            probe.begin()

    def _group(self, one: Replica, purpose: str, backend: str) -> GroupSpec:
        """Of all trainer ranks and the replica's workers, under a key that was never used."""
        return GroupSpec(
            replica=one.number,
            num_senders=self._senders.num_ranks,
            num_workers=len(one.workers),
            host=self._rendezvous.host,
            port=self._rendezvous.port,
            key=f"replica{one.number}/{purpose}/{self._serial}",
            timeout_s=self._driver.timeout_s,
            backend=backend,
        )

    def _join(self, one: JoiningReplica, backend: str) -> None:
        workers = one.attach()
        if not self._sender_layouts:
            asked = {
                f"trainer rank {rank}": self._senders.call(rank, "sync_layout")
                for rank in range(self._senders.num_ranks)
            }
            self._sender_layouts = gather("layout", asked, self._driver.timeout_s)
        one.layouts = key = tuple(map(layout_digest, workers))
        if key not in self._plans:
            plan = make_plan(self._sender_layouts, workers, self._chunk_bytes, self._wire)
            check_plan(plan, self._sender_layouts, workers)
            self._plans[key] = plan
        self._serial += 1
        one.join(self._group(one, "all", backend), self._plans[key], self._sender_layouts, workers)

    def _start(self, one: Replica, version: int, offer: Offer | None) -> Future[str | None]:
        serial = self._serial
        return in_background(lambda: _outcome(one, version, serial, offer), f"sync-{one.number}")

    def _report(
        self, version: int, numbers: Sequence[int], failed: dict[int, str], seconds: float
    ) -> SyncReport:
        records = {number: self._replicas[number].record for number in numbers}
        ready = tuple(number for number in numbers if number not in failed)
        hashes = {n: records[n].wire_hash for n in ready}
        of_grains: dict[int, int | None] = {}
        for n in ready:
            # Hashes of plans that cut columns otherwise do not compare.
            if of_grains.setdefault(self._replicas[n].grains, hashes[n]) != hashes[n]:
                for each in ready:  # who holds the right ones is not known
                    self._lose(self._replicas[each])
                raise SyncError(f"replicas {ready} were sent different weights: {hashes}")
        plans = [one.plan for one in self._replicas.values() if one.plan is not None]
        num_tensors = max((plan.num_tensors for plan in plans), default=0)
        verify = self._driver.verify
        return SyncReport.of(version, records, failed, seconds, num_tensors, is_verified=verify)

    def _replica(self, number: int) -> JoiningReplica:
        if number not in self._replicas:
            raise ValueError(f"there is no replica {number}; known are {sorted(self._replicas)}")
        return self._replicas[number]

    @contextmanager
    def _hold(self, purpose: str) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise BusyError(f"{purpose}: {self._holder} is open; wait for its end")
        self._holder = f"{purpose} (thread {threading.current_thread().name})"
        try:
            yield
        finally:
            self._lock.release()


def _outcome(one: Replica, version: int, serial: int, offer: Offer | None) -> str | None:
    """Run one replica's sync to its end; None when it is READY, else why it is not."""
    run = in_background(lambda: one.run(version, serial, offer), f"run-{one.number}")
    error = run.exception()
    if error is None:
        return None
    complaints = []
    if isinstance(error, RefusedError):
        logger.error("replica %d refuses version %d: %s", one.number, version, error)
    else:
        complaints = one.disconnect()
        logger.error("replica %d is %s: %s", one.number, one.status, error)
        logger.debug("what led to it", exc_info=error)
    return "; ".join([str(error), *complaints])


def _as_workers(workers: Workers) -> Sequence[RemoteReceiver]:
    return workers if isinstance(workers, Sequence) else [workers]

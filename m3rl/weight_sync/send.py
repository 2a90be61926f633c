"""The trainer rank's end of a sync: reads its own shards, sends them, says their hashes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from m3rl.types import TensorSlot
from m3rl.weight_sync.delta import Delta
from m3rl.weight_sync.delta_send import Snapshot
from m3rl.weight_sync.errors import RefusedError, SyncError
from m3rl.weight_sync.layout import Bounds, check_layout, volume
from m3rl.weight_sync.messages import Arranged
from m3rl.weight_sync.plan import check_sends
from m3rl.weight_sync.prepare import Agreed, Prepare, agreed_ops
from m3rl.weight_sync.send_hashes import SendHashes
from m3rl.weight_sync.send_rounds import SendRounds, Weights, places_of
from m3rl.weight_sync.transport import Deadline, GroupSpec, Transport, in_background


@dataclass(slots=True)
class _Link:
    """This rank's side of the group of one replica."""

    transport: Transport
    agreed: Agreed | None = None
    prepare: Prepare | None = None
    rounds: SendRounds | None = None
    stream: Future[int] | None = None
    """Ends with the bytes sent."""
    hashes: Future[np.ndarray] = field(default_factory=Future)
    """Of the sync that was prepared; begun when the first round is under way."""
    is_hashing: bool = False

    def give_up_hashes(self, reason: str) -> None:
        """Let nobody wait for hashes that will never be begun."""
        if not self.is_hashing and not self.hashes.done():
            self.hashes.set_exception(SyncError(f"nothing was hashed: {reason}"))


@dataclass(slots=True)
class _Hashes:
    """What was hashed for one sync, shared by its replicas."""

    serial: int
    by_ops: dict[str, np.ndarray] = field(default_factory=dict)
    """By digest of the ops: replicas of one plan have the same."""


class Sender:
    """Owned by a trainer rank; the driver calls `sync_*` by name through its SenderGroup.

    Every method returns soon but `sync_connect`, which waits for the other members of the group.
    Between `sync_stream` and the end of the driver's `sync()` the rank's weights must not change.
    """

    def __init__(
        self,
        rank: int,
        layout: Sequence[TensorSlot],
        read: Callable[[str, Bounds], Tensor],
        *,
        stays: bool = False,
        fixed: Collection[str] = (),
    ) -> None:
        """
        Args:
            rank: this trainer rank, from 0.
            layout: what it holds, buffers included, in wire dtypes.
            read: (name, bounds) -> that rectangle in its wire dtype; called from several threads at
                a time.
            stays: every read of a rectangle gives the same memory, which holds the present weights:
                it is read once, and sent without a copy where it is contiguous.
            fixed: names of tensors that never change: deltas leave them out, and no copy of what
                was sent is kept of them. They are hashed in every sync like all others.
        """
        check_layout(layout, f"trainer rank {rank}")
        self.rank = rank
        self._layout = tuple(layout)
        self._read = read
        self._stays = stays
        self._fixed = fixed
        self._links: dict[int, _Link] = {}
        self._hashers: dict[str, SendHashes] = {}
        """By digest of the ops."""
        self._hashes = _Hashes(serial=-1)
        self._hash_lock = threading.Lock()
        self._snapshots: dict[str, Snapshot] = {}
        """By digest of the ops; under the lock."""

    def sync_layout(self) -> tuple[TensorSlot, ...]:
        """What this rank holds."""
        return self._layout

    def sync_connect(self, spec: GroupSpec) -> None:
        """Join the group of a replica, leaving the one it had before.

        Raises:
            TransportError: a member did not come in time.
        """
        self.sync_close(spec.replica)
        self._links[spec.replica] = _Link(Transport.join(spec, self.rank, self._device()))

    def sync_prepare(self, replica: int, prepare: Prepare) -> np.ndarray | None:
        """Check the ops of a sync.

        Returns:
            Of ops not known before where they can be sent from, see `messages.arrange`, which is
            what `sync_arrange` is called with before they can be streamed.

        Raises:
            RefusedError: they are not the driver's, or this rank does not hold what it is to send.
        """
        link = self._link(replica)
        owner = f"trainer rank {self.rank}"
        link.agreed = agreed_ops(prepare, self._layout, link.agreed, owner, check_sends)
        link.give_up_hashes("another sync has begun")
        link.prepare, link.hashes, link.is_hashing = prepare, Future(), False
        with self._hash_lock:
            if self._hashes.serial != prepare.serial:
                self._hashes = _Hashes(prepare.serial)
                used = {one.prepare.ops_digest for one in self._links.values() if one.prepare}
                self._hashers = {d: h for d, h in self._hashers.items() if d in used}
                self._snapshots = {d: s for d, s in self._snapshots.items() if d in used}
        if prepare.ops is None:
            return None
        link.rounds = None
        return places_of(prepare.ops, self._weights(), link.transport.device)

    def sync_arrange(self, replica: int, arranged: Arranged) -> None:
        """After the first `sync_prepare` of some ops: lay out how both ends will move them."""
        link = self._link(replica)
        assert link.agreed is not None, "sync_prepare() sets the ops"
        transport = link.transport
        link.rounds = SendRounds(
            link.agreed.ops,
            self._weights(),
            transport.device,
            transport.spec.worker_rank,
            arranged,
        )

    def sync_compare(self, replica: int, base: int) -> np.ndarray:
        """How many elements of each op changed since sync `base`, and how many of its scales,
        [ops, 2] int64.

        Raises:
            RefusedError: it does not know what it sent.
            NonFiniteError: NaN or infinity among what is held in MXFP8.
        """
        agreed = self._agreed(replica)
        if not agreed.ops:
            return np.zeros((0, 2), np.int64)
        with self._hash_lock:
            return self._snapshot(agreed).compare(base)

    def sync_pack(self, replica: int, serial: int) -> None:
        """After `sync_compare`: pack what changed, for sync `serial`."""
        agreed = self._agreed(replica)
        if agreed.ops:
            with self._hash_lock:
                self._snapshot(agreed).pack(serial)

    def sync_release(self, serial: int) -> None:
        """Give up what was packed for sync `serial`."""
        with self._hash_lock:
            for snapshot in self._snapshots.values():
                snapshot.release(serial)

    def sync_stream(self, replica: int, delta: Delta | None = None) -> None:
        """Begin to send in the background; `sync_finish` tells how it ended.

        Args:
            delta: send what was packed, instead of all.
        """
        link = self._link(replica)
        if link.prepare is None or link.rounds is None:
            raise SyncError(f"trainer rank {self.rank}: sync_stream({replica}) before sync_prepare")
        link.stream = in_background(lambda: self._stream(link, delta), f"sync-replica-{replica}")

    def sync_hashes(self, replica: int) -> np.ndarray:
        """Of what is sent in a verified sync; ends when they are computed, beside the sending, or
        with the next `sync_prepare` or `sync_close`.

        Returns:
            `OpHash` of every rectangle this rank sends to the replica, in the order of its ops,
            [ops, 2] uint64: read anew from the weights, not from the buffers that were sent; what
            the replica holds quantised is quantised here too.

        Raises:
            NonFiniteError: NaN or infinity among the weights.
            SyncError: they are never begun.
        """
        return self._link(replica).hashes.result()

    def sync_finish(self, replica: int) -> int:
        """Bytes sent to the replica; called once the replica has received everything.

        Raises:
            SyncError: sending failed, or has not ended in time.
        """
        link = self._link(replica)
        if link.stream is None:
            raise SyncError(f"trainer rank {self.rank}: sync_finish({replica}) before sync_stream")
        return link.stream.result(link.transport.spec.timeout_s)

    def sync_clock(self, replica: int) -> dict[str, float]:
        """Of the last stream: seconds until its first and last round were posted, and until all
        was sent."""
        rounds = self._link(replica).rounds
        assert rounds is not None, "sync_prepare() lays out the rounds"
        return dict(rounds.clock.seconds)

    def sync_close(self, replica: int) -> str | None:
        """Leave the group of a replica; returns what had gone wrong while sending, if anything.

        Raises:
            TimeoutError: the sending thread still waits for a replica that holds the connection
                open.
        """
        link = self._links.pop(replica, None)
        if link is None:
            return None
        link.transport.interrupt()
        try:
            timeout_s = link.transport.spec.timeout_s
            error = link.stream.exception(timeout_s) if link.stream else None
            if link.is_hashing:
                link.hashes.exception(timeout_s)  # it reads weights
            link.give_up_hashes("the group is left")
        finally:
            link.transport.close()
        return None if error is None else f"{type(error).__name__}: {error}"

    def _link(self, replica: int) -> _Link:
        if replica not in self._links:
            raise RefusedError(
                f"trainer rank {self.rank} is not connected to replica {replica}; "
                f"connect({replica}) first"
            )
        return self._links[replica]

    def _agreed(self, replica: int) -> Agreed:
        agreed = self._link(replica).agreed
        if agreed is None:
            raise RefusedError(f"trainer rank {self.rank} has sent nothing to replica {replica}")
        return agreed

    def _snapshot(self, agreed: Agreed) -> Snapshot:
        digest = agreed.ops_digest
        if digest not in self._snapshots:
            self._snapshots[digest] = Snapshot(agreed.ops, self._weights())
        return self._snapshots[digest]

    def _stream(self, link: _Link, delta: Delta | None) -> int:
        assert link.rounds is not None, "sync_arrange() lays them out"
        assert link.agreed is not None, "sync_prepare() sets the ops"
        transport = link.transport
        is_complete = False
        try:
            deadline = Deadline(transport.spec.timeout_s)
            if delta is None:
                link.rounds.run(transport, deadline, lambda: self._begin_hashes(link))
                num_bytes = link.agreed.num_bytes
            else:
                self._begin_hashes(link)
                num_bytes = self._stream_delta(link.agreed, delta, transport, deadline)
            transport.note("done")
            is_complete = True
            return num_bytes
        finally:
            if not is_complete:
                transport.close()
                link.give_up_hashes("the sending failed before it")

    def _stream_delta(
        self, agreed: Agreed, delta: Delta, transport: Transport, deadline: Deadline
    ) -> int:
        if not agreed.ops:
            transport.note("begins")
            return 0
        snapshot = self._snapshots[agreed.ops_digest]
        return snapshot.send(delta, transport, deadline, transport.spec.worker_rank)

    def _begin_hashes(self, link: _Link) -> None:
        agreed, prepare, hashes = link.agreed, link.prepare, link.hashes
        assert agreed is not None, "sync_prepare() sets the ops"
        assert prepare is not None, "sync_prepare() sets it"
        if not prepare.verify or link.is_hashing:
            return
        link.is_hashing = True

        def compute() -> None:
            try:
                hashes.set_result(self._hashes_of(agreed, prepare))
            except BaseException as error:  # it belongs to who waits for the hashes
                hashes.set_exception(error)

        in_background(compute, "sync-hashes")

    def _hashes_of(self, agreed: Agreed, prepare: Prepare) -> np.ndarray:
        with self._hash_lock:
            known = self._hashes.by_ops
            digest = agreed.ops_digest
            if digest not in known:
                if not agreed.ops:
                    return np.zeros((0, 2), np.uint64)
                if digest not in self._hashers:
                    self._hashers[digest] = SendHashes(agreed.ops, self._weights())
                known[digest] = self._hashers[digest].compute()
                if prepare.keeps:
                    self._snapshot(agreed).take(prepare.serial)
            return known[digest]

    def _weights(self) -> Weights:
        shapes = {slot.name: slot.shape for slot in self._layout}
        # Bound here and not before: what reads may change, so long as it reads the same layout.
        owner, device = f"trainer rank {self.rank}", self._device()
        return Weights(owner, shapes, self._read, device, self._stays, self._fixed)

    def _device(self) -> torch.device:
        """Of what `read` gives; asks for the smallest tensor to see."""
        smallest = min(self._layout, key=lambda slot: volume(slot.bounds))
        return self._read(smallest.name, smallest.bounds).device

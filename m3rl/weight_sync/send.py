"""The trainer rank's end of a sync: reads its own shards, sends them, says their hashes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from m3rl.types import TensorSlot
from m3rl.weight_sync.errors import RefusedError, SyncError
from m3rl.weight_sync.layout import Bounds, check_layout, volume
from m3rl.weight_sync.plan import CopyOp, check_sends
from m3rl.weight_sync.prepare import Prepare, agreed_ops
from m3rl.weight_sync.send_hashes import PartKey, SendHashes, part_key
from m3rl.weight_sync.send_rounds import SendRounds, Weights
from m3rl.weight_sync.transport import Deadline, GroupSpec, Transport, in_background
from m3rl.weight_sync.verify import OpHash


@dataclass(slots=True)
class _Link:
    """This rank's side of the group of one replica."""

    transport: Transport
    ops: tuple[CopyOp, ...] | None = None
    prepare: Prepare | None = None
    rounds: SendRounds | None = None
    stream: Future[int] | None = None
    """Ends with the bytes sent."""


@dataclass(slots=True)
class _Hashes:
    """What was hashed for one sync, shared by its replicas."""

    serial: int
    by_part: dict[PartKey, OpHash] = field(default_factory=dict)


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
    ) -> None:
        """
        Args:
            rank: this trainer rank, from 0.
            layout: what it holds, buffers included, in wire dtypes.
            read: (name, bounds) -> that rectangle in its wire dtype; called from several threads at
                a time.
            stays: every read of a rectangle gives the same memory, which holds the present weights:
                it is read once, and sent without a copy where it is contiguous.
        """
        check_layout(layout, f"trainer rank {rank}")
        self.rank = rank
        self._layout = tuple(layout)
        self._read = read
        self._stays = stays
        self._links: dict[int, _Link] = {}
        self._hashers: dict[str, SendHashes] = {}
        """By digest of the ops: replicas of one plan share them."""
        self._hashes = _Hashes(serial=-1)
        self._hash_lock = threading.Lock()

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

    def sync_prepare(self, replica: int, prepare: Prepare) -> None:
        """Check the ops of a sync.

        Raises:
            RefusedError: they are not the driver's, or this rank does not hold what it is to send.
        """
        link = self._link(replica)
        link.ops = agreed_ops(
            prepare, self._layout, link.ops, f"trainer rank {self.rank}", check_sends
        )
        link.prepare = prepare
        if prepare.ops is not None:
            link.rounds = None
        with self._hash_lock:
            if self._hashes.serial != prepare.serial:
                self._hashes = _Hashes(prepare.serial)
                used = {one.prepare.ops_digest for one in self._links.values() if one.prepare}
                self._hashers = {d: h for d, h in self._hashers.items() if d in used}

    def sync_stream(self, replica: int) -> None:
        """Begin to send in the background; `sync_finish` tells how it ended."""
        link = self._link(replica)
        if link.prepare is None:
            raise SyncError(f"trainer rank {self.rank}: sync_stream({replica}) before sync_prepare")
        link.stream = in_background(lambda: self._stream(link), f"sync-replica-{replica}")

    def sync_hashes(self, replica: int) -> np.ndarray:
        """`OpHash` of every rectangle this rank sends to the replica, in the order of its ops.

        Read anew from the weights, not from the buffers that were sent; what the replica holds
        quantised is quantised here too. Replicas of one sync share them.

        Returns:
            [ops, 2] uint64.

        Raises:
            NonFiniteError: NaN or infinity among the weights.
        """
        link = self._link(replica)
        if link.ops is None or link.prepare is None:
            raise SyncError(f"trainer rank {self.rank}: sync_hashes({replica}) before sync_prepare")
        with self._hash_lock:
            known = self._hashes.by_part
            if not all(part_key(op) in known for op in link.ops):
                digest = link.prepare.ops_digest
                if digest not in self._hashers:
                    self._hashers[digest] = SendHashes(link.ops, self._weights())
                known |= self._hashers[digest].compute()
            hashes = [known[part_key(op)] for op in link.ops]
        return np.array(hashes, np.uint64).reshape(-1, 2)

    def sync_finish(self, replica: int) -> int:
        """Bytes sent to the replica; called once the replica has received everything.

        Raises:
            SyncError: sending failed, or has not ended in time.
        """
        link = self._link(replica)
        if link.stream is None:
            raise SyncError(f"trainer rank {self.rank}: sync_finish({replica}) before sync_stream")
        return link.stream.result(timeout=link.transport.spec.timeout_s)

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
            error = link.stream.exception(link.transport.spec.timeout_s) if link.stream else None
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

    def _stream(self, link: _Link) -> int:
        assert link.ops is not None, "sync_prepare() sets the ops"
        transport = link.transport
        is_complete = False
        try:
            if link.rounds is None:
                rank_of = transport.spec.worker_rank
                link.rounds = SendRounds(link.ops, self._weights(), transport.device, rank_of)
            transport.note("begins")
            link.rounds.run(transport, Deadline(transport.spec.timeout_s))
            transport.note("done")
            is_complete = True
            return sum(op.nbytes for op in link.ops)
        finally:
            if not is_complete:
                transport.close()

    def _weights(self) -> Weights:
        shapes = {slot.name: slot.shape for slot in self._layout}
        # Bound here and not before: what reads may change, so long as it reads the same layout.
        return Weights(f"trainer rank {self.rank}", shapes, self._read, self._device(), self._stays)

    def _device(self) -> torch.device:
        """Of what `read` gives; asks for the smallest tensor to see."""
        smallest = min(self._layout, key=lambda slot: volume(slot.bounds))
        return self._read(smallest.name, smallest.bounds).device

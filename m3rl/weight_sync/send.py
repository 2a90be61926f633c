"""The trainer rank's end of a sync: reads its own shards, sends them, says their hashes."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inference.kernels.mxfp8 import hash_tensor, quantize
from inference.kernels.tensor_hash import tensor_hash
from m3rl.types import TensorSlot
from m3rl.weight_sync.errors import NonFiniteError, RefusedError, SyncError
from m3rl.weight_sync.layout import WIRE_DTYPES, Bounds, check_layout, extents, starts
from m3rl.weight_sync.plan import CopyOp, check_sends, windows
from m3rl.weight_sync.prepare import Prepare, agreed_ops
from m3rl.weight_sync.transport import (
    Deadline,
    GroupSpec,
    Posted,
    Transfer,
    Transport,
    in_background,
    wire_bytes,
)
from m3rl.weight_sync.verify import OpHash


@dataclass(slots=True)
class _Link:
    """This rank's side of the group of one replica."""

    transport: Transport
    ops: tuple[CopyOp, ...] | None = None
    prepare: Prepare | None = None
    stream: Future[int] | None = None
    """Ends with the bytes sent."""


@dataclass(slots=True)
class _Hashes:
    """What was hashed for one sync, shared by its replicas."""

    serial: int
    by_part: dict[tuple[str, Bounds, str], OpHash] = field(default_factory=dict)
    """By name, bounds and storage."""


class Sender:
    """Owned by a trainer rank; the driver calls `sync_*` by name through its SenderGroup.

    Every method returns soon but `sync_connect`, which waits for the other members of the group.
    Between `sync_stream` and the end of the driver's `sync()` the rank's weights must not change.
    """

    def __init__(
        self, rank: int, layout: Sequence[TensorSlot], read: Callable[[str, Bounds], Tensor]
    ) -> None:
        """
        Args:
            rank: this trainer rank, from 0.
            layout: what it holds, buffers included, in wire dtypes.
            read: (name, bounds) -> that rectangle in its wire dtype; called from several threads at
                a time.
        """
        check_layout(layout, f"trainer rank {rank}")
        self.rank = rank
        self._layout = tuple(layout)
        self._read = read
        self._shapes = {slot.name: slot.shape for slot in layout}
        self._links: dict[int, _Link] = {}
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
        self._links[spec.replica] = _Link(Transport.join(spec, self.rank))

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
        with self._hash_lock:
            if self._hashes.serial != prepare.serial:
                self._hashes = _Hashes(prepare.serial)

    def sync_stream(self, replica: int) -> None:
        """Begin to send in the background; `sync_finish` tells how it ended."""
        link = self._link(replica)
        if link.prepare is None:
            raise SyncError(f"trainer rank {self.rank}: sync_stream({replica}) before sync_prepare")
        link.stream = in_background(lambda: self._stream(link), f"sync-replica-{replica}")

    def sync_hashes(self, replica: int) -> list[OpHash]:
        """Hashes of every rectangle this rank sends to the replica, in the order of its ops.

        Read anew from the weights, not from the buffers that were sent; what the replica holds
        quantised is quantised here too.

        Raises:
            NonFiniteError: NaN or infinity in what would be quantised.
        """
        link = self._link(replica)
        if link.ops is None:
            raise SyncError(f"trainer rank {self.rank}: sync_hashes({replica}) before sync_prepare")
        with self._hash_lock:
            return [self._hash(op) for op in link.ops]

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
        is_complete = False
        try:
            with torch.no_grad():
                num_bytes = self._send_all(link.transport, link.ops)
            is_complete = True
            return num_bytes
        finally:
            if not is_complete:
                link.transport.close()

    def _send_all(self, transport: Transport, ops: Sequence[CopyOp]) -> int:
        spec = transport.spec
        deadline = Deadline(spec.timeout_s)
        num_sent: dict[int, int] = defaultdict(int)
        in_flight: deque[Posted] = deque()
        for window in windows(ops, spec.chunk_bytes):
            transfers = []
            for op in window:
                peer = spec.worker_rank(op.receiver)
                wire = wire_bytes(self._checked_read(op))
                transfers.append(Transfer(wire, peer, num_sent[peer], op))
                num_sent[peer] += 1
            in_flight.append(transport.send(transfers))
            if len(in_flight) == 2:
                transport.wait(in_flight.popleft(), deadline)
        for posted in in_flight:
            transport.wait(posted, deadline)
        return sum(op.nbytes for op in ops)

    def _checked_read(self, op: CopyOp) -> Tensor:
        tensor = self._read(op.name, op.bounds)
        if tensor.dtype != WIRE_DTYPES[op.dtype] or tuple(tensor.shape) != extents(op.bounds):
            raise SyncError(
                f"trainer rank {self.rank}: read of {op} gave {tensor.dtype} "
                f"{tuple(tensor.shape)}, the plan says {op.dtype} {extents(op.bounds)}; "
                "nothing of it was sent"
            )
        return tensor

    def _hash(self, op: CopyOp) -> OpHash:
        key = (op.name, op.bounds, op.storage)
        known = self._hashes.by_part
        if key not in known:
            with torch.no_grad():
                known[key] = self._computed_hash(op)
        return known[key]

    def _computed_hash(self, op: CopyOp) -> OpHash:
        tensor = self._checked_read(op)
        offsets, shape = starts(op.bounds), self._shapes[op.name]
        wire = tensor_hash(tensor, name=op.name, offsets=offsets, shape=shape)
        if op.storage == "plain":
            return OpHash(wire, wire)
        try:
            quantized = quantize(tensor)
        except ValueError as error:
            raise NonFiniteError(f"trainer rank {self.rank}: {op}: {error}") from None
        return OpHash(wire, hash_tensor(quantized, name=op.name, offsets=offsets, shape=shape))

"""A READY worker hands its weights over to one that comes late and holds the same, byte for byte.

    peer        READY(version) ─ give ─▶ READY(version)            reads, and serves meanwhile
    newcomer    EMPTY, POISONED ─ take ─▶ STREAMED ─ commit ─▶ READY(version)
                                  └─ any fault ─▶ what a broken stream leaves (receive.py)

What is stored is sent, values and scales where a tensor is held in MXFP8: nothing is converted, and
the trainer has no part in it. Both ends say the hashes of what then lies there, part by part as the
trainer once sent it to the peer: they compare with those of the trainer.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inference.kernels.mxfp8 import BLOCK_SIZE, SCALE_SUFFIX, MXFP8Tensor
from inference.kernels.tensor_hash import HashPart, HashTable
from m3rl.types import GivingTarget, SharedPlaces, TensorSlot
from m3rl.weight_sync.errors import RefusedError
from m3rl.weight_sync.lane import Lane
from m3rl.weight_sync.layout import Bounds, layout_digest
from m3rl.weight_sync.plan import CopyOp, check_receives
from m3rl.weight_sync.prepare import Prepare
from m3rl.weight_sync.receive import EngineReceiver, ReceiverState
from m3rl.weight_sync.receive_rounds import Place
from m3rl.weight_sync.transport import (
    Deadline,
    GroupSpec,
    Posted,
    Transfer,
    Transport,
    wire_bytes,
    worker_name,
)
from m3rl.weight_sync.verify import TensorSums, hash_parts

GIVER, TAKER = 0, 1
"""Ranks in the group of a hand-over."""


@dataclass(frozen=True, slots=True)
class PairSpec(GroupSpec):
    """A group of two workers of the same number, of two replicas."""

    peer: int = 0
    """The replica that gives."""
    worker: int = 0

    def member(self, rank: int) -> str:
        return worker_name(self.peer if rank == GIVER else self.replica, self.worker)


@dataclass(frozen=True, slots=True)
class HandOver:
    """What the driver tells both ends; each refuses where it does not hold."""

    spec: PairSpec
    version: int
    layout_digest: str
    """Of both workers."""
    ops: tuple[CopyOp, ...]
    """As which the trainer sent it; both ends hash in these parts."""
    chunk_bytes: int
    """Most that is under way at a time, twice."""


class Piece(NamedTuple):
    """Memory that a tensor is stored in."""

    name: str
    memory: Tensor


class WorkerReceiver(EngineReceiver):
    """The receiver of a worker that can also give what it serves, or take it from another."""

    def serving(self) -> int | None:
        """Version that its engine serves."""
        assert self._target is not None, "bind() comes first"
        return self._target.version

    def gives(self) -> bool:
        """Whether its engine keeps what it serves as it was sent, for another to take."""
        return isinstance(self._target, GivingTarget)

    def offer(self, hand_over: HandOver) -> None:
        """Say whether `give` would refuse, before anybody waits for it.

        Raises:
            RefusedError: see `give`.
        """
        self._expect_served(hand_over)

    def give(self, hand_over: HandOver) -> bytes:
        """Send what this worker serves; returns its `TensorSums`, read after the sending.

        Raises:
            RefusedError: it serves another version, or holds other tensors.
            TransportError: the other worker is late or gone.
        """
        self._expect_served(hand_over)
        assert isinstance(self._target, GivingTarget), "the driver asks others only"
        places = self._target.serving_places()
        pieces, hashes = pieces_of(self._layout, places), self._hashes(hand_over, places)
        transport = Transport.join(hand_over.spec, GIVER, pieces[0].memory.device)
        try:
            sums = _send(pieces, hashes, transport, hand_over)
        finally:
            transport.close()
        self._expect_served(hand_over)
        return sums

    def take(self, hand_over: HandOver) -> bytes:
        """Receive all weights into their places; `commit` with what they should hash to comes next.

        Returns:
            The `TensorSums` of what then lies there.

        Raises:
            RefusedError: it holds other tensors.
            TransportError: the other worker is late or gone.
        """
        self._expect_layout(hand_over)
        assert self._target is not None, "bind() comes first"
        plan = self._target.plan_load([(slot.name, slot.bounds) for slot in self._layout])
        if isinstance(plan, SharedPlaces):
            raise RefusedError(
                f"{self._name} loads weights as they come, and from the trainer alone"
            )
        pieces, hashes = pieces_of(self._layout, plan.places), self._hashes(hand_over, plan.places)
        with self._given_up_unless_done():
            self._target.begin_load(hand_over.version, plan)
            transport = Transport.join(hand_over.spec, TAKER, pieces[0].memory.device)
            try:
                self._held = sums = _receive(pieces, hashes, transport, hand_over)
            finally:
                transport.close()
            self._target.written(0, len(self._layout))
            digest = hand_over.layout_digest
            self._prepare = Prepare(hand_over.version, 0, digest, "", None, verify=True)
            self.state = ReceiverState.STREAMED
        return sums

    def _hashes(self, hand_over: HandOver, places: Sequence[Place]) -> _Hashes:
        check_receives(self._layout, hand_over.ops, self._name)  # they leave nothing out
        return _Hashes(self._layout, places, hand_over.ops)

    def _expect_served(self, hand_over: HandOver) -> None:
        self._expect_layout(hand_over)
        assert self._target is not None, "bind() comes first"
        served = self._target.version if self.state is ReceiverState.READY else None
        if served != hand_over.version:
            raise RefusedError(
                f"{self._name} gives no version {hand_over.version} away: it is "
                f"{self.state.value} and its engine serves version {served}"
            )

    def _expect_layout(self, hand_over: HandOver) -> None:
        if layout_digest(self._read_layout()) != hand_over.layout_digest:
            raise RefusedError(
                f"{self._name} holds other tensors than {hand_over.spec.member(GIVER)} gives to "
                f"{hand_over.spec.member(TAKER)}"
            )


def pieces_of(layout: Sequence[TensorSlot], places: Sequence[Place]) -> list[Piece]:
    """The memory of each slot: one piece, or values and scales of MXFP8."""
    pieces = []
    for slot, place in zip(layout, places, strict=True):
        if isinstance(place, MXFP8Tensor):
            pieces += [Piece(slot.name, place.values), Piece(slot.name + SCALE_SUFFIX, place.scale)]
        else:
            pieces.append(Piece(slot.name, place))
    return pieces


class _Hashes:
    """Of the tensors as they lie in memory, taken in the parts of a plan."""

    def __init__(
        self, layout: Sequence[TensorSlot], places: Sequence[Place], ops: Sequence[CopyOp]
    ) -> None:
        held = {slot.name: (slot, place) for slot, place in zip(layout, places, strict=True)}
        parts: list[HashPart] = []
        names: list[str] = []
        for op in ops:
            slot, place = held[op.name]
            here = tuple(
                (a - s, b - s) for (a, b), (s, _) in zip(op.bounds, slot.bounds, strict=True)
            )
            each = hash_parts(op, _rectangle(place, here), slot.shape)
            parts += each
            names += [op.name] * len(each)
        self._table, self._sums = HashTable(parts), TensorSums(names)

    def launch(self) -> None:
        self._table.launch(0, len(self._table))

    def read(self) -> bytes:
        return self._sums.add_up(np.array(self._table.read(), np.uint64))


def _rectangle(place: Place, bounds: Bounds) -> Place:
    """A part of what is stored, which cuts no block of MXFP8."""
    if isinstance(place, MXFP8Tensor):
        first, last = bounds[-1]
        of_scale = (*bounds[:-1], (first // BLOCK_SIZE, last // BLOCK_SIZE))
        return MXFP8Tensor(_cut(place.values, bounds), _cut(place.scale, of_scale))
    return _cut(place, bounds)


def _cut(tensor: Tensor, bounds: Bounds) -> Tensor:
    return tensor[tuple(slice(first, last) for first, last in bounds)]


class _Run(NamedTuple):
    """Bytes of a piece that travel as one message."""

    piece: int
    first: int
    last: int


def _rounds(pieces: Sequence[Piece], chunk_bytes: int) -> Iterator[list[_Run]]:
    """The same at both ends, whose pieces have the same sizes; each of `chunk_bytes` at most."""
    runs: list[_Run] = []
    free = chunk_bytes
    for i, (_, memory) in enumerate(pieces):
        first, nbytes = 0, memory.numel() * memory.element_size()
        while first < nbytes:
            last = min(nbytes, first + free)
            runs.append(_Run(i, first, last))
            free -= last - first
            first = last
            if not free:
                yield runs
                runs, free = [], chunk_bytes
    if runs:
        yield runs


def _move(
    pieces: Sequence[Piece],
    hashes: _Hashes,
    transport: Transport,
    hand_over: HandOver,
    *,
    wire_of: Callable[[Tensor, torch.device], Tensor],
    post: Callable[[list[Transfer]], Posted],
    peer: int,
    arrived: Callable[[Tensor, Tensor], object],
) -> bytes:
    """Walk through the rounds, two of them under way; then hash what lies there.

    Args:
        wire_of: bytes of a piece on the transport's device.
        arrived: told of the memory of each piece, and of its bytes, when all were transferred.
    """
    deadline, lane = Deadline(hand_over.spec.timeout_s), Lane(pieces[0].memory.device)
    wires: dict[int, Tensor] = {}
    under_way: deque[tuple[Posted, list[_Run], dict[int, Tensor]]] = deque()
    tags = itertools.count()

    def finish() -> None:
        posted, runs, wires = under_way.popleft()
        transport.wait(posted, deadline)
        for i, _, last in runs:
            if last == wires[i].numel():
                arrived(pieces[i].memory, wires[i])

    with torch.no_grad(), lane.entered():
        transport.note("begins")
        for runs in _rounds(pieces, hand_over.chunk_bytes):
            if len(under_way) == 2:
                finish()
            before, wires = wires, {}
            for i in {run.piece for run in runs}:
                wires[i] = before[i] if i in before else wire_of(pieces[i].memory, transport.device)
            transfers = [
                Transfer(
                    wires[i][first:last], peer, next(tags), f"{pieces[i].name}[{first}:{last}]"
                )
                for i, first, last in runs
            ]
            under_way.append((post(transfers), runs, wires))
        while under_way:
            finish()
        hashes.launch()
        transport.wait_for_device(lane.mark(), deadline)
        transport.note("done")
        return hashes.read()


def _send(
    pieces: Sequence[Piece], hashes: _Hashes, transport: Transport, hand_over: HandOver
) -> bytes:
    def bytes_of(memory: Tensor, device: torch.device) -> Tensor:
        return wire_bytes(memory.to(device))

    return _move(
        pieces,
        hashes,
        transport,
        hand_over,
        wire_of=bytes_of,
        post=lambda transfers: transport.post(sends=transfers),
        peer=TAKER,
        arrived=lambda memory, wire: None,
    )


def _receive(
    pieces: Sequence[Piece], hashes: _Hashes, transport: Transport, hand_over: HandOver
) -> bytes:
    def room_for(memory: Tensor, device: torch.device) -> Tensor:
        if memory.is_contiguous() and memory.device == device:
            return wire_bytes(memory)
        size = memory.numel() * memory.element_size()
        return torch.empty(size, dtype=torch.uint8, device=device)

    def put(memory: Tensor, wire: Tensor) -> None:
        if wire.data_ptr() != memory.data_ptr():
            memory.copy_(wire.view(memory.dtype).view(memory.shape))

    return _move(
        pieces,
        hashes,
        transport,
        hand_over,
        wire_of=room_for,
        post=lambda transfers: transport.post(receives=transfers),
        peer=GIVER,
        arrived=put,
    )

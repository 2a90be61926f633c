"""A worker's share of a sync as static lists and tables: what arrives where, round by round.

    in place    plain storage, contiguous, on the transport's device: received straight into it
    staged      all else: into one of two slots, then copied or quantised into its place

Built once for a plan. A sync walks the rounds: the next one is under way while this one is put into
place and hashed there, by one launch of each kind for all of its parts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inference.kernels.copy_table import CopyTable
from inference.kernels.mxfp8 import MXFP8Tensor, QuantizeTable
from inference.kernels.tensor_hash import HashPart, HashTable, combine
from m3rl.weight_sync.lane import Lane
from m3rl.weight_sync.plan import CopyOp
from m3rl.weight_sync.rounds import RUN_AHEAD, Range, Slots, round_ranges
from m3rl.weight_sync.transport import Deadline, Posted, Transfer, Transport, wire_bytes
from m3rl.weight_sync.verify import hash_parts

Place = Tensor | MXFP8Tensor


@dataclass(frozen=True, slots=True)
class _Round:
    """What one round brings: ranges of the share's ops, and of the parts of each table."""

    ops: Range
    receives: tuple[Transfer, ...]
    copies: Range
    quantizes: Range
    hashes: Range


@dataclass(slots=True)
class _Work:
    """What the tables will hold, and the ops that are hashed, by part."""

    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    quantizes: list[tuple[Tensor, MXFP8Tensor]] = field(default_factory=list)
    hashes: list[HashPart] = field(default_factory=list)
    hashed: list[CopyOp] = field(default_factory=list)

    def put(self, landed: Tensor, place: Place) -> None:
        if isinstance(place, MXFP8Tensor):
            self.quantizes.append((landed, place))
        else:
            self.copies.append((landed, place))

    def hash(self, op: CopyOp, place: Place, shape: tuple[int, ...]) -> None:
        parts = hash_parts(op, place, shape)
        self.hashes += parts
        self.hashed += [op] * len(parts)

    @property
    def ends(self) -> tuple[int, int, int]:
        return len(self.copies), len(self.quantizes), len(self.hashes)


class ReceiveRounds:
    """Fills the places of one plan, one sync after the other."""

    def __init__(
        self,
        ops: Sequence[CopyOp],
        places: Sequence[Place],
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> None:
        """
        Args:
            ops: the worker's share, in order.
            places: the memory of each op's rectangle, all on one device.
            shapes: global shape of each tensor, by name.
            device: the transport's.
        """
        ranges = round_ranges(ops)
        in_place = [_bytes_of(place, device) for place in places]
        staged = {i for i, wire in enumerate(in_place) if wire is None}
        self._lane = Lane(device_of(places[0]))
        is_host = self._lane.device != device
        self._slots = Slots(ops, ranges, staged, device, is_pinned=is_host)
        self._landed = Slots(ops, ranges, staged, self._lane.device) if is_host else self._slots
        """Where staged ops are copied or quantised from."""
        work = _Work()
        tags: dict[int, Iterator[int]] = defaultdict(itertools.count)
        self._rounds: list[_Round] = []
        for first, last in ranges:
            before, receives = work.ends, []
            for i in range(first, last):
                op, place, wire = ops[i], places[i], in_place[i]
                if wire is None:
                    work.put(self._landed.tensor(i), place)
                    wire = self._slots.wire(i)
                receives.append(Transfer(wire, op.sender, next(tags[op.sender]), op))
                work.hash(op, place, shapes[op.name])
            tables = zip(before, work.ends, strict=True)
            self._rounds.append(_Round((first, last), tuple(receives), *tables))
        self._copies = CopyTable(work.copies) if work.copies else None
        self._quantizes = QuantizeTable(work.quantizes) if work.quantizes else None
        self._hashes, self._hashed = HashTable(work.hashes), work.hashed

    def run(
        self,
        transport: Transport,
        deadline: Deadline,
        written: Callable[[int, int], None],
        *,
        verify: bool,
    ) -> None:
        """Receive all rounds; everything is in its place, on the device too, when it returns.

        Args:
            written: told of each range of ops that the device was told to put into place.
            verify: also hash what then lies there.

        Raises:
            TransportError: a member is late or gone.
        """
        with torch.no_grad(), self._lane.entered():
            self._hashes.reset()
            marks: deque[torch.cuda.Event | None] = deque()
            arriving = self._post(0, transport, deadline)
            for number, here in enumerate(self._rounds):
                posted = arriving
                if number + 1 < len(self._rounds):
                    arriving = self._post(number + 1, transport, deadline)
                transport.wait(posted, deadline)
                self._put_in_place(number)
                written(*here.ops)
                if verify:
                    self._hashes.launch(*here.hashes)
                marks.append(self._lane.mark())
                if len(marks) > RUN_AHEAD:
                    transport.wait_for_device(marks.popleft(), deadline)
            transport.wait_for_device(marks.pop(), deadline)

    def hashes(self) -> dict[str, int]:
        """After a run with `verify`: hash of the worker's part of each tensor, as it lies there."""
        parts: dict[str, list[int]] = defaultdict(list)
        for op, value in zip(self._hashed, self._hashes.read(), strict=True):
            parts[op.name].append(value)
        return {name: combine(values) for name, values in parts.items()}

    def non_finite(self) -> list[CopyOp]:
        """After a run with `verify`: ops that brought NaN or infinity into plain storage."""
        flags = self._hashes.flags.tolist()
        return [op for op, flag in zip(self._hashed, flags, strict=True) if flag]

    def drain(self, limit_s: float) -> bool:
        """After a run that failed, wait for what the device still does; False: it goes on."""
        return self._lane.drain(limit_s)

    def _post(self, number: int, transport: Transport, deadline: Deadline) -> Posted:
        # Its slot is that of the round two before, all readers of which are in the lane by now.
        # NCCL's stream waits for the lane; the host, where it is the host's memory, does it here.
        if self._landed is not self._slots:
            transport.wait_for_device(self._lane.mark(), deadline)
        return transport.post(receives=self._rounds[number].receives)

    def _put_in_place(self, number: int) -> None:
        here = self._rounds[number]
        if self._landed is not self._slots:
            self._landed.fill(number, self._slots)
        if self._copies is not None:
            self._copies.launch(*here.copies)
        if self._quantizes is not None:
            self._quantizes.launch(*here.quantizes)


def _bytes_of(place: Place, device: torch.device) -> Tensor | None:
    """A place as [bytes] uint8, if a transfer can be received straight into it."""
    if isinstance(place, Tensor) and place.is_contiguous() and place.device == device:
        return wire_bytes(place)
    return None


def device_of(place: Place) -> torch.device:
    """Where a part of the weights lies."""
    return place.device if isinstance(place, Tensor) else place.values.device

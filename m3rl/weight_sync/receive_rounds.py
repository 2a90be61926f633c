"""A worker's share of a sync as static lists and tables: what arrives where, round by round.

    in place    plain storage, contiguous, on the transport's device: received straight into it
    staged      all else, and small parts of packed messages: into one of two slots, then copied or
                quantised into its place
    passed on   in the round after, from where it was received, to workers of the same node

Built once for a plan. A sync walks the rounds: the next one is under way while this one is put into
place and hashed there, by one launch of each kind for all of its parts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from inference.kernels.copy_table import CopyTable
from inference.kernels.mxfp8 import MXFP8Tensor, QuantizeTable, tensors_of
from inference.kernels.tensor_hash import HashPart, HashTable
from m3rl.weight_sync.lane import Lane
from m3rl.weight_sync.messages import Arranged, Message, Passes, unjoined
from m3rl.weight_sync.plan import CopyOp
from m3rl.weight_sync.rounds import RUN_AHEAD, Clock, Range, Slots, joined, spots, staged_ops, title
from m3rl.weight_sync.transport import Deadline, Posted, Transfer, Transport, wire_bytes
from m3rl.weight_sync.verify import Found, TensorSums, hash_parts

Place = Tensor | MXFP8Tensor


@dataclass(frozen=True, slots=True)
class _Round:
    """What one round brings: ranges of the share's ops, and of the parts of each table."""

    ops: tuple[Range, ...]
    receives: tuple[Transfer, ...]
    passes: tuple[Transfer, ...]
    """Of what came in the round before, to other workers."""
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

    def put(self, landed: Place, place: Place) -> None:
        if isinstance(place, MXFP8Tensor) and isinstance(landed, Tensor):
            self.quantizes.append((landed, place))
        else:
            self.copies += zip(tensors_of(landed), tensors_of(place), strict=True)

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
        arranged: Arranged | None = None,
        passes: Passes = (),
        rank_of: Callable[[int], int] = int,
    ) -> None:
        """
        Args:
            ops: the worker's share, in order.
            places: the memory of each op's rectangle, all on one device.
            shapes: global shape of each tensor, by name.
            device: the transport's.
            arranged: rounds and messages; None: those of the plan.
            passes: of the same rounds, or none.
            rank_of: group rank of a worker.
        """
        arranged = unjoined(ops) if arranged is None else arranged
        in_place = [_bytes_of(place, device) for place in places]
        staged = staged_ops(arranged, in_place)
        self.lane = self._lane = Lane(device_of(places[0]))
        is_host = self._lane.device != device
        rounds = [[*itertools.chain(*messages)] for messages in arranged]
        self._slots = Slots(ops, rounds, staged, device, is_pinned=is_host)
        self._landed = Slots(ops, rounds, staged, self._lane.device) if is_host else self._slots
        """Where staged ops are copied or quantised from."""
        wires = self._slots.wires(in_place)
        self.clock = Clock()
        work = _Work()

        def transfers(messages: Iterable[tuple[int, Message]], tags: _Tags) -> list[Transfer]:
            found = []
            for peer, message in messages:
                run, what = joined([wires[i] for i in message]), title([ops[i] for i in message])
                found.append(Transfer(run, peer, next(tags[peer]), what))
            return found

        comes: _Tags = defaultdict(itertools.count)
        goes: _Tags = defaultdict(itertools.count)
        self._rounds: list[_Round] = []
        for messages, passed in zip(arranged, passes or [()] * len(arranged), strict=True):
            before, here = work.ends, sorted(itertools.chain(*messages))
            for i in here:
                if i in staged:
                    work.put(self._landed.rectangle(i), places[i])
                work.hash(ops[i], places[i], shapes[ops[i].name])
            origins = [(_origin(ops[message[0]], rank_of), message) for message in messages]
            onward = [(rank_of(worker), message) for worker, message in passed]
            self._rounds.append(
                _Round(
                    tuple(_runs(here)),
                    tuple(transfers(origins, comes)),
                    tuple(transfers(onward, goes)),
                    *zip(before, work.ends, strict=True),
                )
            )
        self._copies = CopyTable(work.copies) if work.copies else None
        self._quantizes = QuantizeTable(work.quantizes) if work.quantizes else None
        self._hashes, self._hashed = HashTable(work.hashes), work.hashed
        self._found = Found(self._hashes)
        self._sums = TensorSums([op.name for op in work.hashed])

    def run(
        self,
        transport: Transport,
        deadline: Deadline,
        written: Callable[[int, int], None],
        *,
        verify: bool,
        is_read: bool = False,
    ) -> None:
        """Receive all rounds; everything is in its place, on the device too, when it returns.

        Args:
            written: told of each range of ops that the device was told to put into place.
            verify: also hash what then lies there.
            is_read: `written` reads what came: it is called when the device has put it there.

        Raises:
            TransportError: a member is late or gone.
        """
        self.clock = Clock()
        with torch.no_grad(), self._lane.entered():
            marks: deque[torch.cuda.Event | None] = deque()
            arriving = self._post(0, transport, deadline)
            self.clock.note("first_post")
            transport.note("begins")
            self._hashes.reset()
            passing: Posted | None = None
            for number, here in enumerate(self._rounds):
                posted = arriving
                if passing is not None:
                    # It reads the slot in which the next round will arrive.
                    transport.wait(passing, deadline)
                if number + 1 < len(self._rounds):
                    arriving = self._post(number + 1, transport, deadline)
                    self.clock.note("last_post")
                transport.wait(posted, deadline)
                passing = self._pass_on(number + 1, transport)
                self._put_in_place(number)
                if is_read:
                    # Whoever reads would wait for a sender that died without a deadline.
                    transport.wait_for_device(self._lane.mark(), deadline)
                for first, last in here.ops:
                    written(first, last)
                if verify:
                    self._hashes.launch(*here.hashes)
                marks.append(self._lane.mark())
                if len(marks) > RUN_AHEAD:
                    transport.wait_for_device(marks.popleft(), deadline)
            self._found.fetch()
            transport.wait_for_device(self._lane.mark(), deadline)
        self.clock.note("done")

    def find(self, transport: Transport, deadline: Deadline) -> None:
        """Hash what lies in all places, as a run with `verify` does.

        Raises:
            TransportError: not in time.
        """
        with torch.no_grad(), self._lane.entered():
            self._hashes.reset()
            self._hashes.launch(0, len(self._hashes))
            self._found.fetch()
            transport.wait_for_device(self._lane.mark(), deadline)

    def hashes(self) -> bytes:
        """After a run with `verify`: of the worker's part of each tensor, as it lies there."""
        return self._sums.add_up(self._found.sums)

    def non_finite(self) -> list[CopyOp]:
        """After a run with `verify`: ops that brought NaN or infinity into plain storage."""
        return [self._hashed[part] for part in np.flatnonzero(self._found.flags)]

    @property
    def num_messages(self) -> int:
        return sum(len(each.receives) for each in self._rounds)

    @property
    def num_rounds(self) -> int:
        return len(self._rounds)

    def drain(self, limit_s: float) -> bool:
        """After a run that failed, wait for what the device still does; False: it goes on."""
        return self._lane.drain(limit_s)

    def _post(self, number: int, transport: Transport, deadline: Deadline) -> Posted:
        # Its slot is that of the round two before, all readers of which are in the lane by now.
        # NCCL's stream waits for the lane; the host, where it is the host's memory, does it here.
        if self._landed is not self._slots:
            transport.wait_for_device(self._lane.mark(), deadline)
        here = self._rounds[number]
        # In order, what it passes on will have come; else it waits for that.
        passes = here.passes if transport.is_ordered else ()
        return transport.post(sends=passes, receives=here.receives)

    def _pass_on(self, number: int, transport: Transport) -> Posted | None:
        is_due = not transport.is_ordered and number < len(self._rounds)
        passes = self._rounds[number].passes if is_due else ()
        return transport.post(sends=passes) if passes else None

    def _put_in_place(self, number: int) -> None:
        here = self._rounds[number]
        if self._landed is not self._slots:
            self._landed.fill(number, self._slots)
        if self._copies is not None:
            self._copies.launch(*here.copies)
        if self._quantizes is not None:
            self._quantizes.launch(*here.quantizes)


_Tags = Mapping[int, Iterator[int]]


def _origin(op: CopyOp, rank_of: Callable[[int], int]) -> int:
    """Group rank from which an op comes."""
    return op.sender if op.via < 0 else rank_of(op.via)


def _runs(numbers: Sequence[int]) -> Iterator[Range]:
    """Ascending numbers as ranges of neighbours."""
    for _, group in itertools.groupby(enumerate(numbers), key=lambda entry: entry[1] - entry[0]):
        run = [number for _, number in group]
        yield run[0], run[-1] + 1


def places_of(places: Sequence[Place], device: torch.device) -> np.ndarray:
    """Where ops can be received straight into their places, see `rounds.spots`."""
    return spots([_bytes_of(place, device) for place in places])


def _bytes_of(place: Place, device: torch.device) -> Tensor | None:
    """A place as [bytes] uint8, if a transfer can be received straight into it."""
    if isinstance(place, Tensor) and place.is_contiguous() and place.device == device:
        return wire_bytes(place)
    return None


def device_of(place: Place) -> torch.device:
    """Where a part of the weights lies."""
    return place.device if isinstance(place, Tensor) else place.values.device

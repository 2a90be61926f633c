"""A trainer rank's share of a sync, round by round.

in place    a view that stays, contiguous, on the transport's device: sent from where it is
staged      all else, and small parts of packed messages: read or quantised into one of two slots,
            and sent from there
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.kernels.copy_table import CopyTable
from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.lane import Lane
from m3rl.weight_sync.layout import Bounds, extents
from m3rl.weight_sync.messages import Arranged, unjoined
from m3rl.weight_sync.plan import CopyOp
from m3rl.weight_sync.rounds import RUN_AHEAD, Clock, Range, Slots, joined, spots, staged_ops, title
from m3rl.weight_sync.transport import (
    WIRE_DTYPES,
    Deadline,
    Posted,
    Transfer,
    Transport,
    wire_bytes,
)
from m3rl.weight_sync.wire import Quantizer


@dataclass(frozen=True, slots=True)
class Weights:
    """What a trainer rank holds, and how it is read."""

    owner: str
    """Named in errors."""
    shapes: Mapping[str, tuple[int, ...]]
    """Global shape of each tensor, by name."""
    read: Callable[[str, Bounds], Tensor]
    """That rectangle in its wire dtype."""
    device: torch.device
    """Of what is read."""
    stays: bool
    """Whether each read gives the same memory, which then holds the present weights."""
    fixed: Collection[str] = ()
    """Names of tensors that never change."""

    def of(self, op: CopyOp) -> Tensor:
        """The op's rectangle. SyncError when it is not what the plan says."""
        tensor = self.read(op.name, op.bounds)
        if tensor.dtype != WIRE_DTYPES[op.dtype] or tuple(tensor.shape) != extents(op.bounds):
            raise SyncError(
                f"{self.owner}: read of {op} gave {tensor.dtype} {tuple(tensor.shape)}, the plan "
                f"says {op.dtype} {extents(op.bounds)}; nothing of it was sent"
            )
        return tensor.detach()


@dataclass(frozen=True, slots=True)
class _Round:
    sends: tuple[Transfer, ...]
    copies: Range
    """Of views that stay, into the round's slot."""
    fills: tuple[tuple[CopyOp, Tensor], ...]
    """Ops to be read, and their places in the round's slot; without what is quantised."""


class SendRounds:
    """Sends one share of one plan, in one sync after the other."""

    def __init__(
        self,
        ops: Sequence[CopyOp],
        weights: Weights,
        device: torch.device,
        rank_of: Callable[[int], int],
        arranged: Arranged | None = None,
    ) -> None:
        """
        Args:
            ops: the trainer rank's share, in order.
            device: the transport's.
            rank_of: group rank of a worker.
            arranged: rounds and messages; None: those of the plan.
        """
        arranged = unjoined(ops) if arranged is None else arranged
        self._weights = weights
        self._lane = Lane(weights.device)
        self.clock = Clock()
        in_place = _wires(ops, weights, device)
        staged = staged_ops(arranged, in_place)
        rounds = [[*itertools.chain(*messages)] for messages in arranged]
        is_pinned = device.type == "cpu" != weights.device.type
        slots = Slots(ops, rounds, staged, device, is_pinned=is_pinned)
        self._quantizer = Quantizer(ops, rounds, slots, weights)
        tags: dict[int, Iterator[int]] = defaultdict(itertools.count)
        wires = slots.wires(in_place)
        stays_there = weights.stays and weights.device == device
        copies: list[tuple[Tensor, Tensor]] = []
        self._rounds: list[_Round] = []
        for messages in arranged:
            sends, fills, before = [], [], len(copies)
            for message in messages:
                peer = rank_of(ops[message[0]].receiver)
                what = title([ops[i] for i in message])
                run = joined([wires[i] for i in message])
                sends.append(Transfer(run, peer, next(tags[peer]), what))
                for i in (i for i in message if i in staged and ops[i].wire == "plain"):
                    view = weights.of(ops[i]) if stays_there else None
                    if view is not None and view.stride()[-1:] in ((), (1,)):
                        copies.append((view, slots.tensor(i)))
                    else:
                        fills.append((ops[i], slots.tensor(i)))
            copied = before, len(copies)
            self._rounds.append(_Round(tuple(sends), copied, tuple(fills)))
        self._copies = CopyTable(copies) if copies else None

    def run(
        self,
        transport: Transport,
        deadline: Deadline,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Send all rounds; returns when the peers have received them.

        Args:
            begun: called when the first round is under way.

        Raises:
            SyncError: a read gave something else than the plan says.
            NonFiniteError: NaN or infinity in what was quantised.
            TransportError: a member is late or gone.
        """
        self.clock = Clock()
        if not self._rounds:
            transport.note("begins")
            begun()
        with torch.no_grad(), self._lane.entered():
            self._quantizer.reset()
            under_way: deque[Posted] = deque()
            marks: deque[torch.cuda.Event | None] = deque()
            for number, here in enumerate(self._rounds):
                if len(under_way) == 2:
                    # Its slot is that of the round two before.
                    transport.wait(under_way.popleft(), deadline)
                if self._copies is not None:
                    self._copies.launch(*here.copies)
                for op, place in here.fills:
                    place.copy_(self._weights.of(op))
                self._quantizer.fill(number)
                under_way.append(transport.post(sends=here.sends))
                if not marks:
                    self.clock.note("first_post")
                    transport.note("begins")
                    begun()
                marks.append(self._lane.mark())
                self.clock.note("last_post")
                if len(marks) > RUN_AHEAD:
                    transport.wait_for_device(marks.popleft(), deadline)
            for posted in under_way:
                transport.wait(posted, deadline)
            transport.wait_for_device(self._lane.mark(), deadline)
            self._quantizer.check()
        self.clock.note("done")


def places_of(ops: Sequence[CopyOp], weights: Weights, device: torch.device) -> np.ndarray:
    """Where ops can be sent from where they are, see `rounds.spots`."""
    return spots(_wires(ops, weights, device))


def _wires(ops: Sequence[CopyOp], weights: Weights, device: torch.device) -> list[Tensor | None]:
    return [
        _bytes_of(weights.of(op) if weights.stays and op.wire == "plain" else None, device)
        for op in ops
    ]


def _bytes_of(view: Tensor | None, device: torch.device) -> Tensor | None:
    """A view as [bytes] uint8, if it can be sent from where it is."""
    if view is not None and view.is_contiguous() and view.device == device:
        return wire_bytes(view)
    return None

"""A trainer rank's share of a sync, round by round.

in place    a view that stays, contiguous, on the transport's device: sent from where it is
staged      all else: read into one of two slots, and sent from there
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.lane import Lane
from m3rl.weight_sync.layout import Bounds, extents
from m3rl.weight_sync.plan import CopyOp
from m3rl.weight_sync.rounds import RUN_AHEAD, Slots, round_ranges
from m3rl.weight_sync.transport import (
    WIRE_DTYPES,
    Deadline,
    Posted,
    Transfer,
    Transport,
    wire_bytes,
)


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
    fills: tuple[tuple[CopyOp, Tensor], ...]
    """Ops to be read, and their places in the round's slot."""


class SendRounds:
    """Sends one share of one plan, in one sync after the other."""

    def __init__(
        self,
        ops: Sequence[CopyOp],
        weights: Weights,
        device: torch.device,
        rank_of: Callable[[int], int],
    ) -> None:
        """
        Args:
            ops: the trainer rank's share, in order.
            device: the transport's.
            rank_of: group rank of a worker.
        """
        self._weights = weights
        self._lane = Lane(weights.device)
        ranges = round_ranges(ops)
        views = [weights.of(op) if weights.stays else None for op in ops]
        in_place = [_bytes_of(view, device) for view in views]
        staged = {i for i, wire in enumerate(in_place) if wire is None}
        slots = Slots(
            ops, ranges, staged, device, is_pinned=device.type == "cpu" != weights.device.type
        )
        tags: dict[int, Iterator[int]] = defaultdict(itertools.count)
        self._rounds: list[_Round] = []
        for first, last in ranges:
            sends, fills = [], []
            for i in range(first, last):
                wire, peer = in_place[i], rank_of(ops[i].receiver)
                if wire is None:
                    fills.append((ops[i], slots.tensor(i)))
                    wire = slots.wire(i)
                sends.append(Transfer(wire, peer, next(tags[peer]), ops[i]))
            self._rounds.append(_Round(tuple(sends), tuple(fills)))

    def run(self, transport: Transport, deadline: Deadline) -> None:
        """Send all rounds; returns when the peers have received them.

        Raises:
            SyncError: a read gave something else than the plan says.
            TransportError: a member is late or gone.
        """
        with torch.no_grad(), self._lane.entered():
            under_way: deque[Posted] = deque()
            marks: deque[torch.cuda.Event | None] = deque()
            for here in self._rounds:
                if len(under_way) == 2:
                    # Its slot is that of the round two before.
                    transport.wait(under_way.popleft(), deadline)
                for op, place in here.fills:
                    place.copy_(self._weights.of(op))
                under_way.append(transport.post(sends=here.sends))
                marks.append(self._lane.mark())
                if len(marks) > RUN_AHEAD:
                    transport.wait_for_device(marks.popleft(), deadline)
            for posted in under_way:
                transport.wait(posted, deadline)
            transport.wait_for_device(self._lane.mark(), deadline)


def _bytes_of(view: Tensor | None, device: torch.device) -> Tensor | None:
    """A view as [bytes] uint8, if it can be sent from where it is."""
    if view is not None and view.is_contiguous() and view.device == device:
        return wire_bytes(view)
    return None

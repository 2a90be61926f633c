"""What both ends of a sync share: a share's rounds, and memory for what cannot travel in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby

import torch
from torch import Tensor

from m3rl.weight_sync.layout import extents
from m3rl.weight_sync.plan import CopyOp
from m3rl.weight_sync.transport import WIRE_DTYPES

ALIGNMENT = 16
"""Tensors begin at multiples of this in a slot, so that the bytes can be viewed in any dtype."""
RUN_AHEAD = 8
"""Rounds by which the host may be ahead of a CUDA device."""

Range = tuple[int, int]
"""First, and one behind the last."""


def round_ranges(ops: Sequence[CopyOp]) -> list[Range]:
    """The ops of each round of a share, whose ops are in order."""
    ranges, first = [], 0
    for _, group in groupby(ops, key=lambda op: op.round):
        last = first + sum(1 for _ in group)
        ranges.append((first, last))
        first = last
    return ranges


class Slots:
    """Two buffers that the rounds use in turn; an op has the same bytes in every sync."""

    def __init__(
        self,
        ops: Sequence[CopyOp],
        ranges: Sequence[Range],
        staged: Collection[int],
        device: torch.device,
        *,
        is_pinned: bool = False,
    ) -> None:
        """
        Args:
            ranges: ops of each round.
            staged: the ops that need a place here.
        """
        self._ops = ops
        self._places: dict[int, tuple[int, int]] = {}
        self._sizes = [0] * len(ranges)
        for number, (first, last) in enumerate(ranges):
            for i in range(first, last):
                if i in staged:
                    self._places[i] = (number % 2, self._sizes[number])
                    self._sizes[number] += -(-ops[i].nbytes // ALIGNMENT) * ALIGNMENT
        size = max(self._sizes, default=0)
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device, pin_memory=is_pinned)
            for _ in range(2)
        ]

    def wire(self, i: int) -> Tensor:
        """Bytes of a staged op, [bytes] uint8."""
        slot, offset = self._places[i]
        return self._buffers[slot][offset : offset + self._ops[i].nbytes]

    def tensor(self, i: int) -> Tensor:
        """The same as the rectangle that they are."""
        op = self._ops[i]
        return self.wire(i).view(WIRE_DTYPES[op.dtype]).view(extents(op.bounds))

    def fill(self, number: int, source: Slots) -> None:
        """Begin to copy a round's bytes from other slots of the same ops."""
        size, slot = self._sizes[number], number % 2
        if size:
            self._buffers[slot][:size].copy_(source._buffers[slot][:size], non_blocking=True)

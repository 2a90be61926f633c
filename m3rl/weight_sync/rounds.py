"""What both ends of a sync share: a share's rounds, and memory for what cannot travel in place."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from inference.kernels.mxfp8 import BLOCK_SIZE, MXFP8Tensor
from m3rl.weight_sync.layout import extents, volume
from m3rl.weight_sync.messages import ALIGNMENT, STAGED, Arranged
from m3rl.weight_sync.plan import CopyOp
from m3rl.weight_sync.transport import WIRE_DTYPES

RUN_AHEAD = 8
"""Rounds by which the host may be ahead of a CUDA device."""

Range = tuple[int, int]
"""First, and one behind the last."""


def spots(wires: Sequence[Tensor | None]) -> np.ndarray:
    """Where ops lie that travel from or to where they are, as `messages.arrange` takes it.

    Args:
        wires: bytes of each op, None for one that is staged.

    Returns:
        [ops, 2] int64: which piece of memory, or STAGED, and the offset in it.
    """
    memories: dict[int, int] = {}
    found = np.full((len(wires), 2), (STAGED, 0), np.int64)
    for i, wire in enumerate(wires):
        if wire is not None:
            memory = wire.untyped_storage().data_ptr()
            found[i] = memories.setdefault(memory, len(memories)), wire.storage_offset()
    return found


def joined(wires: Sequence[Tensor]) -> Tensor:
    """Neighbours in memory as one run of bytes."""
    if len(wires) == 1:
        return wires[0]
    assert _is_run(wires), "a message is in one piece"
    return wires[0].as_strided((sum(wire.numel() for wire in wires),), (1,))


def staged_ops(arranged: Arranged, wires: Sequence[Tensor | None]) -> set[int]:
    """Ops of messages that are not in one piece where they lie.

    Args:
        wires: bytes of each op, None for one that cannot travel from or to where it is.
    """
    staged: set[int] = set()
    for message in itertools.chain(*arranged):
        here = [wire for i in message if (wire := wires[i]) is not None]
        if len(here) < len(message) or not _is_run(here):
            staged.update(message)
    return staged


def _is_run(wires: Sequence[Tensor]) -> bool:
    memories = {wire.untyped_storage().data_ptr() for wire in wires}
    ends = [wire.data_ptr() + wire.numel() for wire in wires[:-1]]
    return len(memories) == 1 and ends == [wire.data_ptr() for wire in wires[1:]]


def title(ops: Sequence[CopyOp]) -> str | CopyOp:
    """A message as errors show it."""
    return ops[0] if len(ops) == 1 else f"{ops[0]} with {len(ops) - 1} more"


@dataclass(slots=True)
class Clock:
    """When a member was where in a sync: seconds since it began."""

    begin: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, what: str) -> None:
        self.seconds[what] = time.perf_counter() - self.begin


def rectangle_of(wire: Tensor, op: CopyOp) -> Tensor | MXFP8Tensor:
    """An op's bytes as they travel, [nbytes] uint8, as the rectangle that they are: views."""
    shape = extents(op.bounds)
    if op.wire == "plain":
        return wire.view(WIRE_DTYPES[op.dtype]).view(shape)
    num_values = volume(op.bounds)
    return MXFP8Tensor(
        wire[:num_values].view(torch.float8_e4m3fn).view(shape),
        wire[num_values:].view(*shape[:-1], shape[-1] // BLOCK_SIZE),
    )


class Slots:
    """Two buffers that the rounds use in turn; an op has the same bytes in every sync."""

    def __init__(
        self,
        ops: Sequence[CopyOp],
        rounds: Sequence[Sequence[int]],
        staged: Collection[int],
        device: torch.device,
        *,
        is_pinned: bool = False,
    ) -> None:
        """
        Args:
            rounds: the ops of each round, in the order in which they lie in its slot.
            staged: those that need a place here.
        """
        self.device = device
        self._ops = ops
        self._places: dict[int, tuple[int, int]] = {}
        self._sizes = [0] * len(rounds)
        for number, chosen in enumerate(rounds):
            for i in chosen:
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

    def wires(self, in_place: Sequence[Tensor | None]) -> list[Tensor]:
        """Bytes of every op, here or where it lies."""
        return [
            self.wire(i) if wire is None or i in self._places else wire
            for i, wire in enumerate(in_place)
        ]

    def tensor(self, i: int) -> Tensor:
        """The same as the rectangle that they are, of an op that travels in its dtype."""
        rectangle = self.rectangle(i)
        assert isinstance(rectangle, Tensor), f"{self._ops[i]} travels quantised"
        return rectangle

    def rectangle(self, i: int) -> Tensor | MXFP8Tensor:
        """The same of any op."""
        return rectangle_of(self.wire(i), self._ops[i])

    def fill(self, number: int, source: Slots) -> None:
        """Begin to copy a round's bytes from other slots of the same ops."""
        size, slot = self._sizes[number], number % 2
        if size:
            self._buffers[slot][:size].copy_(source._buffers[slot][:size], non_blocking=True)

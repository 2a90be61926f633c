"""Delta syncs: only what changed travels, as the receivers store it, and is written over the old.

A replica that holds the weights of sync `base` takes the difference of sync `serial` to it. Every
trainer rank keeps a copy of what it sent (BF16, or MXFP8 values and scales, 2 or 1.03 bytes an
element, where its weights lie), and finds what changed by comparing bits.

    COMPARE ─▶ does it pay? ─▶ PACK ─▶ stream ─▶ verify: the hashes of a full sync, of all weights
                    │                              │
                    └─ no: full sync               └─ a tensor differs: full sync

A part is cut into tiles of 65,536 elements. A message holds, for the parts of a pair of ranks in
the order of their ops, how many elements of each tile changed, then their places in the tile and
their bits: 2 bytes a place and 4 a tile.

    counts | values of 4 bytes | places | values of 2 bytes | values of 1 byte

Several rounds of the plan are one group, in which each pair exchanges one message. All come from
trainer ranks, also what workers of a node pass on in a full sync: it is little.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.config import MXFP8_BLOCK_SIZE as BLOCK_SIZE
from inference.kernels.changed_values import BITS, PLACE_DTYPE, num_tiles
from m3rl.weight_sync.layout import WIRE_BYTES, volume
from m3rl.weight_sync.plan import CopyOp, Plan
from m3rl.weight_sync.relay import source_of

PAYS_BELOW = 0.25
"""Of the bytes of a full sync; above, comparing and packing are not worth it."""
ITEMS = (4, 2, 1)
"""Bytes of an element, in a message's order."""
COUNT_BYTES, PLACE_BYTES = 4, 2


def planes(op: CopyOp) -> tuple[tuple[int, int], ...]:
    """(bytes of an element, elements) of an op as it is stored: of it, or of values and scales."""
    count = volume(op.bounds)
    if op.storage == "mxfp8":
        return (1, count), (1, count // BLOCK_SIZE)
    return ((WIRE_BYTES[op.dtype], count),)


def op_bytes(ops: Sequence[CopyOp], changed: np.ndarray) -> np.ndarray:
    """Bytes that each op takes in a message, [ops] int64."""
    tiles = [sum(num_tiles(count) for _, count in planes(op)) for op in ops]
    items = [planes(op)[0][0] for op in ops]
    entries = changed.sum(1) * (PLACE_BYTES + np.array(items, np.int64))
    return COUNT_BYTES * np.array(tiles, np.int64) + entries


@dataclass(frozen=True, slots=True)
class DeltaMessage:
    """What one pair of ranks exchanges in one group."""

    peer: int
    """The sender or the worker at the other end."""
    ops: list[int]
    """By their places in the share of this end."""
    tiles: dict[int, int]
    entries: dict[int, int]
    """Both by bytes of an element."""

    @property
    def nbytes(self) -> int:
        return sum(
            COUNT_BYTES * self.tiles[item] + (PLACE_BYTES + item) * self.entries[item]
            for item in ITEMS
        )

    def sections(self, wire: Tensor) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """(counts, places, values) by bytes of an element: views of a message, [nbytes] uint8,
        that begins at a multiple of 4 bytes."""
        end = 0

        def cut(count: int, dtype: torch.dtype) -> Tensor:
            nonlocal end
            begin, end = end, end + count * dtype.itemsize
            return wire[begin:end].view(dtype)

        counts = {item: cut(self.tiles[item], torch.int32) for item in ITEMS}
        values = {4: cut(self.entries[4], BITS[4])}
        places = {item: cut(self.entries[item], PLACE_DTYPE) for item in ITEMS}
        values |= {item: cut(self.entries[item], BITS[item]) for item in (2, 1)}
        return {item: (counts[item], places[item], values[item]) for item in ITEMS}


@dataclass(frozen=True, slots=True)
class Delta:
    """What one member is told of a delta."""

    base: int
    """Serial of the sync to whose weights this is the difference."""
    groups: tuple[tuple[int, tuple[DeltaMessage, ...]], ...]
    """Number and messages of each group in which the member has any."""

    @property
    def nbytes(self) -> int:
        return sum(message.nbytes for _, messages in self.groups for message in messages)


_ByMember = dict[int, dict[int, list[DeltaMessage]]]
"""Member, group."""


class Changes:
    """A delta as the driver sees it: of all members, for one plan."""

    def __init__(
        self, plan: Plan, base: int, by_sender: Sequence[np.ndarray], chunk_bytes: int
    ) -> None:
        """
        Args:
            by_sender: of each trainer rank, how many elements of each op of its share changed, and
                how many of its scales: [ops, 2] int64.
            chunk_bytes: most that a worker receives in a group, or one round.
        """
        self.base = base
        self._plan = plan
        self._places = _places(plan.ops)
        self._changed = np.array(
            [by_sender[op.sender][i] for op, (i, _) in zip(plan.ops, self._places, strict=True)]
        )
        sizes_P = op_bytes(plan.ops, self._changed)
        self.nbytes = int(sizes_P.sum())
        round_P = np.array([op.round for op in plan.ops])
        receiver_P = np.array([op.receiver for op in plan.ops])
        received = np.zeros((int(round_P.max()) + 1, int(receiver_P.max()) + 1), np.int64)
        np.add.at(received, (round_P, receiver_P), sizes_P)
        ends = _group_ends(received, chunk_bytes)
        self._group_P = np.searchsorted(ends, round_P, side="right").tolist()

    @property
    def pays(self) -> bool:
        """Whether it is worth it, beside a full sync."""
        return self.nbytes < PAYS_BELOW * sum(op.nbytes for op in self._plan.ops)

    def deltas(self) -> tuple[dict[int, Delta], dict[int, Delta]]:
        """What each trainer rank is told, and each worker; those without an op are not here."""
        shares: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for k, op in enumerate(self._plan.ops):
            shares[self._group_P[k], op.sender, op.receiver].append(k)
        sent: _ByMember = defaultdict(lambda: defaultdict(list))
        received: _ByMember = defaultdict(lambda: defaultdict(list))
        for (group, sender, worker), chosen in sorted(shares.items()):
            tiles, entries = self._counts(chosen)
            at_sender, at_worker = ([self._places[k][end] for k in chosen] for end in (0, 1))
            sent[sender][group].append(DeltaMessage(worker, at_sender, tiles, entries))
            received[worker][group].append(DeltaMessage(sender, at_worker, tiles, entries))
        senders, workers = (
            {
                member: Delta(self.base, tuple((n, tuple(group)) for n, group in groups.items()))
                for member, groups in side.items()
            }
            for side in (sent, received)
        )
        return senders, workers

    def _counts(self, chosen: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Tiles and changed elements of some ops, by bytes of an element."""
        tiles, entries = dict.fromkeys(ITEMS, 0), dict.fromkeys(ITEMS, 0)
        for k in chosen:
            for (item, count), changed in zip(
                planes(self._plan.ops[k]), self._changed[k].tolist(), strict=False
            ):
                tiles[item] += num_tiles(count)
                entries[item] += changed
        return tiles, entries


def _places(ops: Sequence[CopyOp]) -> list[tuple[int, int]]:
    """Of each op its place in the share of its trainer rank, and in that of its receiver; of one
    that a worker passes on, the place of what came to that worker."""
    sources = source_of(ops)
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    at_sender: dict[int, int] = {}
    places = []
    for k, op in enumerate(ops):
        if op.via < 0:
            at_sender[k] = sent[op.sender]
            sent[op.sender] += 1
        source = k if op.via < 0 else sources[op.via, op.name, op.bounds]
        places.append((at_sender[source], received[op.receiver]))
        received[op.receiver] += 1
    return places


def _group_ends(received: np.ndarray, chunk_bytes: int) -> tuple[int, ...]:
    """Ends of groups of consecutive rounds, [rounds, workers] bytes, as full as they may be."""
    ends, total = [], np.zeros_like(received[0])
    for number, sizes in enumerate(received):
        if number and (total + sizes).max() > chunk_bytes:
            ends.append(number)
            total = np.zeros_like(sizes)
        total = total + sizes
    return (*ends, len(received))

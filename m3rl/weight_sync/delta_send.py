"""A trainer rank's side of deltas: what receivers hold, what changed since, and its messages."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inference.kernels.changed_values import BITS, PLACE_DTYPE, ChangedTable, num_tiles
from inference.kernels.copy_table import CopyTable
from inference.kernels.mxfp8 import tensors_of
from m3rl.weight_sync.delta import ITEMS, Delta, DeltaMessage, planes
from m3rl.weight_sync.errors import RefusedError
from m3rl.weight_sync.lane import Lane
from m3rl.weight_sync.plan import CopyOp
from m3rl.weight_sync.rounds import Range, Slots, rectangle_of
from m3rl.weight_sync.send_rounds import Weights
from m3rl.weight_sync.transport import Deadline, Posted, Transfer, Transport
from m3rl.weight_sync.wire import Quantizer

logger = logging.getLogger(__name__)

BATCH_BYTES = 256 << 20
"""Read or quantised at a time."""


class Packed(NamedTuple):
    """What changed in all parts of one element size."""

    counts: Tensor
    """[tiles] int32."""
    starts: np.ndarray
    """[tiles + 1], where each tile's entries begin."""
    places: Tensor
    values: Tensor


class Snapshot:
    """What the receivers of a share hold, and the difference of the present weights to it.

    A rectangle that several workers hold is kept and compared once; one that never changes
    (`Weights.fixed`) is neither. One thread at a time, but for `send`. Where the memory for it is
    not to be had it is of no sync, and `compare` says why.
    """

    def __init__(self, ops: Sequence[CopyOp], weights: Weights) -> None:
        """
        Args:
            ops: the trainer rank's share, in order.
        """
        self.serial: int | None = None
        """The sync whose weights this is; None: of none."""
        self._ops = ops
        self._weights = weights
        self._lane = Lane(weights.device)
        self._held: _Held | None = None
        self._fault = ""
        """Why nothing is held."""
        self._counts: dict[int, Tensor] = {}
        self._packed: dict[int, Packed] = {}

    def take(self, serial: int) -> None:
        """Remember the present weights, as those of this sync; waits for the device.

        Nothing is done for a sync that it is of already. A sync does not fail where this does: the
        next one is full then.
        """
        if self.serial == serial:
            return
        self.serial, self._counts, self._packed = None, {}, {}
        try:
            self._copy()
        except (RuntimeError, MemoryError) as error:  # out of memory
            self._held = None
            self._fault = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            logger.warning(
                "%s cannot remember what it sends, the next sync is full: %s",
                self._weights.owner,
                self._fault,
            )
            return
        self.serial, self._fault = serial, ""

    def compare(self, base: int) -> np.ndarray:
        """How many elements of each op of the share changed, and how many of its scales, [ops, 2]
        int64; waits for the device.

        Raises:
            RefusedError: this is not what the receivers hold since sync `base`.
            NonFiniteError: NaN or infinity among what is held in MXFP8.
        """
        held = self._held
        if held is None or self.serial != base:
            raise RefusedError(
                f"{self._weights.owner} knows the weights of sync {self.serial}, not those of sync "
                f"{base} that the replica holds{f' ({self._fault})' if self._fault else ''}; it "
                "needs a full sync"
            )
        self._counts, self._packed = {}, {}
        with torch.no_grad(), self._lane.entered():
            held.quantizer.reset()
            found = {
                item: torch.zeros(num_tiles, dtype=torch.int32, device=self._weights.device)
                for item, num_tiles in held.num_tiles.items()
            }
            for number in range(len(held.batches)):
                held.load(number)
                for item, table in held.tables.items():
                    table.count(*held.planes_of(item, number), found[item])
            held.quantizer.check()
            tiles = {item: counts.cpu().numpy() for item, counts in found.items()}
        self._counts = found
        return held.changed(tiles)

    def pack(self, serial: int) -> None:
        """After `compare`: pack what changed, and be the snapshot of this sync; waits.

        Raises:
            RefusedError: the present weights were remembered since.
        """
        held, found = self._held, self._counts
        if held is None or not found:
            raise RefusedError(f"{self._weights.owner}: compare() comes before pack({serial})")
        self.serial, self._counts = None, {}
        packed = {}
        with torch.no_grad(), self._lane.entered():
            starts = {}
            for item, counts in found.items():
                starts[item] = torch.zeros(
                    counts.numel() + 1, dtype=torch.int64, device=counts.device
                )
                torch.cumsum(counts, 0, out=starts[item][1:])
                ends = starts[item].cpu().numpy()
                packed[item] = Packed(
                    counts,
                    ends,
                    torch.empty(int(ends[-1]), dtype=PLACE_DTYPE, device=counts.device),
                    torch.empty(int(ends[-1]), dtype=BITS[item], device=counts.device),
                )
            for number in range(len(held.batches)):
                held.load(number)
                for item, table in held.tables.items():
                    table.take(
                        *held.planes_of(item, number),
                        starts[item],
                        packed[item].places,
                        packed[item].values,
                    )
            self._lane.drain(math.inf)
        self.serial, self._packed = serial, packed

    def send(
        self,
        delta: Delta,
        transport: Transport,
        deadline: Deadline,
        rank_of: Callable[[int], int],
    ) -> int:
        """After `pack`: send a share's messages; returns their bytes when the peers have them.

        Args:
            rank_of: group rank of a worker.

        Raises:
            TransportError: a member is late or gone.
        """
        assert self._packed, "pack() comes first"
        lane = Lane(self._weights.device)  # another replica's may be stuck
        with torch.no_grad(), lane.entered():
            under_way: deque[Posted] = deque()
            for number, group in delta.groups:
                if len(under_way) == 2:
                    transport.wait(under_way.popleft(), deadline)
                transfers = [
                    Transfer(
                        self._message(message).to(transport.device),
                        rank_of(message.peer),
                        number,
                        self._ops[message.ops[0]],
                    )
                    for message in group
                ]
                under_way.append(transport.post(sends=transfers))
                if number == delta.groups[0][0]:
                    transport.note("begins")
            for posted in under_way:
                transport.wait(posted, deadline)
            transport.wait_for_device(lane.mark(), deadline)
        return delta.nbytes

    def release(self, serial: int) -> None:
        """Give up what was packed for this sync; the snapshot stays."""
        if self.serial == serial:
            self._packed = {}

    def _copy(self) -> None:
        with torch.no_grad(), self._lane.entered():
            held = self._held = self._held or _Held(self._ops, self._weights)
            for number, (first, last) in enumerate(held.batches):
                held.load(number)
                if held.copies is not None:
                    held.copies.launch(held.first_plane[first], held.first_plane[last])
            self._lane.drain(math.inf)

    def _message(self, message: DeltaMessage) -> Tensor:
        assert self._held is not None, "pack() comes first"
        wire = torch.empty(message.nbytes, dtype=torch.uint8, device=self._weights.device)
        for item, out in message.sections(wire).items():
            if item not in self._packed:
                continue
            packed, tiles = self._packed[item], list(self._held.tiles_of(item, message.ops))
            entries = [(int(packed.starts[a]), int(packed.starts[b])) for a, b in tiles]
            for source, ranges, target in (
                (packed.counts, tiles, out[0]),
                (packed.places, entries, out[1]),
                (packed.values, entries, out[2]),
            ):
                torch.cat([source[a:b] for a, b in ranges], out=target)
        return wire


class _Held:
    """The memory of a snapshot, and where in it what of the share is compared."""

    def __init__(self, ops: Sequence[CopyOp], weights: Weights) -> None:
        self._weights = weights
        self._ops = ops
        keys = [(op.name, op.bounds, op.storage, op.grain) for op in ops]
        distinct = {
            key: op for key, op in zip(keys, ops, strict=True) if op.name not in weights.fixed
        }
        # As they are stored.
        self._parts = [dataclasses.replace(op, wire=op.storage) for op in distinct.values()]
        numbers = {key: i for i, key in enumerate(distinct)}
        self._part_of = [numbers.get(key, -1) for key in keys]
        """Of each op; -1: it never changes."""
        views = [_view(op, weights) for op in self._parts]
        self._staged = {i for i, view in enumerate(views) if view is None}
        self.batches = list(_batches(self._parts, self._staged))
        batches = [range(*batch) for batch in self.batches]
        self._slots = Slots(self._parts, batches, self._staged, weights.device)
        self.quantizer = Quantizer(self._parts, batches, self._slots, weights)
        self._lay_out_tables(views)

    def load(self, number: int) -> None:
        """Bring the present weights of a batch to where they are compared."""
        first, last = self.batches[number]
        for i in range(first, last):
            if i in self._staged and self._parts[i].wire == "plain":
                self._slots.tensor(i).copy_(self._weights.of(self._parts[i]))
        self.quantizer.fill(number)

    def planes_of(self, item: int, number: int) -> tuple[int, int]:
        """Planes of a batch in the table of an element size."""
        first, last = (int(self._first_of[item][i]) for i in self.batches[number])
        return first, last

    def changed(self, tiles: Mapping[int, np.ndarray]) -> np.ndarray:
        """Changes of each op of the share, [ops, 2] int64, from those of each tile by table."""
        changed = np.zeros((len(self._parts) + 1, 2), np.int64)
        for item, table in self.tables.items():
            ends = np.concatenate([[0], tiles[item].cumsum(dtype=np.int64)])[table.first_tiles]
            changed[tuple(np.array(self._planes[item]).T)] = np.diff(ends)
        return changed[self._part_of]

    def tiles_of(self, item: int, ops: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Tiles of ops in the table of an element size, or behind it, neighbours as one range."""
        begin = end = 0
        for i in ops:
            first, last = self._tiles(item, i)
            if first != end:
                if begin != end:
                    yield begin, end
                begin = first
            end = last
        yield begin, end

    def _tiles(self, item: int, i: int) -> tuple[int, int]:
        """Of an op. Behind those of the table are as many in which nothing changes as the largest
        fixed op has."""
        part, end = self._part_of[i], self._ends[item]
        if part < 0:
            return end, end + _tiles_of(self._ops[i], item)
        if item not in self.tables:
            return end, end
        first_of, first_tiles = self._first_of[item], self.tables[item].first_tiles
        return first_tiles[int(first_of[part])], first_tiles[int(first_of[part + 1])]

    def _lay_out_tables(self, views: Sequence[Tensor | None]) -> None:
        """Lay out, by element size, what is compared: (now, before) of all planes."""
        pairs: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._planes: dict[int, list[tuple[int, int]]] = {}
        """(part, 0 or 1 for its scales) of each table's parts."""
        everything: list[tuple[Tensor, Tensor]] = []
        self.first_plane: list[int] = []
        """Of each part in the table of copies, and one behind the last."""
        for i, op in enumerate(self._parts):
            view = views[i]
            now = self._slots.rectangle(i) if view is None else view
            memory = torch.empty(op.nbytes, dtype=torch.uint8, device=self._weights.device)
            before = tensors_of(rectangle_of(memory, op))
            self.first_plane.append(len(everything))
            for plane, pair in enumerate(zip(tensors_of(now), before, strict=True)):
                item = planes(op)[plane][0]
                pairs.setdefault(item, []).append(pair)
                self._planes.setdefault(item, []).append((i, plane))
                everything.append(pair)
        self.first_plane.append(len(everything))
        self.tables = {item: ChangedTable(each) for item, each in pairs.items()}
        self.copies = CopyTable(everything) if everything else None
        fixed = [op for op, part in zip(self._ops, self._part_of, strict=True) if part < 0]
        behind = {item: max((_tiles_of(op, item) for op in fixed), default=0) for item in ITEMS}
        self._ends = dict.fromkeys(ITEMS, 0) | {
            item: table.first_tiles[-1] for item, table in self.tables.items()
        }
        self.num_tiles = {
            item: self._ends[item] + behind[item]
            for item in ITEMS
            if item in self.tables or behind[item]
        }
        """In the table of an element size, and behind it."""
        self._first_of: dict[int, np.ndarray] = {
            item: np.searchsorted([part for part, _ in each], range(len(self._parts) + 1))
            for item, each in self._planes.items()
        }
        """Of each part its first plane in the table of an element size."""


def _tiles_of(op: CopyOp, item: int) -> int:
    """Tiles of an op's elements of so many bytes."""
    return sum(num_tiles(count) for size, count in planes(op) if size == item)


def _view(op: CopyOp, weights: Weights) -> Tensor | None:
    """The weights' own memory where it can be compared as it lies."""
    if not weights.stays or op.storage != "plain":
        return None
    view = weights.of(op)
    return view if view.ndim == 0 or view.stride(-1) == 1 or view.shape[-1] == 1 else None


def _batches(ops: Sequence[CopyOp], staged: Collection[int]) -> Iterator[Range]:
    """Consecutive ops for which at most BATCH_BYTES, or one op, are read or quantised."""
    sizes = [op.nbytes if i in staged else 0 for i, op in enumerate(ops)]
    cuts, size = [0], 0
    for i, cost in enumerate(sizes):
        if size and size + cost > BATCH_BYTES:
            cuts.append(i)
            size = 0
        size += cost
    yield from pairwise([*cuts, len(ops)])

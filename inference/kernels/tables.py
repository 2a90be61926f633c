"""Static tables on the device: one launch walks many tensors, and no launch waits or copies.

A part (a tensor to hash, a pair to copy) is a box of units: up to three nested loops, and for each
array that is walked (a "map") the place of the first unit and the stride of each loop. A row of the
table holds a box. A tile is a fixed number of neighbouring units of one box and knows its row, so
parts first..last-1 are a range of tiles, a program each.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from inference.kernels.dispatch import use_kernel

Key = TypeVar("Key", bound=Hashable)
MAX_UNITS = 1 << 31
"""Units of a box stay below it: their index and twice their index are 32-bit numbers."""


class Box(NamedTuple):
    """Three loops, outer first, over one or more maps."""

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    """Place of the first unit, one a map."""
    strides: tuple[tuple[int, ...], ...]
    """For each loop its stride in every map."""


def boxes(
    sizes: Sequence[int], starts: Sequence[int], strides: Sequence[tuple[int, ...]]
) -> Iterator[Box]:
    """Loops of any number (as in `Box`) as boxes of three; none where a size is 0."""
    num_units = math.prod(sizes)
    if num_units == 0:
        return
    loops: list[tuple[int, tuple[int, ...]]] = []
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if loops and stride == tuple(loops[0][0] * inner for inner in loops[0][1]):
            loops[0] = (size * loops[0][0], loops[0][1])
        else:
            loops.insert(0, (size, stride))
    if len(loops) <= 3 and num_units < MAX_UNITS:
        loops = [(1, (0,) * len(starts))] * (3 - len(loops)) + loops
        yield Box(tuple(n for n, _ in loops), tuple(starts), tuple(s for _, s in loops))
        return
    (size, stride), *rest = loops
    for first, last in ((0, size // 2), (size // 2, size)):
        moved = [start + first * step for start, step in zip(starts, stride, strict=True)]
        inner = [loop[0] for loop in rest], [loop[1] for loop in rest]
        yield from boxes([last - first, *inner[0]], moved, [stride, *inner[1]])


class Entry(NamedTuple):
    """A row to be."""

    part: int
    box: Box
    extras: tuple[int, ...] = ()
    """Further fields for the kernel of the table, behind those of the maps."""


class TileTable:
    """Rows and tiles of one launch on the device."""

    rows: Tensor
    """[rows, fields] int64; the fields are named in `tables_kernel.py`."""
    tile_rows: Tensor
    """[tiles] int32, the row of each."""

    def __init__(
        self, entries: Sequence[Entry], num_parts: int, block: int, device: torch.device
    ) -> None:
        """
        Args:
            entries: in the order of their parts, at least one.
            block: units of a tile.
        """
        counts = np.array([-(-math.prod(entry.box.sizes) // block) for entry in entries])
        first_tiles = (counts.cumsum() - counts).tolist()
        rows = [_row(entry, tile) for entry, tile in zip(entries, first_tiles, strict=True)]
        # Copies that the host waits for: a launch may be on any stream.
        self.rows = torch.from_numpy(np.array(rows, dtype=np.int64)).to(device)
        tile_rows = np.arange(len(entries), dtype=np.int32).repeat(counts)
        self.tile_rows = torch.from_numpy(tile_rows).to(device)
        tiles = np.zeros(num_parts + 1, dtype=np.int64)
        np.add.at(tiles, [entry.part + 1 for entry in entries], counts)
        self._first_tile: list[int] = tiles.cumsum().tolist()

    def tiles(self, first: int, last: int) -> tuple[int, int]:
        """(first tile, number of tiles) of parts first..last-1."""
        tile = self._first_tile[first]
        return tile, self._first_tile[last] - tile


def grouped(
    entries: Iterable[tuple[Key, Entry]], num_parts: int, block: int, device: torch.device
) -> dict[Key, TileTable]:
    """A table for each kind of kernel that the entries need."""
    groups: dict[Key, list[Entry]] = {}
    for key, entry in entries:
        groups.setdefault(key, []).append(entry)
    return {key: TileTable(group, num_parts, block, device) for key, group in groups.items()}


def _row(entry: Entry, first_tile: int) -> list[int]:
    sizes, starts, strides = entry.box
    fields = [first_tile, math.prod(sizes), entry.part]
    for size in sizes[1:]:
        shift = (size - 1).bit_length()
        fields += [size, -(-(1 << (31 + shift)) // size), shift]
    for start, *steps in zip(starts, *strides, strict=True):
        fields += [start, *steps]
    return [*fields, *entry.extras]


class PartTable:
    """What the tables of parts have in common: their memory stays where it was."""

    def __init__(self, op: str, tensors_of_part: Sequence[Sequence[Tensor]]) -> None:
        """
        Raises:
            ValueError: no part, or tensors on several devices.
        """
        self._op = op
        self._tensors = [tuple(tensors) for tensors in tensors_of_part]
        if not self._tensors:
            raise ValueError(f"{op}: a table needs at least one part")
        on_cuda = use_kernel(op, *(tensor for tensors in self._tensors for tensor in tensors))
        self._on_cuda = on_cuda
        self._pointers = [_pointers(tensors) for tensors in self._tensors]

    def __len__(self) -> int:
        return len(self._tensors)

    def _expect_range(self, first: int, last: int) -> None:
        """Raise unless parts first..last-1 exist and lie where the table has them."""
        if not 0 <= first <= last <= len(self):
            raise ValueError(f"{self._op}: no parts {first} to {last}; there are {len(self)}")
        for part in range(first, last):
            if _pointers(self._tensors[part]) != self._pointers[part]:
                raise RuntimeError(
                    f"{self._op}: the memory of part {part} has moved since the table was built"
                )


def _pointers(tensors: tuple[Tensor, ...]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def expect_dense_rows(op: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the elements of a row are neighbours in memory."""
    if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{op}: columns of {name} have stride {tensor.stride(-1)}, need 1")

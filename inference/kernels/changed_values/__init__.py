"""What changed in weights since a copy of them was made: found, packed, and written elsewhere."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from inference.kernels.changed_values import reference
from inference.kernels.changed_values.reference import BITS, PLACE_DTYPE
from inference.kernels.dispatch import expect_dtype, expect_shape
from inference.kernels.tables import MAX_UNITS, PartTable, expect_dense_rows

__all__ = ["BITS", "PLACE_DTYPE", "TILE", "ChangedTable", "OverwriteTable", "num_tiles"]

TILE = 1 << 16
"""Elements of a tile: a place in it takes two bytes."""


def num_tiles(num_elements: int, tile: int = TILE) -> int:
    """Of a part; the same wherever it lies."""
    return -(-num_elements // tile)


class _TiledTable(PartTable):
    """Parts of one element size, and the tiles of each: those of all parts are numbered through."""

    def __init__(self, op: str, parts: Sequence[tuple[Tensor, ...]], tile: int) -> None:
        super().__init__(op, parts)
        self._tile = tile
        self.item_bytes = parts[0][0].element_size()
        if tile not in range(1, TILE + 1) or tile & (tile - 1):
            raise ValueError(f"{op}: tile={tile}, needs a power of two up to {TILE}")
        for part in parts:
            for tensor in part:
                expect_dense_rows(op, "a part", tensor)
                if tensor.element_size() != self.item_bytes or self.item_bytes not in BITS:
                    raise TypeError(
                        f"{op}: elements of {self.item_bytes} and {tensor.element_size()} bytes "
                        f"in one table, needs one size of {tuple(BITS)}"
                    )
                if tensor.ndim > 3 or tensor.numel() >= MAX_UNITS:
                    raise ValueError(f"{op}: a part of shape {tuple(tensor.shape)} is too large")
        sizes = [num_tiles(part[0].numel(), tile) for part in parts]
        self.first_tiles: list[int] = [0, *np.cumsum(sizes).tolist()]
        """Of each part, and one behind the last."""

    def tiles(self, first: int, last: int) -> slice:
        """Of parts first..last-1."""
        return slice(self.first_tiles[first], self.first_tiles[last])


class ChangedTable(_TiledTable):
    """Finds what differs between memory and a copy of it, bit by bit."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], tile: int = TILE) -> None:
        """
        Args:
            pairs: (now, before) of one shape and dtype, of up to three dimensions, all on one
                device; elements of 1, 2 or 4 bytes, the same in all pairs, the last dimension of
                stride 1. The tensors are kept, and must stay where they are.
            tile: elements of a tile, a power of two.

        Raises:
            TypeError: dtypes differ, or another element size.
            ValueError: shapes differ, too many dimensions, or another stride.
        """
        op = "changed_values.ChangedTable"
        for now, before in pairs:
            expect_dtype(op, "before", before, now.dtype)
            expect_shape(op, "before", before, tuple(now.shape))
        super().__init__(op, pairs, tile)
        self._pairs = tuple(pairs)
        if self._on_cuda:
            from inference.kernels.changed_values import kernel

            self._kernel = kernel.Changed(pairs, self.first_tiles, tile)

    @torch.no_grad()
    def count(self, first: int, last: int, counts: Tensor) -> None:
        """Count what changed in each tile of parts first..last-1; on CUDA enqueued.

        Args:
            counts: [tiles of all parts] int32.

        Raises:
            ValueError: no such parts.
            RuntimeError: the memory of one has moved.
        """
        self._expect_range(first, last)
        if self._on_cuda:
            self._kernel.count(first, last, counts)
            return
        for i in range(first, last):
            reference.count(*self._pairs[i], counts[self.tiles(i, i + 1)], self._tile)

    @torch.no_grad()
    def take(self, first: int, last: int, starts: Tensor, places: Tensor, values: Tensor) -> None:
        """Pack what changed in parts first..last-1, and bring their copies up to date; on CUDA
        enqueued.

        Args:
            starts: [tiles of all parts + 1] int64, where the entries of each tile begin: the sums
                of the counts before it.
            places: [entries] int16, place of each in its tile (bits of a number up to 65535).
            values: [entries], an integer of an element's size: its bits.

        Raises:
            As `count`.
        """
        self._expect_range(first, last)
        if self._on_cuda:
            self._kernel.take(first, last, starts, places, values)
            return
        for i in range(first, last):
            tiles = self.tiles(i, i + 1)
            entries = slice(int(starts[tiles.start]), int(starts[tiles.stop]))
            reference.take(*self._pairs[i], places[entries], values[entries], self._tile)


class OverwriteTable(_TiledTable):
    """Writes such entries into memory of the same parts, whatever its strides."""

    def __init__(self, outs: Sequence[Tensor], tile: int = TILE) -> None:
        """
        Args:
            outs: as the tensors of a `ChangedTable`.
            tile: as there.

        Raises:
            As `ChangedTable`.
        """
        super().__init__("changed_values.OverwriteTable", [(out,) for out in outs], tile)
        self._outs = tuple(outs)
        if self._on_cuda:
            from inference.kernels.changed_values import kernel

            self._kernel = kernel.Overwrite(outs, tile)

    @torch.no_grad()
    def launch(self, first: int, last: int, counts: Tensor, places: Tensor, values: Tensor) -> None:
        """Write the entries of parts first..last-1, and only those; on CUDA enqueued.

        Args:
            counts: [tiles of these parts] int32, their sum the number of entries.
            places, values: [entries], as `ChangedTable.take` makes them.

        Raises:
            ValueError: no such parts, or counts that are not of their tiles.
            RuntimeError: the memory of one has moved.
        """
        self._expect_range(first, last)
        tiles = self.tiles(first, last)
        expect_shape(self._op, "counts", counts, (tiles.stop - tiles.start,))
        starts = counts.new_zeros(counts.numel() + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=starts[1:])
        if self._on_cuda:
            self._kernel.launch(first, last, starts, places, values)
            return
        for i in range(first, last):
            own = slice(*(self.first_tiles[j] - tiles.start for j in (i, i + 1)))
            entries = slice(int(starts[own.start]), int(starts[own.stop]))
            reference.overwrite(
                self._outs[i], counts[own], places[entries], values[entries], self._tile
            )

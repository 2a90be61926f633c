"""Changed values by their place in a tile.

A rectangle, row by row, is cut into tiles of TILE elements; the last one may have fewer. Entries of
a tile are ascending (place in the tile, value), values compared and written as bits.
"""

import torch
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By bytes of an element."""
PLACE_DTYPE = torch.int16
"""The bits of a place in a tile, 0 .. 65535."""


def count(now: Tensor, before: Tensor, counts: Tensor, tile: int) -> None:
    """Write the changed elements of each tile to `counts` [tiles], int32."""
    changed = _bits(now) != _bits(before)
    padded = changed.new_zeros(counts.numel() * tile)
    padded[: changed.numel()] = changed
    counts.copy_(padded.view(-1, tile).sum(1))


def take(now: Tensor, before: Tensor, places: Tensor, values: Tensor, tile: int) -> None:
    """Write the entries of all tiles to `places` and `values`, [changed], and `now` to `before`."""
    where = (_bits(now) != _bits(before)).nonzero()[:, 0]
    places.copy_(_wrapped(where % tile))
    values.copy_(_bits(now)[where])
    before.copy_(now)


def overwrite(out: Tensor, counts: Tensor, places: Tensor, values: Tensor, tile: int) -> None:
    """Write entries of `out`'s tiles to their places in it."""
    tiles = torch.arange(counts.numel()).repeat_interleave(counts.long())
    where = tiles * tile + (places.long() & 0xFFFF)
    flat = _bits(out)
    flat[where] = values
    out.copy_(flat.view(out.dtype).view(out.shape))


def _bits(tensor: Tensor) -> Tensor:
    """Row by row, [elements]; a copy where that is not how they lie."""
    return tensor.view(BITS[tensor.element_size()]).reshape(-1)


def _wrapped(places: Tensor) -> Tensor:
    return torch.where(places < 1 << 15, places, places - (1 << 16)).to(PLACE_DTYPE)

"""How the prefill tokens of a batch are laid out for the index: slabs of tiles, dealt to programs.

Suffixes: `X` rows, (query token, head) pairs side by side · `P` programs ·
`S` segments: runs of pages of one tile, each of one program · `L` tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.kernels.dispatch import send
from inference.kernels.paging import PagedBatch

SCRATCH_BYTES = 32 << 20
"""Scores of a slab; half of an H200's L2, the other half is for the keys."""
COLUMN_ALIGN = 8
"""Scores of a row begin at a multiple of 32 bytes, one sector."""
MIN_PAGES = 4
"""A program takes at least so many pages, or its queries cost more than its keys."""


@dataclass(slots=True)
class Slab:
    """Consecutive tokens whose scores are in the scratch at the same time."""

    first_token: int
    last_token: int
    num_columns: int
    segment_S6: np.ndarray
    """int32 (request, row, rows, position of the first query, first page, pages)."""
    start_P1: np.ndarray
    """int32: program p has the segments `start_P1[p]` to `start_P1[p + 1]`."""


@dataclass(slots=True)
class Tiles:
    """Query tokens of one request each, in the order of the batch."""

    request_L: np.ndarray
    token_L: np.ndarray
    num_tokens_L: np.ndarray
    position_L: np.ndarray
    num_pages_L: np.ndarray


def lay_tiles(batch: PagedBatch, tile_tokens: int) -> Tiles:
    """Cut the prefill chunks into tiles of at most `tile_tokens` tokens."""
    query_len_R, seq_len_R = (length[batch.num_decodes :] for length in batch.host_lengths())
    query_len_R, seq_len_R = query_len_R.astype(np.int64), seq_len_R.astype(np.int64)
    first_token_R = batch.num_decode_tokens + np.cumsum(query_len_R) - query_len_R
    # A padding row has no tile.
    tiles_R = np.where(seq_len_R > 0, -(-query_len_R // tile_tokens), 0)
    row_L = np.repeat(np.arange(len(tiles_R)), tiles_R)
    place_L = np.arange(len(row_L)) - np.repeat(np.cumsum(tiles_R) - tiles_R, tiles_R)
    offset_L = place_L * tile_tokens
    num_tokens_L = np.minimum(query_len_R[row_L] - offset_L, tile_tokens)
    position_L = (seq_len_R - query_len_R)[row_L] + offset_L
    return Tiles(
        request_L=row_L + batch.num_decodes,
        token_L=first_token_R[row_L] + offset_L,
        num_tokens_L=num_tokens_L,
        position_L=position_L,
        num_pages_L=(position_L + num_tokens_L - 1) // batch.page_size + 1,
    )


def count_blocks(tiles: Tiles, num_tokens: int, page_size: int) -> np.ndarray:
    """[num_tokens] int32 blocks that each token sees; 0 for padding and decodes."""
    blocks_T = np.zeros(num_tokens, np.int32)
    place = np.arange(tiles.num_tokens_L.max(initial=0))
    is_real = place < tiles.num_tokens_L[:, None]
    blocks = (tiles.position_L[:, None] + place) // page_size + 1
    blocks_T[(tiles.token_L[:, None] + place)[is_real]] = blocks[is_real]
    return blocks_T


def lay_slabs(tiles: Tiles, num_heads: int, num_programs: int) -> list[Slab]:
    """Group neighbouring tiles whose scores fit in the scratch; deal their pages to programs."""
    slabs = []
    last_L = (tiles.token_L + tiles.num_tokens_L).tolist()
    columns_L = (-(-tiles.num_pages_L // COLUMN_ALIGN) * COLUMN_ALIGN).tolist()
    first, num_columns = 0, 0
    for tile, columns in enumerate(columns_L):
        widest = max(num_columns, columns)
        rows = (last_L[tile] - int(tiles.token_L[first])) * num_heads
        if tile > first and rows * widest * 4 > SCRATCH_BYTES:
            slabs.append(_slab(tiles, first, tile, num_columns, num_heads, num_programs))
            first, widest = tile, columns
        num_columns = widest
    if columns_L:
        slabs.append(_slab(tiles, first, len(columns_L), num_columns, num_heads, num_programs))
    return slabs


def _slab(
    tiles: Tiles, first: int, last: int, num_columns: int, num_heads: int, num_programs: int
) -> Slab:
    """Tiles [first, last), their pages dealt evenly to at most `num_programs` programs."""
    part = slice(first, last)
    end_L = np.cumsum(tiles.num_pages_L[part])
    total = int(end_L[-1])
    num_programs = max(1, min(num_programs, total // MIN_PAGES))
    cut_P1 = total * np.arange(num_programs + 1) // num_programs
    # Segments end where a tile or a program's share does.
    bound_S1 = np.union1d(cut_P1, end_L)
    tile_S = np.searchsorted(end_L, bound_S1[:-1], side="right")
    segment_S6 = np.stack(
        [
            tiles.request_L[part][tile_S],
            tiles.token_L[part][tile_S] * num_heads,
            tiles.num_tokens_L[part][tile_S] * num_heads,
            tiles.position_L[part][tile_S],
            bound_S1[:-1] - (end_L - tiles.num_pages_L[part])[tile_S],
            np.diff(bound_S1),
        ],
        1,
    )
    return Slab(
        first_token=int(tiles.token_L[first]),
        last_token=int(tiles.token_L[last - 1] + tiles.num_tokens_L[last - 1]),
        num_columns=num_columns,
        segment_S6=segment_S6.astype(np.int32),
        start_P1=np.searchsorted(bound_S1, cut_P1).astype(np.int32),
    )


@dataclass(slots=True)
class DeviceSlab:
    """A `Slab` whose arrays are on the device."""

    first_token: int
    last_token: int
    num_columns: int
    segment_S6: Tensor
    start_P1: Tensor


@dataclass(slots=True)
class Layout:
    """How the prefill tokens of a step are worked on; the same in all layers."""

    key: tuple[object, ...]
    slabs: list[DeviceSlab]
    num_blocks_X: Tensor
    """[T * K] int32 blocks that each row sees."""
    has_padding: bool


_newest: Layout | None = None
"""The layout of the newest step: every layer after a step's first finds it here."""


def layout_of(
    batch: PagedBatch,
    num_tokens: int,
    num_heads: int,
    rows: int,
    num_programs: int,
    device: torch.device,
) -> Layout:
    """The layout of `batch`, made anew unless the newest one had the same lengths."""
    global _newest
    lengths = (length.tobytes() for length in batch.host_lengths())
    shape = (batch.num_decodes, batch.num_decode_tokens, batch.page_size, num_tokens, num_heads)
    key = (*lengths, *shape, rows, num_programs, SCRATCH_BYTES, device)
    if _newest is not None and _newest.key == key:
        return _newest
    tiles = lay_tiles(batch, rows // num_heads)
    slabs = lay_slabs(tiles, num_heads, num_programs)
    blocks_T = count_blocks(tiles, num_tokens, batch.page_size)
    parts = [np.repeat(blocks_T, num_heads)]
    for slab in slabs:
        parts += [slab.segment_S6.reshape(-1), slab.start_P1]
    # One copy for all.
    sizes = [len(part) for part in parts]
    num_blocks_X, *parts = send(np.concatenate(parts), device).split(sizes)
    _newest = Layout(
        key=key,
        slabs=[
            DeviceSlab(slab.first_token, slab.last_token, slab.num_columns, segment_S6, start_P1)
            for slab, segment_S6, start_P1 in zip(slabs, parts[::2], parts[1::2], strict=True)
        ],
        num_blocks_X=num_blocks_X,
        has_padding=not blocks_T[batch.num_decode_tokens :].all(),
    )
    return _newest

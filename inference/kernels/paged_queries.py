"""How the references see a paged batch: tiles of equally long queries with their gathered keys.

Decodes are the tiles with one query token a request; prefill chunks of equal length share a tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from inference.kernels.paging import PagedBatch

# Most query-key pairs of one tile: at M3's size its keys take 128 MiB, its logits 16 MiB.
MAX_TILE_PAIRS = 1 << 16


@dataclass(slots=True)
class QueryTile:
    """`Q` query tokens of each of `R` requests and the `S = N * page_size` keys they may see."""

    tokens_RQ: Tensor
    """int64: place of each query token in the packed batch."""
    num_keys_RQ: Tensor
    """int64: how many keys each query sees, itself included."""
    page_ids_RN: Tensor
    """int64: physical pages; where the request has none, page 0, which no query sees there."""
    is_visible_RQS: Tensor
    """bool: key s is not in the query's future."""
    is_written_RS: Tensor
    """bool: the place holds a key; other places may hold anything, NaN included."""

    def gather(self, pages: Tensor) -> Tensor:
        """Pages of the tile's requests, [R, N, ...]."""
        flat = pages.index_select(0, self.page_ids_RN.flatten())
        return flat.unflatten(0, tuple(self.page_ids_RN.shape))


def query_tiles(batch: PagedBatch) -> Iterator[QueryTile]:
    """Cover every real query token of `batch` once.

    Padding belongs to no tile: rows with `seq_len_R` 0 and tokens beyond the last request.
    """
    starts = batch.query_start_R1.tolist()
    seq_lens = batch.seq_len_R.tolist()
    rows_by_query_len: dict[int, list[int]] = {}
    for row, (start, stop) in enumerate(pairwise(starts)):
        if stop > start and seq_lens[row] > 0:
            rows_by_query_len.setdefault(stop - start, []).append(row)
    for query_len, rows in rows_by_query_len.items():
        num_pages = -(-max(seq_lens[row] for row in rows) // batch.page_size)
        num_keys = num_pages * batch.page_size
        tile_len = min(query_len, max(1, MAX_TILE_PAIRS // num_keys))
        tile_rows = max(1, MAX_TILE_PAIRS // (num_keys * tile_len))
        for first in range(0, len(rows), tile_rows):
            for offset in range(0, query_len, tile_len):
                stop = min(offset + tile_len, query_len)
                yield _tile(batch, rows[first : first + tile_rows], offset, stop, num_pages)


def _tile(
    batch: PagedBatch, rows: list[int], first_query: int, last_query: int, num_pages: int
) -> QueryTile:
    device = batch.positions_T.device
    row_R = torch.tensor(rows, device=device)
    query_Q = torch.arange(first_query, last_query, device=device)
    tokens_RQ = batch.query_start_R1[row_R].long()[:, None] + query_Q
    seq_len_R1 = batch.seq_len_R[row_R].long()[:, None]
    num_keys_RQ = torch.minimum(batch.positions_T[tokens_RQ] + 1, seq_len_R1)
    page_ids_RN = batch.page_table_RN[row_R, :num_pages].long()
    key_S = torch.arange(num_pages * batch.page_size, device=device)
    is_written_RS = key_S < seq_len_R1
    require_pages(page_ids_RN, is_written_RS[:, :: batch.page_size])
    return QueryTile(
        tokens_RQ=tokens_RQ,
        num_keys_RQ=num_keys_RQ,
        page_ids_RN=page_ids_RN.clamp(min=0),
        is_visible_RQS=key_S < num_keys_RQ[:, :, None],
        is_written_RS=is_written_RS,
    )


def require_pages(page_ids: Tensor, is_needed: Tensor) -> None:
    """Raise ValueError if a page that is read was never given to its request."""
    if page_ids.shape != is_needed.shape or bool(((page_ids < 0) & is_needed).any()):
        raise ValueError(
            "page_table_RN has no page for keys that seq_len_R counts or blocks_TKB names; "
            "the scheduler must give a request its pages before the step"
        )


def masked_softmax(logits: Tensor, is_visible: Tensor) -> Tensor:
    """Softmax over the visible places of the last dimension; all zeros where none is visible."""
    probs = torch.where(is_visible, logits, -torch.inf).softmax(-1)
    return torch.where(is_visible, probs, 0.0)

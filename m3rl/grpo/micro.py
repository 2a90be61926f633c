"""One micro-batch: rows of a training batch packed one after the other, and the way back.

`T` packed tokens · `M` those of them that are trained on, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.kernels.dispatch import send
from inference.kernels.packing import Packing


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows `rows` of the batch without padding.

    Without rows it is a token of which nothing is trained: its loss is 0, and a rank that has run
    out of rows takes part in the collectives of the others with it. Ranks that share the rows have
    all tokens, and each a range of them as queries; a row of filling makes them enough.
    """

    rows: np.ndarray
    """Indices into the batch, in the order of packing."""
    ids_T: Tensor
    """int64"""
    packing: Packing
    targets_M: Tensor
    """int64: places among the packed tokens of those that are trained on; none begins a row."""
    places: tuple[np.ndarray, np.ndarray]
    """(row of the batch, column) of each of them, on the host."""

    @classmethod
    def of(
        cls,
        rows: np.ndarray,
        ids_BS: np.ndarray,
        length_B: np.ndarray,
        mask_BS: np.ndarray,
        device: torch.device,
        *,
        place: int = 0,
        num_sharers: int = 1,
    ) -> MicroBatch:
        """Take `rows` of the batch's arrays.

        Args:
            place: which of the ranks that share the rows asks.

        Raises:
            ValueError: a token is masked in behind the end of its row, or is the first of it.
        """
        lengths = length_B[rows]
        is_token_BS = np.arange(ids_BS.shape[1]) < lengths[:, None]
        mask = mask_BS[rows]
        if (mask & ~is_token_BS).any():
            raise ValueError("the loss mask covers padding; lengths and masks disagree")
        if mask[:, :1].any():
            raise ValueError("the first token of a row has no log-probability; mask it out")
        num_filling = max(0, num_sharers - int(lengths.sum()))
        ids_T = np.concatenate([ids_BS[rows][is_token_BS], np.zeros(num_filling, np.int64)])
        all_lengths = [*lengths.tolist(), num_filling] if num_filling else lengths.tolist()
        first, count = token_ranges(len(ids_T), num_sharers)[place]
        row, column = np.nonzero(mask)
        targets_M = (np.cumsum(lengths) - lengths)[row] + column
        return cls(
            rows=rows,
            ids_T=send(ids_T, device),
            packing=Packing.of(all_lengths, device, first, count),
            targets_M=send(targets_M, device),
            places=(rows[row], column),
        )

    def tokens(self, values_BS: np.ndarray) -> Tensor:
        """[M] values of the trained tokens."""
        return send(values_BS[self.places], self.ids_T.device)

    def per_token(self, values_B: np.ndarray) -> Tensor:
        """[M] the value of each trained token's row."""
        return send(values_B[self.places[0]], self.ids_T.device)

    def put(self, values_M: Tensor, into_BS: np.ndarray) -> None:
        """Write values of trained tokens to their places in a batch array."""
        into_BS[self.places] = values_M.detach().cpu().numpy()


def token_ranges(num_tokens: int, num_sharers: int) -> list[tuple[int, int]]:
    """(first, count) of the queries of each rank that shares a packed row: neighbouring ranges of
    nearly equal size, the longer ones first.

    Raises:
        ValueError: fewer tokens than ranks.
    """
    if num_tokens < num_sharers:
        raise ValueError(f"{num_tokens} tokens cannot be split over {num_sharers} ranks")
    each, more = divmod(num_tokens, num_sharers)
    return [(i * each + min(i, more), each + (i < more)) for i in range(num_sharers)]

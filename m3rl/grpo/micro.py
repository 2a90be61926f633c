"""One micro-batch: rows of a training batch as tensors, and the way back to its arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows `rows` of the batch, cut to the longest of them. `T` counts their masked tokens."""

    rows: np.ndarray
    ids_BS: Tensor
    """int64, padded on the right with 0."""
    length_B: Tensor
    """int64"""
    mask_BS: Tensor
    """bool: tokens that are trained on."""

    @classmethod
    def of(
        cls,
        rows: np.ndarray,
        ids_BS: np.ndarray,
        length_B: np.ndarray,
        mask_BS: np.ndarray,
        device: torch.device,
    ) -> MicroBatch:
        """Take `rows` of the batch's arrays.

        Raises:
            ValueError: a token is masked in behind the end of its row.
        """
        width = int(length_B[rows].max())
        mask = mask_BS[rows, :width]
        if (mask_BS[rows] & (np.arange(mask_BS.shape[1]) >= length_B[rows, None])).any():
            raise ValueError("the loss mask covers padding; lengths and masks disagree")
        return cls(
            rows=rows,
            ids_BS=torch.from_numpy(ids_BS[rows, :width]).to(device),
            length_B=torch.from_numpy(length_B[rows]).to(device),
            mask_BS=torch.from_numpy(mask).to(device),
        )

    def tokens(self, values_BS: np.ndarray) -> Tensor:
        """[T] values of this micro-batch's masked tokens, row by row."""
        values = torch.from_numpy(values_BS[self.rows, : self.ids_BS.shape[1]])
        return values.to(self.mask_BS.device)[self.mask_BS]

    def per_token(self, values_B: np.ndarray) -> Tensor:
        """[T] the value of each masked token's row."""
        values = torch.from_numpy(values_B[self.rows]).to(self.mask_BS.device)
        return values.repeat_interleave(self.mask_BS.sum(-1))

    def put(self, values_T: Tensor, into_BS: np.ndarray) -> None:
        """Write values of masked tokens to their places in a batch array."""
        rows, columns = np.nonzero(self.mask_BS.cpu().numpy())
        into_BS[self.rows[rows], columns] = values_T.detach().cpu().numpy()

"""A token's choices of experts, sorted by expert: a row for each that is not -1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.kernels.dispatch import send
from inference.kernels.expert_gemm.align_kernel import align
from inference.kernels.hardware import USE_PDL

ALL_ROWS = 1 << 30
"""An expert's rows are one tile, however many."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Choice `t * A + a` is token t's a-th expert; an expert's rows are in the order of choices."""

    ids_TA: Tensor
    """[T, A] int32, contiguous."""
    choice_X: Tensor
    """[X] int32: the choice of each row."""
    row_P: Tensor
    """[P = T * A] int32: the row of each choice; anything where the id is -1."""
    end_E: Tensor
    """[E] int32: the first row behind each expert's."""
    hit: tuple[tuple[int, int, int], ...]
    """(expert, its first row, first row behind) of those with rows, ascending; on the host."""

    @classmethod
    def of(cls, ids_TA: Tensor, num_experts: int) -> Choices:
        """Sort; waits for the device once."""
        ids_TA = ids_TA.to(torch.int32).contiguous()
        plan = align(ids_TA, num_experts, ALL_ROWS, use_pdl=USE_PDL)
        head = plan.data[: plan.order_start].tolist()
        num_hit, num_rows = head[:2]
        tiles = np.array(head[4:], dtype=np.int64).reshape(-1, 4)[:num_hit, :3]
        counts = np.zeros(num_experts, dtype=np.int32)
        counts[tiles[:, 0]] = tiles[:, 2] - tiles[:, 1]
        return cls(
            ids_TA,
            choice_X=plan.data[plan.order_start : plan.order_start + num_rows],
            row_P=plan.data[plan.place_start :],
            end_E=send(counts.cumsum(dtype=np.int32), ids_TA.device),
            hit=tuple(map(tuple, tiles.tolist())),
        )

    @property
    def num_rows(self) -> int:
        return len(self.choice_X)

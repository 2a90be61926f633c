"""From a schedule over the running rows to the tensors of one forward pass.

Legend of the engine's shape suffixes: `T` tokens of the step, packed over requests · `R` requests
of the step · `S` requests that sample in it · `M` rows of `RunningRows` · `N` pages of a request ·
`X` token places of a row · `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.engine.rows import RunningRows
from inference.engine.scheduler import Schedule
from inference.kernels.paging import PagedBatch


@dataclass(slots=True)
class StepBatch:
    """What the worker computes in one step."""

    input_ids_T: Tensor
    """[T] int64"""
    paged: PagedBatch
    last_token_S: Tensor
    """[S] int64: place in T of the last token of each request that samples."""


def build_batch(rows: RunningRows, schedule: Schedule, device: torch.device) -> StepBatch:
    """Gather the scheduled tokens, their slots and page tables; no loop over requests or tokens."""
    rows_R, num_new_R, page_size = schedule.rows_R, schedule.num_new_R, rows.page_size
    stop_R = np.cumsum(num_new_R)
    start_R = stop_R - num_new_R
    seq_len_R = rows.num_computed[rows_R] + num_new_R
    max_seq_len = int(seq_len_R.max())
    table_RN = rows.page_table_MN[rows_R, : -(-max_seq_len // page_size)]

    r_T = np.repeat(np.arange(len(rows_R)), num_new_R)
    positions_T = np.arange(len(r_T)) + (seq_len_R - stop_R)[r_T]
    pages_T = table_RN[r_T, positions_T // page_size].astype(np.int64)
    return StepBatch(
        input_ids_T=_tensor(rows.tokens_MX[rows_R[r_T], positions_T].astype(np.int64), device),
        paged=PagedBatch(
            positions_T=_tensor(positions_T, device),
            slots_T=_tensor(pages_T * page_size + positions_T % page_size, device),
            query_start_R1=_tensor(np.append(start_R, stop_R[-1]).astype(np.int32), device),
            seq_len_R=_tensor(seq_len_R.astype(np.int32), device),
            page_table_RN=_tensor(table_RN, device),
            page_size=page_size,
            num_decodes=schedule.num_decodes,
            max_query_len=int(num_new_R.max()),
            max_seq_len=max_seq_len,
        ),
        last_token_S=_tensor(stop_R[schedule.is_last_R] - 1, device),
    )


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)

"""From a schedule over the running rows to the tensors of one forward pass.

Legend of the engine's shape suffixes: `T` tokens of the step, packed over requests · `R` requests
of the step · `S` requests that sample in it · `M` rows of `RunningRows` · `N` pages of a request ·
`X` token places of a row · `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from inference.engine.rows import PENDING, RunningRows
from inference.engine.sampler import SamplingArrays, has_cuts, sampling_arrays
from inference.engine.scheduler import Schedule
from inference.engine.sharing import DecodePlanner
from inference.engine.staging import Staging
from inference.kernels.paging import PagedBatch


@dataclass(slots=True)
class StepBatch:
    """What the worker computes in one step."""

    input_ids_T: Tensor
    """[T] int64; `PENDING` where the host does not know the token yet."""
    rows_T: Tensor
    """[T] int64: row of `RunningRows` that the token belongs to."""
    has_pending: bool
    paged: PagedBatch
    last_token_S: Tensor
    """[S] int64: place in T of the last token of each request that samples."""
    sampling: SamplingArrays
    max_tokens: int
    """T, or the largest T of all dp groups in the step."""


@dataclass(slots=True)
class StepArrays:
    """The tokens of a step on the host."""

    input_ids_T: np.ndarray
    rows_T: np.ndarray
    positions_T: np.ndarray
    slots_T: np.ndarray
    query_start_R1: np.ndarray
    seq_len_R: np.ndarray
    last_token_S: np.ndarray


def step_arrays(rows: RunningRows, schedule: Schedule) -> StepArrays:
    """Gather the scheduled tokens and their slots; no loop over requests or tokens."""
    rows_R, num_new_R, page_size = schedule.rows_R, schedule.num_new_R, rows.page_size
    stop_R = np.cumsum(num_new_R)
    seq_len_R = rows.num_computed[rows_R] + num_new_R

    r_T = np.repeat(np.arange(len(rows_R)), num_new_R)
    rows_T = rows_R[r_T]
    positions_T = np.arange(len(r_T)) + (seq_len_R - stop_R)[r_T]
    pages_T = rows.page_table_MN[rows_T, positions_T // page_size].astype(np.int64)
    return StepArrays(
        input_ids_T=rows.tokens_MX[rows_T, positions_T].astype(np.int64),
        rows_T=rows_T,
        positions_T=positions_T,
        slots_T=pages_T * page_size + positions_T % page_size,
        query_start_R1=np.append(0, stop_R).astype(np.int32),
        seq_len_R=seq_len_R.astype(np.int32),
        last_token_S=stop_R[schedule.is_last_R] - 1,
    )


def build_batch(
    rows: RunningRows,
    schedule: Schedule,
    staging: Staging,
    planner: DecodePlanner | None = None,
) -> StepBatch:
    """The tensors of any step; with a `planner` its decodes are planned for kernels."""
    rows_R, rows_S = schedule.rows_R, schedule.rows_R[schedule.is_last_R]
    step = step_arrays(rows, schedule)
    max_seq_len = int(step.seq_len_R.max())
    table_RN = rows.page_table_MN[rows_R, : -(-max_seq_len // rows.page_size)]
    arrays = [
        step.input_ids_T,
        step.rows_T,
        step.last_token_S,
        step.positions_T,
        step.slots_T,
        step.query_start_R1,
        step.seq_len_R,
        table_RN,
        *sampling_arrays(rows, rows_S),
    ]
    plan = None
    if planner is not None and schedule.num_decodes:
        plan = planner.plan(rows, rows_R[: schedule.num_decodes], step.seq_len_R)
        arrays += plan.arrays
    sent = staging.send(arrays)
    return StepBatch(
        input_ids_T=sent[0],
        rows_T=sent[1],
        has_pending=bool((step.input_ids_T == PENDING).any()),
        paged=PagedBatch(
            positions_T=sent[3],
            slots_T=sent[4],
            query_start_R1=sent[5],
            seq_len_R=sent[6],
            page_table_RN=sent[7],
            page_size=rows.page_size,
            num_decodes=schedule.num_decodes,
            max_query_len=int(schedule.num_new_R.max()),
            max_seq_len=max_seq_len,
            plan=None if plan is None else plan.on_device(sent[15:]),
            query_len_host_R=schedule.num_new_R,
            seq_len_host_R=step.seq_len_R,
        ),
        last_token_S=sent[2],
        sampling=SamplingArrays.of(sent[8:15], has_cuts=has_cuts(rows, rows_S)),
        max_tokens=len(step.input_ids_T),
    )


def padding_batch(
    staging: Staging, page_size: int, planner: DecodePlanner | None = None
) -> tuple[Tensor, PagedBatch]:
    """(input ids, batch) of one row without keys: what a dp group without requests computes."""
    arrays: list[np.ndarray] = [
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        np.full(1, -1, np.int64),
        np.array([0, 1], np.int32),
        np.zeros(1, np.int32),
        np.full((1, 1), -1, np.int32),
    ]
    plan = None
    if planner is not None:
        plan = planner.plan_padding(1)
        arrays += plan.arrays
    ids_T, positions_T, slots_T, query_start_R1, seq_len_R, table_RN, *units = staging.send(arrays)
    return ids_T, PagedBatch(
        positions_T=positions_T,
        slots_T=slots_T,
        query_start_R1=query_start_R1,
        seq_len_R=seq_len_R,
        page_table_RN=table_RN,
        page_size=page_size,
        num_decodes=1,
        max_query_len=1,
        max_seq_len=1,
        plan=None if plan is None else plan.on_device(units),
        query_len_host_R=np.ones(1, np.int64),
        seq_len_host_R=np.zeros(1, np.int32),
    )

"""Decode steps as CUDA graphs: one replay instead of a hundred launches.

Everything a captured step reads lies at a fixed address: its inputs in one packed buffer that is
overwritten before each replay, the page tables of all rows on the device, weights and pages. A
batch is padded to the next captured size with rows that have no keys.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inference.config import EngineConfig
from inference.engine.batch import step_arrays
from inference.engine.rows import PENDING, RunningRows
from inference.engine.sampler import (
    PendingSample,
    SamplingArrays,
    has_cuts,
    pack,
    sample,
    sampling_arrays,
)
from inference.engine.scheduler import Schedule
from inference.engine.sharing import DecodePlanner, HostPlan
from inference.engine.staging import Staging, offsets, views
from inference.kernels.paging import LayerPages, PagedBatch
from inference.models.minimax_m3 import Capture, MiniMaxM3


@dataclass(slots=True)
class CapturedStep:
    """One graph and the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    """uint8: all that changes from step to step."""
    starts_R1: Tensor
    """What never changes; held because the graph reads it where it lies."""
    sampling: SamplingArrays
    logits_SV: Tensor
    packed: Tensor
    """uint8: the sampled tokens, to be fetched in one copy."""


class DecodeGraphs:
    """Captures a decode step the first time its size is met, and replays it from then on."""

    def __init__(
        self,
        model: MiniMaxM3,
        pages: Sequence[LayerPages],
        capture: Capture | None,
        planner: DecodePlanner,
        newest_M: Tensor,
        config: EngineConfig,
        wait_for: Callable[[torch.cuda.Event], None] | None = None,
    ) -> None:
        """`wait_for`: see `Fetch`."""
        assert config.page_size is not None, "EngineConfig.resolve fills in the page size"
        assert config.max_model_len is not None, "EngineConfig.resolve fills in the length"
        assert config.cuda_graph_sizes, "the worker makes graphs only for sizes"
        self.sizes = config.cuda_graph_sizes
        self._model, self._pages, self._capture = model, pages, capture
        self._planner, self._newest_M = planner, newest_M
        self._wait_for = wait_for or torch.cuda.Event.synchronize
        self._stream: torch.cuda.Stream | None = None
        self._page_size, self._max_len = config.page_size, config.max_model_len
        width = -(-config.max_model_len // config.page_size)
        num_rows = config.max_running_requests
        self._padding_row = num_rows
        self._table_MN = torch.full(
            (num_rows + 1, width), -1, dtype=torch.int32, device=newest_M.device
        )
        self._staging, self._table_staging = Staging(newest_M.device), Staging(newest_M.device)
        self._captured: dict[tuple[int, bool], CapturedStep] = {}
        self._memory: Any = None
        """The pool that all graphs share."""

    def fits(self, schedule: Schedule) -> bool:
        """Whether the step is a decode of a size that is captured, and every row samples in it.

        A prefill chunk of one token that does not end its prompt is no decode: it samples nothing.
        """
        num_rows = len(schedule.rows_R)
        is_decode = schedule.num_decodes == num_rows and bool(schedule.is_last_R.all())
        return is_decode and num_rows <= self.sizes[-1]

    @torch.inference_mode()
    def launch(
        self,
        rows: RunningRows,
        schedule: Schedule,
        *,
        min_rows: int = 0,
        shares: bool | None = None,
    ) -> PendingSample:
        """Replay the step of `schedule`, whose rows all have one new token.

        Args:
            min_rows: the graph has room for so many at least.
            shares: whether it is one for requests that share pages; None: as these do.
        """
        count = len(schedule.rows_R)
        size = self.sizes[bisect_left(self.sizes, max(count, min_rows))]
        arrays, plan, shares = self._arrays(rows, schedule, size, shares)
        self._update_tables(rows)
        step = self._captured.get((size, shares))
        if step is None:
            step = self._captured[size, shares] = self._capture_step(size, arrays, plan)
        self._staging.send(arrays, step.inputs)
        step.graph.replay()
        packed = step.packed
        if has_cuts(rows, schedule.rows_R):
            tokens = sample(step.logits_SV, replace(step.sampling, has_cuts=True))
            self._newest_M[step.sampling.rows_S] = tokens.ids_R
            packed = pack(tokens)
        return PendingSample(packed, count, self._wait_for)

    def _arrays(
        self, rows: RunningRows, schedule: Schedule, size: int, shares: bool | None
    ) -> tuple[list[np.ndarray], HostPlan, bool]:
        """The inputs of a step padded to `size` rows, its plan, whether requests share pages."""
        rows_R, num_padding = schedule.rows_R, size - len(schedule.rows_R)
        step = step_arrays(rows, schedule)
        plan = self._planner.plan(rows, rows_R, step.seq_len_R, num_rows=size)
        if shares is None:
            shares = bool(plan.index.shared_X4[0, 3] or plan.dense.shared_X4[0, 3])
        if not shares:
            for units in (plan.index, plan.dense):
                units.shared_X4 = units.shared_X4[:0]
        values = [
            (step.input_ids_T, 0),
            (step.positions_T, 0),
            (step.slots_T, -1),
            (step.seq_len_R, 0),
            *zip(
                sampling_arrays(rows, rows_R),
                (self._padding_row, 0.0, 0, 1.0, 0.0, 0, 0),
                strict=True,
            ),
        ]
        padded = [
            np.append(array, np.full(num_padding, fill, array.dtype)) for array, fill in values
        ]
        return [*padded, *plan.arrays], plan, shares

    def _update_tables(self, rows: RunningRows) -> None:
        """Bring the page tables on the device up to date."""
        changed = rows.take_changed_rows()
        if len(changed):
            width = min(rows.page_table_MN.shape[1], self._table_MN.shape[1])
            index, table = self._table_staging.send(
                [changed, np.ascontiguousarray(rows.page_table_MN[changed, :width])]
            )
            self._table_MN[:, :width].index_copy_(0, index, table)

    def _capture_step(self, size: int, arrays: list[np.ndarray], plan: HostPlan) -> CapturedStep:
        """Run a step of padding rows alone, which compiles its kernels, then capture it."""
        inputs = torch.empty(offsets(arrays)[-1], dtype=torch.uint8, device=self._newest_M.device)
        parts = views(inputs, arrays)
        starts_R1 = torch.arange(size + 1, dtype=torch.int32, device=inputs.device)
        padding = [np.zeros_like(array) for array in arrays]
        padding[2][:] = -1
        padding[4][:] = self._padding_row
        self._staging.send(padding, inputs)
        sampling = SamplingArrays.of(parts[4:11], has_cuts=False)

        def run() -> tuple[Tensor, Tensor]:
            ids_T = torch.where(parts[0] == PENDING, self._newest_M[sampling.rows_S], parts[0])
            paged = self._paged(size, parts, starts_R1, plan)
            hidden_TC = self._model(ids_T, paged, self._pages, self._capture, max_tokens=size)
            logits_SV = self._model.logits(hidden_TC)
            tokens = sample(logits_SV, sampling)
            self._newest_M.index_copy_(0, sampling.rows_S, tokens.ids_R)
            return logits_SV, pack(tokens)

        if self._stream is None:
            # Of a priority of its own, so it is nobody else's.
            self._stream = torch.cuda.Stream(inputs.device, priority=-2)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
            # Not for the whole device, where weights may be arriving for long; and a rank that does
            # not come is named.
            self._wait_for(self._stream.record_event())
            # Other threads may use the device meanwhile: NCCL's own, and the one that receives.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                logits_SV, packed = run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._memory = graph.pool()
        return CapturedStep(graph, inputs, starts_R1, sampling, logits_SV, packed)

    def _paged(
        self, size: int, parts: list[Tensor], starts_R1: Tensor, plan: HostPlan
    ) -> PagedBatch:
        return PagedBatch(
            positions_T=parts[1],
            slots_T=parts[2],
            query_start_R1=starts_R1,
            seq_len_R=parts[3],
            page_table_RN=self._table_MN[parts[4]],
            page_size=self._page_size,
            num_decodes=size,
            max_query_len=1,
            max_seq_len=self._max_len,
            plan=plan.on_device(parts[11:]),
        )

"""The running requests as arrays, one row each, so that a decode step loops over no request.

Shapes: `M` rows · `X` token places of a row · `N` pages of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inference.engine.request import LiveRequest

PENDING = -1
"""Stands for a token that is being sampled: the device knows it, the host not yet."""


class RunningRows:
    """What a step reads and writes of every running request; widths grow with what is admitted."""

    def __init__(self, num_rows: int, page_size: int) -> None:
        self.page_size = page_size
        self.page_table_MN = np.full((num_rows, 4), -1, np.int32)
        self.tokens_MX = np.zeros((num_rows, 4 * page_size), np.int32)
        self.logprobs_MX = np.zeros((num_rows, 4 * page_size), np.float32)
        self.raw_logprobs_MX = np.zeros((num_rows, 4 * page_size), np.float32)
        self.num_tokens = np.zeros(num_rows, np.int64)
        """Tokens known: the prompt and what was sampled."""
        self.num_computed = np.zeros(num_rows, np.int64)
        """Tokens whose keys are in the pages."""
        self.num_planned = np.zeros(num_rows, np.int64)
        """Tokens that the step being scheduled will compute."""
        self.num_pages = np.zeros(num_rows, np.int64)
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.max_total = np.zeros(num_rows, np.int64)
        self.seed = np.zeros(num_rows, np.int64)
        self.temperature = np.ones(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.stop_ids = np.full((num_rows, 4), -1, np.int64)
        self.has_stop_strings = np.zeros(num_rows, bool)
        self.version = np.full(num_rows, -1, np.int64)
        """Policy version of the newest sampled token; -1 before the first."""
        self.group = np.full(num_rows, -1, np.int64)
        """Number of the request's group; -1 without one."""
        self.ticket = np.zeros(num_rows, np.int64)
        """Grows whenever the row is given to someone: tells its occupants apart."""
        self.is_taken = np.zeros(num_rows, bool)
        self.live: list[LiveRequest | None] = [None] * num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._has_new_pages = np.zeros(num_rows, bool)

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def place(self, live: LiveRequest, pages: Sequence[int], num_computed: int) -> int:
        """Give `live` a row; its first `num_computed` tokens have their keys in `pages`."""
        row, count = self._free.pop(), len(live.tokens)
        self._widen(live)
        self.tokens_MX[row, :count] = live.tokens
        self.logprobs_MX[row, :count] = live.logprobs
        self.raw_logprobs_MX[row, :count] = live.raw_logprobs
        self.page_table_MN[row] = -1
        self.page_table_MN[row, : len(pages)] = pages
        self.num_pages[row] = len(pages)
        self._has_new_pages[row] = True
        self.num_tokens[row] = count
        self.num_computed[row] = num_computed
        self.num_prompt[row] = live.num_prompt
        self.max_total[row] = live.max_total
        self.version[row] = live.version_spans[-1][1] if live.version_spans else -1
        self.group[row] = -1 if live.group is None else live.group.number
        self.ticket[row] += 1
        self._set_params(row, live)
        self.live[row] = live
        self.is_taken[row] = True
        live.row = row
        return row

    def _set_params(self, row: int, live: LiveRequest) -> None:
        params = live.request.params
        self.seed[row] = live.seed
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(live.stop_ids)] = live.stop_ids
        self.has_stop_strings[row] = bool(params.stop)

    def _widen(self, live: LiveRequest) -> None:
        if live.max_total > self.tokens_MX.shape[1]:
            width = max(live.max_total, 2 * self.tokens_MX.shape[1])
            self.tokens_MX = _widened(self.tokens_MX, width, 0)
            self.logprobs_MX = _widened(self.logprobs_MX, width, 0)
            self.raw_logprobs_MX = _widened(self.raw_logprobs_MX, width, 0)
            num_pages = -(-width // self.page_size)
            self.page_table_MN = _widened(self.page_table_MN, num_pages, -1)
        if len(live.stop_ids) > self.stop_ids.shape[1]:
            self.stop_ids = _widened(self.stop_ids, len(live.stop_ids), -1)

    def remove(self, live: LiveRequest) -> list[int]:
        """Take `live` out, its arrays copied back to it; returns its pages in order."""
        row = live.row
        count = int(self.num_tokens[row])
        pages = self.pages(row)
        live.tokens = self.tokens_MX[row, :count].copy()
        live.logprobs = self.logprobs_MX[row, :count].copy()
        live.raw_logprobs = self.raw_logprobs_MX[row, :count].copy()
        live.row = -1
        self.live[row] = None
        self.is_taken[row] = False
        self._free.append(row)
        return pages

    def pages(self, row: int, count: int | None = None) -> list[int]:
        """The first `count` pages of a row, all by default."""
        count = int(self.num_pages[row]) if count is None else count
        return self.page_table_MN[row, :count].tolist()

    def add_page(self, rows: np.ndarray, pages: Sequence[int]) -> None:
        """One page more for each of `rows`."""
        self.page_table_MN[rows, self.num_pages[rows]] = pages
        self.num_pages[rows] += 1
        self._has_new_pages[rows] = True

    def take_changed_rows(self) -> np.ndarray:
        """Rows whose page table changed since the last call."""
        changed = np.flatnonzero(self._has_new_pages)
        self._has_new_pages[:] = False
        return changed

    def is_complete(self, rows: np.ndarray) -> np.ndarray:
        """[len(rows)] bool: no token more may be sampled; the last one may still be on its way."""
        return self.num_tokens[rows] >= self.max_total[rows]

    def append_pending(self, rows: np.ndarray) -> np.ndarray:
        """Room for a token of each of `rows` that is being sampled; returns their places."""
        places = self.num_tokens[rows]
        self.tokens_MX[rows, places] = PENDING
        self.num_tokens[rows] = places + 1
        return places

    def fill_tokens(
        self,
        rows: np.ndarray,
        places: np.ndarray,
        ids: np.ndarray,
        logprobs: np.ndarray,
        raw_logprobs: np.ndarray,
    ) -> None:
        """The sampled tokens for which `append_pending` made room."""
        self.tokens_MX[rows, places] = ids
        self.logprobs_MX[rows, places] = logprobs
        self.raw_logprobs_MX[rows, places] = raw_logprobs


def _widened(old: np.ndarray, width: int, fill: int) -> np.ndarray:
    new = np.full((old.shape[0], width), fill, old.dtype)
    new[:, : old.shape[1]] = old
    return new

"""A scheduler without a model: a memory that knows which tokens each slot was written for."""

from __future__ import annotations

import numpy as np

from inference.engine.request import LiveRequest, Request, SamplingParams, make_live
from inference.engine.scheduler import Schedule, Scheduler

PAGE = 4


class SimulatedEngine:
    """Runs schedules without a model: a slot remembers (version, all tokens up to its own).

    The token after a prefix is a function of the prefix, so two ways to one place must agree.
    """

    def __init__(self, **options) -> None:
        defaults = {
            "num_pages": 16,
            "page_size": PAGE,
            "max_running_requests": 4,
            "max_tokens_per_step": 8,
            "enable_prefix_cache": True,
        }
        self.max_tokens_per_step = (defaults | options)["max_tokens_per_step"]
        self.scheduler = Scheduler(**(defaults | options))
        self.version = 0
        self.scheduler.start_version(0)
        self.memory: dict[int, tuple] = {}
        self.finished: dict[str, list[int]] = {}
        self.admitted: list[str] = []
        self.counter = 0

    def add(self, prompt, name=None, **kwargs) -> LiveRequest:
        max_tokens = kwargs.pop("max_tokens", 4)
        self.counter += 1
        name = f"r{self.counter}" if name is None else name
        params = SamplingParams(max_tokens=max_tokens, seed=self.counter)
        live = make_live(Request(name, list(prompt), params, **kwargs), ())
        self.scheduler.add(live)
        return live

    def step(self) -> Schedule | None:
        before = {live.request_id for live in self.scheduler.running}
        schedule = self.scheduler.schedule()
        if schedule is not None:
            assert schedule.num_new_R.sum() <= self.max_tokens_per_step
            assert (schedule.num_new_R[: schedule.num_decodes] == 1).all()
            assert (schedule.num_new_R[schedule.num_decodes :] > 1).all()
        self.admitted += [
            live.request_id for live in self.scheduler.running if live.request_id not in before
        ]
        self.scheduler.check()
        if schedule is None:
            return None
        self._forward(schedule)
        self.scheduler.advance(schedule)
        self.scheduler.remember_prompts(schedule, np.ones(len(schedule.rows_R), bool))
        self._sample(schedule)
        self.scheduler.check()
        return schedule

    def _tokens(self, row: int, count: int) -> tuple:
        return tuple(self.scheduler.rows.tokens_MX[row, :count].tolist())

    def _slot(self, row: int, position: int) -> int:
        page = int(self.scheduler.rows.page_table_MN[row, position // PAGE])
        assert page >= 0, "a token without a page"
        return page * PAGE + position % PAGE

    def _forward(self, schedule: Schedule) -> None:
        rows = self.scheduler.rows
        work = [
            (row, int(rows.num_computed[row]), int(rows.num_computed[row]) + new)
            for row, new in zip(schedule.rows_R.tolist(), schedule.num_new_R.tolist(), strict=True)
        ]
        written = set()
        for row, start, stop in work:
            for position in range(start, stop):
                slot = self._slot(row, position)
                assert slot not in written, "two tokens in one slot"
                written.add(slot)
                self.memory[slot] = (self.version, self._tokens(row, position + 1))
        for row, _, stop in work:
            stale = rows.live[row].has_stale_pages
            for position in range(stop):
                version, tokens = self.memory[self._slot(row, position)]
                assert tokens == self._tokens(row, position + 1), "another request's keys"
                assert stale or version == self.version, "keys of an older version"

    def _sample(self, schedule: Schedule) -> None:
        rows = self.scheduler.rows
        for row in schedule.rows_R[schedule.is_last_R].tolist():
            live = rows.live[row]
            if not live.has_sampled:
                live.version_spans.append((0, self.version))
            prefix = self._tokens(row, int(rows.num_tokens[row]))
            token = np.array([next_token(prefix)], np.int32)
            place = rows.append_pending(np.array([row]))
            rows.fill_tokens(np.array([row]), place, token, np.zeros(1), np.zeros(1))
            if rows.num_tokens[row] == rows.max_total[row]:
                self.scheduler.finish(live)
                self.finished[live.request_id] = live.tokens.tolist()

    def run(self, max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if self.step() is None:
                return
        raise AssertionError("the requests never end")


def next_token(prefix: tuple) -> int:
    return (sum(prefix) * 31 + len(prefix)) % 7


def expected_tokens(prompt, max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tuple(tokens)))
    return tokens

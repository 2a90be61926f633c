"""Seconds of each phase of a step, by metric name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """`with watch("time/train"): ...`; what no phase covers is in `time/other`, so that phases sum
    to `time/step`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self.seconds(name) + time.perf_counter() - start

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count `seconds` measured inside `source` as `target`."""
        self._seconds[source] = self.seconds(source) - seconds
        self._seconds[target] = self.seconds(target) + seconds

    def seconds(self, name: str) -> float:
        return self._seconds.get(name, 0.0)

    def total_s(self) -> float:
        return time.perf_counter() - self._start

    def record(self) -> dict[str, float]:
        """All phases, `time/other` and `time/step`."""
        total = self.total_s()
        other = total - sum(self._seconds.values())
        return {**self._seconds, "time/other": other, "time/step": total}

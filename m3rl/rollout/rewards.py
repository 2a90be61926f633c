"""Rewards from killable processes: a scorer that raises, hangs or returns NaN costs its item only.

Each process is a program of its own (`reward_worker`), not a fork: it works the same from threads
and from Ray actors, re-imports no `__main__`, uses no signals, and is killed with all it started.

    pending ──▶ in flight (a few items a worker) ──▶ ok | error | nonfinite
       ▲                     │ silent for timeout_s: worker killed and replaced
       └── rest of its items ┴──▶ timeout
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from m3rl.config import DataConfig, ReasoningGymConfig, RewardConfig
from m3rl.errors import M3rlError
from m3rl.types import RewardStatus

logger = logging.getLogger(__name__)

CHUNK_SIZE = 16
"""Items sent to a worker at a time: they hide the round trip and are shared out after a kill."""
START_TIMEOUT_S = 120.0
"""Longest wait for a scorer's imports."""
STDERR = 2
"""Where scorers print to: stdout belongs to the results of the command."""

Item = tuple[dict[str, Any], str]
"""Prompt payload and completion text."""


class RewardError(M3rlError):
    """Too many rewards of a call failed, or the scorer cannot start; carries the first cause."""


@dataclass(slots=True)
class Score:
    """Outcome of one item; `value` is NaN unless the status is 'ok'."""

    status: RewardStatus
    value: float = float("nan")
    parts: dict[str, float] = field(default_factory=dict)
    message: str = ""


class RewardPool:
    """Scores completions in `reward.workers` processes, which start in the background.

    Close it (or use it as a context manager) to end the processes; they also end with this one.
    """

    def __init__(self, reward: RewardConfig, data: DataConfig) -> None:
        self._timeout_s = reward.timeout_s
        self._max_error_frac = reward.max_error_frac
        self._lock = threading.Lock()
        scorer = scorer_of(reward, data)
        self._workers = [_Worker(scorer) for _ in range(reward.workers)]

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_started(self) -> None:
        """Return when every worker can score.

        Raises:
            RewardError: the scorer cannot be imported or started (says why).
        """
        with self._lock:
            nothing = _Call([], self._timeout_s, self._max_error_frac)
            for worker in self._workers:
                worker.wait_ready(nothing)

    def score(self, items: Sequence[Item]) -> list[Score]:
        """Outcomes in the order of `items`; safe to call from any thread.

        Raises:
            RewardError: more than `max_error_frac` of the items failed, or no worker can start.
        """
        with self._lock:
            call = _Call(items, self._timeout_s, self._max_error_frac)
            try:
                while not call.is_done:
                    self._advance(call)
            finally:  # whatever ended the call, no worker may answer it later
                for worker in self._workers:
                    if worker.in_flight:
                        worker.restart()
        if call.failed:
            logger.warning("%s", call.failures())
        return [call.scores[key] for key in range(len(items))]

    def close(self) -> None:
        """End all processes; safe to call twice."""
        for worker in self._workers:
            worker.kill()

    def _advance(self, call: _Call) -> None:
        """Hand out work, then wait for the next message or deadline."""
        for worker in self._workers:
            if worker.is_idle and call.pending:
                worker.send(call)
        busy = [worker for worker in self._workers if worker.deadline < math.inf]
        remaining = min(worker.deadline for worker in busy) - time.monotonic()
        readable = wait([worker.connection for worker in busy], max(0.0, remaining))
        for worker in busy:
            if worker.connection in readable:
                worker.receive(call)
            elif time.monotonic() >= worker.deadline:
                worker.give_up(call)


class _Call:
    """The items of one `score` call. Each is pending, in flight with one worker, or scored."""

    def __init__(self, items: Sequence[Item], timeout_s: float, max_error_frac: float) -> None:
        self.items = items
        self.timeout_s = timeout_s
        self.pending = deque(range(len(items)))
        self.scores: dict[int, Score] = {}
        self.failed: list[Score] = []
        self._max_error_frac = max_error_frac

    @property
    def is_done(self) -> bool:
        return len(self.scores) == len(self.items)

    def record(self, key: int, score: Score) -> None:
        self.scores[key] = score
        if score.status == "ok":
            return
        self.failed.append(score)
        if len(self.failed) > self._max_error_frac * len(self.items):
            raise RewardError(
                f"{self.failures()}; that is more than reward.max_error_frac="
                f"{self._max_error_frac:g} allows: mend the reward, or raise reward.timeout_s or "
                "reward.max_error_frac"
            )

    def failures(self) -> str:
        counts = ", ".join(f"{n} {s}" for s, n in Counter(s.status for s in self.failed).items())
        return (
            f"{len(self.failed)} of {len(self.items)} rewards failed ({counts}); "
            f"first: {self.failed[0].message}"
        )


class _Worker:
    """One scoring process and what it is working on.

    `deadline` is infinite while there is nothing to wait for; `in_flight[0]` is being scored.
    """

    def __init__(self, scorer: tuple[str, Any]) -> None:
        self._scorer = scorer
        self.in_flight: deque[int] = deque()
        self._is_ready = False
        self._start()

    @property
    def is_idle(self) -> bool:
        return self._is_ready and not self.in_flight

    def wait_ready(self, call: _Call) -> None:
        while not self._is_ready:
            if self.connection.poll(max(0.0, self.deadline - time.monotonic())):
                self.receive(call)
            else:
                self.give_up(call)

    def send(self, call: _Call) -> None:
        keys = [call.pending.popleft() for _ in range(min(CHUNK_SIZE, len(call.pending)))]
        try:
            self.connection.send([(key, *call.items[key]) for key in keys])
        except OSError:  # it died while idle; nothing of this call is to blame
            call.pending.extendleft(reversed(keys))
            self.restart()
            return
        self.in_flight.extend(keys)
        self.deadline = time.monotonic() + call.timeout_s

    def receive(self, call: _Call) -> None:
        """Take one message; a closed connection is blamed on the item that was being scored."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            reason = f"the scorer ended its process (exit code {self.kill()})"
            if not self._is_ready:
                raise RewardError(f"{self._scorer}: {reason} while starting") from None
            self._replace(call, Score("error", message=reason))
            return
        if message[0] == "failed":
            raise RewardError(f"the scorer {self._scorer} cannot be started: {message[1]}")
        if message[0] == "ready":
            self._is_ready, self.deadline = True, math.inf
            return
        key, status, value, parts, text = message
        asked = self.in_flight.popleft()
        assert key == asked, "a worker answers in the order it was asked"
        self.deadline = time.monotonic() + call.timeout_s if self.in_flight else math.inf
        call.record(key, Score(status, value, parts, text))

    def give_up(self, call: _Call) -> None:
        """Kill the process that let its deadline pass."""
        if not self._is_ready:
            raise RewardError(f"the scorer {self._scorer} did not start in {START_TIMEOUT_S:g} s")
        reason = f"no score within reward.timeout_s={call.timeout_s:g} s"
        self._replace(call, Score("timeout", message=reason))

    def _replace(self, call: _Call, score: Score) -> None:
        """A fresh process; the item being scored is over, those behind it go back in front."""
        key = self.in_flight.popleft()
        call.pending.extendleft(reversed(self.in_flight))
        self.restart()
        call.record(key, score)

    def restart(self) -> None:
        self.kill()
        self.in_flight.clear()
        self._start()

    def kill(self) -> int:
        """End the process and all that it started; returns its exit code."""
        self.connection.close()
        if self._process.returncode is None:
            # start_new_session made it the leader of its own group, and it is not reaped yet
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _start(self) -> None:
        self._is_ready = False
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.connection: Connection
        self.connection, theirs = Pipe()
        with theirs:
            module = ["-m", "m3rl.rollout.reward_worker"]
            self._process = subprocess.Popen(
                [sys.executable, *module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": _python_path()},
                start_new_session=True,
            )
        self.connection.send(self._scorer)


def scorer_of(reward: RewardConfig, data: DataConfig) -> tuple[str, Any]:
    """(kind, argument) of `reward_worker.SCORERS` for a configuration."""
    if reward.kind == "function":
        return "function", reward.target
    if reward.kind == "exact":
        return "exact", None
    datasets = [d for d in (data.train, data.eval) if isinstance(d, ReasoningGymConfig)]
    return "reasoning_gym", [d.model_dump(include={"name", "seed", "params"}) for d in datasets]


def _python_path() -> str:
    """Where this process finds modules, so that a scorer does too."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)

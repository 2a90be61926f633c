"""Real runs of the command line on a small M3: real Ray, real processes, real kills."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

CONFIG = "configs/tiny_cpu.yaml"
SMALL = [
    "rollout.group_size=4",
    "rollout.prompts_per_step=4",
    "rollout.max_tokens=8",
    "data.train.size=300",
    "data.eval.size=20",
    "eval.num_prompts=4",
    "eval.at_start=false",
    "eval.at_end=false",
    "logging.wandb.mode=disabled",
    "logging.sample_table_every=0",
]
"""Everything as in the demo, on a few prompts."""
START_TIMEOUT_S = 150.0
NOTE_FAMILY_S = 0.25
"""Between two looks for new descendants, each of which reads about every process of the machine."""


class Run:
    """One `m3rl` process, its output in a file, its whole process tree known."""

    def __init__(self, command: str, run_dir: Path, *overrides: str, config: str = CONFIG) -> None:
        self.run_dir = run_dir
        self.log_path = run_dir.with_name(f"{run_dir.name}.{time.monotonic_ns()}.log")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "m3rl.cli", command, config, f"run.dir={run_dir}"]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*words, *SMALL, *overrides],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
                # A shell's background job ignores SIGINT, and its children inherit that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self.family: dict[int, psutil.Process] = {}
        self._noted_at = 0.0

    def output(self) -> str:
        return self.log_path.read_text(errors="replace")

    def note_family(self) -> None:
        """Remember every descendant alive now, to ask later whether it is gone."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self.family.update({child.pid: child for child in children})
        self._noted_at = time.monotonic()

    def _note_family_at_times(self) -> None:
        if time.monotonic() - self._noted_at >= NOTE_FAMILY_S:
            self.note_family()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll; fails with the run's output when it ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            self._note_family_at_times()
            code = self.process.poll()
            assert code is None, f"ended with {code} before {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"timed out before {what}:\n{self.output()}"
            time.sleep(0.02)

    def finish(self, expected: int = 0) -> str:
        """Wait for the end; the output, after checking the exit code."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.process.poll() is None:
            self._note_family_at_times()
            if time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"did not end:\n{self.output()}")
            time.sleep(0.05)
        assert self.process.returncode == expected, self.output()
        return self.output()

    def send(self, number: signal.Signals) -> None:
        self.note_family()
        self.process.send_signal(number)

    def survivors(self, but: tuple[str, ...] = (), timeout_s: float = 30.0) -> list[str]:
        """Descendants that go on running, except those whose title begins with one of `but`."""
        deadline = time.monotonic() + timeout_s
        while (alive := self._running(but)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive

    def surviving_workers(self) -> list[str]:
        """Like `survivors`, but for two agents of Ray's own.

        After a SIGKILL of the driver they try to report to the dead cluster for a minute before
        they end.
        """
        return self.survivors(but=("ray::DashboardAgent", "ray::RuntimeEnvAgent"))

    def _running(self, but: tuple[str, ...]) -> list[str]:
        titles = []
        for process in self.family.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    titles.append(" ".join(process.cmdline()))
        return [title for title in titles if not title.startswith(but)]

    def actors(self, kind: str) -> list[psutil.Process]:
        """Worker processes of a Ray actor class, by its name in the process title."""
        self.note_family()
        found = []
        for process in self.family.values():
            try:
                if any(f"ray::{kind}" in word for word in process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Whole lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def hashes(run_dir: Path) -> list[str]:
    return [line["weights_hash"] for line in metrics(run_dir)]

"""A run that is interrupted, and its directory."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.end_to_end.runs import Run, metrics

ENDLESS = ("train.steps=5000", "checkpoint.every=1")


def begun(run_dir: Path) -> Run:
    """A run without end that has added a line to those that were there."""
    num_lines = len(metrics(run_dir))
    run = Run("train", run_dir, *ENDLESS)
    run.wait_until(lambda: len(metrics(run_dir)) > num_lines, "a line of its own")
    return run


@pytest.mark.timeout(400)
def test_an_interrupted_run_leaves_no_process_and_its_directory_to_the_same_run_alone(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    run = begun(run_dir)
    second = Run("train", run_dir, *ENDLESS)
    assert "another m3rl process is running in this directory" in second.finish(expected=2)
    run.send(signal.SIGINT)
    run.finish(expected=130)
    assert run.survivors() == []
    changed = Run("train", run_dir, "train.steps=50", "optimizer.lr=2e-3")
    output = changed.finish(expected=2)
    assert "optimizer.lr" in output
    assert "another run.dir" in output
    again = begun(run_dir)
    again.send(signal.SIGTERM)
    assert "resumed from step" in again.finish(expected=143)
    assert again.survivors() == []
    steps = len(metrics(run_dir))
    last = Run("train", run_dir, f"train.steps={steps + 1}", "checkpoint.every=1")
    assert "resumed from step" in last.finish()
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, steps + 2))

"""Runs that are killed or interrupted, and go on."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from m3rl.rollout.records import read_completions
from tests.end_to_end.runs import Run, hashes, metrics

SAVING = ("train.steps=4", "checkpoint.every=1")


def assert_same_rollouts(a: Path, b: Path, steps: int) -> None:
    for step in range(1, steps + 1):
        name = f"rollouts/step_{step:06d}.parquet"
        for left, right in zip(read_completions(a / name), read_completions(b / name), strict=True):
            assert left.sample_id == right.sample_id
            assert np.array_equal(left.completion_ids, right.completion_ids)
            assert np.array_equal(left.logprobs, right.logprobs)
            assert left.reward == right.reward


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_killed_after_its_second_line_ends_with_the_weights_of_one_never_killed(
    tmp_path: Path, num_ranks: int
) -> None:
    options = (*SAVING, f"train.num_ranks={num_ranks}")
    straight = Run("train", tmp_path / "straight", *options)
    straight.finish()
    assert straight.survivors() == []
    killed = Run("train", tmp_path / "killed", *options)
    killed.wait_until(lambda: len(metrics(killed.run_dir)) >= 2, "its second line")
    killed.send(signal.SIGKILL)
    killed.process.wait()
    assert killed.surviving_workers() == []
    again = Run("train", tmp_path / "killed", *options)
    output = again.finish()
    assert "resumed from step" in output
    assert "resumed from step 0" not in output
    assert [line["step"] for line in metrics(again.run_dir)] == [1, 2, 3, 4]
    assert hashes(again.run_dir) == hashes(straight.run_dir)
    assert len(set(hashes(straight.run_dir))) == 4
    assert_same_rollouts(again.run_dir, straight.run_dir, 4)
    for line in metrics(straight.run_dir):
        assert line["mismatch/logprob_abs_diff_mean"] <= 1e-5
        assert line["refit/checksum_ok"] == 1.0
        assert line["refit/hash"] == line["weights_hash"]  # FP32 wire: the masters' own bits
        parts = sum(v for k, v in line.items() if k.startswith("time/") and "refit_" not in k)
        assert parts - line["time/step"] == pytest.approx(line["time/step"], rel=0.02)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_no_process_and_can_go_on(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = Run("train", tmp_path / "run", "train.steps=5000", "checkpoint.every=1")
    run.wait_until(lambda: len(metrics(run.run_dir)) >= 1, "its first line")
    run.send(number)
    run.finish(expected=code)
    assert run.survivors() == []
    steps = len(metrics(run.run_dir))
    again = Run("train", tmp_path / "run", f"train.steps={steps + 1}", "checkpoint.every=1")
    assert "resumed from step" in again.finish()
    assert [line["step"] for line in metrics(run.run_dir)] == list(range(1, steps + 2))

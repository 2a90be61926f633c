"""Runs that are killed, interrupted or split over more ranks, and go on as one that is not."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from m3rl.rollout.records import read_completions
from tests.end_to_end.runs import Run, hashes, metrics

SAVING = ("train.steps=4", "checkpoint.every=1")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Run]:
    """By number of trainer ranks: a finished run of four steps that nothing happened to."""
    runs: dict[int, Run] = {}

    def of(num_ranks: int) -> Run:
        if num_ranks not in runs:
            folder = tmp_path_factory.mktemp("straight")
            run = Run("train", folder / "run", *SAVING, f"train.num_ranks={num_ranks}")
            run.finish()
            assert run.survivors() == []
            runs[num_ranks] = run
        return runs[num_ranks]

    return of


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
    straight: Callable[[int], Run], tmp_path: Path, num_ranks: int
) -> None:
    options = (*SAVING, f"train.num_ranks={num_ranks}")
    whole = straight(num_ranks).run_dir
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
    assert hashes(again.run_dir) == hashes(whole)
    assert len(set(hashes(whole))) == 4
    assert_same_rollouts(again.run_dir, whole, 4)
    for line in metrics(whole):
        assert line["mismatch/logprob_abs_diff_mean"] <= 1e-5
        assert line["refit/checksum_ok"] == 1.0
        assert line["refit/hash"] == line["weights_hash"]  # FP32 wire: the masters' own bits
        parts = sum(v for k, v in line.items() if k.startswith("time/") and "refit_" not in k)
        assert parts - line["time/step"] == pytest.approx(line["time/step"], rel=0.02)


@pytest.mark.timeout(600)
def test_a_run_whose_rank_is_stopped_ends_and_says_which_and_the_command_that_resumes_it(
    straight: Callable[[int], Run], tmp_path: Path
) -> None:
    options = (*SAVING, "train.num_ranks=2", "train.timeout_s=15")
    run = Run("train", tmp_path / "run", *options)
    run.wait_until(lambda: len(metrics(run.run_dir)) >= 2, "its second line")
    run.actors("RankProcess")[1].send_signal(signal.SIGSTOP)
    output = run.finish(expected=1)
    assert re.search(r"error: .*rank [01] (is stopped|is silent)", output), output
    resumes = re.search(r"\n`m3rl (train .*)` resumes from step (\d+)\n$", output)
    assert resumes is not None, output
    assert int(resumes.group(2)) >= 2
    assert run.survivors() == []
    words = [sys.executable, "-m", "m3rl.cli", *resumes.group(1).split()]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert f"resumed from step {resumes.group(2)}" in done.stderr
    assert hashes(run.run_dir) == hashes(straight(2).run_dir)


@pytest.mark.timeout(300)
def test_a_replica_of_two_ranks_samples_what_one_of_one_rank_does(
    straight: Callable[[int], Run], tmp_path: Path
) -> None:
    split = Run("train", tmp_path / "tp2", "train.steps=3", "rollout.backend.parallel.tp=2")
    split.finish()
    assert split.survivors() == []
    assert all(line["refit/checksum_ok"] == 1.0 for line in metrics(split.run_dir))
    for step in range(1, 4):
        name = f"rollouts/step_{step:06d}.parquet"
        one, two = (read_completions(run.run_dir / name) for run in (straight(1), split))
        for a, b in zip(one, two, strict=True):
            assert a.sample_id == b.sample_id
            assert a.completion_ids.tolist() == b.completion_ids.tolist()
            # FP32 sums split over the ranks, and updates from such logprobs
            np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-4)

"""Training as a user runs it: killed and resumed, a replica lost, interrupted, refused."""

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


@pytest.mark.timeout(400)
def test_a_killed_replica_is_replaced_and_the_run_loses_no_sample(tmp_path: Path) -> None:
    """The only one, in whatever phase the step is."""
    run = Run("train", tmp_path / "run", "train.steps=8")
    run.wait_until(lambda: len(metrics(run.run_dir)) >= 2, "its second line")
    run.actors("M3Replica")[0].kill()
    output = run.finish()
    assert "given up" in output or "failed in the weight sync" in output
    lines = metrics(run.run_dir)
    assert len(lines) == 8
    assert sum(line["fault/worker_restarts"] for line in lines) == 1
    versions = [0, *(int(line["policy/version"]) for line in lines)]
    for step in range(1, 9):
        completions = read_completions(run.run_dir / f"rollouts/step_{step:06d}.parquet")
        expected = [(4 * (step - 1) + p, i) for p in range(4) for i in range(4)]
        assert [c.sample_id for c in completions] == expected
        assert {int(c.version_spans[0, 1]) for c in completions} == {versions[step - 1]}
    assert run.survivors() == []


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


@pytest.mark.timeout(300)
def test_a_reward_that_always_raises_ends_the_run_with_its_words_and_no_process(
    tmp_path: Path,
) -> None:
    run = Run(
        "train",
        tmp_path / "run",
        "train.steps=3",
        "reward={kind: function, target: 'tests.end_to_end.faulty_rewards:always_raises'}",
    )
    output = run.finish(expected=1)
    assert "this reward is broken on purpose" in output
    assert "reward.max_error_frac" in output
    assert run.survivors() == []


@pytest.mark.timeout(300)
def test_rewards_that_sometimes_raise_hang_or_are_nan_are_counted_and_never_zero(
    tmp_path: Path,
) -> None:
    run = Run(
        "train",
        tmp_path / "run",
        "train.steps=2",
        "reward={kind: function, target: 'tests.end_to_end.faulty_rewards:sometimes', "
        "timeout_s: 1.0, workers: 2, max_error_frac: 1.0}",
    )
    run.finish()
    seen: set[str] = set()
    for step, line in enumerate(metrics(run.run_dir), start=1):
        completions = read_completions(run.run_dir / f"rollouts/step_{step:06d}.parquet")
        status = [c.reward_status for c in completions]
        seen.update(status)
        failed = (status.count("error") + status.count("nonfinite")) / len(status)
        assert line["reward/verifier_error_frac"] == pytest.approx(failed)
        timeouts = status.count("timeout") / len(status)
        assert line["reward/verifier_timeout_frac"] == pytest.approx(timeouts)
        for completion in completions:
            assert np.isnan(completion.reward) == (completion.reward_status != "ok")
    assert seen == {"ok", "error", "timeout", "nonfinite"}


@pytest.mark.timeout(300)
def test_a_run_directory_refuses_another_configuration_and_a_second_process(
    tmp_path: Path,
) -> None:
    first = Run("train", tmp_path / "run", "train.steps=5000")
    first.wait_until(lambda: len(metrics(first.run_dir)) >= 1, "its first line")
    second = Run("train", tmp_path / "run", "train.steps=5000")
    assert "another m3rl process is running in this directory" in second.finish(expected=2)
    first.send(signal.SIGINT)
    first.finish(expected=130)
    changed = Run("train", tmp_path / "run", "train.steps=50", "optimizer.lr=2e-3")
    output = changed.finish(expected=2)
    assert "optimizer.lr" in output
    assert "another run.dir" in output

"""Training as a user runs it: a replica lost, rewards that fail."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from m3rl.rollout.records import read_completions
from tests.end_to_end.runs import Run, metrics


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


@pytest.mark.timeout(400)
def test_a_killed_replica_takes_its_weights_from_the_other_one(tmp_path: Path) -> None:
    run = Run("train", tmp_path / "run", "train.steps=6", "rollout.backend.num_replicas=2")
    run.wait_until(lambda: len(metrics(run.run_dir)) >= 2, "its second line")
    run.actors("M3Replica")[0].kill()
    output = run.finish()
    assert re.search(r"replica (\d) has version \d+ from replica (?!\1)\d", output), output
    lines = metrics(run.run_dir)
    assert len(lines) == 6
    assert sum(line["fault/worker_restarts"] for line in lines) == 1
    assert all(line.get("mismatch/logprob_abs_diff_mean", 0.0) <= 1e-5 for line in lines)
    assert run.survivors() == []


@pytest.mark.timeout(300)
def test_a_probed_run_with_shadows_reports_the_probe_at_its_versions(tmp_path: Path) -> None:
    run = Run(
        "train",
        tmp_path / "run",
        "train.steps=4",
        "weight_sync.probe.every=2",
        "weight_sync.pause=recompute",
        "weight_sync.chunk_mib=1",
        "rollout.backend.engine.shadow_weights=true",
    )
    run.finish()
    lines = metrics(run.run_dir)
    assert [int(line["policy/version"]) for line in lines] == [1, 2, 3, 4]
    errors = [line.get("refit/probe_error") for line in lines]
    assert errors[0] is errors[2] is None
    assert 0 < max(errors[1], errors[3]) < 1e-5  # FP32 sums in another order
    assert all(line["refit/checksum_ok"] == 1.0 for line in lines)


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

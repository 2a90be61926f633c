"""Collecting, evaluating and the warm start as a user runs them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from m3rl.rollout.records import read_completions
from tests.end_to_end.runs import Run, hashes, metrics


def rows(run_dir: Path) -> dict[str, list]:
    return {p.name: read_completions(p) for p in sorted((run_dir / "rollouts").glob("*.parquet"))}


@pytest.mark.timeout(300)
def test_an_interrupted_collection_goes_on_and_equals_one_never_interrupted(
    tmp_path: Path,
) -> None:
    options = ("rollout.num_prompts=30", "rollout.capture_routing=true")
    whole = Run("rollout", tmp_path / "whole", *options)
    assert "mean reward" in whole.finish()
    cut = Run("rollout", tmp_path / "cut", *options)
    cut.wait_until(lambda: len(list(cut.run_dir.glob("rollouts/*.parquet"))) >= 2, "two files")
    cut.send(signal.SIGKILL)
    cut.process.wait()
    before = {p.name: p.stat().st_mtime_ns for p in cut.run_dir.glob("rollouts/*.parquet")}
    again = Run("rollout", tmp_path / "cut", *options)
    assert f"{len(before)} of 8 files are there already" in again.finish()
    assert again.survivors() == []
    for name, time_ns in before.items():
        assert (cut.run_dir / "rollouts" / name).stat().st_mtime_ns == time_ns
    left, right = rows(whole.run_dir), rows(cut.run_dir)
    assert list(left) == list(right) == [f"step_{i:06d}.parquet" for i in range(1, 9)]
    ids = [c.sample_id for file in left.values() for c in file]
    assert ids == [(p, i) for p in range(30) for i in range(4)]
    for a, b in zip(
        (c for f in left.values() for c in f), (c for f in right.values() for c in f), strict=True
    ):
        assert np.array_equal(a.completion_ids, b.completion_ids)
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert a.routing is not None
        assert a.routing.shape[0] == len(a.prompt_ids) + len(a.completion_ids) - 1


@pytest.mark.timeout(300)
def test_a_warm_start_killed_and_started_again_ends_with_the_same_weights_and_can_be_used(
    tmp_path: Path,
) -> None:
    options = ("sft.steps=6", "sft.batch_size=8", "checkpoint.every=1", "sft.init=random")
    straight = Run("sft", tmp_path / "straight", *options)
    straight.finish()
    killed = Run("sft", tmp_path / "killed", *options)
    killed.wait_until(lambda: len(metrics(killed.run_dir)) >= 2, "its second line")
    killed.send(signal.SIGKILL)
    killed.process.wait()
    again = Run("sft", tmp_path / "killed", *options)
    assert "resumed from step" in again.finish()
    assert hashes(again.run_dir) == hashes(straight.run_dir)
    losses = [line["sft/loss"] for line in metrics(straight.run_dir)]
    assert losses[-1] < losses[0]
    used = Run("eval", tmp_path / "unused", f"model.path={again.run_dir / 'model'}")
    result = json.loads(used.finish().splitlines()[-1])
    assert result["eval/spell_backward/num_prompts"] == 4

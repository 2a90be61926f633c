"""GRPO as a user runs it, with vLLM's CPU build as the generation backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from m3rl.rollout.records import read_completions
from tests.end_to_end.runs import Run, metrics

pytest.importorskip("vllm")

CONFIG = "configs/tiny_vllm_cpu.yaml"


def check_steps(run: Run, steps: int) -> None:
    """All of them ran, on weights that both sides hold and of which both compute the same."""
    lines = metrics(run.run_dir)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    versions = [0, *(int(line["policy/version"]) for line in lines)]
    for step, line in enumerate(lines, start=1):
        if "refit/hash" in line:  # not where the only replica was lost in the sync
            assert line["refit/checksum_ok"] == 1.0
            assert line["refit/hash"] == line["weights_hash"]  # FP32 wire: the masters' own bits
        assert line.get("mismatch/logprob_abs_diff_mean", 0.0) <= 1e-4
        completions = read_completions(run.run_dir / f"rollouts/step_{step:06d}.parquet")
        expected = [(4 * (step - 1) + p, i) for p in range(4) for i in range(4)]
        assert [c.sample_id for c in completions] == expected
        assert {int(c.version_spans[0, 1]) for c in completions} == {versions[step - 1]}
    assert sum("refit/hash" in line for line in lines) >= steps - 1
    assert len({line["weights_hash"] for line in lines}) >= 2
    assert run.survivors() == []


@pytest.mark.timeout(400)
def test_grpo_with_vllm_survives_the_death_of_its_replica_and_probes_its_versions(
    tmp_path: Path,
) -> None:
    """Three steps of the small M3; the only replica is killed after the first."""
    run = Run(
        "train", tmp_path / "run", "train.steps=3", "weight_sync.probe.every=1", config=CONFIG
    )
    run.wait_until(lambda: len(metrics(run.run_dir)) >= 1, "its first line")
    run.actors("VllmReplica")[0].kill()
    output = run.finish()
    assert "given up" in output or "failed in the weight sync" in output
    check_steps(run, 3)
    lines = metrics(run.run_dir)
    assert sum(line["fault/worker_restarts"] for line in lines) == 1
    assert 0 < max(line.get("refit/probe_error", 0.0) for line in lines) < 1e-4


@pytest.mark.timeout(400)
def test_three_steps_of_another_architecture_whose_layers_come_one_by_one(tmp_path: Path) -> None:
    """(The small M3 above receives all weights before it loads them.)"""
    words = ["train.steps=3", "rollout.backend.engine.staging=layers"]
    run = Run("train", tmp_path / "run", *words, config="configs/qwen_vllm_cpu.yaml")
    run.finish()
    check_steps(run, 3)
    assert all(line["refit/checksum_ok"] == 1.0 for line in metrics(run.run_dir))

"""A run whose replica is sent what changed: FP32 masters, BF16 weights, a small learning rate."""

from pathlib import Path

import pytest

from tests.end_to_end.runs import Run, metrics


@pytest.mark.timeout(300)
def test_a_run_sends_what_changed_and_all_every_third_time(tmp_path: Path) -> None:
    run = Run(
        "train",
        tmp_path / "run",
        "train.steps=4",
        "policy.dtype=bfloat16",
        "optimizer.lr=1e-6",
        "weight_sync.delta=true",
        "weight_sync.delta_full_every=3",
    )
    run.finish()
    lines = metrics(run.run_dir)
    # The sync of version 0, a full one, belongs to no step.
    assert [line["refit/delta_replicas"] for line in lines] == [1, 1, 0, 1]
    full = lines[2]["refit/bytes"]
    assert all(line["refit/bytes"] < 0.25 * full for line in (lines[0], lines[1], lines[3]))
    assert all(line["refit/checksum_ok"] == 1.0 for line in lines)

"""The shipped weights of the small M3 are what its recipe makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = ["logging.wandb.mode=disabled"]


def m3rl(command: str, config: str, *overrides: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "m3rl.cli", command, config, *SETTINGS, *overrides],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def held_out_accuracy(model: str) -> float:
    output = m3rl("eval", "configs/tiny_cpu.yaml", f"model.path={model}")
    return json.loads(output.splitlines()[-1])["eval/spell_backward/accuracy"]


@pytest.mark.timeout(600)
def test_the_recipe_makes_a_model_within_ten_points_of_the_shipped_one(tmp_path: Path) -> None:
    run_dir = tmp_path / "sft"
    m3rl("sft", "configs/tiny_sft.yaml", f"run.dir={run_dir}")
    made = held_out_accuracy(str(run_dir / "model"))
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    # Teacher forcing and generation are two ways to ask the same question.
    assert made == pytest.approx(last["sft/greedy_accuracy"], abs=0.02)
    shipped = held_out_accuracy("configs/models/tiny_m3")
    assert abs(made - shipped) <= 0.10
    weights = Path("configs/models/tiny_m3/model.safetensors")
    assert weights.stat().st_size <= 3 << 20

"""What of the GPU benches can be shown without a GPU: their clock, their gate, their inputs."""

import importlib
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import slices
from benchmarks.kernels.__main__ import FAMILIES
from benchmarks.kernels.harness import Bench, Timing
from inference.config import ModelConfig


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_imported_without_a_gpu_or_a_peer(family):
    assert callable(importlib.import_module(f"benchmarks.kernels.{family}").run)


@pytest.mark.parametrize("command", ["benchmarks.kernels", "benchmarks.engine"])
def test_a_bench_without_a_gpu_says_so(command):
    done = subprocess.run(
        [sys.executable, "-m", command],
        capture_output=True,
        text=True,
        check=False,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 2
    assert "CUDA device, and there is none" in done.stderr


def test_a_time_of_a_wrong_result_is_not_recorded(tmp_path):
    bench, timing = Bench(60.0, results=tmp_path), Timing(2.0, 1.0, 3.0)
    for error in (0.2, float("nan")):
        bench.case(
            "wrong",
            lambda e=error: bench.record(
                "linear", "wrong", timing, correct={"error": e}, tolerance={"error": 0.1}
            ),
        )
    assert len(bench.failures) == 2
    assert not list(tmp_path.iterdir())
    bench.record("linear", "right", timing, correct={"error": 0.0}, tolerance={"error": 0.1})
    (line,) = (tmp_path / "linear.jsonl").read_text().splitlines()
    assert json.loads(line)["case"] == "right"


def test_a_peer_that_fails_is_told_and_costs_nothing_else():
    bench = Bench(60.0, peers=("vllm",))
    with bench.peer_part("b1"):
        raise ModuleNotFoundError("No module named 'peer'")
    assert bench.failures == ["b1, peer: ModuleNotFoundError: No module named 'peer'"]


def test_no_prompt_is_the_beginning_of_another_case():
    short, long = slices.prompts(1, 100, seed=3), slices.prompts(1, 200, seed=3)
    assert short[0] != long[0][:100]
    assert slices.prompts(2, 50, seed=3) == slices.prompts(2, 50, seed=3)


@pytest.mark.parametrize("num_experts", [16, 128])
def test_the_slices_are_m3_at_full_width(num_experts):
    config = ModelConfig.from_dict(slices.slice_config(num_experts), source="slice")
    assert (config.hidden_size, config.num_local_experts) == (6144, num_experts)
    assert config.sparse_layers == config.moe_layers == (3, 4, 5)


class FakeDriver:
    """Two prefill steps, then a token a request and step."""

    def __init__(self) -> None:
        self.count, self.steps = 0, 0

    def add(self, prompt, group, max_tokens):
        self.count += 1

    def step(self) -> int:
        self.steps += 1
        return 0 if self.steps <= 2 else self.count

    def abort(self):
        self.count = 0


def test_only_warm_steps_of_the_whole_batch_are_timed():
    driver, seen = FakeDriver(), []
    times = slices.time_decode(driver, [([1], None)] * 4, lambda: seen.append(driver.steps))
    assert seen == [2 + slices.WARM_STEPS]
    assert len(times.us) == slices.TIMED_STEPS
    assert np.min(times.us) > 0
    assert driver.count == 0

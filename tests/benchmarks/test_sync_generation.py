"""What a generating replica feels of a sync: by hand, and of a pause of known length."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from benchmarks.sync_generation import BEFORE_S, SMALL, GeneratingSide, Journal, felt
from benchmarks.weight_sync import bench_config
from inference.models.weights import published_tensors

STEP_S = 0.01


def journal(*gaps: float, tokens: int) -> Journal:
    """Calm steps, then some of these lengths with so many tokens each, then calm ones."""
    made, end = Journal(), 0.0
    for count, gap in [*[(8, STEP_S)] * 50, *[(tokens, gap) for gap in gaps], *[(8, STEP_S)] * 4]:
        end += gap
        made.steps.append(end)
        made.tokens.append(count + (made.tokens[-1] if made.tokens else 0))
    return made


def test_steps_of_double_length_beside_a_shadow_are_half_the_throughput():
    made = journal(0.02, 0.02, 0.02, 0.075, tokens=8)
    made.streams, made.pauses, made.resumes = [0.5], [0.56], [0.625]
    found = felt(made, 0)
    assert found.before == pytest.approx(8 / STEP_S)
    assert found.during == pytest.approx(8 / STEP_S / 2)
    assert found.step_us == pytest.approx(1e6 * STEP_S)
    assert found.pause_us == pytest.approx(1e6 * (0.075 - STEP_S))


def test_a_long_step_before_the_pause_is_not_the_pause():
    made = journal(0.2, 0.02, 0.03, tokens=8)
    made.streams, made.pauses, made.resumes = [0.5], [0.722], [0.745]
    assert felt(made, 0).pause_us == pytest.approx(1e6 * (0.03 - STEP_S))


def test_without_a_shadow_the_pause_spans_the_stream():
    made = journal(0.1, tokens=8)
    made.streams, made.pauses, made.resumes = [0.52], [0.501], [0.59]
    found = felt(made, 0)
    assert found.before == pytest.approx(8 / STEP_S, rel=0.01)  # it begins inside a step
    assert found.pause_us == pytest.approx(1e6 * (0.1 - STEP_S))


def test_requests_run_on_and_a_pause_is_seen_as_long_as_it_is():
    raw = bench_config(is_small=True)
    side = GeneratingSide(raw, "cpu", "none", replace(SMALL, max_tokens=20), has_shadow=True)
    replica = side._replica

    def weights(seed: int):
        torch.manual_seed(seed)
        for spec in published_tensors(side.config):
            dtype = torch.float32 if spec.is_fp32 else torch.bfloat16
            yield spec.name, torch.empty(spec.shape, dtype=dtype).normal_(0, 0.02)

    replica.load_all(weights(0))
    held = side.hashes()
    side.keep_running()
    made, begin = side.journal(), time.perf_counter()
    some_began_again = 2 * SMALL.num_requests * 20
    while (
        not made.tokens or made.tokens[-1] < some_began_again or made.steps[-1] < begin + BEFORE_S
    ):
        time.sleep(0.01)
    made.streams.append(time.perf_counter())
    side.pause("keep")
    replica.load_all(weights(1))
    time.sleep(0.25)
    side.resume()
    while made.steps[-1] < made.resumes[-1] + 3 * STEP_S:
        time.sleep(0.01)
    # One that has just ended runs again a step later.
    until = time.perf_counter() + 10
    while replica.stats()["running"] < SMALL.num_requests:
        assert time.perf_counter() < until, replica.stats()
        time.sleep(0.01)
    found = felt(made, 0)
    paused_us = 1e6 * (made.resumes[0] - made.pauses[0])
    assert 0.25e6 - found.step_us < found.pause_us < paused_us + 1e6
    side.end_running()
    assert side.hashes() != held


@pytest.mark.slow
def test_the_small_form_records_what_generation_feels(tmp_path):
    command = [sys.executable, "-m", "benchmarks.weight_sync", "--cpu", "--only", "generation"]
    options = ["--quantization", "mxfp8", "--results", str(tmp_path)]
    subprocess.run([*command, *options], check=True, timeout=250)
    records = [json.loads(line) for line in (tmp_path / "weight_sync.jsonl").open()]
    assert [record["case"].rpartition(", ")[2] for record in records] == [
        "the pause",
        "the sync",
        "the pause",
    ]
    assert records[0]["correct"] == {"tensors_differ": 0.0, "completions_differ": 0.0}
    assert records[2]["correct"] == {"tensors_differ": 0.0}
    assert 0 < records[1]["value"]["smallest_share"] <= records[1]["value"]["throughput_share"]
    assert records[2]["us"] > records[0]["us"], "a pause with the transfer in it is the longer one"

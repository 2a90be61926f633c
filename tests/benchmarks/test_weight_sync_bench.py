"""The bench of weight syncs without a GPU: a small model over gloo, end to end."""

import json
import math
import subprocess
import sys
from concurrent.futures import Future

import pytest

from benchmarks.kernels.harness import Bench, Timing
from benchmarks.weight_sync import Pair, bench_config
from inference.config import ModelConfig
from inference.models.weights import published_tensors


def test_the_bench_moves_twenty_gigabytes_in_the_shapes_of_m3():
    config = ModelConfig.from_dict(bench_config(is_small=False), source="bench")
    elements = sum(math.prod(spec.shape) for spec in published_tensors(config))
    assert 2 * elements > 20e9


@pytest.mark.slow
def test_the_small_form_records_syncs_baselines_and_the_receiving_side(tmp_path):
    command = [sys.executable, "-m", "benchmarks.weight_sync", "--cpu", "--results", str(tmp_path)]
    parts = ["--only", "baselines", "receive", "wire", "delta", "--quantization", "mxfp8"]
    subprocess.run([*command, *parts], check=True, timeout=250)
    records = [json.loads(line) for line in (tmp_path / "weight_sync.jsonl").open()]
    assert [record.get("peer") for record in records] == [
        None,
        None,
        "packed broadcast in turn",
        "packed broadcast overlapped",
        "one call a tensor over pipes",
        "a write a tensor",
        None,
        None,
    ]
    assert all(record["correct"]["tensors_differ"] == 0.0 for record in records)
    assert "quantised by the sender" in records[-2]["case"]
    assert records[-1]["value"]["largest_share"] == records[-1]["correct"]["largest_share"] < 0.01
    assert records[0]["value"]["busiest_share"] == 1


@pytest.mark.slow
def test_the_simplest_baseline_can_go_through_ray(tmp_path):
    pytest.importorskip("ray")
    from benchmarks import sync_ray

    bench = Bench(60.0, results=tmp_path)
    sync_ray.measure(bench, "none", ["cpu", "cpu"], "gloo", Timing(1, 1, 1), 1, is_small=True)
    (line,) = (tmp_path / "weight_sync.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["peer"] == "one call a tensor through Ray"
    assert record["correct"] == {"tensors_differ": 0.0}


class Told(Pair):
    """Notes what both sides are told."""

    def __init__(self):
        self.said, self.reps, self.replica = [], 2, self

    def call(self, method):
        answer = Future()
        answer.set_result(1)
        return answer

    def step(self):
        self.said.append("step")

    def on_all(self, method, *args):
        self.said.append(method)
        return [[1.0, 2.0]]

    def compare(self, peer, *args):
        self.said.append("compare")


def test_before_each_baseline_the_weights_change_so_that_one_that_moves_nothing_is_seen():
    pair = Told()
    pair.baselines(Timing(1, 1, 1), 1.0)
    assert pair.said == [
        *["step", "packed_broadcast", "compare"] * 2,
        *["step", *["broadcast_one"] * 3, "compare"],
    ]

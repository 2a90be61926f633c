"""The benches of training on a CPU: small shapes, the same code, comparisons that can fail."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks import train_attention, train_layer, train_memory, train_step
from benchmarks.kernels.harness import Bench
from benchmarks.train_measure import TINY, cost_if_it_fits, model_config, published_config
from benchmarks.train_peer import TransformersTrainer
from benchmarks.train_shapes import Shapes
from m3rl import policy_layers

CPU = torch.device("cpu")


@pytest.fixture
def records(tmp_path):
    """Run with a bench; gives (records, failures)."""

    def collect(run):
        bench = Bench(120.0, tmp_path)
        run(bench)
        lines = [line for file in tmp_path.iterdir() for line in file.open()]
        return [json.loads(line) for line in lines], bench.failures

    return collect


def test_the_slices_are_m3_at_full_width():
    layer = Shapes.m3().config
    assert (layer.sparse_layers, layer.moe_layers, layer.num_local_experts) == ((0,), (0,), 128)
    slice_ = train_step.Slice.m3()
    config = model_config(slice_.raw)
    assert config.moe_layers == config.sparse_layers == (1, 2, 3)
    for c in (layer, config):
        assert (c.hidden_size, c.vocab_size, c.index_topk_blocks) == (6144, 200064, 16)
    assert sum(slice_.padded["8K in 4 samples"]) == sum(slice_.padded["8K in one sample"]) == 8192
    assert {sum(lengths) for lengths in slice_.packed.values()} == {16384, 65536}


@pytest.mark.parametrize("part", train_attention.PARTS)
def test_every_part_of_the_attention_bench_runs_and_is_right(records, part):
    found, failures = records(lambda bench: train_attention.PARTS[part](bench, Shapes.tiny()))
    assert failures == []
    assert len(found) == {"layer": 2, "core": 2, "index": 2}.get(part, 1)
    for record in found:
        assert max(record["correct"].values()) < 1e-5
        assert record.get("peer") == train_peer_of(part)


def train_peer_of(part):
    return {"layer": "transformers-sdpa", "core": "flash-dense"}.get(part)


def test_a_wrong_layer_is_not_recorded(records, monkeypatch):
    right = policy_layers.varlen_attention

    def wrong(*args, **kwargs):
        out, _ = right(*args, **kwargs)
        return out * 1.1, None

    monkeypatch.setattr(policy_layers, "varlen_attention", wrong)
    found, failures = records(lambda bench: train_layer.run(bench, Shapes.tiny()))
    assert found == []
    assert len(failures) == 2
    assert "above" in failures[0]


def test_what_does_not_fit_is_none():
    def run():
        raise torch.OutOfMemoryError("more than there is")

    assert cost_if_it_fits(run, CPU) is None


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """The records of the small slice's steps."""
    folder = tmp_path_factory.mktemp("results")
    bench = Bench(120.0, folder)
    train_step.run(bench, train_step.Slice.tiny(), [])
    assert bench.failures == []
    return {r["case"]: r for r in map(json.loads, (folder / "train_step.jsonl").open())}


def test_packed_and_padded_steps_have_the_same_loss_and_gradient(steps):
    record = steps["tiny in 3 samples"]
    assert record["peer"] == "transformers-sdpa"
    assert len(record["correct"]) == 5
    assert max(record["correct"].values()) < 1e-5
    assert record["value"]["padded_share_of_peers_rows"] == pytest.approx(1 - 35 / 63)


def test_a_packed_step_has_the_loss_of_its_samples_alone(steps):
    record = steps["tiny packed"]
    assert "peer" not in record
    assert record["correct"]["mean |delta logprob|, packed or alone"] < 1e-5


def test_a_peer_that_disagrees_costs_the_record(records, monkeypatch):
    rows = TransformersTrainer._rows

    def wrong(self, ids_BS, length_B):
        return rows(self, ids_BS, length_B) | {
            "position_ids": torch.zeros_like(torch.tensor(ids_BS))
        }

    monkeypatch.setattr(TransformersTrainer, "_rows", wrong)
    found, failures = records(
        lambda bench: train_step.run(bench, train_step.Slice.tiny(), ["tiny in 3 samples"])
    )
    assert found == []
    assert "the peer's" in failures[0]


def test_the_peer_takes_a_step_and_leaves_the_index_branch_alone():
    raw = published_config(1, 3, **TINY)
    settings = dataclasses.replace(train_step.OPTIMIZER, lr=1e-3)
    trainer = TransformersTrainer(raw, "float32", CPU, settings)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    batch = train_step.Samples.of((30, 12), vocab_size=131)
    first, norm = trainer.step(batch.ids_BS, np.array(batch.lengths), batch.mask_BS)
    second, _ = trainer.step(batch.ids_BS, np.array(batch.lengths), batch.mask_BS)
    assert norm > 0
    assert second < first
    after = dict(trainer.model.named_parameters())
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "indexer" in name}


def test_planned_memory_is_recorded_where_it_is_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train_memory", "--cpu", "--results", str(tmp_path)])
    assert train_memory.main() == 0
    found = list(map(json.loads, (tmp_path / "train_memory.jsonl").open()))
    assert [record["case"] for record in found] == list(train_memory.SMALL_CASES)
    assert all(record["correct"]["|planned / measured - 1|"] < 1e-3 for record in found)
    plan_rank = train_memory.plan_rank

    def too_much(setting):
        plan = plan_rank(setting)
        return dataclasses.replace(plan, uses=plan.uses | {"more": plan.total_bytes // 10})

    monkeypatch.setattr(train_memory, "plan_rank", too_much)
    assert train_memory.main() == 1
    assert len((tmp_path / "train_memory.jsonl").read_text().splitlines()) == len(found)


@pytest.mark.parametrize("command", ["train_attention", "train_step", "train_memory"])
def test_without_a_gpu_a_bench_says_so(command):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{command}"],
        capture_output=True,
        text=True,
        check=False,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 2
    assert "CUDA device, and there is none" in done.stderr

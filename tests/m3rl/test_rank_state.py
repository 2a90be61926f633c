"""A rank saved and loaded: the same bits, or a refusal that says why."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from m3rl import checkpoint
from m3rl.checkpoint import CheckpointError
from tests.m3rl.rank_cases import CONFIG, random_batch, start, with_optimizer
from tests.tiny_models import random_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


def test_stopped_and_resumed_is_bit_for_bit_uninterrupted(model, tmp_path):
    settings = replace(with_optimizer(warmup_steps=4), updates_per_batch=2)
    straight = start(model, settings)
    for seed in range(4):
        straight.update(random_batch(seed))

    stopped = start(model, settings)
    stopped.save(tmp_path / "at_0")
    for seed in range(2):
        stopped.update(random_batch(seed))
    torch.rand(3)
    np.random.rand(3)
    stopped.save(tmp_path / "at_2")
    expected = torch.rand(2).tolist(), np.random.rand(2).tolist()

    resumed = start(model, settings)
    assert resumed.load(tmp_path / "at_2") == resumed.policy_version == 4
    assert (torch.rand(2).tolist(), np.random.rand(2).tolist()) == expected
    for seed in range(2, 4):
        resumed.update(random_batch(seed))
    assert resumed.master_hash() == straight.master_hash()

    from_the_beginning = start(model, settings)
    assert from_the_beginning.load(tmp_path / "at_0") == 0
    for seed in range(4):
        from_the_beginning.update(random_batch(seed))
    assert from_the_beginning.master_hash() == straight.master_hash()


# BR-051
def test_a_checkpoint_is_a_model_path_and_keeps_the_bias_of_now(model, tmp_path):
    rank = start(model)
    rank.update(random_batch(0))
    bias = rank.policy.model.model.layers[1].mlp.gate.e_score_correction_bias
    with torch.no_grad():
        bias.copy_(torch.arange(8) * 0.1 + 0.1234567)
    rank.save(tmp_path / "saved")
    again = start(tmp_path / "saved")
    assert again.master_hash() == rank.master_hash()
    saved = again.policy.wire_view("model.layers.1.block_sparse_moe.e_score_correction_bias")
    assert torch.equal(saved, bias)
    assert (tmp_path / "saved" / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_a_resumed_run_writes_checkpoints_that_can_be_resumed_after_the_one_it_came_from_is_gone(
    model, tmp_path
):
    names = {"config.json": (model / "config.json").read_bytes(), "tokenizer.json": b"{}"}
    for name, content in names.items():
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_bytes(content)
    shutil.copyfile(model / "model.safetensors", tmp_path / "model" / "model.safetensors")
    checkpoint.save(tmp_path, 1, start(tmp_path / "model").save, {}, keep=2)
    for step in (2, 3, 4, 5):
        found = checkpoint.find_latest(tmp_path)
        assert found.step == step - 1  # it is whole
        if step in (2, 5):
            rank = start(found.path)
            rank.load(found.path)
        rank.update(random_batch(step))
        newest = checkpoint.save(tmp_path, step, rank.save, {}, keep=2)
    assert {name: (newest / name).read_bytes() for name in names} == names
    assert start(newest).master_hash() == rank.master_hash()


def test_checkpoints_of_other_models_or_rank_counts_are_refused(model, tmp_path):
    rank = start(model)
    rank.save(tmp_path / "saved")
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    raw["text_config"]["rope_theta"] = 10000
    (tmp_path / "saved" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="is another model than"):
        rank.load(tmp_path / "saved")
    rank.save(tmp_path / "of_two")
    (tmp_path / "of_two" / "ranks" / "00001.pt").touch()
    with pytest.raises(CheckpointError, match=r"resume it with train\.num_ranks=2"):
        rank.load(tmp_path / "of_two")

"""What of the benches of MXFP8 can be shown without a GPU: floors, the peer's config, the gate."""

import json
import sys

import pytest
import torch

from benchmarks import agreement, slices
from benchmarks.vllm_engine import model_config
from tests.tiny_models import random_checkpoint, tiny_config

RAW = tiny_config(intermediate_size=64, num_hidden_layers=2, num_local_experts=2)


def test_an_expert_in_mxfp8_has_the_bytes_of_values_and_scales():
    assert slices.expert_bytes("mxfp8") == 3 * 3072 * 6144 * 33 / 32
    assert slices.expert_bytes() == 3 * 3072 * 6144 * 2


def test_the_floor_counts_what_each_scope_quantises():
    plain, experts, released = (
        slices.decode_bytes(1, 512, 4, quantization=name)
        for name in ("none", "mxfp8", "mxfp8_released")
    )
    assert plain - experts == 3 * 4 * (slices.expert_bytes() - slices.expert_bytes("mxfp8"))
    head = 2 * 200064 * 6144
    assert experts - released == (slices.linear_bytes() - head) * (1 - 33 / 64)


@pytest.mark.parametrize("quantization", ["mxfp8", "mxfp8_released"])
def test_the_peer_quantises_what_the_runtime_does(quantization):
    ignored = model_config(16, quantization)["quantization_config"]["ignored_layers"]
    assert "model.layers.3.block_sparse_moe.gate" in ignored
    assert not any(".experts." in name for name in ignored)
    for name in ("self_attn.q_proj", "block_sparse_moe.shared_experts.up_proj"):
        assert (f"model.layers.3.{name}" in ignored) == (quantization == "mxfp8")
    assert "quantization_config" not in model_config(16, "none")


@pytest.fixture
def run_agreement(tmp_path, monkeypatch):
    """Compare a small model in MXFP8 on the CPU; gives (exit status, records)."""
    random_checkpoint(tmp_path / "hf", RAW, seed=3, dtype=torch.bfloat16)
    prompts = [[5, 6, 7], list(range(2, 42))]
    (tmp_path / "prompts.json").write_text(json.dumps({"prompts": prompts}))
    command = ["agreement", str(tmp_path), "--quantization", "mxfp8", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run():
        status, file = agreement.main(), tmp_path / "engine.jsonl"
        return status, [json.loads(line) for line in file.open()] if file.exists() else []

    return run


def test_a_replica_in_mxfp8_agrees_with_one_that_holds_its_values(run_agreement):
    status, (record,) = run_agreement()
    assert status == 0
    assert record["value"]["mean"] <= 1e-5
    assert record["value"]["top1"] == 1


def test_a_replica_that_disagrees_is_not_recorded(run_agreement, monkeypatch):
    monkeypatch.setattr(agreement, "without_quantization", lambda tensors, *_: tensors)
    assert run_agreement() == (1, [])

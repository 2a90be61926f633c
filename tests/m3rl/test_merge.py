"""`m3rl merge`: a checkpoint becomes a model directory."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from inference import LLM, SamplingParams
from inference.models.checkpoint import CheckpointError as RuntimeCheckpointError
from inference.models.checkpoint import list_tensors
from inference.models.weights import read_checkpoint
from inference.quantize import quantize_checkpoint
from m3rl import checkpoint
from m3rl.checkpoint import CheckpointError
from m3rl.checkpoint_files import weight_problems
from m3rl.cli import main
from m3rl.lora.files import StoredAdapters
from m3rl.lora.merge import merge_checkpoint
from tests.m3rl.lora_cases import ALL, CONFIG, LORA, RANK
from tests.m3rl.rank_cases import random_batch, start
from tests.m3rl.tiny_tokenizer import write_tokenizer
from tests.tiny_models import model_config, random_checkpoint

MODEL = model_config(CONFIG)
BF16 = replace(RANK, dtype="bfloat16")
ADAPTED = {
    "attention": RANK,
    "everything": replace(BF16, lora=replace(LORA, targets=ALL)),
    "frozen_mxfp8": replace(BF16, lora=replace(LORA, mxfp8_experts=True)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


@pytest.fixture(scope="module")
def mxfp8_model(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("quantised") / "mxfp8"
    quantize_checkpoint(model, path)
    return path


def trained(model, settings, folder):
    """A rank after a step, and its checkpoint."""
    rank = start(model, settings)
    rank.update(random_batch(1))
    rank.save(folder)
    return rank


def weights(path):
    return dict(read_checkpoint(path, MODEL))


def assert_same(path, expected):
    found = weights(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", ADAPTED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_merged_adapters_are_the_bits_that_their_trainer_computes_with(
    model, tmp_path, case, dtype
):
    (tmp_path / "step").mkdir()
    rank = trained(model, ADAPTED[case], tmp_path / "step")
    rank.save_model(tmp_path / "expected", dtype)
    merge_checkpoint(tmp_path / "step", tmp_path / "out", dtype=dtype)
    assert_same(tmp_path / "out", weights(tmp_path / "expected"))
    base = weights(model)
    assert any(
        not torch.equal(t.float(), base[n].to(t.dtype).float())
        for n, t in weights(tmp_path / "out").items()
    )
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        p.name for p in (tmp_path / "expected").iterdir()
    )


def test_a_base_in_mxfp8_gives_a_model_that_is_not_quantised(mxfp8_model, tmp_path):
    (tmp_path / "step").mkdir()
    rank = trained(mxfp8_model, ADAPTED["frozen_mxfp8"], tmp_path / "step")
    merge_checkpoint(tmp_path / "step", tmp_path / "out")
    assert_same(
        tmp_path / "out",
        {n: t if t.dtype == torch.float32 else t.bfloat16() for n, t in rank.policy.export()},
    )
    assert "quantization_config" in json.loads((tmp_path / "step/config.json").read_text())
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert weight_problems(tmp_path / "out", MODEL.num_parameters) == []


def test_a_checkpoint_of_all_weights_is_rounded_once(model, tmp_path):
    run = tmp_path / "run"
    rank = start(model, replace(RANK, lora=None))
    rank.update(random_batch(1))
    checkpoint.save(run, 1, rank.save, {}, keep=1)
    rank.save_model(tmp_path / "expected", "bfloat16")
    for place, source in enumerate((run, run / "checkpoints" / "step_000001")):
        merge_checkpoint(source, tmp_path / f"out{place}")
        assert_same(tmp_path / f"out{place}", weights(tmp_path / "expected"))
    with pytest.raises(CheckpointError, match="holds all weights, no adapters"):
        merge_checkpoint(run, tmp_path / "other", base=model)
    with pytest.raises(CheckpointError, match="out0 exists; give a path that does not"):
        merge_checkpoint(run, tmp_path / "out0")


def test_the_runtime_generates_what_the_trainer_expects(model, tmp_path):
    moved = tmp_path / "model"
    shutil.copytree(model, moved)
    write_tokenizer(moved)
    (tmp_path / "step").mkdir()
    rank, batch = trained(moved, RANK, tmp_path / "step"), random_batch(2)
    merge_checkpoint(tmp_path / "step", tmp_path / "out", dtype="float32")
    prompt = batch.ids_BS[0, :5].tolist()
    llm = LLM(tmp_path / "out", num_pages=64)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True, seed=1))
    row = np.array(prompt + output.token_ids.tolist())
    batch.ids_BS[0, : len(row)], batch.length_B[0] = row, len(row)
    batch.loss_mask_BS[0] = False
    batch.loss_mask_BS[0, 5 : len(row)] = True
    batch.behaviour_logprobs_BS[:] = 0
    np.testing.assert_allclose(rank.logprobs(batch)[0, 5 : len(row)], output.logprobs, atol=1e-5)


def test_adapters_are_merged_into_the_model_that_they_were_trained_on(model, tmp_path):
    (tmp_path / "step").mkdir()
    first, other = tmp_path / "first", tmp_path / "other"
    shutil.copytree(model, first)
    random_checkpoint(other, CONFIG, seed=1)
    trained(first, RANK, tmp_path / "step").save_model(tmp_path / "expected")
    first.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"first, which is not there; .* with --base"):
        merge_checkpoint(tmp_path / "step", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"other have the hash .* with --base"):
        merge_checkpoint(tmp_path / "step", tmp_path / "out", base=other)
    assert not [p for p in tmp_path.iterdir() if p.name.endswith("out")], "nothing is left"
    config = (other / "config.json").read_text().replace('"rope_theta": 5000000', '"rope_theta": 9')
    (other / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match="other is another model than"):
        merge_checkpoint(tmp_path / "step", tmp_path / "out", base=other)
    merge_checkpoint(tmp_path / "step", tmp_path / "out", base=tmp_path / "moved", dtype="float32")
    assert_same(tmp_path / "out", weights(tmp_path / "expected"))


def test_what_is_no_whole_checkpoint_is_refused(model, tmp_path):
    rank = start(model, RANK)
    step = checkpoint.save(tmp_path / "run", 1, rank.save, {}, keep=1)
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run directory"):
        merge_checkpoint(tmp_path, tmp_path / "out")
    weights_file = step / "adapter_model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="not complete: the content of adapter_model"):
        merge_checkpoint(step, tmp_path / "out")
    (step / "manifest.json").unlink()
    weights_file.unlink()
    with pytest.raises(CheckpointError, match="no adapters can be read"):
        merge_checkpoint(step, tmp_path / "out")


def test_adapters_of_others_are_refused(model, tmp_path):
    trained(model, RANK, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"r": None}))
    with pytest.raises(CheckpointError, match="no adapters can be read"):
        StoredAdapters.open(tmp_path)
    del config["r"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"do not say their 'r'; .* merge with peft"):
        StoredAdapters.open(tmp_path)


def test_a_checkpoint_of_adapters_as_a_model_names_the_command(model, tmp_path):
    trained(model, RANK, tmp_path)
    (problem,) = weight_problems(tmp_path, MODEL.num_parameters)
    assert f"`m3rl merge {tmp_path} OUT`" in problem
    with pytest.raises(RuntimeCheckpointError, match=r"holds adapters, not a model; .*m3rl merge"):
        list_tensors(tmp_path)


def test_the_command_merges_or_says_why_not(model, tmp_path, capsys):
    (tmp_path / "step").mkdir()
    trained(model, RANK, tmp_path / "step")
    words = ["merge", str(tmp_path / "step"), str(tmp_path / "out"), "--base", str(model)]
    assert main([*words, "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    assert {t.dtype for t in weights(tmp_path / "out").values()} == {torch.float32}
    assert main(words) == 1
    assert (
        capsys.readouterr().err == f"error: {tmp_path / 'out'} exists; give a path that does not\n"
    )


def test_a_checkpoint_of_another_architecture_is_rounded_too(tmp_path):
    source = Path("configs/models/tiny_qwen3")
    merge_checkpoint(source, tmp_path / "out")
    wanted, found = (load_file(f / "model.safetensors") for f in (source, tmp_path / "out"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name].bfloat16()) for name in wanted)

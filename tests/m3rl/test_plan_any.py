"""`m3rl check` of other architectures than M3: what is refused, and what is planned."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from m3rl.config import Config, ConfigError
from m3rl.config_architecture import architecture_conflicts
from m3rl.plan import make_plan
from m3rl.plan_any import AnyPlan
from m3rl.plan_text import describe, gpu_table
from tests.m3rl import run_files
from tests.m3rl.any_models import QWEN3_MOE, write_any
from tests.m3rl.rank_cases import SETTINGS, random_batch, start

MODEL = Path("configs/models/tiny_qwen3")
NUM_PARAMETERS = 468_736
SHORT = {"micro_batch_tokens": 1024}


def config(folder: Path, model: Path = MODEL, **sections) -> Config:
    return run_files.config(folder, model={"path": str(model)}, **sections)


def plan(folder: Path, model: Path = MODEL, **sections) -> AnyPlan:
    """Of what `m3rl sft` starts: no replicas."""
    made = make_plan(config(folder, model, **sections), generates=False)
    assert isinstance(made, AnyPlan)
    return made


@pytest.fixture
def copied(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "model")


def change(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_parameters_are_counted_by_class(tmp_path):
    made = plan(tmp_path)
    assert made.parameters == {
        "embedding": 263 * 96,
        "norms": 4 * (2 * 96 + 2 * 32) + 96,
        "MLPs": 4 * 3 * 96 * 256,
        "attention": 4 * (2 * 96 * 128 + 2 * 96 * 64),
    }
    assert sum(made.parameters.values()) == NUM_PARAMETERS


def test_a_rank_takes_what_was_planned(tmp_path):
    made = plan(tmp_path, grpo={"kl": {"coef": 0.1}})
    rank = start(MODEL, replace(SETTINGS, loss=replace(SETTINGS.loss, kl_coef=0.1)))
    rank.update(random_batch(0))
    moments = [t for n, t in rank._optimizer.tensors().items() if not n.endswith(".step")]
    assert made.trainer == {
        "FP32 masters": sum(p.nbytes for p in rank.policy.parameters()),
        "AdamW moments": sum(t.nbytes for t in moments),
        "weights before an update": sum(t.nbytes for t in rank.policy.wire_state().values()),
        "reference policy": sum(p.nbytes for p in rank._reference.parameters()),
        "gradients": sum(p.nbytes for p in rank.policy.parameters()),
    }
    assert made.received_bytes == made.sent_bytes == 4 * NUM_PARAMETERS


def test_ranks_share_masters_and_a_worker_takes_all_weights_in_the_wires_dtype(tmp_path):
    made = plan(tmp_path, train={"num_ranks": 2}, policy={"dtype": "bfloat16"})
    half = 132 * 96 + (NUM_PARAMETERS - 263 * 96) // 2
    assert made.trainer["FP32 masters"] == 4 * half
    assert made.sent_bytes == 2 * half
    assert made.received_bytes == 2 * NUM_PARAMETERS


def test_experts_are_a_class_of_their_own_and_divide(tmp_path):
    shutil.copytree(MODEL, tmp_path / "moe", ignore=shutil.ignore_patterns("*.safetensors"))
    model = write_any(tmp_path / "moe", QWEN3_MOE, vocab_size=263, max_position_embeddings=512)
    made = plan(tmp_path, tmp_path / "moe")
    assert sum(made.parameters.values()) == sum(p.numel() for p in model.parameters())
    experts = [p for p in model.parameters() if p.ndim == 3]
    assert made.parameters["routed experts"] == sum(p.numel() for p in experts)
    quarter = plan(tmp_path, tmp_path / "moe", train={"num_ranks": 4}).trainer["FP32 masters"]
    assert math.isclose(quarter, made.trainer["FP32 masters"] / 4, rel_tol=0.01)


def on_gpu(gib):
    return {"max_tokens": 12, "backend": {"device": "cuda", "gpu_memory_gib": gib}}


def test_on_a_gpu_more_than_it_has_is_refused_with_what_needs_less(tmp_path):
    sections = {
        "train": {"device": "cuda"},
        "policy": {"dtype": "bfloat16", "activation_checkpointing": False},
    }
    with pytest.raises(ConfigError, match=r"a GPU of 1 ranks needs .* and has 1\.0 GiB") as refusal:
        plan(tmp_path, rollout=on_gpu(1), **sections)
    assert "policy.activation_checkpointing: true; optimizer.offload: true" in str(refusal.value)
    fits = plan(tmp_path, rollout=on_gpu(100), **sections)
    shorter = dict(sections["policy"], micro_batch_tokens=1024)
    smaller = plan(tmp_path, **(sections | {"policy": shorter}))
    assert sum(smaller.trainer.values()) < sum(fits.trainer.values())


def test_the_plan_reads_as_tables(tmp_path):
    text = describe(plan(tmp_path))
    assert "a model of type qwen3" in text
    assert "468,736" in text
    assert "weight sync: 1.8 MiB from the busiest trainer rank" in text
    assert "rank of a replica" not in text
    told = describe(replace(plan(tmp_path), replica={"KV cache": 3 << 30}))
    assert "one rank of a replica  KV cache" in told
    with pytest.raises(ConfigError, match="--gpus: plans MiniMax-M3 alone"):
        gpu_table(plan(tmp_path), [8])


def test_the_bundled_runtime_is_refused_where_replicas_are_started(tmp_path):
    with pytest.raises(ConfigError, match=r"type qwen3; set rollout\.backend\.kind: vllm"):
        make_plan(config(tmp_path))


@pytest.mark.parametrize(
    ("section", "values", "key"),
    [
        ("policy", {"lora": {}, "dtype": "float32"}, "policy.lora"),
        ("policy", {"index_loss": {"coef": 0.1}, "dtype": "float32"}, "policy.index_loss.coef"),
        ("policy", {"index_drift_every": 2, "dtype": "float32"}, "policy.index_drift_every"),
        ("train", {"num_ranks": 2, "parallel": {"ep": 2}}, "train.parallel.ep"),
        ("train", {"num_ranks": 2, "parallel": {"cp": 2}}, "train.parallel.cp"),
    ],
)
def test_what_m3_alone_has_is_refused_with_its_key(tmp_path, section, values, key):
    with pytest.raises(ConfigError, match=f"{key}: is for MiniMax-M3") as refusal:
        make_plan(config(tmp_path, **{section: values}), generates=False)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("head_dim", [36, 256])
def test_heads_that_no_kernel_takes_are_refused_on_a_gpu(tmp_path, copied, head_dim):
    change(copied / "config.json", head_dim=head_dim)
    assert plan(tmp_path, copied)
    with pytest.raises(ConfigError, match=f"train.device: cuda .* have {head_dim}; set cpu"):
        plan(tmp_path, copied, train={"device": "cuda"}, policy={"dtype": "bfloat16", **SHORT})


def test_nothing_of_it_is_refused_for_m3(tmp_path):
    run_files.write_model(tmp_path / "model")
    drifting = run_files.config(tmp_path, policy={"index_drift_every": 2, "dtype": "float32"})
    assert list(architecture_conflicts(drifting, tmp_path / "model")) == []


def test_rows_longer_than_the_models_positions_are_refused(tmp_path, copied):
    change(copied / "config.json", max_position_embeddings=111)
    with pytest.raises(ConfigError, match=r"= 112 is more than the model's .* 111"):
        plan(tmp_path, copied)


def test_files_that_do_not_fit_the_model_are_refused(tmp_path, copied):
    change(copied / "config.json", vocab_size=300)
    with pytest.raises(ConfigError, match=r"has 263 rows, and config.json a vocab_size of 300"):
        plan(tmp_path, copied)
    change(copied / "config.json", vocab_size=263)
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="truncated or damaged"):
        plan(tmp_path, copied)


def test_a_warm_start_from_random_weights_needs_none_and_a_check_lists_them(tmp_path, copied):
    (copied / "model.safetensors").unlink()
    random = make_plan(config(tmp_path, copied), required=["tokenizer"], generates=False)
    assert isinstance(random, AnyPlan)
    assert random.parameters == {}
    assert any("copy the weights" in notice for notice in random.notices)
    with pytest.raises(ConfigError, match="copy the weights"):
        plan(tmp_path, copied)
    checked = make_plan(config(tmp_path, copied), is_launch=False, generates=False)
    assert any("copy the weights" in what for what in checked.needed)
    assert "needed at launch" in describe(checked)


def test_check_answers_without_importing_torch_or_transformers(tmp_path):
    (tmp_path / "config.yaml").write_text(json.dumps(run_files.settings(tmp_path)))
    code = (
        "import sys; from m3rl.cli import main; "
        f"code = main(['check', {str(tmp_path / 'config.yaml')!r}, 'model.path={MODEL}']); "
        "heavy = {'ray', 'torch', 'transformers', 'wandb', 'vllm'} & set(sys.modules); "
        "assert not heavy, heavy; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "set rollout.backend.kind: vllm" in done.stderr


def test_a_tensor_that_cannot_be_trained_is_named(tmp_path, copied):
    from safetensors.torch import load_file, save_file

    tensors = load_file(copied / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, copied / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is I8"):
        plan(tmp_path, copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": "</s>"}, "eos_token_id has '</s>', no token id"),
        ({"num_attention_heads": "4"}, "num_attention_heads '4', no number"),
    ],
)
def test_values_of_a_wrong_type_are_named(tmp_path, copied, changes, message):
    change(copied / "config.json", **changes)
    backend = {"backend": {"kind": "vllm"}}
    with pytest.raises(ConfigError, match=message):
        make_plan(config(tmp_path, copied, rollout=backend), is_launch=False)


def test_a_key_that_is_no_text_is_named():
    words = ["rollout.backend.kind=vllm", "rollout.backend.engine.extra={1: 2}"]
    with pytest.raises(ConfigError, match=r"extra\.1: a key must be text"):
        Config.load("configs/tiny_cpu.yaml", words)


def test_a_tied_head_may_be_stored_and_must_be_the_embedding(tmp_path, copied):
    file = copied / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    assert sum(plan(tmp_path, copied).parameters.values()) == NUM_PARAMETERS
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"ties embedding and head .* set tie_word_embeddings"):
        plan(tmp_path, copied)

"""Settings and plans of adapters."""

import json
from pathlib import Path

import pytest
import torch

from inference.config import ModelConfig
from m3rl.assemble import rank_settings
from m3rl.checkpoint_files import weight_problems
from m3rl.config import Config, ConfigError
from m3rl.config_checks import idle_keys
from m3rl.config_policy import lora_settings
from m3rl.lora.frozen import MXFP8Experts, allocate_experts
from m3rl.lora.policy import LoraPolicy
from m3rl.lora.settings import LoraSettings
from m3rl.plan import make_plan
from m3rl.plan_lora import plan_rank
from m3rl.plan_trainer import TrainerSetting
from tests.m3rl.lora_cases import ALL, CONFIG
from tests.m3rl.run_files import config, settings, write_model
from tests.tiny_models import model_config

RECIPE = Path(__file__).parents[2] / "configs" / "m3_16gpu_lora.yaml"
H200_BYTES = 139 << 30


def adapted(folder, **lora):
    return config(folder, policy={"dtype": "bfloat16", "lora": lora})


def test_settings_of_ranks_are_those_of_the_file(tmp_path):
    assert rank_settings(config(tmp_path)).lora is None
    lora = {"rank": 8, "alpha": 4, "targets": ["shared_experts", "attention"]}
    run = {"name": "test", "dir": str(tmp_path), "seed": 7}
    policy = {"dtype": "bfloat16", "lora": lora | {"frozen_experts": "mxfp8"}}
    found = lora_settings(config(tmp_path, run=run, policy=policy))
    assert found == LoraSettings(8, 4.0, ("shared_experts", "attention"), True, 7)
    assert found.scale == 0.5
    assert lora_settings(adapted(tmp_path)) == LoraSettings(16, 32.0)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 0}, "policy.lora.rank"),
        ({"alpha": 0}, "policy.lora.alpha"),
        ({"targets": []}, "policy.lora.targets"),
        ({"targets": ["mlp"]}, "policy.lora.targets"),
        ({"frozen_experts": "int4"}, "policy.lora.frozen_experts"),
        ({"ranks": 3}, "policy.lora.ranks: unknown key .*; did you mean 'rank'"),
        (
            {"targets": ["experts"], "frozen_experts": "mxfp8"},
            "quantised anew in every step with policy.lora.frozen_experts: mxfp8",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, lora, said):
    with pytest.raises(ConfigError, match=said):
        adapted(tmp_path, **lora)


def test_the_index_branch_is_not_trained_beside_adapters(tmp_path):
    policy = {"lora": {}, "index_loss": {"coef": 0.1}}
    with pytest.raises(ConfigError, match=r"with policy\.lora adapters alone are trained"):
        config(tmp_path, policy=policy)


def test_adapters_of_random_weights_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"adapters need a trained base, and sft\.init: random"):
        config(tmp_path, policy={"lora": {}}, sft={"init": "random"})


def test_a_delta_is_not_idle_where_most_weights_stay(tmp_path):
    def idle(**policy):
        raw = settings(tmp_path, policy={"dtype": "float32"} | policy, weight_sync={"delta": True})
        loaded = Config.from_dict(raw, {"weight_sync.delta": "file:1"})
        return [text for text in idle_keys(loaded) if text.startswith("weight_sync.delta ")]

    assert len(idle()) == 1
    assert idle(lora={}) == []


def test_full_syncs_of_adapters_are_noticed(tmp_path):
    write_model(tmp_path / "model")
    plan = make_plan(adapted(tmp_path))
    assert any("with delta: true only these travel" in notice for notice in plan.notices)


def test_adapters_may_have_a_base_in_mxfp8(tmp_path):
    model = write_model(tmp_path / "model")
    config_file = json.loads((model / "config.json").read_text())
    count = ModelConfig.from_dict(config_file, source="test").num_parameters
    header = {"model.all": {"dtype": "F8_E4M3", "shape": [count], "data_offsets": [0, count]}}
    raw = json.dumps(header).encode()
    file = model / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(count))
    make_plan(adapted(tmp_path))
    with pytest.raises(ConfigError, match=r"MXFP8 is for policy\.lora"):
        make_plan(config(tmp_path))
    assert weight_problems(model, count, allow_mxfp8=True) == []


@pytest.mark.parametrize("targets", [("attention",), ALL])
@pytest.mark.parametrize("mxfp8", [False, True])
def test_what_is_planned_is_what_a_policy_holds(targets, mxfp8):
    mxfp8 = mxfp8 and "experts" not in targets
    lora = LoraSettings(rank=3, alpha=1.0, targets=targets, mxfp8_experts=mxfp8)
    policy = LoraPolicy(model_config(CONFIG), dtype="bfloat16", lora=lora)
    allocate_experts(policy.model, torch.device("cpu"))
    held = [e.held for e in policy.model.modules() if isinstance(e, MXFP8Experts)]
    experts = sum(t.nbytes for each in held for weight in each.values() for t in weight)
    state = policy.model.state_dict()
    stacks = sum(t.nbytes for name, t in state.items() if ".mlp.experts." in name)
    uses = plan_rank(TrainerSetting(policy.config, "bfloat16", lora=lora)).uses
    assert uses["frozen experts"] == experts + stacks
    assert uses["frozen weights"] == sum(t.nbytes for t in state.values()) - stacks
    assert uses["adapters"] == sum(p.nbytes for p in policy.adapters.parameters())
    assert uses["AdamW moments"] == 2 * uses["adapters"]
    assert uses["gradients"] == uses["adapters"]
    adapted = sum(policy._own(name)[0].nbytes for name in policy.adapters.names)
    assert uses["base of adapted weights"] == adapted


def test_the_real_model_fits_two_nodes_of_eight():
    plan = make_plan(Config.load(RECIPE), is_launch=False)
    assert plan.trainer.ranks == plan.sync.replica.world == 8
    assert plan.memory.total_bytes < 0.8 * H200_BYTES
    assert plan.replica.total_bytes < 0.8 * H200_BYTES
    # 33 bytes for 32 values; an eighth of the experts on each rank.
    experts = plan.parameters["routed experts"] // 8 * 33 / 32
    assert plan.memory.uses["frozen experts"] == pytest.approx(experts, rel=1e-6)
    assert plan.notices == ()
    larger = ["policy.lora.frozen_experts=auto", "policy.micro_batch_tokens=65536"]
    too_large = Config.load(RECIPE, larger)
    with pytest.raises(ConfigError, match="train: a GPU of 8 ranks, ep 8, cp 1, needs"):
        make_plan(too_large, is_launch=False)

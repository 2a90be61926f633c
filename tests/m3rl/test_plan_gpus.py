"""Plans of runs on GPUs: memory, times, clusters of several sizes, and the recipes."""

import json
import re
import time
from pathlib import Path

import pytest

from m3rl.cli import main
from m3rl.config import Config, ConfigError
from m3rl.plan import make_plan
from m3rl.plan_text import describe, gpu_table
from tests.m3rl.run_files import config, write_model
from tests.released_model import released_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def refusal(folder, required=(), **sections):
    with pytest.raises(ConfigError) as caught:
        make_plan(config(folder, **sections), required=required)
    return str(caught.value)


def rollout(**changes):
    return {"group_size": 2, "prompts_per_step": 4, "max_tokens": 12} | changes


def cuda(**backend):
    return {"backend": {"kind": "m3", "device": "cuda", **backend}}


def test_a_sync_between_gpus_is_projected(tmp_path, model):
    text = describe(make_plan(config(tmp_path, rollout=rollout(**cuda(gpu_memory_gib=139)))))
    assert re.search(r"projected on H200s: \d+\.\d\d s, floor \d+\.\d\d s, at 50 GB/s a GPU", text)


def test_a_sync_that_must_exceed_its_deadline_is_refused(tmp_path, model):
    one = config(tmp_path, rollout=rollout(**cuda(gpu_memory_gib=139)))
    make_plan(one)
    # Less than the configuration lets anybody write: a sync of this model takes no second.
    hasty = one.weight_sync.model_copy(update={"timeout_s": 1e-6})
    with pytest.raises(ConfigError) as caught:
        make_plan(one.model_copy(update={"weight_sync": hasty}))
    text = str(caught.value)
    assert "weight_sync.timeout_s: 1e-06" in text
    assert "is less than a sync takes at the speed of the links, 0.00 s; raise it" in text


def test_chunks_and_deltas_of_the_configuration_are_those_of_the_plan(tmp_path, model):
    plan = make_plan(config(tmp_path, weight_sync={"chunk_mib": 7, "delta": True}))
    assert (plan.sync.chunk_bytes, plan.sync.delta) == (7 << 20, True)
    assert "rounds of 7.0 MiB a worker" in describe(plan)


def test_gpus_beyond_the_trainers_are_replicas_and_with_too_few_fewer_train(tmp_path, model):
    text, works = gpu_table(make_plan(config(tmp_path, train={"num_ranks": 2})), [1, 2, 8])
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()[2:]]
    assert rows[0] == [
        "1",
        "-",
        "-",
        "-",
        "-",
        "refused: train.num_ranks and one replica are 3 GPUs",
    ]
    assert rows[1][:3] == ["2", "1", "1 of 1"]
    assert rows[1][-1] == "fits with train.num_ranks: 1"
    assert rows[2][:3] == ["8", "2", "6 of 1"]
    assert "s, floor" in rows[2][3]
    assert rows[2][-1] == "fits"
    assert works


def released(model):
    """The real model in the place of the small one."""
    (model / "config.json").write_text(json.dumps(released_config() | {"eos_token_id": 200020}))


MXFP8 = cuda(gpu_memory_gib=139, parallel={"dp": 8}, engine={"quantization": "mxfp8"})
ON_GPUS = {"policy": {"dtype": "bfloat16", "micro_batch_tokens": 512}}


def test_the_real_model_has_the_parameters_of_its_checkpoint(tmp_path, model):
    released(model)
    plan = make_plan(config(tmp_path), required=[])
    assert sum(plan.parameters.values()) + plan.vision_parameters == 427_040_140_160
    rows = [line.split() for line in describe(plan).splitlines()]
    assert ["all", "with", "vision", "427,040,140,160"] in rows
    active = next(int(row[-1].replace(",", "")) for row in rows if row[:1] == ["active"])
    assert round(active / 1e9, 1) == 23.5


def test_gpus_that_are_too_few_for_the_real_model_are_refused_with_what_it_needs(tmp_path, model):
    released(model)
    plain = make_plan(config(tmp_path, rollout=rollout(**cuda()), **ON_GPUS), required=[])
    text, works = gpu_table(plain, [8])
    assert not works
    assert "refused: no replica fits 7 GPUs" in text
    half = make_plan(config(tmp_path, rollout=rollout(**MXFP8), **ON_GPUS), required=[])
    text, works = gpu_table(half, [8, 16])
    assert not works
    assert re.search(r"refused: a trainer rank needs at least \d+\.\d TiB on 4 GPUs", text)


def test_the_real_model_is_spread_over_a_cluster_with_what_must_be_set(tmp_path, model):
    released(model)
    options = {"rollout": rollout(**MXFP8), "train": {"device": "cuda", "num_ranks": 128}}
    plan = make_plan(config(tmp_path, **ON_GPUS, **options), required=[])
    row = gpu_table(plan, [128])[0].splitlines()[2]
    fits = r"128 +64 +8 of 8 .* (\d+) s +fits with train.num_ranks: 64, optimizer.offload: true"
    assert re.search(fits, row)


def test_a_trainer_rank_that_does_not_fit_is_refused_with_what_does(tmp_path, model):
    released(model)
    options = {"rollout": rollout(**MXFP8), **ON_GPUS}
    options["train"] = {"device": "cuda", "num_ranks": 64, "parallel": {"ep": 8}}
    options["grpo"] = {"kl": {"coef": 0.1}}
    text = refusal(tmp_path, **options)
    assert "train: a GPU of 64 ranks, ep 8, cp 1, needs " in text
    assert re.search(r"  AdamW moments +49\.6 GiB", text)
    assert "at its backward pass of layer" in text
    assert "what fits: optimizer.offload: true; " in text
    options["optimizer"] = {"offload": True}
    make_plan(config(tmp_path, **options), required=[])


def test_experts_that_cannot_be_split_so_are_refused(tmp_path, model):
    assert "trainer ep=3 does not divide 4 experts" in refusal(
        tmp_path, train={"num_ranks": 3, "parallel": {"ep": 3}}
    )


def test_a_step_on_gpus_is_projected_in_its_parts(tmp_path, model):
    on_gpus = {
        "rollout": rollout(**cuda()),
        "train": {"device": "cuda"},
        "policy": {"dtype": "bfloat16"},
    }
    text = describe(make_plan(config(tmp_path, **on_gpus)))
    parts = r"(.*) s = generation (.*) \+ training (.*) \+ weight sync (.*), [\d,]+ tokens/s"
    total, *seconds = map(float, re.search(f"projected step .*: {parts}", text).groups())
    assert total == pytest.approx(sum(seconds), abs=0.02)
    assert "1 micro-batches of 8,192 tokens an update: head 2.0 GiB, " in text
    assert "projected step" not in describe(make_plan(config(tmp_path)))


def test_a_replica_that_does_not_fit_its_gpu_is_refused_with_what_fits(tmp_path, model):
    small = 2.25  # GiB, where CUDA alone takes 2
    pages = cuda(gpu_memory_gib=small, engine={"num_pages": 4_000_000})
    text = refusal(tmp_path, rollout=rollout(**pages))
    assert "a GPU of tp=1, ep=1, dp=1 needs 4." in text
    assert "and has 2.2 GiB: 2." in text
    assert re.search(r"  KV pages +1\.9 GiB", text)
    most = int(re.search(r"what fits: num_pages=(\d+) or less", text)[1])
    fitting = cuda(gpu_memory_gib=small, engine={"num_pages": most})
    plan = make_plan(config(tmp_path, rollout=rollout(**fitting)))
    assert f"its GPU has room for {most:,} pages" in describe(plan)


def test_a_split_replica_is_planned_by_its_ranks(tmp_path, model):
    whole = make_plan(config(tmp_path, rollout=rollout(**cuda(gpu_memory_gib=139))))
    split = cuda(gpu_memory_gib=139, parallel={"tp": 1, "dp": 2})
    plan = make_plan(config(tmp_path, rollout=rollout(**split)))
    experts = [each.replica.weights["routed experts"] for each in (plan, whole)]
    assert experts[0] == experts[1] // 2
    assert plan.sync.replica.world == len(plan.projection.received_bytes) == 2
    assert plan.demand_pages < whole.demand_pages
    assert "one rank of a replica" in describe(plan)
    rows = gpu_table(plan, [2, 3, 5])[0].splitlines()[-3:]
    assert "1 of 1 " in rows[0]
    assert rows[0].endswith("fits with rollout.backend.parallel: tp 1, dp 1, ep 1")
    assert [re.search(r"^ +(\d) +1 +(\d) of 2", row).groups() for row in rows[1:]] == [
        ("3", "1"),
        ("5", "2"),
    ]


def test_a_replica_that_cannot_be_split_so_is_refused_with_what_can(tmp_path, model):
    split = {"backend": {"kind": "m3", "parallel": {"tp": 5}}}
    assert "tp=5 does not divide num_attention_heads" in refusal(tmp_path, rollout=rollout(**split))
    split = {"backend": {"kind": "m3", "parallel": {"tp": 2, "ep": 3}}}
    assert "ep=3 does not divide into tp=2, dp=1" in refusal(tmp_path, rollout=rollout(**split))


def test_a_gpu_of_unknown_size_is_noticed(tmp_path, model):
    plan = make_plan(config(tmp_path, rollout=rollout(**cuda())))
    assert any("rollout.backend.gpu_memory_gib: null" in notice for notice in plan.notices)
    known = make_plan(config(tmp_path, rollout=rollout(**cuda(gpu_memory_gib=139))))
    assert not any("gpu_memory_gib" in notice for notice in known.notices)
    assert gpu_table(known, [2])[0].startswith("GPUs of 139.0 GiB")


def test_gpu_memory_of_a_replica_without_a_gpu_is_a_contradiction(tmp_path):
    cpu = {"backend": {"kind": "m3", "device": "cpu", "gpu_memory_gib": 139}}
    with pytest.raises(ConfigError, match="device: cpu uses none"):
        config(tmp_path, rollout=rollout(**cpu))


RECIPES = sorted((ROOT / "configs").glob("m3_*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_of_the_real_model_fits_its_gpus(file):
    recipe = Config.load(file)
    plan = make_plan(recipe, is_launch=False)
    assert plan.memory.total_bytes <= plan.replica.gpu_bytes
    assert plan.trainer.device == recipe.rollout.backend.device == "cuda"
    size = plan.trainer.ranks + plan.num_replicas * plan.sync.replica.world
    assert f"{size}gpu" in file.stem
    text, works = gpu_table(plan, [size])
    assert works
    assert text.splitlines()[-1].endswith(" fits")


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.name)
def test_every_recipe_is_planned_for_six_cluster_sizes_in_seconds(file, capsys):
    begun = time.process_time()
    assert main(["check", str(file), "--gpus", "8,16,32,64,128,256"]) == 0
    assert time.process_time() - begun < 5
    out = capsys.readouterr().out
    verdicts = re.findall(r"^ +(\d+) .* (fits|refused)\b", out, re.MULTILINE)
    assert [size for size, _ in verdicts] == ["8", "16", "32", "64", "128", "256"]
    assert verdicts[-1] == ("256", "fits")


def test_the_parity_recipe_has_the_algorithm_of_its_model():
    recipe = Config.load(ROOT / "configs" / "m3_256gpu.yaml")
    assert (recipe.rollout.prompts_per_step, recipe.rollout.group_size) == (32, 16)
    assert (recipe.data.max_prompt_tokens, recipe.rollout.max_tokens) == (2048, 6144)
    grpo, adamw = recipe.grpo, recipe.optimizer
    assert (grpo.advantage, grpo.objective, grpo.ratio) == ("grpo", "ppo_clip", "token")
    assert (grpo.clip_low, grpo.clip_high, grpo.dual_clip) == (0.2, 0.28, 10.0)
    assert (grpo.aggregation, grpo.kl.coef, grpo.entropy_coef) == ("token_mean", 0.0, 0.0)
    assert (grpo.importance.kind, grpo.importance.cap) == ("tis", 2.0)
    assert (grpo.refill_rounds, grpo.overlong.buffer, grpo.truncated) == (0, 0, "keep")
    assert (adamw.lr, adamw.weight_decay, adamw.betas) == (1e-6, 0.1, (0.9, 0.999))
    assert (adamw.warmup_steps, adamw.grad_clip, adamw.eps) == (10, 1.0, 1e-8)
    assert (recipe.eval.every, recipe.checkpoint.every, recipe.checkpoint.keep) == (10, 3, 2)
    short = Config.load(ROOT / "configs" / "m3_256gpu_4k.yaml")
    assert (short.rollout.max_tokens, short.eval.num_prompts) == (2048, 960)


def test_the_run_for_two_gpus_needs_nothing_that_is_not_here():
    recipe = Config.load(ROOT / "configs" / "h200x2_small.yaml")
    plan = make_plan(recipe)
    assert plan.trainer.ranks + plan.num_replicas * plan.sync.replica.world == 2
    assert plan.trainer.device == recipe.rollout.backend.device == "cuda"
    assert plan.trainer.dtype == "bfloat16"
    assert recipe.train.steps <= 20
    assert recipe.logging.wandb.mode == "disabled"
    assert recipe.data.train.kind == recipe.data.eval.kind == "reasoning_gym"
    assert not plan.notices

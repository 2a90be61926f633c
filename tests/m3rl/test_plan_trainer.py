"""What the planner says of a trainer rank's memory, against real policies and real steps."""

import dataclasses
import json

import pytest
import torch

from benchmarks.record import RESULTS
from benchmarks.train_measure import model_config as published_model
from benchmarks.train_step import Slice
from inference.config import ModelConfig
from inference.kernels.packing import Packing
from inference.models.name_map import transformers_placement
from m3rl.index_alignment import IndexLoss, IndexLossSettings
from m3rl.lora.settings import LoraSettings
from m3rl.optimizer import Optimizer
from m3rl.plan_fit import changes, fits, micro_batches, remedies
from m3rl.plan_lora import plan_rank
from m3rl.plan_time import Demand, measured_rates, train_flop
from m3rl.plan_trainer import TrainerSetting
from m3rl.policy import Policy
from m3rl.rank_group import RankGroup
from m3rl.rank_settings import OptimizerSettings
from m3rl.sync_plan import published_layout
from m3rl.weight_sync.layout import volume
from m3rl.weight_sync.trainer_layout import TrainerShards, trainer_layouts
from tests.released_model import FOLDER
from tests.tiny_models import model_config, tiny_config

MODEL = model_config(tiny_config())
RELEASED = ModelConfig.from_pretrained(FOLDER)
ADAMW = OptimizerSettings(
    lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, grad_clip=1.0, warmup_steps=0
)
M3 = TrainerSetting(
    RELEASED, "bfloat16", "cuda", ranks=128, ep=8, micro_batch_tokens=8192, num_micro_batches=4
)
DEMAND = Demand(32, 16, 2048, 6144, 64)


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("trains_index", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policys_masters_gradients_and_moments_take_what_was_planned(dtype, trains_index):
    policy = Policy(MODEL, dtype=dtype, trains_index=trains_index)
    policy.init_random(0, std=0.1, embedding_std=1.0, bias_std=0.01)
    group = RankGroup(0, 1, None, device="cpu", num_threads=1, timeout_s=5)
    optimizer = Optimizer(policy, ADAMW, group)
    ids_T = torch.randint(3, MODEL.vocab_size, (40,))
    loss = IndexLoss(IndexLossSettings(coef=0.1), 40.0, 40) if trains_index else None
    logprobs_M, _ = policy(
        ids_T, Packing.of([40], "cpu"), torch.arange(1, 40), temperature=1.0, index_loss=loss
    )
    logprobs_M.sum().backward()
    measured = {
        "FP32 masters": bytes_of([*policy.parameters(), *policy.buffers()]),
        "gradients": bytes_of(p.grad for p in policy.parameters() if p.grad is not None),
        "weights before an update": bytes_of(policy.wire_state().values()),
    }
    optimizer.step(0.0)
    measured["AdamW moments"] = bytes_of(optimizer.tensors().values())
    planned = plan_rank(TrainerSetting(MODEL, dtype, trains_index=trains_index)).uses
    assert planned == pytest.approx(measured, rel=0.02)
    assert sum(planned.values()) == pytest.approx(sum(measured.values()), rel=0.05)


@pytest.mark.parametrize(("ranks", "ep"), [(2, 1), (4, 2), (4, 4)])
def test_masters_of_a_sharded_rank_are_what_its_layout_says(ranks, ep):
    split = TrainerShards(ranks, ep=ep)
    layouts = trainer_layouts(
        published_layout(MODEL, "float32"), transformers_placement(MODEL), split
    )
    most = max(4 * sum(volume(slot.bounds) for slot in layout) for layout in layouts)
    found = plan_rank(TrainerSetting(MODEL, "float32", ranks=ranks, ep=ep))
    assert found.uses["FP32 masters"] == pytest.approx(most, rel=0.01)


def test_all_ranks_together_hold_the_model_once():
    one = plan_rank(dataclasses.replace(M3, ranks=1, ep=1))
    for name in ("FP32 masters", "AdamW moments"):
        assert 128 * plan_rank(M3).uses[name] == pytest.approx(one.uses[name], rel=0.001)


CASES = {"8K in one sample": 8192, "16K packed": 16384, "64K packed": 65536}


@pytest.mark.parametrize("case", CASES)
def test_steps_of_a_slice_on_an_h200_took_what_is_planned(case):
    records = map(json.loads, (RESULTS / "train_step.jsonl").read_text().splitlines())
    peak_gb = next(r["value"]["peak_gb"] for r in records if r["case"] == case)
    setting = TrainerSetting(
        published_model(Slice.m3().raw),
        "bfloat16",
        "cuda",
        micro_batch_tokens=CASES[case],
        compares=False,
    )
    found = plan_rank(setting)
    planned = found.total_bytes - found.uses["CUDA, reserved"]
    assert planned / 1e9 == pytest.approx(peak_gb, rel=0.05)


def test_what_takes_less_is_smaller_and_what_adds_is_larger():
    def size(**options):
        return plan_rank(dataclasses.replace(M3, **options)).total_bytes

    base = size()
    less = [{"offload": True}, {"micro_batch_tokens": 4096}, {"cp": 8}, {"ranks": 256}]
    more = [
        {"checkpointing": False},
        {"has_reference": True},
        {"remembers_sent": True},
        {"ep": 1},
        {"dtype": "float32"},
    ]
    assert all(size(**options) < base for options in less)
    assert all(size(**options) > base for options in more)


def test_a_longer_micro_batch_takes_memory_in_proportion():
    sizes = [
        plan_rank(dataclasses.replace(M3, micro_batch_tokens=tokens)).total_bytes
        for tokens in (16384, 32768, 65536)
    ]
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.01)


def test_a_frozen_base_has_no_masters_and_its_experts_may_be_half_as_large():
    setting = dataclasses.replace(M3, ranks=8)
    plain, half = (
        plan_rank(dataclasses.replace(setting, lora=LoraSettings(16, 32, mxfp8_experts=mxfp8)))
        for mxfp8 in (False, True)
    )
    experts = 57 * 16 * 3 * 6144 * 3072
    assert plain.uses["frozen experts"] == 2 * experts
    assert half.uses["frozen experts"] == experts + experts // 32
    # r (in + out) of query, key, value and output
    adapters = 60 * 16 * (2 * (6144 + 8192) + 2 * (6144 + 512))
    for found in (plain, half):
        assert "FP32 masters" not in found.uses
        assert found.uses["adapters"] == found.uses["gradients"] == 4 * adapters
        assert found.uses["AdamW moments"] == 8 * adapters
    assert half.total_bytes < 80 << 30


def test_what_is_proposed_fits_and_nothing_of_it_is_needless():
    setting = dataclasses.replace(M3, ranks=64, micro_batch_tokens=32768)
    gpu_bytes = 139 << 30
    assert not fits(setting, gpu_bytes)
    assert list(remedies(setting, DEMAND, gpu_bytes)) == [
        "optimizer.offload: true",
        "policy.micro_batch_tokens: 8192",
        "train.num_ranks: 128",
    ]
    for change in ({"offload": True}, {"micro_batch_tokens": 8192}, {"ranks": 128}):
        assert fits(dataclasses.replace(setting, **change), gpu_bytes)
    assert not fits(dataclasses.replace(setting, micro_batch_tokens=16384), gpu_bytes)
    assert changes(setting, setting) == []


def test_micro_batches_are_counted_in_whole_rows():
    assert micro_batches(M3, DEMAND) == 4  # 4 rows of 8K on each of 128 ranks
    assert micro_batches(dataclasses.replace(M3, micro_batch_tokens=20_000), DEMAND) == 2
    assert micro_batches(dataclasses.replace(M3, cp=8), DEMAND) == 32
    assert micro_batches(M3, DEMAND, updates_per_batch=2) == 2


def test_rates_are_those_of_the_records_or_stated(tmp_path):
    assert not measured_rates(tmp_path).is_measured
    record = {"bench": "train_step", "case": "16K packed", "value": {"tokens_per_s": 20_000.0}}
    (tmp_path / "train_step.jsonl").write_text(json.dumps(record) + "\n")
    measured_rates.cache_clear()
    rates = measured_rates(tmp_path)
    slice_ = dataclasses.replace(
        RELEASED,
        num_hidden_layers=4,
        layer_types=RELEASED.layer_types[:1] + RELEASED.layer_types[-1:] * 3,
        mlp_layer_types=RELEASED.mlp_layer_types[:1] + RELEASED.mlp_layer_types[-1:] * 3,
        num_local_experts=12,
    )
    assert rates.train_flops == 20_000 * train_flop(slice_, 4096, checkpointing=True)
    assert not rates.is_measured  # of generation nothing is


def test_flop_of_a_token_are_those_of_its_active_weights():
    # Without the head, forward, again, and two products backward: 8 for each weight.
    flop = train_flop(RELEASED, 0, checkpointing=True)
    head, index = 6144 * 200064, 57 * 6144 * 5 * 128
    assert flop == 8 * (23_503_306_752 - index) + 8 * head + 2 * index
    frozen = train_flop(RELEASED, 0, checkpointing=True, trains_weights=False)
    assert frozen == 6 * (23_503_306_752 - index) + 6 * head + 2 * index


def test_the_repositorys_records_are_read():
    assert measured_rates().is_measured

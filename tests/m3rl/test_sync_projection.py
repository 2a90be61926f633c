import dataclasses

import pytest

from inference.config import EngineConfig, ModelConfig
from inference.engine.engine import Engine
from inference.parallel.config import ParallelConfig
from m3rl.plan_text import H200_BYTES
from m3rl.policy import Policy
from m3rl.sync_plan import (
    SyncSetting,
    one_layer_of_each_kind,
    published_layout,
    replicas_on,
    runtime_layout,
)
from m3rl.weight_sync.layout import as_slots
from m3rl.weight_sync.trainer_layout import TrainerShards
from tests.released_model import FOLDER
from tests.tiny_models import model_config, tiny_config

# Columns in whole blocks of MXFP8
MODEL = model_config(
    tiny_config(
        dense_intermediate_size=64, intermediate_size=32, shared_intermediate_size=32, vocab_size=96
    )
)
RELEASED = ModelConfig.from_pretrained(FOLDER)


@pytest.mark.parametrize("quantization", ["none", "mxfp8", "mxfp8_released"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_planned_replica_holds_what_its_engine_says(dtype, quantization):
    config = EngineConfig(num_pages=8, dtype=dtype, quantization=quantization)
    planned = runtime_layout(MODEL, config, ParallelConfig(), 0)
    assert set(planned) == set(as_slots(Engine(MODEL, config).weight_layout()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_planned_trainer_holds_what_its_policy_says(dtype):
    policy = Policy(MODEL, dtype=dtype)
    assert published_layout(MODEL, dtype) == policy.layout()


def test_layers_of_a_kind_are_counted_and_planned_once():
    small, repeats = one_layer_of_each_kind(RELEASED)
    assert repeats == {"layer.0": 3, "layer.1": 57}
    assert (small.num_hidden_layers, small.moe_layers, small.sparse_layers) == (2, (1,), (1,))


def test_one_trainer_rank_sends_every_weight_to_every_replica():
    setting = SyncSetting(MODEL, EngineConfig(dtype="bfloat16"), num_replicas=3)
    router = len(MODEL.moe_layers) * MODEL.num_local_experts * (MODEL.hidden_size + 1)
    model_bytes = 2 * MODEL.num_parameters + 2 * router
    found = setting.project()
    assert found.received_bytes == (model_bytes,)
    assert found.sent_bytes == (3 * model_bytes,)
    two = dataclasses.replace(setting, trainer=TrainerShards(2, replicas=2)).project()
    assert sum(two.sent_bytes) == 3 * model_bytes
    assert two.balance < 1.05


def test_experts_that_the_trainer_quantises_are_half_of_the_bytes():
    setting = SyncSetting(RELEASED, EngineConfig(dtype="bfloat16", quantization="mxfp8"))
    plain, small = (dataclasses.replace(setting, wire=wire).project() for wire in ("bf16", "mxfp8"))
    assert 0.5 < small.sent_bytes[0] / plain.sent_bytes[0] < 0.54


def test_smaller_chunks_are_more_rounds():
    setting = SyncSetting(RELEASED, EngineConfig(dtype="bfloat16", quantization="mxfp8"))
    small = dataclasses.replace(setting, chunk_bytes=64 << 20)
    assert small.project().num_rounds > 3 * setting.project().num_rounds


def test_with_deltas_replicas_share_one_plan():
    shards = TrainerShards(4, replicas=4)
    setting = SyncSetting(MODEL, EngineConfig(dtype="bfloat16"), shards, num_replicas=4)
    turning, alike = (dataclasses.replace(setting, delta=d).project() for d in (False, True))
    assert all(size % 4 == 0 for size in alike.sent_bytes)  # four times the same
    assert turning.balance < alike.balance


def test_replicas_of_the_real_model_fill_gpus():
    setting = SyncSetting(RELEASED, EngineConfig(dtype="bfloat16", quantization="mxfp8"))
    assert replicas_on(setting, 2, H200_BYTES) is None
    found = replicas_on(setting, 24, H200_BYTES)
    assert (found.replica, found.num_replicas) == (ParallelConfig(1, 4, 4), 6)
    split = dataclasses.replace(setting, replica=ParallelConfig(8, 1, 8))
    found = replicas_on(split, 24, H200_BYTES)
    assert (found.replica, found.num_replicas) == (ParallelConfig(8, 1, 8), 3)
    assert replicas_on(split, 6, H200_BYTES).replica == ParallelConfig(1, 4, 4)


@pytest.mark.parametrize(("ranks", "ep"), [(24, 8), (16, 16), (48, 4)])
def test_syncs_of_a_sharded_trainer_are_balanced(ranks, ep):
    setting = SyncSetting(
        RELEASED,
        EngineConfig(dtype="bfloat16", quantization="mxfp8"),
        TrainerShards(ranks, ep=ep),
        ParallelConfig(1, 4, 4),
        6,
    )
    projection = setting.project()
    assert projection.balance <= 1.05
    assert projection.seconds <= 1.5 * projection.floor_s

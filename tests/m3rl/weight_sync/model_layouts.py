"""Layouts of a tiny M3 on both sides: sharded trainer ranks, and workers of a replica."""

from __future__ import annotations

from inference.config import ModelConfig
from inference.models.weights import published_tensors, transformers_placement
from inference.parallel.config import ParallelConfig
from inference.parallel.shards import runtime_shards
from m3rl.types import TensorSlot
from m3rl.weight_sync.layout import whole
from m3rl.weight_sync.trainer_layout import TrainerShards, trainer_layout
from tests.tiny_models import model_config, tiny_config

MODEL = model_config(tiny_config(vocab_size=96, num_attention_heads=8, shared_intermediate_size=32))
"""1 dense and 3 alike MoE layers, 8 experts, 2 KV heads, 32 columns."""
TRAINERS = [
    TrainerShards(),
    TrainerShards(world=3),
    TrainerShards(world=4, ep=4),
    TrainerShards(world=8, ep=2),
    TrainerShards(world=8, replicas=2, ep=2),
    TrainerShards(world=6, replicas=6),
]
REPLICAS = [
    ParallelConfig(),
    ParallelConfig(tp=1, dp=4),
    ParallelConfig(tp=2, dp=2),
    ParallelConfig(tp=2, dp=2, ep=2),
    ParallelConfig(tp=4, dp=1),
    ParallelConfig(tp=8, dp=1, ep=4),
]


def published(model: ModelConfig = MODEL) -> list[TensorSlot]:
    return [
        TensorSlot(
            spec.name,
            "float32" if spec.is_fp32 else "bfloat16",
            spec.shape,
            whole(spec.shape),
            spec.bucket,
        )
        for spec in published_tensors(model)
    ]


def trainer(split: TrainerShards, model: ModelConfig = MODEL) -> list[tuple[TensorSlot, ...]]:
    tensors = published(model)
    places = transformers_placement(model)
    return [trainer_layout(tensors, places, split, rank) for rank in range(split.world)]


def replica(
    parallel: ParallelConfig, model: ModelConfig = MODEL, quantization: str = "none"
) -> list[list[TensorSlot]]:
    layouts = []
    for rank in range(parallel.world):
        shards = runtime_shards(model, parallel, rank)
        layouts.append(
            [
                TensorSlot(
                    spec.name,
                    "float32" if spec.is_fp32 else "bfloat16",
                    spec.shape,
                    shards[spec.name].bounds,
                    spec.bucket,
                    "mxfp8" if spec.is_quantized(quantization) else "plain",
                )
                for spec in published_tensors(model)
                if spec.name in shards
            ]
        )
    return layouts

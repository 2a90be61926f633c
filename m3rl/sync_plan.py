"""What a weight sync of a run will move, and how long it will take, from the model's config alone.

Enters the runtime for its layouts: the name map and the split over ranks. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from inference.config import ConfigError, EngineConfig, ModelConfig
from inference.memory import plan_memory
from inference.models.name_map import TensorSpec, published_tensors, transformers_placement
from inference.parallel.config import ParallelConfig
from inference.parallel.shards import runtime_shards
from m3rl.rollout.vllm_staging import own_slots, run_of_experts
from m3rl.types import TensorSlot
from m3rl.weight_sync.layout import whole
from m3rl.weight_sync.simulate import Links, Projection, simulate
from m3rl.weight_sync.trainer_layout import TrainerShards, parameters_of, trainer_layouts

LINKS = Links()


@dataclass(frozen=True, slots=True)
class SyncSetting:
    """What decides about a run's syncs."""

    model: ModelConfig
    engine: EngineConfig
    """Of every replica."""
    trainer: TrainerShards = field(default_factory=TrainerShards)
    replica: ParallelConfig = field(default_factory=ParallelConfig)
    num_replicas: int = 1
    holds_whole: bool = False
    """Whether each worker of a replica receives every tensor whole, as vLLM's do."""
    shares_experts: bool = False
    """With `holds_whole`: of the experts each worker receives its share alone."""
    wire: str = "bf16"
    """See `WeightSyncConfig.wire`."""
    delta: bool = False
    """Whether trainer ranks remember what they send; then replicas alike share one plan."""
    chunk_bytes: int = 256 << 20
    """Most that a worker receives in a round."""

    def project(self) -> Projection:
        """One sync of all replicas.

        Raises:
            ConfigError, LayoutError, PlanError: it cannot be split so.
        """
        return _project(self)


@cache
def _project(setting: SyncSetting) -> Projection:
    model, repeats = one_layer_of_each_kind(setting.model)
    tensors = published_layout(model, setting.engine.dtype)
    return simulate(
        trainer_layouts(tensors, transformers_placement(model), setting.trainer),
        [_worker_layout(model, setting, rank) for rank in range(setting.replica.world)],
        num_replicas=setting.num_replicas,
        repeats=repeats,
        chunk_bytes=setting.chunk_bytes,
        takes_turns=not setting.delta,
        wire=setting.wire,
        links=LINKS,
    )


def _worker_layout(model: ModelConfig, setting: SyncSetting, rank: int) -> list[TensorSlot]:
    if not setting.holds_whole:
        return runtime_layout(model, setting.engine, setting.replica, rank)
    whole_model = runtime_layout(model, setting.engine, ParallelConfig(), 0)
    if not setting.shares_experts:
        return whole_model
    own = run_of_experts(model.num_local_experts, rank, setting.replica.world)
    return own_slots(whole_model, dict.fromkeys(model.moe_layers, own))


@cache
def one_layer_of_each_kind(model: ModelConfig) -> tuple[ModelConfig, dict[str, int]]:
    """The model with one layer of each kind, and for the bucket of each how many it stands for.

    Layouts follow from names, shapes and roles, and these are compared: what is planned for one
    layer holds for all of its kind.
    """
    kinds = Counter(zip(model.layer_types, model.mlp_layer_types, strict=True))
    attention, mlp = zip(*kinds, strict=True)
    small = dataclasses.replace(
        model, num_hidden_layers=len(kinds), layer_types=attention, mlp_layer_types=mlp
    )
    of_kind = dict(zip(kinds, _layers(small).values(), strict=True))
    for number, layer in _layers(model).items():
        kind = model.layer_types[number], model.mlp_layer_types[number]
        assert layer == of_kind[kind], f"layer {number} is unlike others with {kind}"
    return small, {f"layer.{i}": count for i, count in enumerate(kinds.values())}


class Parameter(NamedTuple):
    """Of the trainer's model, transformers' name; or a buffer."""

    name: str
    bucket: str
    shape: tuple[int, ...]
    is_experts: bool
    """Whether it stacks a layer's experts."""
    is_fp32: bool
    times: int
    """Layers that have one."""


@cache
def trainer_parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """Those of one layer of each kind, and of what is no layer."""
    small, repeats = one_layer_of_each_kind(model)
    slots, places = published_layout(small, "bfloat16"), transformers_placement(small)
    first = {places[slot.name].param: slot for slot in reversed(slots)}
    return tuple(
        Parameter(
            name,
            first[name].bucket,
            shape,
            is_experts,
            first[name].dtype == "float32",
            repeats.get(first[name].bucket, 1),
        )
        for name, (shape, is_experts) in parameters_of(slots, places).items()
    )


def published_layout(model: ModelConfig, dtype: str) -> list[TensorSlot]:
    """Every published tensor, whole, as it is sent."""
    return [_slot(spec, dtype) for spec in published_tensors(model)]


def runtime_layout(
    model: ModelConfig, engine: EngineConfig, parallel: ParallelConfig, rank: int
) -> list[TensorSlot]:
    """What a worker of a replica holds: what its engine's `weight_layout` will say.

    Raises:
        ConfigError: the model cannot be split so.
    """
    shards = runtime_shards(model, parallel, rank)
    slots = []
    for spec in published_tensors(model):
        if spec.name in shards:
            is_quantized = spec.is_quantized(engine.quantization)
            slot = _slot(spec, "bfloat16" if is_quantized else engine.dtype)
            storage = "mxfp8" if is_quantized else "plain"
            bounds = shards[spec.name].bounds
            slots.append(dataclasses.replace(slot, bounds=bounds, storage=storage))
    return slots


def replicas_on(setting: SyncSetting, num_gpus: int, gpu_bytes: int) -> SyncSetting | None:
    """As many replicas as so many GPUs hold, or None where not one fits.

    They are split as they are now or, where that does not fit, with data-parallel attention, each
    on the fewest GPUs (a power of two) that hold it.
    """
    for parallel in (setting.replica, *_expert_parallel(num_gpus)):
        if parallel.world > num_gpus:
            continue
        try:
            plan_memory(setting.model, setting.engine, parallel, gpu_bytes=gpu_bytes)
        except ConfigError:
            continue  # it does not divide, or is too large still
        return dataclasses.replace(
            setting, replica=parallel, num_replicas=num_gpus // parallel.world
        )
    return None


def _expert_parallel(most: int) -> Iterator[ParallelConfig]:
    size = 1
    while size <= most:
        yield ParallelConfig(tp=1, dp=size, ep=size)
        size *= 2


def _slot(spec: TensorSpec, dtype: str) -> TensorSlot:
    return TensorSlot(
        spec.name,
        "float32" if spec.is_fp32 else dtype,
        spec.shape,
        whole(spec.shape),
        spec.bucket,
    )


def _layers(model: ModelConfig) -> dict[int, list[tuple[object, ...]]]:
    """All that a layout can depend on, of each layer."""
    layers: dict[int, list[tuple[object, ...]]] = defaultdict(list)
    for spec in published_tensors(model):
        if spec.bucket.startswith("layer."):
            number = int(spec.bucket.removeprefix("layer."))
            inner = spec.name.removeprefix(f"model.{spec.bucket.replace('layer', 'layers')}.")
            layers[number].append((inner, spec.shape, spec.role, spec.is_fp32))
    return dict(layers)

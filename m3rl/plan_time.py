"""How long a training step will take on H200s, from rates measured on one.

Every completion is taken to be of full length. The measured rates stand in `benchmarks/results`:
- training: FLOP/s of the whole optimizer step of a slice of M3 (`train_step`), spent on the FLOP of
  the planned model. FSDP's gathers run beside it, and count where they take longer; the exchange of
  tokens between expert-parallel ranks comes on top.
- generation: how far decode steps of slices are above the time of their bytes (`engine`), times the
  bytes of the planned model's steps; two collectives a layer come on top. Prompts are read at the
  FLOP/s of the slice's prefills.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from inference.config import ConfigError, ModelConfig
from inference.memory import DTYPE_BYTES, plan_memory
from m3rl.plan_trainer import FP32, TrainerSetting
from m3rl.sync_plan import LINKS, SyncSetting

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MODEL = ROOT / "configs" / "models" / "minimax_m3"
"""What the measured slices are slices of."""
STATED_TRAIN_FLOPS, STATED_PREFILL_FLOPS = 450e12, 500e12
STATED_X_FLOOR = 1.3
MEMORY_BYTES_S = 4.3e12
"""Of the floors of `engine`'s records."""
HOST_BYTES_S = 50e9
"""Between a GPU and its host's memory, one way at a time."""
LAYER_LAUNCH_S = {"decode": 50e-6, "training": 5e-3}
"""Estimate: least time of a layer in a decode step's graph, and in a micro-batch."""
COLLECTIVE_S = {True: 20e-6, False: 40e-6}
"""Estimate: a small collective of a decode step, inside a node or across."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a training step asks for, in samples and tokens, at most."""

    prompts: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int
    max_running: int
    """Requests that a replica, or a dp rank of it, decodes together."""

    @property
    def row(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def tokens(self) -> int:
        return self.prompts * self.group_size * self.row


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured, or stated where nothing was."""

    train_flops: float
    prefill_flops: float
    x_floor: float
    """Time of a decode step over that of its bytes."""
    is_measured: bool
    """All of them."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of each part of a step, one after the other."""

    generation: float
    training: float
    sync: float

    @property
    def total(self) -> float:
        return self.generation + self.training + self.sync


def step_time(trainer: TrainerSetting, sync: SyncSetting, demand: Demand) -> StepTime:
    rates = measured_rates()
    return StepTime(
        generation=_generation(sync, demand, rates),
        training=_training(trainer, demand, rates),
        sync=sync.project().seconds,
    )


@cache
def measured_rates(results: Path = RESULTS, model: Path = MODEL) -> Rates:
    """Of the newest records of each kind."""
    train = prefill = x_floor = None
    try:
        m3 = ModelConfig.from_pretrained(model)
    except ConfigError:
        m3 = None
    if m3 is not None:
        train = _train_flops(results / "train_step.jsonl", m3)
        prefill = _prefill_flops(results / "engine.jsonl", m3)
    x_floors = _values(
        results / "engine.jsonl",
        lambda case: case.startswith(("rank groups", "layers6 b")),
        lambda record: record["x_floor"],
    )
    x_floor = max(x_floors, default=None)
    return Rates(
        train_flops=train or STATED_TRAIN_FLOPS,
        prefill_flops=prefill or STATED_PREFILL_FLOPS,
        x_floor=x_floor or STATED_X_FLOOR,
        is_measured=None not in (train, prefill, x_floor),
    )


def _train_flops(file: Path, m3: ModelConfig) -> float | None:
    """Of the step of 16K packed tokens: `benchmarks.train_step`'s slice has a dense layer, three
    with MSA and 12 experts, and computes layers again."""
    found = _values(
        file, lambda case: case == "16K packed", lambda record: record["value"]["tokens_per_s"]
    )
    flop = train_flop(_slice(m3, num_dense=1, num_moe=3, num_experts=12), 4096, checkpointing=True)
    return found[-1] * flop if found else None


def _prefill_flops(file: Path, m3: ModelConfig) -> float | None:
    """Of prompts of 2K: the rank slice of `benchmarks.slices`, 16 experts in each of 3 layers."""
    found = _values(
        file,
        lambda case: case == "rank prefill 16x2048",
        lambda record: record["value"]["tokens_per_s"],
    )
    flop = forward_flop(_slice(m3, num_dense=3, num_moe=3, num_experts=16), 1024)
    return found[-1] * flop if found else None


def _values(
    file: Path, wanted: Callable[[str], bool], value: Callable[[dict[str, Any]], float]
) -> list[float]:
    if not file.is_file():
        return []
    records = (json.loads(line) for line in file.read_text().splitlines())
    return [value(record) for record in records if wanted(record["case"])]


def _slice(m3: ModelConfig, *, num_dense: int, num_moe: int, num_experts: int) -> ModelConfig:
    def kinds(of_layers: tuple[str, ...]) -> tuple[str, ...]:
        return of_layers[:1] * num_dense + of_layers[-1:] * num_moe

    return dataclasses.replace(
        m3,
        num_hidden_layers=num_dense + num_moe,
        layer_types=kinds(m3.layer_types),
        mlp_layer_types=kinds(m3.mlp_layer_types),
        num_local_experts=num_experts,
    )


def active_parameters(model: ModelConfig) -> dict[str, int]:
    """Weights that a token is multiplied with, by class; neither the embedding nor norms."""
    C, layers, moe = model.hidden_size, model.num_hidden_layers, len(model.moe_layers)
    heads = model.num_attention_heads + model.num_key_value_heads
    index = model.index_head_dim * (model.index_n_heads + 1)
    return {
        "attention": layers * 2 * C * model.head_dim * heads,
        "index": len(model.sparse_layers) * C * index,
        "dense": (layers - moe) * 3 * C * model.dense_intermediate_size,
        "experts": moe * model.num_experts_per_tok * 3 * C * model.intermediate_size,
        "shared": moe * 3 * C * model.shared_intermediate_size,
        "router": moe * C * model.num_local_experts,
        "head": C * model.vocab_size,
    }


def _attention_flop(model: ModelConfig, context: int) -> tuple[float, float]:
    """(attention, index scores) of a token that sees so many, in a forward pass."""
    sparse = len(model.sparse_layers)
    seen = min(context, model.index_topk_blocks * model.index_block_size)
    keys = (model.num_hidden_layers - sparse) * context + sparse * seen
    index = 2.0 * sparse * context * model.index_n_heads * model.index_head_dim
    return 4.0 * keys * model.num_attention_heads * model.head_dim, index


def forward_flop(model: ModelConfig, context: int) -> float:
    """FLOP of a token of a prompt; no logits."""
    weights = active_parameters(model)
    return 2 * (sum(weights.values()) - weights["head"]) + sum(_attention_flop(model, context))


def train_flop(
    model: ModelConfig, context: int, *, checkpointing: bool, trains_weights: bool = True
) -> float:
    """FLOP of a token of a training step; logits are always computed twice.

    Args:
        context: tokens that a token sees, the mean.
        trains_weights: whether gradients of weights are made, not of adapters alone.
    """
    weights = active_parameters(model)
    head, index = weights.pop("head"), weights.pop("index")
    attention, scores = _attention_flop(model, context)
    passes = 2 + checkpointing + trains_weights
    return (
        2 * passes * sum(weights.values())
        + 2 * (3 + trains_weights) * head
        + (3.5 + checkpointing) * attention
        + 2 * index
        + scores
    )


def _training(trainer: TrainerSetting, demand: Demand, rates: Rates) -> float:
    tokens = demand.tokens / trainer.ranks
    flop = train_flop(
        trainer.model,
        demand.row // 2,
        checkpointing=trainer.checkpointing,
        trains_weights=trainer.lora is None,
    )
    micro_batches = math.ceil(tokens * trainer.cp / trainer.micro_batch_tokens)
    launching = micro_batches * trainer.model.num_hidden_layers * LAYER_LAUNCH_S["training"]
    computing = max(launching, tokens * flop / rates.train_flops)
    gathering = micro_batches * _gather_seconds(trainer)
    moments = 0.0
    if trainer.offload and trainer.lora is None:
        moments = 4 * FP32 * trainer.model.num_parameters / trainer.ranks / HOST_BYTES_S
    return max(computing, gathering) + tokens * _exchange_seconds(trainer) + moments


def _gather_seconds(trainer: TrainerSetting) -> float:
    """Weights gathered twice, gradients summed in FP32 once, of a micro-batch."""
    model, width = trainer.model, trainer.width
    experts = len(model.moe_layers) * model.num_local_experts * 3
    experts *= model.hidden_size * model.intermediate_size
    others = model.num_parameters - experts
    of_group = trainer.ranks // trainer.ep
    passes = 2 * width + (FP32 if trainer.lora is None else 0)
    seconds = passes * others * (1 - 1 / trainer.ranks) / _link(trainer.ranks)
    if trainer.lora is None or not trainer.lora.mxfp8_experts:
        seconds += passes * experts / trainer.ep * (1 - 1 / of_group) / _link(trainer.ranks)
    return seconds


def _exchange_seconds(trainer: TrainerSetting) -> float:
    """A token's rows to its experts and back, in each of a layer's passes."""
    model = trainer.model
    row = model.num_experts_per_tok * model.hidden_size * trainer.width
    passes = 2 * (2 + trainer.checkpointing) * len(model.moe_layers)
    return passes * row * (1 - 1 / trainer.ep) / _link(trainer.ep)


def _link(ranks: int) -> float:
    """Bytes/s of a GPU to the others of a group of so many neighbours."""
    return LINKS.nvlink if ranks <= LINKS.gpus_per_node else LINKS.nic


def _generation(sync: SyncSetting, demand: Demand, rates: Rates) -> float:
    split, model = sync.replica, sync.model
    groups = sync.num_replicas * split.dp
    requests = demand.group_size * -(-demand.prompts // groups)
    running = min(requests, demand.max_running)
    rounds = -(-requests // running)
    context = demand.prompt_tokens + demand.completion_tokens // 2
    reading = rates.x_floor * _decode_bytes(sync, running, context) / MEMORY_BYTES_S
    step = max(reading, model.num_hidden_layers * LAYER_LAUNCH_S["decode"])
    if split.world > 1:
        is_inside = split.world <= LINKS.gpus_per_node
        step += 2 * model.num_hidden_layers * COLLECTIVE_S[is_inside]
    prompts = demand.prompts / sync.num_replicas * demand.prompt_tokens
    flop = forward_flop(model, demand.prompt_tokens // 2)
    prefill = prompts * flop / (split.world * rates.prefill_flops)
    return rounds * demand.completion_tokens * step + prefill


def _decode_bytes(sync: SyncSetting, rows: int, context: int) -> float:
    """That one GPU of a replica reads in a step of so many requests for each dp rank."""
    model, engine, split = sync.model, sync.engine, sync.replica
    weights = dict(plan_memory(model, engine, split).weights)
    names = ("routed experts", "routed experts, scales")
    experts = sum(weights.pop(name, 0) for name in names)
    # What lies in the table is not read, nor a shadow.
    others = sum(n for name, n in weights.items() if name not in ("embedding", "shadow copy"))
    tokens = rows * split.dp
    missed = (1 - model.num_experts_per_tok / model.num_local_experts) ** tokens
    return others + (1 - missed) * experts + rows * _cache_bytes(sync, context)


def _cache_bytes(sync: SyncSetting, context: int) -> float:
    """Of one request's keys and values, and index keys, in all layers of one GPU."""
    model, engine = sync.model, sync.engine
    width, index_width = (
        DTYPE_BYTES[engine.dtype if dtype == "auto" else dtype]
        for dtype in (engine.kv_dtype, engine.index_dtype)
    )
    sparse = len(model.sparse_layers)
    heads = max(1, model.num_key_value_heads // sync.replica.tp)
    seen = min(context, model.index_topk_blocks * model.index_block_size)
    keys = (model.num_hidden_layers - sparse) * context + sparse * seen
    pages = keys * 2 * heads * model.head_dim * width
    return pages + sparse * context * model.index_head_dim * index_width

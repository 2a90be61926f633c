"""What a configuration will need, worked out before anything starts; refuses what cannot work.

Reads JSON files and safetensors headers only: it imports neither ray, torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from inference import config as model_config
from inference.memory import (
    DTYPE_BYTES,
    MemoryPlan,
    count_parameters,
    plan_memory,
    size_text,
)
from inference.parallel.config import ParallelConfig
from m3rl.checkpoint_files import tokenizer_problems, weight_problems
from m3rl.config import Config, ConfigError
from m3rl.config_policy import lora_settings
from m3rl.model_layout import ModelLayoutError, is_m3
from m3rl.plan_any import AnyPlan, make_any_plan
from m3rl.plan_files import dataset_problems, is_here, missing_reward, run_dir_problems
from m3rl.plan_fit import micro_batches, remedies
from m3rl.plan_lora import plan_rank
from m3rl.plan_notices import config_notices
from m3rl.plan_time import Demand
from m3rl.plan_trainer import TrainerMemory, TrainerSetting
from m3rl.plan_vllm import (
    longest_row,
    missing_vllm,
    vllm_m3_notices,
    vllm_m3_problems,
    vllm_memory,
    vllm_model_problems,
)
from m3rl.sync_plan import SyncSetting, published_layout
from m3rl.weight_sync.errors import LayoutError
from m3rl.weight_sync.simulate import Projection

__all__ = ["MODEL_PARTS", "ModelPart", "Plan", "make_plan", "size_text"]

ModelPart = Literal["tokenizer", "weights"]
MODEL_PARTS: tuple[ModelPart, ...] = ("tokenizer", "weights")


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run, in parameters, bytes, tokens and pages."""

    name: str
    num_replicas: int
    parameters: dict[str, int]
    """By class of weight; the sum is the text model."""
    vision_parameters: int
    """Which no part of a run loads."""
    trainer: TrainerSetting
    memory: TrainerMemory
    """Of the GPU, or the process, of one trainer rank."""
    replica: MemoryPlan
    """Of the GPU, or the process, that holds one rank of a replica."""
    sync: SyncSetting
    projection: Projection
    """Of one weight sync."""
    demand: Demand
    """Of a training step."""
    page_size: int
    num_pages: int | None
    """None: vLLM divides its own memory."""
    demand_pages: int
    """Most pages that one replica's share of a training step can need at once."""
    notices: tuple[str, ...]
    needed: tuple[str, ...] = ()
    """What a launch needs and this machine lacks."""


def make_plan(
    config: Config,
    *,
    required: Collection[ModelPart] = MODEL_PARTS,
    allow_mxfp8: bool = False,
    is_launch: bool = True,
    generates: bool = True,
) -> Plan | AnyPlan:
    """Check the files that `config` names and add up what a run needs.

    Args:
        required: parts of the checkpoint that must be right; the others are only noticed.
        allow_mxfp8: whether the weights may be stored in MXFP8: nothing is trained. Adapters may
            be, beside them.
        is_launch: whether it is to run here and now; if not, files that are not here are listed in
            `Plan.needed`, and those that are here must still be right.
        generates: whether replicas are started for it.

    Raises:
        ConfigError: one line for each thing that cannot work.
    """
    path = config.find(config.model.path)
    if _is_other(path):
        return make_any_plan(
            config,
            path,
            required,
            notices=config_notices(config),
            is_launch=is_launch,
            generates=generates,
        )
    is_m3_runtime = config.rollout.backend.kind == "m3"  # which reads released checkpoints
    allow_mxfp8 = (allow_mxfp8 and is_m3_runtime) or config.policy.lora is not None
    problems: list[str] = []
    notices: list[str] = []
    needed: list[str] = []
    model = sizes = None
    try:
        model = model_config.ModelConfig.from_pretrained(path)
    except model_config.ConfigError as error:
        problems.append(f"model.path: {error} ({config.origin('model.path')})")
    vocab_size = None if model is None else model.vocab_size
    eos_ids = () if model is None else model.eos_token_ids
    found = {"tokenizer": tokenizer_problems(path, vocab_size, eos_ids)}
    if model is not None:
        found["weights"] = weight_problems(path, model.num_parameters, allow_mxfp8=allow_mxfp8)
        sizes = _sizes(config, model, problems)
    for part, faults in found.items():
        is_elsewhere = not is_launch and not is_here(path, part)
        where = needed if is_elsewhere else problems if part in required else notices
        where += faults
    for fault, is_missing in dataset_problems(config):
        (needed if is_missing and not is_launch else problems).append(fault)
    if model is not None and config.rollout.backend.kind == "vllm":
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
        problems += vllm_model_problems(config, raw)
        notices += vllm_m3_notices(config)
    if generates and (absent := missing_vllm(config)):
        (problems if is_launch else needed).append(absent)
    problems += run_dir_problems(config)
    if problems or sizes is None:
        raise ConfigError("\n".join(problems))
    needed += [] if is_launch else missing_reward(config)
    plan = _plan_of(config, sizes, (*notices, *config_notices(config)), tuple(needed))
    if hurry := _too_short_a_timeout(config, plan.projection.seconds):
        raise ConfigError(hurry)
    return plan


def _is_other(path: Path) -> bool:
    """Whether the model is none of M3's; one without a config.json is told of as M3's are."""
    try:
        return not is_m3(path)
    except ModelLayoutError:
        return False


class _Sizes(NamedTuple):
    replica: MemoryPlan
    trainer: TrainerSetting
    memory: TrainerMemory


def _sizes(config: Config, model: model_config.ModelConfig, problems: list[str]) -> _Sizes | None:
    """What one rank of a replica and of the trainer hold; adds to `problems` what cannot be."""
    if length_problems := _length_problems(config, model):
        problems += length_problems
        return None
    memory = None
    replica = _replica_memory(config, model, problems)
    trainer = _trainer_setting(config, model)
    try:
        memory = plan_rank(trainer)
    except LayoutError as error:
        problems.append(f"train.parallel: {error} ({config.origin('train.parallel.ep')})")
    else:
        problems += _trainer_problems(config, trainer, memory)
    return None if replica is None or memory is None else _Sizes(replica, trainer, memory)


def _replica_memory(
    config: Config, model: model_config.ModelConfig, problems: list[str]
) -> MemoryPlan | None:
    backend = config.rollout.backend
    if backend.kind == "vllm":
        width = DTYPE_BYTES[config.policy.dtype]
        weights = {name: width * count for name, count in count_parameters(model).items()}
        slots = published_layout(model, config.policy.dtype)
        plan, refusal = vllm_memory(backend, weights, slots, _gpu(config))
        problems += [] if refusal is None else [refusal]
        return plan
    try:
        return plan_memory(model, _engine_config(config), _parallel(config), gpu_bytes=_gpu(config))
    except model_config.ConfigError as error:
        problems.append("rollout.backend: " + str(error).replace("\n", "\n  "))
        return None


def _plan_of(
    config: Config, sizes: _Sizes, notices: tuple[str, ...], needed: tuple[str, ...]
) -> Plan:
    model, demand = sizes.trainer.model, _demand(config)
    sync = _sync_setting(config, model, sizes.trainer)
    return Plan(
        name=config.run.name,
        num_replicas=sync.num_replicas,
        parameters=count_parameters(model),
        vision_parameters=_vision_parameters(config.find(config.model.path)),
        trainer=sizes.trainer,
        memory=sizes.memory,
        replica=sizes.replica,
        sync=sync,
        projection=sync.project(),
        demand=demand,
        page_size=model.index_block_size,
        num_pages=_num_pages(config),
        demand_pages=_demand_pages(demand, sync, model.index_block_size),
        notices=notices,
        needed=needed,
    )


def _too_short_a_timeout(config: Config, seconds: float) -> str | None:
    timeout_s = config.weight_sync.timeout_s
    if config.rollout.backend.device == "cpu" or seconds <= timeout_s:
        return None
    return (
        f"weight_sync.timeout_s: {timeout_s:g} ({config.origin('weight_sync.timeout_s')}) is less "
        f"than a sync takes at the speed of the links, {seconds:.2f} s; raise it well above that"
    )


def _engine_config(config: Config) -> model_config.EngineConfig:
    """What every replica is told, see `assemble.replica_settings`; of vLLM's replicas what decides
    about a weight sync."""
    backend = config.rollout.backend
    return model_config.EngineConfig(
        **(backend.engine.model_dump() if backend.kind == "m3" else {}),
        dtype=config.policy.dtype,
        device=backend.device,
        capture_routing=config.rollout.capture_routing,
        capture_blocks=config.rollout.capture_blocks,
    )


def _num_pages(config: Config) -> int | None:
    backend = config.rollout.backend
    return backend.engine.num_pages if backend.kind == "m3" else None


def _gpu(config: Config) -> int | None:
    """What a process can have of a GPU; None: nobody knows."""
    memory_gib = config.rollout.backend.gpu_memory_gib
    return None if memory_gib is None else int(memory_gib * (1 << 30))


def _trainer_setting(config: Config, model: model_config.ModelConfig) -> TrainerSetting:
    """What every trainer rank is told; see `assemble.rank_settings`."""
    policy, train, demand = config.policy, config.train, _demand(config)
    trainer = TrainerSetting(
        model,
        policy.dtype,
        train.device,
        ranks=train.num_ranks,
        ep=train.parallel.ep,
        cp=train.parallel.cp,
        micro_batch_tokens=policy.micro_batch_tokens,
        checkpointing=policy.activation_checkpointing,
        offload=config.optimizer.offload,
        has_reference=config.grpo.kl.coef > 0,
        remembers_sent=config.weight_sync.delta,
        trains_index=policy.index_loss.coef > 0,
        lora=lora_settings(config),
    )
    num = micro_batches(trainer, demand, config.grpo.updates_per_batch)
    return replace(trainer, num_micro_batches=num)


def _trainer_problems(
    config: Config, trainer: TrainerSetting, memory: TrainerMemory
) -> Iterator[str]:
    gpu_bytes, needs = _gpu(config), memory.total_bytes
    if trainer.device == "cpu" or gpu_bytes is None or needs <= gpu_bytes:
        return
    lines = [
        f"train: a GPU of {trainer.ranks} ranks, ep {trainer.ep}, cp {trainer.cp}, needs "
        f"{size_text(needs)} and has {size_text(gpu_bytes)}: {size_text(needs - gpu_bytes)} too "
        f"much, at its {memory.peak}",
        *(f"  {name:26} {size_text(size):>10}" for name, size in memory.uses.items()),
    ]
    found = "; ".join(remedies(trainer, _demand(config), gpu_bytes))
    yield "\n  ".join([*lines, f"what fits: {found or 'nothing'}"])


def _parallel(config: Config) -> ParallelConfig:
    backend = config.rollout.backend
    if backend.kind == "vllm":
        return ParallelConfig(tp=backend.ranks_per_replica)
    return ParallelConfig(**backend.parallel.model_dump())


def _length_problems(config: Config, model: model_config.ModelConfig) -> list[str]:
    """A request of full length must fit into the model's positions and into a replica's pages."""
    backend = config.rollout.backend
    if backend.kind == "vllm":
        return list(vllm_m3_problems(config, model))
    longest = longest_row(config)
    try:
        limits = _engine_config(config).resolve(model)
    except model_config.ConfigError as error:
        return [f"rollout.backend.engine: {error}"]
    assert limits.max_model_len is not None, "resolve() fills it"
    if longest <= limits.max_model_len:
        return []
    engine, block = backend.engine, model.index_block_size
    return [
        f"rollout.max_tokens: data.max_prompt_tokens + rollout.max_tokens = {longest} is more than "
        f"a replica can hold: {limits.max_model_len} (max_position_embeddings "
        f"{model.max_position_embeddings}, {engine.num_pages} pages of {block} tokens); shorten "
        f"them, or set rollout.backend.engine.num_pages to {-(-longest // block)} or more"
    ]


def _sync_setting(
    config: Config, model: model_config.ModelConfig, trainer: TrainerSetting
) -> SyncSetting:
    backend = config.rollout.backend
    return SyncSetting(
        model,
        _engine_config(config),
        trainer.shards,
        _parallel(config),
        backend.num_replicas,
        holds_whole=backend.kind == "vllm",
        shares_experts=backend.kind == "vllm" and backend.engine.enable_expert_parallel,
        wire=config.weight_sync.wire,
        delta=config.weight_sync.delta,
        chunk_bytes=config.weight_sync.chunk_mib << 20,
    )


def _demand(config: Config) -> Demand:
    rollout = config.rollout
    return Demand(
        prompts=rollout.prompts_per_step,
        group_size=rollout.group_size,
        prompt_tokens=config.data.max_prompt_tokens,
        completion_tokens=rollout.max_tokens,
        max_running=rollout.backend.max_running,
    )


def _demand_pages(demand: Demand, sync: SyncSetting, page: int) -> int:
    """Of a dp group: each has its own pages, and the requests are shared out."""
    per_group = -(-demand.prompts // (sync.num_replicas * sync.replica.dp))
    shared = demand.prompt_tokens // page
    own = -(-demand.row // page) - shared
    running = min(per_group * demand.group_size, demand.max_running)
    return min(per_group, running) * shared + running * own


def _vision_parameters(path: Path) -> int:
    """Of tower, projector and patch merger, from the published config.json; 0 of a text model."""
    raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    vision = raw.get("vision_config")
    if not vision:
        return 0
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    out = raw.get("projector_hidden_size", vision["projection_dim"])
    merged = vision["img_token_compression_config"]
    pixels = vision["num_channels"] * merged["temporal_patch_size"] * vision["patch_size"] ** 2
    # Weights and biases: two norms, four projections, two products.
    layer = 4 * width + 4 * (width + 1) * width + 2 * width * inner + inner + width
    tower = pixels * width + 2 * width + vision["num_hidden_layers"] * layer
    patches = merged["spatial_merge_size"] ** 2 * out
    return int(tower + (width + 1 + out + 1) * out + (patches + 1 + out + 1) * out)

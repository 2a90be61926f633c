"""What a configuration will need, worked out before anything starts; refuses what cannot work.

Reads JSON files and safetensors headers only: it imports neither ray, torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
from m3rl.data import iterate_items
from m3rl.report import table
from m3rl.sync_plan import LINKS, SyncSetting, sharded
from m3rl.weight_sync.simulate import Projection
from m3rl.weight_sync.trainer_layout import TrainerShards

ModelPart = Literal["tokenizer", "weights"]
MODEL_PARTS: tuple[ModelPart, ...] = ("tokenizer", "weights")
CHECKED_ITEMS = 100
"""Items of each dataset that are looked at; the whole of it is checked when a run starts."""
H200_BYTES = 139 << 30
"""Memory of one H200 that a process can have; the GPU table plans for it unless it is told more."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run, in parameters, bytes, tokens and pages."""

    name: str
    num_ranks: int
    num_replicas: int
    parameters: dict[str, int]
    """By class of weight; the sum is the model."""
    trainer_bytes: dict[str, int]
    """Of one trainer rank, by use; activations are not counted."""
    replica: MemoryPlan
    """Of the GPU, or the process, that holds one rank of a replica."""
    sync: SyncSetting
    projection: Projection
    """Of one weight sync."""
    tokens_per_step: int
    """Most tokens of one training step, prompts counted for each completion."""
    page_size: int
    num_pages: int
    demand_pages: int
    """Most pages that one replica's share of a training step can need at once."""
    notices: tuple[str, ...]


def make_plan(
    config: Config, *, required: Collection[ModelPart] = MODEL_PARTS, allow_mxfp8: bool = False
) -> Plan:
    """Check the files that `config` names and add up what a run needs.

    Args:
        required: parts of the checkpoint that must be right; the others are only noticed.
        allow_mxfp8: whether the weights may be stored in MXFP8: nothing is trained.

    Raises:
        ConfigError: one line for each thing that cannot work.
    """
    path = config.find(config.model.path)
    problems: list[str] = []
    notices: list[str] = []
    model = replica = None
    try:
        model = model_config.ModelConfig.from_pretrained(path)
    except model_config.ConfigError as error:
        problems.append(f"model.path: {error} ({config.origin('model.path')})")
    vocab_size = None if model is None else model.vocab_size
    eos_ids = () if model is None else model.eos_token_ids
    faults = tokenizer_problems(path, vocab_size, eos_ids)
    (problems if "tokenizer" in required else notices).extend(faults)
    if model is not None:
        faults = weight_problems(path, model.num_parameters, allow_mxfp8=allow_mxfp8)
        (problems if "weights" in required else notices).extend(faults)
        length_problems = _length_problems(config, model)
        problems += length_problems
        if not length_problems:
            try:
                replica = _plan_replica(config, model)
            except model_config.ConfigError as error:
                refusal = str(error).replace("\n", "\n  ")
                problems.append(f"rollout.backend: {refusal}")
    problems += _dataset_problems(config) + _run_dir_problems(config)
    if problems or model is None or replica is None:
        raise ConfigError("\n".join(problems))
    return _measure(config, model, replica, (*notices, *_notices(config)))


def describe(plan: Plan) -> str:
    """The plan as a few tables."""
    total = sum(plan.parameters.values())
    parameters = [[name, f"{n:,}", f"{n / total:.1%}"] for name, n in plan.parameters.items()]
    parameters.append(["all", f"{total:,}", ""])
    rank = "replica" if plan.sync.replica.world == 1 else "rank of a replica"
    memory = [
        [f"one {who}", what, size_text(n)]
        for who, uses in (("trainer rank", plan.trainer_bytes), (rank, plan.replica.uses))
        for what, n in [*uses.items(), ("all", sum(uses.values()))]
    ]
    capacity = plan.num_pages * plan.page_size
    fits = (
        "all of a step fits at once"
        if plan.demand_pages <= plan.num_pages
        else f"requests wait for pages: {plan.demand_pages / plan.num_pages:.1f} rounds"
    )
    lines = [
        f"{plan.name}: {plan.num_ranks} trainer rank(s), {plan.num_replicas} replica(s)",
        "",
        table(["parameters", "count", "share"], parameters, right=(1, 2)),
        "",
        table(["memory", "of", "size"], memory, right=(2,)),
        "",
        f"tokens of a training step: at most {plan.tokens_per_step:,}",
        f"KV room of a replica: {plan.num_pages:,} pages of {plan.page_size} = {capacity:,} tokens"
        + _room(plan.replica),
        f"a step needs at most {plan.demand_pages:,} pages of it: {fits}",
        *_sync_lines(plan),
    ]
    lines += [f"note: {notice}" for notice in plan.notices]
    return "\n".join(lines)


def gpu_table(plan: Plan, sizes: Sequence[int]) -> tuple[str, bool]:
    """One row for each number of GPUs, and whether any of them works.

    Trainer ranks and the split of a replica stay as configured, and replicas take the other GPUs.
    The policy is not spread over several GPUs yet, so a model that needs that is refused here; its
    weight sync is projected for shards on half of the GPUs (`sync_plan.sharded`).
    """
    rank_bytes, replica_bytes = sum(plan.trainer_bytes.values()), plan.replica.total_bytes
    gpu_bytes = H200_BYTES if plan.replica.gpu_bytes is None else plan.replica.gpu_bytes
    too_big = [
        f"{who} needs {size_text(n)} and {cure}"
        for who, n, cure in (
            ("a trainer rank", rank_bytes, "cannot be spread over GPUs yet"),
            ("a rank of a replica", replica_bytes, "rollout.backend.parallel has too few of them"),
        )
        if n > gpu_bytes
    ]
    rows = []
    works, world = False, plan.sync.replica.world
    for size in sizes:
        replicas = (size - plan.num_ranks) // world
        if too_big:
            verdict = "refused: " + "; ".join(too_big)
        elif replicas < 1:
            needed = plan.num_ranks + world
            verdict = f"refused: train.num_ranks and one replica are {needed} GPUs"
        else:
            verdict, works = "fits", True
        setting = sharded(plan.sync, size, gpu_bytes) if too_big else None
        if verdict == "fits":
            setting = dataclasses.replace(plan.sync, num_replicas=replicas)
        sync = "-" if setting is None else _sync_text(setting)
        rows.append([str(size), str(plan.num_ranks), str(max(replicas, 0)), sync, verdict])
    kind = "H200 GPUs" if plan.replica.gpu_bytes is None else f"GPUs of {size_text(gpu_bytes)}"
    header = [kind, "trainer ranks", "replicas", "weight sync", "verdict"]
    return table(header, rows, right=(0, 1, 2)), works


def _sync_lines(plan: Plan) -> list[str]:
    found = plan.projection
    mean = round(sum(found.sent_bytes) / len(found.sent_bytes))
    lines = [
        f"weight sync: {size_text(max(found.sent_bytes))} from the busiest trainer rank, "
        f"{size_text(mean)} from a mean one, {size_text(max(found.received_bytes))} to each "
        f"worker, in {found.num_rounds:,} rounds"
    ]
    if plan.sync.engine.device != "cpu":
        lines.append(
            f"projected on H200s: {found.seconds:.2f} s, floor {found.floor_s:.2f} s, at "
            f"{LINKS.nic / 1e9:.0f} GB/s a GPU between nodes and {LINKS.nvlink / 1e9:.0f} inside"
        )
    return lines


def _sync_text(setting: SyncSetting) -> str:
    """'1.18 s, floor 1.10 s', and how a model is sharded that one GPU cannot hold."""
    found = setting.project()
    text = f"{found.seconds:.2f} s, floor {found.floor_s:.2f} s"
    ranks, replicas, ep = setting.trainer.world, setting.num_replicas, setting.replica.world
    return text if ep == 1 else f"{text} ({ranks} FSDP ranks to {replicas} x ep={ep})"


def _room(replica: MemoryPlan) -> str:
    if replica.max_num_pages is None:
        return ""
    return f"; its GPU has room for {replica.max_num_pages:,} pages"


def _engine_config(config: Config) -> model_config.EngineConfig:
    """What every replica is told; see `assemble.replica_settings`."""
    backend = config.rollout.backend
    return model_config.EngineConfig(
        **backend.engine.model_dump(),
        dtype=config.policy.dtype,
        device=backend.device,
        capture_routing=config.rollout.capture_routing,
        capture_blocks=config.rollout.capture_blocks,
    )


def _plan_replica(config: Config, model: model_config.ModelConfig) -> MemoryPlan:
    memory_gib = config.rollout.backend.gpu_memory_gib
    gpu_bytes = None if memory_gib is None else int(memory_gib * (1 << 30))
    return plan_memory(model, _engine_config(config), _parallel(config), gpu_bytes=gpu_bytes)


def _parallel(config: Config) -> ParallelConfig:
    return ParallelConfig(**config.rollout.backend.parallel.model_dump())


def _length_problems(config: Config, model: model_config.ModelConfig) -> list[str]:
    """A request of full length must fit into the model's positions and into a replica's pages."""
    engine = config.rollout.backend.engine
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    try:
        limits = _engine_config(config).resolve(model)
    except model_config.ConfigError as error:
        return [f"rollout.backend.engine: {error}"]
    assert limits.max_model_len is not None, "resolve() fills it"
    if longest <= limits.max_model_len:
        return []
    pages = -(-longest // model.index_block_size)
    return [
        f"rollout.max_tokens: data.max_prompt_tokens + rollout.max_tokens = {longest} is more than "
        f"a replica can hold: {limits.max_model_len} (max_position_embeddings "
        f"{model.max_position_embeddings}, {engine.num_pages} pages of {model.index_block_size} "
        f"tokens); shorten them, or set rollout.backend.engine.num_pages to {pages} or more"
    ]


def _run_dir_problems(config: Config) -> list[str]:
    """The nearest folder that is there already must be one that can be written to."""
    path = Path(config.run.dir).absolute()
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return []
    fault = "cannot be written to" if nearest.is_dir() else "is not a directory"
    return [f"run.dir: {nearest} {fault} ({config.origin('run.dir')}); choose another run.dir"]


def _dataset_problems(config: Config) -> list[str]:
    problems = []
    for key, dataset in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if dataset is None:
            continue
        try:
            if not list(itertools.islice(iterate_items(config, dataset, key), CHECKED_ITEMS)):
                problems.append(f"{key}: the dataset is empty")
        except ConfigError as error:
            problems.append(str(error))
    return problems


def _notices(config: Config) -> list[str]:
    rollout = config.rollout
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    cut = [key for key, value in off.items() if getattr(rollout, key) != value]
    notices = []
    if cut:
        notices.append(
            f"rollout.{cut[0]}: {getattr(rollout, cut[0])} truncates the sampling distribution, "
            "which is for `m3rl rollout`; training needs the whole one"
        )
    backend = rollout.backend
    if backend.device == "cuda" and backend.gpu_memory_gib is None:
        notices.append(
            "rollout.backend.gpu_memory_gib: null, so nobody looks whether a replica fits a GPU"
        )
    if config.eval.at_start or config.eval.at_end or config.eval.every:
        name = getattr(config.data.eval, "size", None)
        if name is not None and name < config.eval.num_prompts:
            notices.append(
                f"eval.num_prompts: {config.eval.num_prompts} is more than data.eval.size: {name}; "
                "all of them are used"
            )
    return notices


def _measure(
    config: Config,
    model: model_config.ModelConfig,
    replica: MemoryPlan,
    notices: tuple[str, ...],
) -> Plan:
    rollout = config.rollout
    prompt, completion = config.data.max_prompt_tokens, rollout.max_tokens
    page, pages = model.index_block_size, rollout.backend.engine.num_pages
    parameters = count_parameters(model)
    ranks, replicas = config.train.num_ranks, rollout.backend.num_replicas
    trainer = TrainerShards(ranks, replicas=ranks)
    engine, wire = _engine_config(config), config.weight_sync.wire
    sync = SyncSetting(model, engine, trainer, _parallel(config), replicas, wire)
    # Of a dp group: each has its own pages, and the requests are shared out.
    per_replica = -(-rollout.prompts_per_step // (replicas * sync.replica.dp))
    shared = prompt // page
    own = -(-(prompt + completion) // page) - shared
    running = min(per_replica * rollout.group_size, rollout.backend.engine.max_running_requests)
    return Plan(
        name=config.run.name,
        num_ranks=ranks,
        num_replicas=replicas,
        parameters=parameters,
        trainer_bytes=_trainer_bytes(config, parameters),
        replica=replica,
        sync=sync,
        projection=sync.project(),
        tokens_per_step=rollout.prompts_per_step * rollout.group_size * (prompt + completion),
        page_size=page,
        num_pages=pages,
        demand_pages=min(per_replica, running) * shared + running * own,
        notices=notices,
    )


def _trainer_bytes(config: Config, parameters: dict[str, int]) -> dict[str, int]:
    """The index branch is frozen: it has a master, no gradient and no moments."""
    total = sum(parameters.values())
    trained = total - parameters["index branch"]
    out = {"FP32 masters": 4 * total, "gradients": 4 * trained, "Adam moments": 8 * trained}
    if config.policy.dtype != "float32":
        out[f"{config.policy.dtype} copy"] = DTYPE_BYTES[config.policy.dtype] * total
    if config.weight_sync.delta:
        out["what was sent"] = DTYPE_BYTES[config.policy.dtype] * total // config.train.num_ranks
    return out

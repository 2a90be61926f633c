"""A plan as people read it: tables of memory, of a weight sync, of clusters of several sizes."""

from __future__ import annotations

from collections.abc import Sequence

from m3rl.config import ConfigError
from m3rl.plan import Plan, size_text
from m3rl.plan_any import AnyPlan
from m3rl.plan_any_text import describe_any
from m3rl.plan_fit import split
from m3rl.plan_time import StepTime, active_parameters, measured_rates, step_time
from m3rl.plan_trainer import TrainerSetting
from m3rl.report import table
from m3rl.sync_plan import LINKS, SyncSetting
from m3rl.weight_sync.simulate import Projection

H200_BYTES = 139 << 30
"""Memory of one H200 that a process can have; the GPU table plans for it unless it is told more."""


def describe(plan: Plan | AnyPlan) -> str:
    """The plan as a few tables, and what a launch needs besides."""
    return describe_any(plan) if isinstance(plan, AnyPlan) else _describe_m3(plan)


def _describe_m3(plan: Plan) -> str:
    lines = [
        f"{plan.name}: {plan.trainer.ranks} trainer rank(s){_trainer_split(plan.trainer)}, "
        f"{plan.num_replicas} replica(s){_replica_split(plan.sync)}",
        "",
        _parameter_table(plan),
        "",
        _memory_table(plan),
        "",
        *_trainer_lines(plan),
        f"tokens of a training step: at most {plan.demand.tokens:,}",
        *_page_lines(plan),
        *_sync_lines(plan),
        *_time_lines(plan),
    ]
    lines += [f"note: {notice}" for notice in plan.notices]
    lines += [f"needed at launch: {what}" for what in launch_needs(plan)]
    return "\n".join(lines)


def gpu_table(plan: Plan | AnyPlan, sizes: Sequence[int]) -> tuple[str, bool]:
    """One row for each number of GPUs, and whether any of them works (`plan_fit.split`).

    Raises:
        ConfigError: the model is no M3; or replicas are vLLM's, which measure their memory when
            they start.
    """
    if isinstance(plan, AnyPlan):
        raise ConfigError(
            f"--gpus: plans MiniMax-M3 alone, and the model is of type {plan.model_type}; leave "
            "--gpus out"
        )
    if plan.num_pages is None:
        raise ConfigError(
            "--gpus: plans replicas of the bundled runtime, and rollout.backend.kind: vllm shares "
            "a GPU out when it starts; leave --gpus out, or add rollout.backend.kind=m3"
        )
    gpu_bytes = H200_BYTES if plan.replica.gpu_bytes is None else plan.replica.gpu_bytes
    rows, works = [], False
    for size in sizes:
        found = split(plan.trainer, plan.sync, plan.demand, size, gpu_bytes)
        if isinstance(found, str):
            rows.append([str(size), "-", "-", "-", "-", f"refused: {found}"])
            continue
        works = True
        verdict = f"fits with {', '.join(found.changes)}" if found.changes else "fits"
        time = _step_time(found.trainer, found.sync, plan)
        rows.append(
            [
                str(size),
                str(found.trainer.ranks),
                f"{found.sync.num_replicas} of {found.sync.replica.world}",
                _seconds(found.sync.project()),
                "-" if time is None else f"{time.total:.0f} s",
                verdict,
            ]
        )
    kind = "H200 GPUs" if plan.replica.gpu_bytes is None else f"GPUs of {size_text(gpu_bytes)}"
    header = [kind, "trainer ranks", "replicas", "weight sync", "step", "verdict"]
    return table(header, rows, right=(0, 1, 2, 4)), works


def launch_needs(plan: Plan | AnyPlan) -> list[str]:
    """What a launch needs and is not here."""
    return list(plan.needed)


def _parameter_table(plan: Plan) -> str:
    total = sum(plan.parameters.values())
    rows = [[name, f"{n:,}", f"{n / total:.1%}"] for name, n in plan.parameters.items()]
    active = active_parameters(plan.trainer.model)
    rows.append(["all", f"{total:,}", ""])
    rows.append(["active in a token, head apart", f"{sum(active.values()) - active['head']:,}", ""])
    if plan.vision_parameters:
        rows.append(["vision, never loaded", f"{plan.vision_parameters:,}", ""])
        rows.append(["all with vision", f"{total + plan.vision_parameters:,}", ""])
    return table(["parameters", "count", "share"], rows, right=(1, 2))


def _memory_table(plan: Plan) -> str:
    rank = "replica" if plan.sync.replica.world == 1 else "rank of a replica"
    rows = [
        [f"one {who}", what, size_text(n)]
        for who, uses in (("trainer rank", plan.memory.uses), (rank, plan.replica.uses))
        for what, n in [*uses.items(), ("all", sum(uses.values()))]
    ]
    return table(["memory", "of", "size"], rows, right=(2,))


def _trainer_split(trainer: TrainerSetting) -> str:
    """' in shards: ep=8, cp=1'; nothing for one."""
    return f" in shards: ep={trainer.ep}, cp={trainer.cp}" if trainer.ranks > 1 else ""


def _replica_split(setting: SyncSetting) -> str:
    """', each of 16 ranks: tp=16, dp=1, ep=16'; nothing for replicas of one."""
    split = setting.replica
    if split.world == 1:
        return ""
    return f", each of {split.world} ranks: tp={split.tp}, dp={split.dp}, ep={split.expert_groups}"


def _trainer_lines(plan: Plan) -> list[str]:
    trainer, memory = plan.trainer, plan.memory
    lines = []
    if memory.moments:
        sizes = ", ".join(f"{name} {size_text(size)}" for name, size in memory.moments.items())
        lines.append(
            f"a trainer rank's moments, {trainer.num_micro_batches} micro-batches of "
            f"{trainer.micro_batch_tokens:,} tokens an update: {sizes}"
        )
    if memory.host_bytes:
        lines.append(f"AdamW's moments in the host's memory: {size_text(memory.host_bytes)} a rank")
    return lines


def _page_lines(plan: Plan) -> list[str]:
    if plan.num_pages is None:
        return []
    capacity = plan.num_pages * plan.page_size
    fits = (
        "all of a step fits at once"
        if plan.demand_pages <= plan.num_pages
        else f"requests wait for pages: {plan.demand_pages / plan.num_pages:.1f} rounds"
    )
    return [
        f"KV room of a replica: {plan.num_pages:,} pages of {plan.page_size} = {capacity:,} tokens"
        + _room(plan),
        f"a step needs at most {plan.demand_pages:,} pages of it: {fits}",
    ]


def _sync_lines(plan: Plan) -> list[str]:
    found, setting = plan.projection, plan.sync
    mean = round(sum(found.sent_bytes) / len(found.sent_bytes))
    lines = [
        f"weight sync: {size_text(max(found.sent_bytes))} from the busiest trainer rank, "
        f"{size_text(mean)} from a mean one (balance {found.balance:.2f}), "
        f"{size_text(max(found.received_bytes))} to each worker, by {found.num_copies:,} copies a "
        f"replica in {found.num_rounds:,} rounds of {size_text(setting.chunk_bytes)} a worker"
    ]
    if setting.engine.device != "cpu":
        lines.append(f"projected on H200s: {_seconds(found)}, at {_links()}")
    return lines


def _time_lines(plan: Plan) -> list[str]:
    time = _step_time(plan.trainer, plan.sync, plan)
    if time is None:
        return []
    rates = measured_rates()
    how = "measured" if rates.is_measured else "partly assumed"
    return [
        f"projected step on H200s, all completions of full length: {time.total:.2f} s = generation "
        f"{time.generation:.2f} + training {time.training:.2f} + weight sync {time.sync:.2f}, "
        f"{plan.demand.tokens / time.total:,.0f} tokens/s; at {how} rates: training "
        f"{rates.train_flops / 1e12:.0f} TFLOP/s, prompts {rates.prefill_flops / 1e12:.0f} "
        f"TFLOP/s, decode steps {rates.x_floor:.2f}x the time of their bytes"
    ]


def _step_time(trainer: TrainerSetting, sync: SyncSetting, plan: Plan) -> StepTime | None:
    """None where a part of the step runs on no GPU, or in vLLM, whose rates nobody measured."""
    if plan.num_pages is None or "cpu" in (trainer.device, sync.engine.device):
        return None
    return step_time(trainer, sync, plan.demand)


def _seconds(found: Projection) -> str:
    return f"{found.seconds:.2f} s, floor {found.floor_s:.2f} s"


def _links() -> str:
    return f"{LINKS.nic / 1e9:.0f} GB/s a GPU between nodes and {LINKS.nvlink / 1e9:.0f} inside"


def _room(plan: Plan) -> str:
    most = plan.replica.max_num_pages
    return "" if most is None else f"; its GPU has room for {most:,} pages"

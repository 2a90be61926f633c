"""A plan as people read it: tables of memory, of a weight sync, of clusters of several sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from m3rl.plan import Plan, size_text
from m3rl.report import table
from m3rl.sync_plan import LINKS, SyncSetting, sharded
from m3rl.weight_sync.simulate import Projection

H200_BYTES = 139 << 30
"""Memory of one H200 that a process can have; the GPU table plans for it unless it is told more."""


def describe(plan: Plan) -> str:
    """The plan as a few tables, and what a launch needs besides."""
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
        f"{plan.name}: {plan.num_ranks} trainer rank(s), {plan.num_replicas} replica(s)"
        + _split(plan.sync),
        "",
        table(["parameters", "count", "share"], parameters, right=(1, 2)),
        "",
        table(["memory", "of", "size"], memory, right=(2,)),
        "",
        f"tokens of a training step: at most {plan.tokens_per_step:,}",
        f"KV room of a replica: {plan.num_pages:,} pages of {plan.page_size} = {capacity:,} tokens"
        + _room(plan),
        f"a step needs at most {plan.demand_pages:,} pages of it: {fits}",
        *_sync_lines(plan),
    ]
    lines += [f"note: {notice}" for notice in plan.notices]
    lines += [f"needed at launch: {what}" for what in launch_needs(plan)]
    return "\n".join(lines)


def gpu_table(plan: Plan, sizes: Sequence[int]) -> tuple[str, bool]:
    """One row for each number of GPUs, and whether any of them works.

    Trainer ranks and the split of a replica stay as configured, and replicas take the other GPUs.
    The policy is not spread over several GPUs yet, so a model that needs that is refused here; its
    weight sync is projected for shards on half of the GPUs (`sync_plan.sharded`).
    """
    rank_bytes, replica_bytes = sum(plan.trainer_bytes.values()), plan.replica.total_bytes
    gpu_bytes = _gpu_bytes(plan)
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


def _split(setting: SyncSetting) -> str:
    """', each of 16 ranks: tp=16, dp=1, ep=16'; nothing for replicas of one."""
    split = setting.replica
    if split.world == 1:
        return ""
    return f", each of {split.world} ranks: tp={split.tp}, dp={split.dp}, ep={split.expert_groups}"


def _gpu_bytes(plan: Plan) -> int:
    return H200_BYTES if plan.replica.gpu_bytes is None else plan.replica.gpu_bytes


def launch_needs(plan: Plan) -> list[str]:
    """What a launch needs and is not here."""
    return [*plan.needed, *_too_big(plan)]


def _too_big(plan: Plan) -> list[str]:
    rank_bytes = sum(plan.trainer_bytes.values())
    if rank_bytes <= _gpu_bytes(plan):
        return []
    return [
        f"{size_text(rank_bytes)} of memory for each of {plan.num_ranks} trainer ranks, since each "
        "holds the whole policy (it cannot be spread over ranks yet)"
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
    if setting.engine.device == "cpu":
        return lines
    lines.append(f"projected on H200s: {_seconds(found)}, at {_links()}")
    if _too_big(plan):
        shards = setting.with_shards()
        found = shards.project()
        lines.append(
            f"were the policy in FSDP shards, experts in {shards.trainer.ep} groups: "
            f"{_seconds(found)}, balance {found.balance:.2f}"
        )
    return lines


def _seconds(found: Projection) -> str:
    return f"{found.seconds:.2f} s, floor {found.floor_s:.2f} s"


def _links() -> str:
    return f"{LINKS.nic / 1e9:.0f} GB/s a GPU between nodes and {LINKS.nvlink / 1e9:.0f} inside"


def _sync_text(setting: SyncSetting) -> str:
    """'1.18 s, floor 1.10 s', and how a model is sharded that one GPU cannot hold."""
    text = _seconds(setting.project())
    trainer, world = setting.trainer, setting.replica.world
    if trainer.shards == 1:
        return text
    return f"{text} ({trainer.world} FSDP ranks to {setting.num_replicas} replicas of {world})"


def _room(plan: Plan) -> str:
    most = plan.replica.max_num_pages
    return "" if most is None else f"; its GPU has room for {most:,} pages"

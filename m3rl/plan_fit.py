"""Settings near to those of a run that fit its GPUs, or another number of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace

from inference.memory import size_text
from m3rl.plan_lora import plan_rank
from m3rl.plan_time import Demand
from m3rl.plan_trainer import TrainerSetting
from m3rl.sync_plan import SyncSetting, replicas_on
from m3rl.weight_sync.errors import LayoutError

MAX_RANKS = 1024
EXPERT_GROUPS = 8
"""Most that are proposed: the GPUs of a node."""
SHARES = (4, 5, 6, 7)
"""Eighths of a cluster that may train, where the trainer does not stay as configured."""


def changes(old: TrainerSetting, new: TrainerSetting) -> list[str]:
    """`key: value` of what a configuration must say for `new`."""
    keys = {
        "ranks": "train.num_ranks",
        "ep": "train.parallel.ep",
        "micro_batch_tokens": "policy.micro_batch_tokens",
        "checkpointing": "policy.activation_checkpointing",
        "offload": "optimizer.offload",
    }
    pairs = [(key, getattr(new, name)) for name, key in keys.items()]
    was = [getattr(old, name) for name in keys]
    return [
        f"{key}: {str(value).lower()}"
        for (key, value), before in zip(pairs, was, strict=True)
        if value != before
    ]


def micro_batches(trainer: TrainerSetting, demand: Demand, updates_per_batch: int = 1) -> int:
    """Of a rank and an optimizer step, if all rows are of full length."""
    rows = -(-demand.prompts * demand.group_size // updates_per_batch)
    rows_of_rank = -(-rows // (trainer.ranks // trainer.cp))
    return -(-rows_of_rank // max(1, trainer.micro_batch_tokens // demand.row))


def fits(trainer: TrainerSetting, gpu_bytes: int) -> bool:
    try:
        return plan_rank(trainer).total_bytes <= gpu_bytes
    except LayoutError:  # it cannot be split so
        return False


def remedies(trainer: TrainerSetting, demand: Demand, gpu_bytes: int) -> Iterator[str]:
    """What a configuration may say instead, so that a trainer rank fits: on as many ranks, and on
    the fewest more."""
    options = list(_lighter(trainer, demand))
    ranks = 2 * trainer.ranks
    while ranks <= MAX_RANKS:
        wider = replace(trainer, ranks=ranks)
        options += [wider, *_lighter(wider, demand)]
        ranks *= 2
    fewest: int | None = None
    told: list[set[str]] = []
    for option in filter(lambda option: fits(option, gpu_bytes), options):
        if fewest is not None and option.ranks not in (trainer.ranks, fewest):
            return
        if option.ranks > trainer.ranks:
            fewest = option.ranks
        texts = changes(trainer, option)
        keys = {text.partition(":")[0] for text in texts}
        if not any(keys >= less for less in told):  # else a part of it is enough
            told.append(keys)
            yield ", ".join(texts)


def _lighter(trainer: TrainerSetting, demand: Demand) -> Iterator[TrainerSetting]:
    """The same ranks with less on each: one thing at a time, then all of them."""
    if trainer.device == "cpu":
        return
    together = trainer
    ep = min(trainer.ep * 2, EXPERT_GROUPS)
    if ep > trainer.ep and trainer.ranks % ep == 0:
        yield replace(trainer, ep=ep)
        together = replace(together, ep=ep)
    if not trainer.checkpointing:
        yield replace(trainer, checkpointing=True)
        together = replace(together, checkpointing=True)
    if not trainer.offload:
        yield replace(trainer, offload=True)
        together = replace(together, offload=True)
    tokens = trainer.micro_batch_tokens // 2
    while tokens >= demand.row:
        yield replace(trainer, micro_batch_tokens=tokens)
        tokens //= 2
    shortest = min(trainer.micro_batch_tokens, demand.row)
    if together != trainer:
        yield together
        yield replace(together, micro_batch_tokens=shortest)


@dataclass(frozen=True, slots=True)
class Split:
    """A way to use a number of GPUs."""

    trainer: TrainerSetting
    sync: SyncSetting
    changes: tuple[str, ...]
    """What the configuration must say for it, besides the number of replicas."""


def split(
    trainer: TrainerSetting, sync: SyncSetting, demand: Demand, num_gpus: int, gpu_bytes: int
) -> Split | str:
    """The trainer as it is and replicas on all other GPUs, or else half of the GPUs train, or more
    where that is too few; or why none of it works."""
    world = sync.replica.world
    numbers = [num_gpus * share // 8 for share in SHARES]
    if trainer.ranks + world <= num_gpus:
        numbers.insert(0, trainer.ranks)
    reason, least = "", 1 << 62
    for ranks in filter(None, numbers):
        replicas = replicas_on(sync, num_gpus - ranks, gpu_bytes)
        if replicas is None:
            reason = reason or f"no replica fits {num_gpus - ranks} GPUs"
            continue
        wanted = replace(trainer, ranks=ranks)
        if ranks != trainer.ranks:
            wanted = _spread(wanted)
        wanted = replace(wanted, num_micro_batches=micro_batches(wanted, demand))
        options = [wanted, *_lighter(wanted, demand)]
        found = next((option for option in options if fits(option, gpu_bytes)), None)
        if found is None:
            size = min(map(_size, options))
            if size < least:
                least = size
                reason = f"a trainer rank needs at least {size_text(size)} on {ranks} GPUs"
            continue
        told = changes(trainer, found)
        if replicas.replica != sync.replica:
            parallel = dataclasses.asdict(replicas.replica)
            told.append(
                "rollout.backend.parallel: "
                + ", ".join(f"{key} {value}" for key, value in parallel.items())
            )
        return Split(found, replace(replicas, trainer=found.shards), tuple(told))
    return reason or f"train.num_ranks and one replica are {trainer.ranks + world} GPUs"


def _spread(trainer: TrainerSetting) -> TrainerSetting:
    """Experts and rows split over as many ranks as divide the trainer's."""
    ep, cp = trainer.ep, trainer.cp
    while trainer.ranks % ep:
        ep -= 1
    while trainer.ranks % cp:
        cp -= 1
    return replace(trainer, ep=ep, cp=cp)


def _size(trainer: TrainerSetting) -> int:
    try:
        return plan_rank(trainer).total_bytes
    except LayoutError:
        return 1 << 62

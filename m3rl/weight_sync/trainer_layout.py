"""What each rank of a sharded trainer holds: FSDP over rows, EP over experts, replicas of both.

    rank = replica · shards + row_part · ep + expert_group         shards = world / replicas

Rows (dimension 0) of a tensor are cut over all `shards` ranks of a replica, those of a routed
expert over the shards / ep ranks of its expert group; groups hold consecutive experts. Cuts are
those of `torch.chunk`, which FSDP uses: the last ranks may hold less, or nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from m3rl.types import TensorSlot
from m3rl.weight_sync.errors import LayoutError
from m3rl.weight_sync.layout import Layout, whole

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class TrainerShards:
    """How trainer ranks split the policy; the default is one rank that holds all of it."""

    world: int = 1
    replicas: int = 1
    """Complete copies (HSDP); equal to `world`, every rank holds all."""
    ep: int = 1
    """Groups of a replica's ranks that split the experts."""

    def __post_init__(self) -> None:
        for name in ("world", "replicas", "ep"):
            if getattr(self, name) < 1:
                raise LayoutError(f"trainer {name}={getattr(self, name)} must be at least 1")
        if self.world % (self.replicas * self.ep):
            raise LayoutError(
                f"trainer world={self.world} is no multiple of replicas={self.replicas} times "
                f"ep={self.ep}"
            )

    @property
    def shards(self) -> int:
        """Ranks that share one copy."""
        return self.world // self.replicas

    def expert_group(self, rank: int) -> int:
        return rank % self.shards % self.ep

    def row_part(self, rank: int) -> int:
        """Which part of the rows of its experts a rank holds, of shards / ep."""
        return rank % self.shards // self.ep


def trainer_layout(tensors: Layout, split: TrainerShards, rank: int) -> tuple[TensorSlot, ...]:
    """The part of each published tensor that trainer rank `rank` holds.

    Args:
        tensors: every tensor of the policy, whole (`Policy.layout`).

    Raises:
        LayoutError: `ep` does not divide the experts, or there is no such rank.
    """
    if not 0 <= rank < split.world:
        raise LayoutError(f"trainer rank {rank} is not one of world={split.world}")
    num_experts = _count_experts(tensors)
    if num_experts % split.ep:
        raise LayoutError(f"trainer ep={split.ep} does not divide {num_experts} experts")
    per_group = num_experts // split.ep
    slots = []
    for slot in tensors:
        expert = expert_of(slot.name)
        if expert is None:
            rows = chunk(slot.shape, split.shards, rank % split.shards)
        elif expert // per_group == split.expert_group(rank):
            rows = chunk(slot.shape, split.shards // split.ep, split.row_part(rank))
        else:
            continue
        if rows is not None:
            bounds = (rows, *whole(slot.shape)[1:]) if slot.shape else ()
            slots.append(dataclasses.replace(slot, bounds=bounds))
    return tuple(slots)


def expert_of(name: str) -> int | None:
    """Number of the routed expert that a published tensor belongs to; None for all others."""
    found = _EXPERT.search(name)
    return None if found is None else int(found[1])


def chunk(shape: Sequence[int], parts: int, part: int) -> tuple[int, int] | None:
    """First and last row (exclusive) of a part in `torch.chunk`; None for one without rows."""
    if not shape:
        return (0, 1)  # a scalar is not cut: each rank holds it
    size = -(-shape[0] // parts)
    start, stop = min(part * size, shape[0]), min((part + 1) * size, shape[0])
    return (start, stop) if start < stop else None


def _count_experts(tensors: Layout) -> int:
    return 1 + max((e for slot in tensors if (e := expert_of(slot.name)) is not None), default=-1)

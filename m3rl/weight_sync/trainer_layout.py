"""What each rank of a sharded trainer holds: FSDP over rows, EP over experts, replicas of both.

    rank = replica · shards + row_part · ep + expert_group         shards = world / replicas

The trainer keeps several published tensors in one parameter: gate rows and then up rows, all
experts of a layer. Parameters are what is cut. Rows (dimension 0) are cut over all `shards` ranks
of a replica. Experts go in consecutive runs to the expert groups, and those of a group to its
shards / ep ranks: whole ones where that comes out even, else rows of each (dimension 1). Cuts are
those of `torch.chunk`, which FSDP uses: the last ranks may hold less, or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

from m3rl.types import TensorSlot
from m3rl.weight_sync.errors import LayoutError
from m3rl.weight_sync.layout import Bounds, Layout

_EXPERT = re.compile(r"\.experts\.(\d+)\.")

Index = tuple[slice | int, ...]


class Place(Protocol):
    """Where a published tensor lies: `parameters[param][index]` (the name map's `Placement`)."""

    @property
    def param(self) -> str: ...
    @property
    def index(self) -> Index: ...


class Part(NamedTuple):
    """What a rank holds of a published tensor."""

    bounds: Bounds
    """In the published tensor."""
    place: Index
    """In the rank's part of the parameter."""


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
        """Which part of its group's experts a rank holds, of shards / ep."""
        return rank % self.shards // self.ep


def trainer_layouts(
    tensors: Layout, places: Mapping[str, Place], split: TrainerShards
) -> list[tuple[TensorSlot, ...]]:
    """`trainer_layout` of every rank; ranks of several replicas have the same tuple."""
    shards = [trainer_layout(tensors, places, split, rank) for rank in range(split.shards)]
    return shards * split.replicas


def trainer_layout(
    tensors: Layout, places: Mapping[str, Place], split: TrainerShards, rank: int
) -> tuple[TensorSlot, ...]:
    """The part of each published tensor that trainer rank `rank` holds.

    Args:
        tensors: every tensor of the policy, whole.
        places: of each of them, in the trainer's parameters.

    Raises:
        LayoutError: `ep` does not divide the experts, or there is no such rank.
    """
    parts = held_parts(tensors, places, split, rank)
    return tuple(
        TensorSlot(
            slot.name, slot.dtype, slot.shape, parts[slot.name].bounds, slot.bucket, slot.storage
        )
        for slot in tensors
        if slot.name in parts
    )


def held_parts(
    tensors: Layout, places: Mapping[str, Place], split: TrainerShards, rank: int
) -> dict[str, Part]:
    """What a rank holds of each published tensor, by name; arguments as of `trainer_layout`."""
    if not 0 <= rank < split.world:
        raise LayoutError(f"trainer rank {rank} is not one of world={split.world}")
    regions: dict[str, Bounds | None] = {}
    for param, (shape, is_experts) in parameters_of(tensors, places).items():
        regions[param] = held_region(shape, is_experts, split, rank)
    parts = {}
    for slot in tensors:
        place = places[slot.name]
        region = regions[place.param]
        part = None if region is None else part_of(region, place.index)
        if part is not None:
            parts[slot.name] = part
    return parts


def held_region(
    shape: tuple[int, ...], is_experts: bool, split: TrainerShards, rank: int
) -> Bounds | None:
    """The rectangle of a parameter that a rank holds; None: nothing of it.

    Raises:
        LayoutError: `ep` does not divide the experts.
    """
    if not is_experts:
        return _cut(tuple((0, size) for size in shape), 0, split.shards, rank % split.shards)
    if shape[0] % split.ep:
        raise LayoutError(f"trainer ep={split.ep} does not divide {shape[0]} experts")
    own, parts = shape[0] // split.ep, split.shards // split.ep
    first = split.expert_group(rank) * own
    region = ((first, first + own), *((0, size) for size in shape[1:]))
    return _cut(region, cut_dim(own, shape[1], parts), parts, split.row_part(rank))


def cut_dim(num_experts: int, num_rows: int, parts: int) -> int:
    """The dimension of a parameter [num_experts, num_rows, ...] that FSDP cuts into `parts`.

    Rows only if that is even, which FSDP demands of any dimension but the first.
    """
    return int(num_experts % parts != 0 and num_rows % parts == 0)


def part_of(region: Bounds, index: Index) -> Part | None:
    """What a rectangle of a parameter holds of the published tensor at `index` of it."""
    bounds: list[tuple[int, int]] = []
    local: list[slice | int] = []
    for (start, stop), at in zip(region, index, strict=False):
        if isinstance(at, int):
            if not start <= at < stop:
                return None
            local.append(at - start)
        else:
            first, last = max(start, at.start), min(stop, at.stop)
            if first >= last:
                return None
            bounds.append((first - at.start, last - at.start))
            local.append(slice(first - start, last - start))
    return Part((*bounds, *region[len(index) :]), tuple(local))


@cache
def expert_of(name: str) -> int | None:
    """Number of the routed expert that a published tensor belongs to; None for all others."""
    found = _EXPERT.search(name)
    return None if found is None else int(found[1])


def chunk(size: int, parts: int, part: int) -> tuple[int, int] | None:
    """Begin and end of a part in `torch.chunk`; None for an empty one."""
    each = -(-size // parts)
    start, stop = min(part * each, size), min((part + 1) * each, size)
    return (start, stop) if start < stop else None


def _cut(region: Bounds, dim: int, parts: int, part: int) -> Bounds | None:
    if not region:
        return region  # a scalar is not cut: each rank holds it
    start, stop = region[dim]
    found = chunk(stop - start, parts, part)
    if found is None:
        return None
    return (*region[:dim], (start + found[0], start + found[1]), *region[dim + 1 :])


def parameters_of(
    tensors: Layout, places: Mapping[str, Place]
) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Shape of every parameter, and whether it stacks experts: what its tensors fill together."""
    found: dict[str, tuple[tuple[int, ...], bool]] = {}
    for slot in tensors:
        index = places[slot.name].index
        ends = [at + 1 if isinstance(at, int) else at.stop for at in index]
        sizes = [*ends, *slot.shape[sum(isinstance(at, slice) for at in index) :]]
        known, is_experts = found.get(places[slot.name].param, (sizes, False))
        shape = tuple(map(max, sizes, known))
        found[places[slot.name].param] = shape, is_experts or expert_of(slot.name) is not None
    return found

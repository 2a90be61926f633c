"""Replicas take turns, and so do trainer ranks that hold the same: none sends while others wait.

Every replica is planned alone, and replicas alike get the same plan: what that leaves to chance
would come once for each of them, at the same time. So a round's bytes are shared out evenly among
the ranks that could send them, and who begins changes from bucket to bucket and from replica to
replica. Replicas for which the same ranks begin begin with another round of each bucket.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from m3rl.weight_sync.layout import Layout, bucket_order
from m3rl.weight_sync.plan import CopyOp, Plan, ops_digest
from m3rl.weight_sync.relay import source_of

BUNDLE_BYTES = 256 << 10
"""Smaller ops of a round and a worker stay together, since they travel as one message,"""
PARTS = 16
"""up to this part of what a rank sends in the round."""
_STEP = 0x9E3779B1
"""2^32 / golden ratio: the places where buckets begin stay evenly spread, however many they are."""

Group = tuple[int, ...]
"""Trainer ranks with equal layouts, ascending."""


class Turn(NamedTuple):
    """A replica's among all: of those that take turns with the same trainer ranks."""

    number: int = 0
    of: int = 1


def twins(senders: Sequence[Layout]) -> list[Group]:
    """All trainer ranks, those with equal layouts as one group."""
    groups: dict[Layout, list[int]] = defaultdict(list)
    for rank, layout in enumerate(senders):
        groups[tuple(layout)].append(rank)
    return [tuple(group) for group in groups.values()]


def take_turns(plan: Plan, senders: Sequence[Layout], turn: Turn) -> Plan:
    """The plan as one replica of several carries it out: the same copies and as many rounds.

    Rounds of a bucket are in another order, and each copy is sent by one of the ranks that hold
    what its sender holds. It is the plan itself where nothing changes.

    Args:
        senders: layout of each trainer rank.
    """
    groups = twins(senders)
    if len(groups) == len(senders) and turn.number == 0:
        return plan
    group_of = {rank: group for group in groups for rank in group}
    buckets: dict[str, list[int]] = defaultdict(list)
    for k, op in enumerate(plan.ops):
        if op.via < 0:
            buckets[op.bucket].append(k)
    turned = list(plan.ops)
    ahead = ahead_of(min(map(len, groups)), turn)
    for number, bucket in enumerate(sorted(buckets, key=bucket_order)):
        ops = [plan.ops[k] for k in buckets[bucket]]
        first, last = ops[0].round, ops[-1].round
        for k, op, place in zip(buckets[bucket], ops, places(ops, group_of), strict=True):
            group = group_of[op.sender]
            begin = first_place(len(group), number, turn)
            round = first + turned_round(op.round - first, last - first + 1, ahead)
            turned[k] = op.placed(group[(place + begin) % len(group)], round)
    sources = source_of(plan.ops)
    for k, op in enumerate(plan.ops):
        if op.via >= 0:
            source = turned[sources[op.via, op.name, op.bounds]]
            turned[k] = op.placed(source.sender, source.round + 1)
    ordered = tuple(sorted(turned, key=lambda op: (op.round, op.receiver)))
    return Plan(ordered, ops_digest(ordered))


def ahead_of(size: int, turn: Turn) -> tuple[int, int]:
    """Of the replicas for which the same of `size` ranks begin: which one it is, of how many."""
    same = turn.number * size // turn.of
    first, last = (-(-begin * turn.of // size) for begin in (same, same + 1))
    return turn.number - first, last - first


def turned_round(number: Any, count: int, ahead: tuple[int, int]) -> Any:
    """When a round comes, of `count` of a bucket from 0; one number or an array."""
    return (number + ahead[0] * count // ahead[1]) % count


def first_place(size: int, bucket: int, turn: Turn) -> int:
    """Which rank of a group of `size` is at place 0, for the bucket of this number."""
    return (bucket * _STEP % (1 << 32) * size >> 32) + turn.number * size // turn.of


def places(ops: Sequence[CopyOp], group_of: dict[int, Group]) -> list[int]:
    """For each copy of a bucket the place of its sender in its group: largest first, each goes to
    the place with the fewest bytes in its round, of these to the one with the fewest before it."""
    found = [0] * len(ops)
    total: dict[Group, list[int]] = {group: [0] * len(group) for group in set(group_of.values())}
    for (_, group), bundles in sorted(_bundles(ops, group_of).items()):
        load = [(0, before, place) for place, before in enumerate(total[group])]
        heapq.heapify(load)
        for negative, chosen in sorted(
            (-sum(ops[i].nbytes for i in each), each) for each in bundles
        ):
            here, before, place = load[0]
            heapq.heapreplace(load, (here - negative, before - negative, place))
            total[group][place] -= negative
            for i in chosen:
                found[i] = place
    return found


def _bundles(
    ops: Sequence[CopyOp], group_of: dict[int, Group]
) -> dict[tuple[int, Group], list[list[int]]]:
    """By round and group the ops that one rank sends together, of those with a choice."""
    chosen: dict[tuple[int, Group], list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        group = group_of[op.sender]
        if len(group) > 1:
            chosen[op.round, group].append(i)
    bundles = {}
    for (number, group), here in chosen.items():
        total = sum(ops[i].nbytes for i in here)
        most_bytes = min(BUNDLE_BYTES, total // (PARTS * len(group)))
        bundles[number, group] = list(_bundled(ops, here, most_bytes))
    return bundles


def _bundled(ops: Sequence[CopyOp], chosen: Sequence[int], most_bytes: int) -> Iterator[list[int]]:
    """Ops of a round, of each worker the small ones together, as many as `most_bytes` take."""
    begun: dict[int, list[int]] = defaultdict(list)
    sizes: dict[int, int] = defaultdict(int)
    for i in chosen:
        worker, nbytes = ops[i].receiver, ops[i].nbytes
        if sizes[worker] + nbytes > most_bytes and begun[worker]:
            yield begun.pop(worker)
            sizes[worker] = 0
        begun[worker].append(i)
        sizes[worker] += nbytes
    yield from begun.values()

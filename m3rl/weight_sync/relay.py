"""Replicated bytes leave the trainers once per node: its workers share them and pass them on.

    trainer --network--> worker i of a node --NVLink--> each other worker there that wants the same

Attention and embeddings are equal on all workers with data-parallel attention. Sent to each, they
are half of what a worker of an EP-32 replica receives; a node of eight needs an eighth of that.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from m3rl.weight_sync.errors import PlanError
from m3rl.weight_sync.layout import Bounds, Layout, name_order
from m3rl.weight_sync.plan import (
    CopyOp,
    Plan,
    check_receives,
    check_sends,
    in_rounds,
    ops_digest,
)

PARTS = 4
"""Pieces larger than this part of what a worker takes over in a bucket are cut, so that the workers
of a node differ by little."""


@dataclass(frozen=True, slots=True)
class RelayedPlan:
    """Copies that bring one replica to the trainer's weights, in two stages."""

    plan: Plan
    """From trainer ranks to workers."""
    onward: tuple[tuple[int, ...], ...]
    """For each op of the plan the workers to which its receiver passes it on, in the round after
    the op's. (The last round of all is one of passes alone.)"""

    @property
    def digest(self) -> str:
        """Of both stages, in order."""
        return hashlib.sha256(f"{self.plan.digest}{self.onward}".encode()).hexdigest()

    def arrivals(self, worker: int) -> list[CopyOp]:
        """All that comes to a worker, from trainer ranks and from others of its node."""
        return [
            op
            for op, onward in zip(self.plan.ops, self.onward, strict=True)
            for target in (op.receiver, *onward)
            if target == worker
        ]


def largest_part(ops: Iterable[CopyOp]) -> int:
    """Bytes of the most that trainer ranks send to a worker in a round."""
    parts: Counter[tuple[int, int]] = Counter()
    for op in ops:
        if op.via < 0:
            parts[op.round, op.receiver] += op.nbytes
    return max(parts.values())


def relayed(plan: Plan, nodes: Sequence[int]) -> Plan:
    """The plan with what workers of a node pass on to one another as ops of their own (`via`), in
    the round after; the plan itself where there is nothing to pass on.

    Args:
        nodes: node of each worker, any numbers.
    """
    if len(set(nodes)) == len(nodes):
        return plan
    found = relay(plan.ops, nodes, largest_part(plan.ops))
    passes = [
        dataclasses.replace(op, receiver=worker, via=op.receiver, round=op.round + 1)
        for op, onward in zip(found.plan.ops, found.onward, strict=True)
        for worker in onward
    ]
    if not passes:
        return plan
    ops = tuple(sorted([*found.plan.ops, *passes], key=lambda op: (op.round, op.receiver)))
    return Plan(ops, ops_digest(ops))


def source_of(ops: Iterable[CopyOp]) -> dict[tuple[int, str, Bounds], int]:
    """Which op brings a worker a rectangle straight from a trainer rank, by their places."""
    return {(op.receiver, op.name, op.bounds): k for k, op in enumerate(ops) if op.via < 0}


def check_passes(plan: Plan, senders: Sequence[Layout], receivers: Sequence[Layout]) -> None:
    """Prove that copies and passes bring every worker exactly what it holds, and that each pass is
    of what has come in the round before.

    Raises:
        PlanError: names the tensor.
    """
    for rank, layout in enumerate(senders):
        check_sends(layout, plan.sends(rank), f"trainer rank {rank}")
    for rank, layout in enumerate(receivers):
        check_receives(layout, plan.receives(rank), f"worker {rank}")
    sources = source_of(plan.ops)
    for op in plan.ops:
        source = sources.get((op.via, op.name, op.bounds))
        if op.via >= 0 and (source is None or plan.ops[source].round != op.round - 1):
            raise PlanError(
                f"worker {op.via} is to pass {op} on to worker {op.receiver} in round {op.round}, "
                "which has not come there in the round before"
            )


def relay(ops: Sequence[CopyOp], nodes: Sequence[int], chunk_bytes: int) -> RelayedPlan:
    """Have each rectangle that several workers of a node want sent there once.

    Trainer rank and worker of a rectangle are those with the fewest bytes so far, of the ranks that
    sent it before and of the workers that want it. What a trainer rank sends to a node in a bucket
    goes to one worker if it is small enough: few messages, whatever the number of tensors.

    Args:
        ops: all copies to one replica, as `make_plan` makes them.
        nodes: node of each worker, any numbers.
        chunk_bytes: see `make_plan`; what is passed on is not counted.
    """
    received = [0] * len(nodes)
    sent = [0] * (1 + max((op.sender for op in ops), default=-1))
    copies: list[CopyOp] = []
    others: dict[tuple[int, str, Bounds], tuple[int, ...]] = {}
    for bucket in by_bucket(ops).values():
        alone, shared = _by_sharing(bucket, nodes)
        for op in alone:
            received[op.receiver] += op.nbytes
            sent[op.sender] += op.nbytes
        copies += alone
        for bundle in _bundles(shared, nodes, sent):
            chosen = min(bundle[0].workers, key=lambda worker: (received[worker], worker))
            received[chosen] += sum(piece.nbytes for piece in bundle)
            for piece in bundle:
                copies.append(piece.sent_to(chosen))
                onward = tuple(worker for worker in piece.workers if worker != chosen)
                others[chosen, piece.op.name, piece.bounds] = onward
    numbered = in_rounds(sorted(copies, key=_place), chunk_bytes)
    onward_of = tuple(others.get((op.receiver, op.name, op.bounds), ()) for op in numbered)
    return RelayedPlan(Plan(numbered, ops_digest(numbered)), onward_of)


def check_relay(
    relayed: RelayedPlan,
    senders: Sequence[Layout],
    receivers: Sequence[Layout],
    nodes: Sequence[int],
) -> None:
    """Prove that both stages together bring every worker exactly what it holds.

    Raises:
        PlanError: names what a trainer rank is to send and does not hold, what leaves its node, or
            what a worker lacks or receives twice.
    """
    for rank, layout in enumerate(senders):
        check_sends(layout, relayed.plan.sends(rank), f"trainer rank {rank}")
    if len(relayed.onward) != len(relayed.plan.ops):
        raise PlanError(
            f"the plan has {len(relayed.plan.ops)} ops and {len(relayed.onward)} lists of whom to "
            "pass them on to"
        )
    for op, onward in zip(relayed.plan.ops, relayed.onward, strict=True):
        if op.sender >= len(senders) or max(op.receiver, *onward, 0) >= len(receivers):
            raise PlanError(f"{op} names a rank that does not exist")
        for worker in onward:
            if nodes[worker] != nodes[op.receiver]:
                raise PlanError(
                    f"worker {op.receiver} is to pass {op} on to worker {worker}, which is on "
                    "another node"
                )
    for rank, layout in enumerate(receivers):
        check_receives(layout, relayed.arrivals(rank), f"worker {rank}")


def by_bucket(ops: Iterable[CopyOp]) -> dict[str, list[CopyOp]]:
    """Ops of each bucket, in their order."""
    buckets: dict[str, list[CopyOp]] = defaultdict(list)
    for op in ops:
        buckets[op.bucket].append(op)
    return dict(buckets)


@dataclass(frozen=True, slots=True)
class _Shared:
    """A piece that several workers of a node want, and the trainer rank that will send it."""

    op: CopyOp
    """By which one of them would have received it, or more."""
    workers: tuple[int, ...]
    """All of them, ascending."""
    bounds: Bounds
    nbytes: int
    sender: int

    def sent_to(self, worker: int) -> CopyOp:
        return dataclasses.replace(self.op, bounds=self.bounds, sender=self.sender, receiver=worker)


def _by_sharing(
    ops: Sequence[CopyOp], nodes: Sequence[int]
) -> tuple[list[CopyOp], list[list[CopyOp]]]:
    """Ops whose rectangle one worker of its node wants, and groups of those that several want."""
    groups: dict[tuple[str, Bounds, str, int], list[CopyOp]] = defaultdict(list)
    for op in ops:
        groups[op.name, op.bounds, op.storage, nodes[op.receiver]].append(op)
    alone = [group[0] for group in groups.values() if len(group) == 1]
    shared = [sorted(g, key=lambda op: op.receiver) for g in groups.values() if len(g) > 1]
    return alone, sorted(shared, key=lambda g: (-g[0].nbytes, g[0].name, g[0].bounds))


def _bundles(
    groups: Sequence[list[CopyOp]], nodes: Sequence[int], sent: list[int]
) -> list[list[_Shared]]:
    """Pieces of a bucket that go to one worker together, largest first; adds them to `sent`."""
    shares: dict[int, float] = defaultdict(float)
    for group in groups:
        shares[nodes[group[0].receiver]] += group[0].nbytes / len(group)
    bundles: dict[tuple[int, tuple[int, ...]], list[_Shared]] = defaultdict(list)
    single: list[list[_Shared]] = []
    for group in groups:
        most_bytes = shares[nodes[group[0].receiver]] / PARTS
        workers = tuple(op.receiver for op in group)
        for bounds, nbytes in _row_parts(group[0], most_bytes):
            sender = min((op.sender for op in group), key=lambda rank: (sent[rank], rank))
            sent[sender] += nbytes
            piece = _Shared(group[0], workers, bounds, nbytes, sender)
            bundle = bundles[sender, workers]
            if sum(other.nbytes for other in bundle) + nbytes > most_bytes:
                single.append([piece])
            else:
                bundle.append(piece)
    full = [bundle for bundle in bundles.values() if bundle]
    return sorted([*single, *full], key=lambda bundle: -sum(piece.nbytes for piece in bundle))


def _row_parts(op: CopyOp, most_bytes: float) -> Iterator[tuple[Bounds, int]]:
    """Even parts of a rectangle's rows, of about `most_bytes` or one row, and their bytes; vectors
    stay whole."""
    if len(op.bounds) < 2:
        yield op.bounds, op.nbytes
        return
    (start, stop), *others = op.bounds
    rows = stop - start
    count = min(rows, -int(-op.nbytes // most_bytes))
    edges = [start + rows * i // count for i in range(count + 1)]
    for first, last in pairwise(edges):
        yield ((first, last), *others), op.nbytes // rows * (last - first)


def _place(op: CopyOp) -> tuple[str, Bounds, int, int]:
    return name_order(op.name), op.bounds, op.receiver, op.sender

"""The static plan of a sync: who sends which rectangle of which tensor to whom, and in which round.

Pure functions of the layouts, no device, the same result in every process. Ranks are counted
separately on the two sides: `sender` among the trainer ranks, `receiver` among the workers of one
replica.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from inference.config import MXFP8_BLOCK_SIZE as BLOCK_SIZE
from m3rl.types import TensorSlot
from m3rl.weight_sync.errors import PlanError
from m3rl.weight_sync.layout import (
    STORAGES,
    WIRE_BYTES,
    Bounds,
    Layout,
    bucket_order,
    by_name,
    check_layout,
    check_same_tensor,
    contains,
    covers,
    even_parts,
    first_overlap,
    grid_cells,
    name_order,
    quantized_storage,
    volume,
    whole,
    wire_of,
    wire_size,
)

MAX_GRAIN = 16 * BLOCK_SIZE
"""Sixteen scales of MXFP8, and more than a hash takes of anything else."""


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One rectangle of one tensor, from one trainer rank to one worker."""

    bucket: str
    name: str
    dtype: str
    bounds: Bounds
    sender: int
    receiver: int
    storage: str = "plain"
    """How the receiver holds it, see TensorSlot."""
    grain: int = 1
    """Largest power of two, at most MAX_GRAIN, that divides every place at which the tensor's last
    dimension is cut in this plan: the same for all of its ops. Hashes go by it (`verify.py`)."""
    round: int = 0
    """When it travels, see `in_rounds`."""
    via: int = -1
    """The worker that passes it on, in the round after its own (`relay.py`); -1: nobody does."""
    wire: str = "plain"
    """'plain': in its dtype; 'mxfp8': quantised by the sender, as the receiver holds it."""

    @property
    def nbytes(self) -> int:
        return wire_size(self.bounds, self.dtype, self.wire)

    def placed(self, sender: int, round: int) -> CopyOp:
        """As dataclasses.replace, quicker: a real model has a million of these."""
        what = self.bucket, self.name, self.dtype, self.bounds, sender, self.receiver
        return CopyOp(*what, self.storage, self.grain, round, self.via, self.wire)

    def __str__(self) -> str:
        where = ",".join(f"{start}:{stop}" for start, stop in self.bounds)
        return f"{self.name}[{where}] ({self.bucket})"


@dataclass(frozen=True, slots=True)
class Plan:
    """All copies that bring one replica to the trainer's weights, in the order they travel."""

    ops: tuple[CopyOp, ...]
    digest: str
    """Of all ops, in order."""

    def sends(self, sender: int) -> tuple[CopyOp, ...]:
        return tuple(op for op in self.ops if op.sender == sender and op.via < 0)

    def receives(self, receiver: int) -> tuple[CopyOp, ...]:
        return tuple(op for op in self.ops if op.receiver == receiver)

    @property
    def nbytes(self) -> int:
        """That leave the trainer ranks."""
        return sum(op.nbytes for op in self.ops if op.via < 0)

    @property
    def num_tensors(self) -> int:
        return len({op.name for op in self.ops})


class _Piece(NamedTuple):
    """An op whose sender is not chosen yet; pieces of a bucket sort by the first four."""

    minus_bytes: int
    name: str
    bounds: Bounds
    receiver: int
    holders: tuple[int, ...]
    """Trainer ranks that could send it, ascending."""
    slot: TensorSlot
    grain: int


_IN_DIGEST = attrgetter(
    "bucket", "name", "dtype", "bounds", "sender", "receiver", "grain", "round", "via"
)


def ops_digest(ops: Sequence[CopyOp]) -> str:
    """SHA-256 of a canonical text of the ops in their order: equal in every process."""
    kinds = {kind: quantized_storage(kind) for kind in STORAGES}
    rows = [[*_IN_DIGEST(op), *kinds[op.storage], *kinds[op.wire]] for op in ops]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def make_plan(
    senders: Sequence[Layout], receivers: Sequence[Layout], chunk_bytes: int, wire: str = "bf16"
) -> Plan:
    """Plan the copies from all trainer ranks to all workers of a replica, see `copies`."""
    ops = in_rounds(copies(senders, receivers, chunk_bytes, wire), chunk_bytes)
    return Plan(ops, ops_digest(ops))


def copies(
    senders: Sequence[Layout], receivers: Sequence[Layout], chunk_bytes: int, wire: str = "bf16"
) -> list[CopyOp]:
    """Who sends what to whom, bucket by bucket, not in rounds yet.

    Wanted rectangles are cut along the edges of everything held on either side, so a piece is held
    or wanted whole or not at all, and workers that hold the same part receive identical pieces. A
    piece held by several trainer ranks is sent by the one that has the fewest bytes to send so far.

    Args:
        senders: layout of each trainer rank.
        receivers: layout of each worker of the replica.
        chunk_bytes: most that a worker receives in a round; larger pieces are split.
        wire: one of WIRES.

    Raises:
        ValueError: unknown `wire`.
        LayoutError: a layout is impossible, or two sides disagree about a tensor.
        PlanError: a part that nobody holds, or a tensor that the replica does not want whole.
    """
    if chunk_bytes < 64:
        raise PlanError(f"chunk_bytes={chunk_bytes} is too small to hold a row; use at least 64")
    _check_both_sides(senders, receivers)
    held = [by_name(layout) for layout in senders]
    wanted = [by_name(layout) for layout in receivers]
    pieces: dict[str, list[_Piece]] = defaultdict(list)
    for name in sorted({name for layout in wanted for name in layout}):
        for piece in _pieces(name, held, wanted, chunk_bytes, wire):
            pieces[piece.slot.bucket].append(piece)
    load = [0] * len(senders)
    buckets = sorted(pieces, key=bucket_order)
    return [op for bucket in buckets for op in _assign(pieces[bucket], load, wire)]


def in_rounds(ops: Iterable[CopyOp], chunk_bytes: int) -> tuple[CopyOp, ...]:
    """The ops in the order in which they travel, with their rounds numbered from 0.

    A round is of one bucket and brings each worker `chunk_bytes` at most, or one op. A worker takes
    from all trainer ranks by turns, each worker beginning with another one: within a round nobody
    sends to all while others wait.
    """
    # No deadlock: a member begins a round when it is through with its earlier ones, and all of its
    # transfers at once. Of the rounds not complete take the first: all its members begin it.
    buckets: dict[str, list[CopyOp]] = defaultdict(list)
    for op in ops:
        buckets[op.bucket].append(op)
    numbered: list[CopyOp] = []
    first_round = 0
    for bucket in sorted(buckets, key=bucket_order):
        by_receiver: dict[int, list[CopyOp]] = defaultdict(list)
        for op in _by_turns(buckets[bucket]):
            by_receiver[op.receiver].append(op)
        rounds = [
            (first_round + i, receiver, op)
            for receiver, each in sorted(by_receiver.items())
            for i, op in _chunks(each, chunk_bytes)
        ]
        rounds.sort(key=lambda entry: entry[:2])
        numbered += [op.placed(op.sender, i) for i, _, op in rounds]
        first_round = rounds[-1][0] + 1
    return tuple(numbered)


def check_plan(plan: Plan, senders: Sequence[Layout], receivers: Sequence[Layout]) -> None:
    """Prove that the plan brings every worker exactly what it holds and that each op can be sent.

    Raises:
        PlanError: names the tensor that is missing, sent twice, not held by its sender or out of
            order.
    """
    if plan.digest != ops_digest(plan.ops):
        raise PlanError(f"plan digest {plan.digest[:12]} does not belong to its ops; plan again")
    for rank, layout in enumerate(senders):
        check_sends(layout, plan.sends(rank), f"trainer rank {rank}")
    for rank, layout in enumerate(receivers):
        check_receives(layout, plan.receives(rank), f"worker {rank}")
    for op in plan.ops:
        if op.sender >= len(senders) or op.receiver >= len(receivers):
            raise PlanError(f"{op} names a rank that does not exist")
    for here, there in pairwise(plan.ops):
        if here.round > there.round or (here.round == there.round and here.bucket != there.bucket):
            raise PlanError(f"{there} is not ordered by round, or not of the bucket of its round")
        if bucket_order(here.bucket) > bucket_order(there.bucket):
            raise PlanError("ops are not ordered by bucket: pre, layer.0, layer.1, ..., post")
    _check_grains(plan.ops)


def check_sends(layout: Layout, ops: Sequence[CopyOp], owner: str) -> None:
    """Prove that a trainer rank holds all that it is to send.

    Raises:
        PlanError: names the op.
    """
    held = by_name(layout)
    for op in ops:
        if not any(_fits(op, slot) for slot in held.get(op.name, ())):
            raise PlanError(f"{owner} is to send {op} as {op.dtype}, which it does not hold so")


def check_receives(layout: Layout, ops: Sequence[CopyOp], owner: str) -> None:
    """Prove that a worker receives every element it holds exactly once, and nothing else.

    Raises:
        PlanError: names the tensor.
    """
    parts: dict[TensorSlot, list[Bounds]] = {slot: [] for slot in layout}
    slots = by_name(layout)
    for op in ops:
        home = next((slot for slot in slots.get(op.name, ()) if _fits(op, slot)), None)
        if home is None or home.storage != op.storage:
            raise PlanError(f"{owner} is to receive {op} as {op.dtype}, for which it has no place")
        parts[home].append(op.bounds)
    for slot, rectangles in parts.items():
        twice = first_overlap(rectangles)
        if twice is not None:
            raise PlanError(f"{owner} would receive a part of {slot.name} twice: {twice[1]}")
        if not covers(slot.bounds, rectangles):
            count = sum(volume(part) for part in rectangles)
            raise PlanError(
                f"{owner} would receive {count} of {volume(slot.bounds)} elements of {slot.name}; "
                "a copy is missing from the plan"
            )


def _check_both_sides(senders: Sequence[Layout], receivers: Sequence[Layout]) -> None:
    owned: dict[str, list[tuple[TensorSlot, str]]] = defaultdict(list)
    for side, layouts in (("trainer rank", senders), ("worker", receivers)):
        if not layouts:
            raise PlanError(f"there is no {side}; a sync needs at least one on each side")
        for rank, layout in enumerate(layouts):
            check_layout(layout, f"{side} {rank}")
            for slot in layout:
                owned[slot.name].append((slot, f"{side} {rank}"))
    for name, slots in owned.items():
        check_same_tensor([slot for slot, _ in slots], [owner for _, owner in slots])
        if not any(owner.startswith("worker") for _, owner in slots):
            raise PlanError(
                f"{name} is held by {slots[0][1]} and by no worker; the replica does not list it"
            )
        if not any(owner.startswith("trainer") for _, owner in slots):
            raise PlanError(
                f"{name} is held by {slots[0][1]} and by no trainer rank; the trainer does not "
                "list it (a buffer is not among a module's parameters)"
            )


def _pieces(
    name: str,
    held: Sequence[dict[str, list[TensorSlot]]],
    wanted: Sequence[dict[str, list[TensorSlot]]],
    chunk_bytes: int,
    wire: str,
) -> list[_Piece]:
    sources: dict[Bounds, list[int]] = defaultdict(list)
    for rank, slots in enumerate(held):
        for slot in slots.get(name, ()):
            sources[slot.bounds].append(rank)
    targets: dict[TensorSlot, list[int]] = defaultdict(list)
    for receiver, slots in enumerate(wanted):
        for slot in slots.get(name, ()):
            targets[slot].append(receiver)
    edges = {*sources, *(slot.bounds for slot in targets)}
    cuts = [sorted({edge for side in sides for edge in side}) for sides in zip(*edges, strict=True)]
    holders_of: dict[Bounds, list[int]] = defaultdict(list)
    for bounds, ranks in sources.items():
        # Every edge is a cut, so what is held and what is wanted fall into the same cells.
        for cell in grid_cells(bounds, cuts):
            holders_of[cell] += ranks
    found: list[tuple[TensorSlot, Bounds, tuple[int, ...]]] = []
    for slot, receivers in targets.items():
        block = BLOCK_SIZE if slot.storage == "mxfp8" else 1
        for cell in grid_cells(slot.bounds, cuts):
            if block > 1 and any(edge % block for edge in cell[-1]):
                raise PlanError(
                    f"{name}: {cell} is cut through a block of {block} columns, which worker "
                    f"{receivers[0]} quantises together; shard its rows on the trainer"
                )
            holders = tuple(sorted(holders_of.get(cell, ())))
            if not holders:
                raise PlanError(
                    f"{name}: no trainer rank holds {cell}, which worker {receivers[0]} needs"
                )
            max_elements = chunk_bytes // WIRE_BYTES[slot.dtype]
            found += [(slot, part, holders) for part in even_parts(cell, max_elements, block)]
    shape = next(iter(targets)).shape
    if not covers(whole(shape), list({part for _, part, _ in found})):
        raise PlanError(
            f"{name}: the workers together hold only a part of shape {shape}; "
            "the replica is not a complete copy of the model"
        )
    grain = _grain(part for _, part, _ in found)
    pieces: list[_Piece] = []
    for slot, part, holders in found:
        size = wire_size(part, slot.dtype, wire_of(slot.storage, wire))
        pieces += [_Piece(-size, name, part, r, holders, slot, grain) for r in targets[slot]]
    return pieces


def _grain(parts: Iterable[Bounds]) -> int:
    """`CopyOp.grain` of a tensor that is cut into these."""
    return math.gcd(MAX_GRAIN, *{edge for part in parts for edge in (part[-1] if part else (1,))})


def _check_grains(ops: Sequence[CopyOp]) -> None:
    parts: dict[str, list[CopyOp]] = defaultdict(list)
    for op in ops:
        parts[op.name].append(op)
    for each in parts.values():
        grain = _grain(op.bounds for op in each)
        wrong = next((op for op in each if op.grain != grain), None)
        if wrong is not None:
            raise PlanError(f"{wrong} has grain {wrong.grain}, its tensor is cut by {grain}")


def _assign(pieces: Sequence[_Piece], load: list[int], wire: str) -> list[CopyOp]:
    """Choose the sender of each piece of a bucket, largest first, and add its bytes to `load`."""
    ops = []
    for minus_bytes, name, bounds, receiver, holders, slot, grain in sorted(pieces):
        sender = holders[0] if len(holders) == 1 else min(holders, key=lambda r: (load[r], r))
        load[sender] -= minus_bytes
        how = (slot.storage, grain, 0, -1, wire_of(slot.storage, wire))
        ops.append(CopyOp(slot.bucket, name, slot.dtype, bounds, sender, receiver, *how))
    return sorted(ops, key=lambda op: (name_order(op.name), op.bounds, op.receiver))


def _by_turns(ops: Sequence[CopyOp]) -> list[CopyOp]:
    """Ops of a bucket, for each receiver by the bytes that their sender sends to it before them."""
    num_senders = 1 + max(op.sender for op in ops)
    sent: dict[tuple[int, int], int] = defaultdict(int)
    turns = []
    for op in ops:
        turns.append((sent[op.sender, op.receiver], (op.sender - op.receiver) % num_senders))
        sent[op.sender, op.receiver] += op.nbytes
    order = sorted(range(len(ops)), key=turns.__getitem__)
    return [ops[i] for i in order]


def _chunks(ops: Sequence[CopyOp], chunk_bytes: int) -> Iterator[tuple[int, CopyOp]]:
    """Each op with the number of its chunk; a chunk has `chunk_bytes` at most, or one op."""
    number = size = 0
    for op in ops:
        nbytes = op.nbytes
        if size and size + nbytes > chunk_bytes:
            number, size = number + 1, 0
        size += nbytes
        yield number, op


def _fits(op: CopyOp, slot: TensorSlot) -> bool:
    return (
        (op.name, op.dtype, op.bucket) == (slot.name, slot.dtype, slot.bucket)
        and len(op.bounds) == len(slot.bounds)
        and contains(slot.bounds, op.bounds)
    )

"""Which ops of a round travel as one message, and which rounds as one.

A plan knows rectangles; where they lie only the ends know. Each end says so once, and from both
answers follows what joins: a message is a run of ops whose memory is in one piece at either end
(w1 and w3 of all experts of a layer, say), or small ones that both ends stage for it; a round is a
few of the plan's rounds for which the ends need no more memory than for one of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from m3rl.weight_sync.plan import CopyOp
from m3rl.weight_sync.relay import source_of

ALIGNMENT = 16
"""Tensors begin at multiples of this in a slot, so that the bytes can be viewed in any dtype."""
STAGED = -1

Message = tuple[int, ...]
"""Ops of a member's share, by their place there."""
Arranged = tuple[tuple[Message, ...], ...]
"""A member's part of a sync: rounds of messages."""
Passes = tuple[tuple[tuple[int, Message], ...], ...]
"""What a worker sends in each of its rounds of what it has received: to whom, which of its ops."""


class Limits(NamedTuple):
    """What joins."""

    round_bytes: int = 2 << 30
    """Most that a worker receives in a round, if the plan's rounds are not larger: the hash of a
    round begins when it is complete. What is passed on is not counted."""
    pack_bytes: int = 256 << 10
    """Messages up to which those of a round and pair of ranks are worth a copy, to be one."""


def unjoined(ops: Sequence[CopyOp]) -> Arranged:
    """The rounds of the plan, each op of a share a message."""
    by_round = groupby(enumerate(ops), key=lambda entry: entry[1].round)
    return tuple(tuple((i,) for i, _ in group) for _, group in by_round)


def arrange(
    ops: Sequence[CopyOp],
    sends: Sequence[np.ndarray],
    receives: Sequence[np.ndarray],
    chunk_bytes: int,
    limits: Limits,
) -> tuple[list[Arranged], list[tuple[Arranged, Passes]]]:
    """Join the ops of a plan, the same for both ends.

    Args:
        ops: of the plan, in order.
        sends: for each trainer rank, of the ops of its share: number of the piece of memory it lies
            in, or STAGED, and the offset there in bytes; [ops, 2] int64.
        receives: the same for each worker.
        chunk_bytes: most that is staged at either end in a round, or what the plan's rounds are.

    Returns:
        What each trainer rank does, and each worker; a worker's round may be empty on one side. A
        message that is not in one piece at an end is staged there as a whole.
    """
    shares = _Shares(ops, sends, receives)
    by_sender: list[list[tuple[Message, ...]]] = [[] for _ in sends]
    by_worker: list[list[tuple[tuple[Message, ...], tuple[tuple[int, Message], ...]]]]
    by_worker = [[] for _ in receives]
    for chosen in _rounds(ops, shares.spots, chunk_bytes, limits.round_bytes):
        sent: dict[int, list[Message]] = defaultdict(list)
        received: dict[int, list[Message]] = defaultdict(list)
        passed: dict[int, list[tuple[int, Message]]] = defaultdict(list)
        runs = _messages(ops, shares.spots, chosen)
        for message in _packed(ops, shares.spots, runs, limits.pack_bytes):
            shares.land(message)
            op = ops[message[0]]
            there = tuple(shares.at_receiver[k] for k in message)
            received[op.receiver].append(there)
            here = tuple(shares.at_sender[k] for k in message)
            if op.via < 0:
                sent[op.sender].append(here)
            else:
                passed[op.via].append((op.receiver, here))
        for sender, messages in sent.items():
            by_sender[sender].append(tuple(messages))
        for worker in sorted({*received, *passed}):
            by_worker[worker].append((tuple(received[worker]), tuple(passed[worker])))
    workers = [(tuple(r for r, _ in each), tuple(p for _, p in each)) for each in by_worker]
    return list(map(tuple, by_sender)), workers


_Spot = tuple[int, int, int, int]
"""Memory and offset at the sender, memory and offset at the receiver."""


class _Shares:
    """Of each op its place in the share of who sends it and of who receives it, and where it lies
    at both. What is passed on is an op of the share of the worker that has received it."""

    def __init__(
        self, ops: Sequence[CopyOp], sends: Sequence[np.ndarray], receives: Sequence[np.ndarray]
    ) -> None:
        at_senders, at_workers = ([end.tolist() for end in side] for side in (sends, receives))
        counts: Counter[tuple[str, int]] = Counter()
        self.at_receiver: list[int] = []
        self.at_sender: list[int] = []
        for op in ops:
            self.at_receiver.append(counts["worker", op.receiver])
            counts["worker", op.receiver] += 1
            self.at_sender.append(counts["sender", op.sender])
            counts["sender", op.sender] += op.via < 0
        self.spots: list[_Spot] = []
        self._ops = ops
        self._onward: dict[int, list[int]] = defaultdict(list)
        """Ops that pass one on."""
        sources = source_of(ops)
        for k, op in enumerate(ops):
            to = at_workers[op.receiver][self.at_receiver[k]]
            if op.via < 0:
                lies = at_senders[op.sender][self.at_sender[k]]
            else:
                source = sources[op.via, op.name, op.bounds]
                self._onward[source].append(k)
                self.at_sender[k] = self.at_receiver[source]
                lies = at_workers[op.via][self.at_sender[k]]
            self.spots.append((*lies, *to))

    def land(self, message: Sequence[int]) -> None:
        """What passes on a message that is staged where it arrives takes it from there."""
        places = [(memory, begin) for _, _, memory, begin in (self.spots[k] for k in message)]
        sizes = [self._ops[k].nbytes for k in message]
        ends = [(memory, end + size) for (memory, end), size in zip(places, sizes, strict=True)]
        if STAGED not in (memory for memory, _ in places) and ends[:-1] == places[1:]:
            return
        offset = 0
        for k, size in zip(message, sizes, strict=True):
            for onward in self._onward[k]:
                self.spots[onward] = (STAGED - 1 - message[0], offset, *self.spots[onward][2:])
            offset += size


def _rounds(
    ops: Sequence[CopyOp], spots: Sequence[_Spot], chunk_bytes: int, round_bytes: int
) -> list[list[int]]:
    """The ops of each round: neighbouring rounds of the plan and of one bucket become one.

    The last one stays as small as it is: its hash is waited for. Passes follow one round behind
    what they pass on.
    """
    rounds: list[list[int]] = []
    number_of: dict[int, int] = {}
    total: Counter[tuple[str, int]] = Counter()
    copies = [k for k, op in enumerate(ops) if op.via < 0]
    for number, group in groupby(copies, key=lambda k: ops[k].round):
        here = list(group)
        more = _bytes(ops, spots, here)
        fits = all(
            total[member] + size <= (round_bytes if member[0] == "in all" else chunk_bytes)
            for member, size in more.items()
        )
        same_bucket = bool(rounds) and ops[rounds[-1][0]].bucket == ops[here[0]].bucket
        if not (fits and same_bucket and here[-1] != copies[-1]):
            rounds.append([])
            total = Counter()
        rounds[-1] += here
        total += more
        number_of[number] = len(rounds) - 1
    rounds.append([])
    for k, op in enumerate(ops):
        if op.via >= 0:
            rounds[number_of[op.round - 1] + 1].append(k)
    return [chosen for chosen in rounds if chosen]


def _bytes(
    ops: Sequence[CopyOp], spots: Sequence[_Spot], chosen: Sequence[int]
) -> Counter[tuple[str, int]]:
    """What each member stages of some ops, and what each worker receives in all."""
    sizes: Counter[tuple[str, int]] = Counter()
    for k in chosen:
        op, (at_sender, _, at_worker, _) = ops[k], spots[k]
        sizes["in all", op.receiver] += op.nbytes
        if at_sender == STAGED:
            sizes["sender", op.sender] += op.nbytes
        if at_worker == STAGED:
            sizes["worker", op.receiver] += op.nbytes
    return sizes


def _messages(
    ops: Sequence[CopyOp], spots: Sequence[_Spot], chosen: Sequence[int]
) -> Iterator[list[int]]:
    """The ops of a round as messages, in the order of their first ops."""
    starts: dict[tuple[int, ...], int] = {}
    ends: dict[int, tuple[int, ...]] = {}
    staged_bytes: Counter[tuple[int, int]] = Counter()
    for k in chosen:
        op, pair = ops[k], _pair(ops[k])
        at_sender, from_byte, at_worker, to_byte = spots[k]
        # The place of a staged op is free: as at the other end, or behind the last one.
        if at_sender == at_worker == STAGED:
            from_byte = to_byte = staged_bytes[pair]
            staged_bytes[pair] += op.nbytes
        elif at_sender == STAGED:
            from_byte = to_byte
        elif at_worker == STAGED:
            to_byte = from_byte
        starts[*pair, at_sender, from_byte, at_worker, to_byte] = k
        if STAGED not in (at_sender, at_worker) or op.nbytes % ALIGNMENT == 0:
            ends[k] = (*pair, at_sender, from_byte + op.nbytes, at_worker, to_byte + op.nbytes)
    successors = {k: starts[end] for k, end in ends.items() if end in starts}
    for k in sorted(set(chosen) - set(successors.values())):
        message = [k]
        while message[-1] in successors:
            message.append(successors[message[-1]])
        yield message


def _packed(
    ops: Sequence[CopyOp],
    spots: Sequence[_Spot],
    messages: Iterator[list[int]],
    pack_bytes: int,
) -> Iterator[list[int]]:
    """Small messages of a pair as one; what is passed on only where it lies in one piece."""
    packs: dict[tuple[int, ...], list[int]] = {}
    others: list[list[int]] = []
    for message in messages:
        first, last = ops[message[0]], ops[message[-1]]
        sizes = [ops[k].nbytes for k in message]
        if sum(sizes) > pack_bytes or any(size % ALIGNMENT for size in sizes):
            others.append(message)
            continue
        key: tuple[int, ...] = _pair(first)
        if first.via >= 0:
            memory, begin = spots[message[0]][:2]
            pack = packs.pop((*key, memory, begin), [])
            memory, end = spots[message[-1]][:2]
            key = (*key, memory, end + last.nbytes)
        else:
            pack = packs.pop(key, [])
        packs[key] = pack + message
    yield from sorted([*packs.values(), *others])


def _pair(op: CopyOp) -> tuple[int, int]:
    """Who sends it, trainer ranks from 0, workers from -1 down, and who receives it."""
    return (op.sender if op.via < 0 else ~op.via, op.receiver)

"""How long a sync will take on a cluster, worked out from its plan; nothing is sent.

The model:
- GPUs are numbered trainer ranks first, then replica after replica; `gpus_per_node` share a node.
- All replicas are synced at once, and all ranks begin a round when the last has ended the one
  before: the sync is the sum over rounds, a round the slowest of what any GPU does in it.
- A GPU sends and receives `nic` bytes/s across nodes and `nvlink` bytes/s inside one, all at the
  same time; the network between nodes is never the limit.
- What workers pass on travels one round behind, beside that round's copies.
- Replicas begin with several rounds of a bucket, and trainer ranks that hold the same take turns
  (`turns`).
- A trainer rank reads FP32 and writes what it sends; a worker reads what arrived, writes what it
  stores and hashes that: at `memory` bytes/s, beside the links.
- The host posts a message in `post_s`, beside the links; a round costs `round_s` on top.

The floor is the longest stage of an ideal pipeline: trainer ranks send equally much, the workers
of a node receive equally much, and each byte enters a node once for each replica. Its links are
those of the model, so the ratio of the two is what the plan itself costs.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from m3rl.weight_sync.layout import Layout, bucket_order, volume
from m3rl.weight_sync.plan import CopyOp, Plan, copies, in_rounds, ops_digest
from m3rl.weight_sync.relay import RelayedPlan, by_bucket, relay
from m3rl.weight_sync.turns import Turn, ahead_of, first_place, places, turned_round, twins

_MXFP8_BYTES = 33 / 32
"""Of one weight and its share of a scale."""
_NIC_OUT, _NIC_IN, _NVLINK_OUT, _NVLINK_IN, _MEMORY, _POSTS = range(6)


@dataclass(frozen=True, slots=True)
class Links:
    """What a GPU can do, in bytes/s and s."""

    nic: float = 50e9
    """Line rate of a 400 Gb/s port."""
    nvlink: float = 394e9
    """A raw copy between two H200s of one host, as measured."""
    memory: float = 0.7 * 4.8e12
    post_s: float = 5e-6
    round_s: float = 100e-6
    pack_bytes: int = 1 << 18
    """Smaller ops of one pair of ranks and one round travel as one message."""
    gpus_per_node: int = 8


@dataclass(frozen=True, slots=True)
class Projection:
    """What a sync of all replicas moves and how long it takes; bytes are those on the wire."""

    sent_bytes: tuple[int, ...]
    """By each trainer rank."""
    received_bytes: tuple[int, ...]
    """By each worker of a replica: from trainer ranks, and passed on by other workers."""
    num_copies: int
    """From trainer ranks to one replica."""
    num_rounds: int
    seconds: float
    floor_s: float

    @property
    def balance(self) -> float:
        """Bytes of the busiest trainer rank over the mean."""
        return max(self.sent_bytes) * len(self.sent_bytes) / sum(self.sent_bytes)


def simulate(
    senders: Sequence[Layout],
    receivers: Sequence[Layout],
    *,
    num_replicas: int = 1,
    repeats: Mapping[str, int] | None = None,
    chunk_bytes: int = 256 << 20,
    is_relayed: bool = True,
    takes_turns: bool = True,
    wire: str = "bf16",
    links: Links | None = None,
) -> Projection:
    """Project one sync.

    Args:
        senders: layout of each trainer rank.
        receivers: layout of each worker of a replica; all replicas have the same.
        repeats: how many buckets each bucket stands for, 1 where it names none: layers that are
            alike are planned once.
        chunk_bytes: most bytes that a worker receives from trainer ranks in a round.
        is_relayed: whether workers of a node pass replicated bytes on.
        takes_turns: whether each replica begins with another round, and another one of the ranks
            that hold the same.
        wire: 'bf16', or 'mxfp8': what is stored in MXFP8 is quantised by the trainer.

    Raises:
        LayoutError, PlanError: see `copies`.
        ValueError: unknown `wire`.
    """
    ops = copies(senders, receivers, chunk_bytes, wire)
    cluster = _Cluster(len(senders), len(receivers), num_replicas, links or Links())
    times = dict.fromkeys((op.bucket for op in ops), 1) | dict(repeats or {})
    ideal = {nodes: relay(ops, nodes, chunk_bytes) for nodes in set(cluster.worker_nodes)}
    chosen = ideal if is_relayed else dict.fromkeys(ideal, _unrelayed(ops, chunk_bytes))
    ranks = _Ranks(senders, num_replicas if takes_turns else 1)
    steps = _steps(chosen, times, cluster, ranks)
    totals = _totals(steps)
    ideal_totals = totals if is_relayed else _totals(_steps(ideal, times, cluster, ranks))
    workers = cluster.gpus(0)
    return Projection(
        sent_bytes=_integers((totals[_NIC_OUT] + totals[_NVLINK_OUT])[: len(senders)]),
        received_bytes=_integers((totals[_NIC_IN] + totals[_NVLINK_IN])[workers]),
        num_copies=sum(times[op.bucket] for op in chosen[cluster.worker_nodes[0]].plan.ops),
        num_rounds=sum(step.times * (step.work.shape[1] - 1) for step in steps),
        seconds=_seconds(steps, cluster.links),
        floor_s=_floor(ideal_totals, cluster),
    )


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Which GPU, and so which node, a rank is."""

    num_senders: int
    num_workers: int
    num_replicas: int
    links: Links

    @property
    def num_gpus(self) -> int:
        return self.num_senders + self.num_workers * self.num_replicas

    def gpus(self, replica: int) -> Any:
        """[worker]: number of its GPU."""
        first = self.num_senders + replica * self.num_workers
        return np.arange(first, first + self.num_workers)

    @property
    def worker_nodes(self) -> list[tuple[int, ...]]:
        """Per replica the node of each worker, counted from that of its first."""
        nodes = [self.gpus(d) // self.links.gpus_per_node for d in range(self.num_replicas)]
        return [tuple((each - each[0]).tolist()) for each in nodes]


def _unrelayed(ops: Sequence[CopyOp], chunk_bytes: int) -> RelayedPlan:
    numbered = in_rounds(ops, chunk_bytes)
    return RelayedPlan(Plan(numbered, ops_digest(numbered)), ((),) * len(numbered))


class _Ranks:
    """Trainer ranks by groups that hold the same."""

    def __init__(self, senders: Sequence[Layout], num_turns: int) -> None:
        groups = twins(senders)
        self.group_of = {rank: group for group in groups for rank in group}
        self._sizes = [len(group) for group in groups]
        self._members = np.zeros((len(groups), max(self._sizes)), int)
        self.number_of = np.zeros(len(senders), int)
        """[rank]: number of its group."""
        for number, group in enumerate(groups):
            self._members[number, : len(group)] = group
            self.number_of[list(group)] = number
        self._num_turns = num_turns

    def begins(self, bucket: int) -> tuple[int, ...]:
        """Which of its ranks each group begins with, for the first replica."""
        return tuple(first_place(size, bucket, Turn()) for size in self._sizes)

    def turn(self, replica: int) -> Turn:
        return Turn(replica % self._num_turns, self._num_turns)

    def ahead(self, turn: Turn) -> tuple[int, int]:
        return ahead_of(min(self._sizes), turn)

    def senders(self, groups: Any, places: Any, begins: Sequence[int], turn: Turn) -> Any:
        """[ops]: trainer rank that is at a place of its group."""
        ahead = [first_place(size, 0, turn) for size in self._sizes]
        place = places + (np.array(begins) + ahead)[groups]
        return self._members[groups, place % np.array(self._sizes)[groups]]


class _Ops:
    """Ops of one bucket as arrays."""

    def __init__(self, ops: Sequence[CopyOp], ranks: _Ranks) -> None:
        sizes = np.array([volume(op.bounds) for op in ops], float)
        self.wired = np.array([op.nbytes for op in ops], float)
        is_quantized = np.array([op.storage == "mxfp8" for op in ops], bool)
        self.group = ranks.number_of[[op.sender for op in ops]]
        self.receiver = np.array([op.receiver for op in ops], int)
        self.stored = np.where(is_quantized, sizes * _MXFP8_BYTES, self.wired)
        self.exported = 4 * sizes + self.wired

    def passed(self, onward: Sequence[tuple[int, ...]]) -> tuple[Any, _Ops]:
        """What their receivers pass on: of which of these each is, and the ops."""
        which = np.repeat(np.arange(len(onward)), [len(workers) for workers in onward])
        passed = copy.copy(self)
        for name, values in vars(self).items():
            setattr(passed, name, values[which])
        passed.receiver = np.array([worker for workers in onward for worker in workers], int)
        return which, passed


class _Bucket:
    """Of the replicas whose workers lie on nodes in one way."""

    def __init__(
        self, ops: Sequence[CopyOp], onward: Sequence[tuple[int, ...]], ranks: _Ranks
    ) -> None:
        self.sent = _Ops(ops, ranks)
        self.which, self.passed = self.sent.passed(onward)
        self.round = np.array([op.round - ops[0].round for op in ops], int)
        self.place = np.array(places(ops, ranks.group_of), int)
        """Of the sender of each copy, in its group."""
        self.num_rounds = ops[-1].round - ops[0].round + 1


@dataclass(frozen=True, slots=True)
class _Step:
    """One bucket, and how many it stands for."""

    work: Any
    """[kind, round, GPU]: bytes, and for posts a number. The last round is that of the last passes
    alone."""
    times: int


def _steps(
    plans: Mapping[tuple[int, ...], RelayedPlan],
    times: Mapping[str, int],
    cluster: _Cluster,
    ranks: _Ranks,
) -> list[_Step]:
    """All buckets in their order, those as one for which the same ranks begin."""
    by_nodes: dict[str, dict[tuple[int, ...], _Bucket]] = {}
    for nodes, relayed in plans.items():
        onward = iter(relayed.onward)
        for bucket, ops in by_bucket(relayed.plan.ops).items():
            found = _Bucket(ops, list(islice(onward, len(ops))), ranks)
            by_nodes.setdefault(bucket, {})[nodes] = found
    steps = []
    number = 0
    for bucket in sorted(by_nodes, key=bucket_order):
        alike = Counter(ranks.begins(number + i) for i in range(times[bucket]))
        number += times[bucket]
        for begins, count in alike.items():
            work = _work(by_nodes[bucket], cluster, ranks, begins)
            steps.append(_Step(work, count))
    return steps


def _work(
    by_nodes: Mapping[tuple[int, ...], _Bucket],
    cluster: _Cluster,
    ranks: _Ranks,
    begins: Sequence[int],
) -> Any:
    num_rounds = max(bucket.num_rounds for bucket in by_nodes.values()) + 1
    work = np.zeros((6, num_rounds, cluster.num_gpus))
    for replica, nodes in enumerate(cluster.worker_nodes):
        bucket, workers, turn = by_nodes[nodes], cluster.gpus(replica), ranks.turn(replica)
        sent, passed, which = bucket.sent, bucket.passed, bucket.which
        rounds = turned_round(bucket.round, bucket.num_rounds, ranks.ahead(turn))
        senders = ranks.senders(sent.group, bucket.place, begins, turn)
        _add(work, sent, rounds, senders, workers, cluster.links)
        passers = workers[sent.receiver[which]]
        _add(work, passed, rounds[which] + 1, passers, workers, cluster.links)
        np.add.at(work[_MEMORY], (rounds, senders), sent.exported)
    return work


def _add(work: Any, ops: _Ops, rounds: Any, source: Any, workers: Any, links: Links) -> None:
    target = workers[ops.receiver]
    is_near = source // links.gpus_per_node == target // links.gpus_per_node
    np.add.at(work, (np.where(is_near, _NVLINK_OUT, _NIC_OUT), rounds, source), ops.wired)
    np.add.at(work, (np.where(is_near, _NVLINK_IN, _NIC_IN), rounds, target), ops.wired)
    np.add.at(work[_MEMORY], (rounds, target), ops.wired + 2 * ops.stored)
    is_large = ops.wired > links.pack_bytes
    # A message: each large op, and the first small one of a pair and round.
    pair = (rounds * len(work[0, 0]) + source) * len(work[0, 0]) + target
    _, first_small = np.unique(np.where(is_large, -1, pair), return_index=True)
    is_posted = is_large.copy()
    is_posted[first_small] = True
    for gpu in (source, target):
        np.add.at(work[_POSTS], (rounds[is_posted], gpu[is_posted]), 1)


def _totals(steps: Sequence[_Step]) -> Any:
    """[kind, GPU], all rounds."""
    return sum(step.times * step.work.sum(axis=1) for step in steps)


def _seconds(steps: Sequence[_Step], links: Links) -> float:
    unit = [1 / rate for rate in (links.nic, links.nic, links.nvlink, links.nvlink, links.memory)]
    cost = np.array([*unit, links.post_s])[:, None, None]
    total = tail = 0.0
    for step in steps:
        *slowest, tail = (step.work * cost).max(axis=(0, 2)).tolist()
        # The last passes of a bucket travel beside the first round of the next one.
        slowest[0] = max(slowest[0], tail)
        total += step.times * (sum(slowest) + links.round_s * len(slowest))
    return float(total + tail + (links.round_s if tail else 0.0))


def _floor(totals: Any, cluster: _Cluster) -> float:
    links = cluster.links
    trainer = np.arange(cluster.num_senders)
    stages = [(totals[_NIC_OUT, trainer].mean(), totals[_NVLINK_OUT, trainer].mean())]
    for replica in range(cluster.num_replicas):
        gpus = cluster.gpus(replica)
        for node in np.unique(gpus // links.gpus_per_node):
            here = gpus[gpus // links.gpus_per_node == node]
            stages.append((totals[_NIC_IN, here].mean(), totals[_NVLINK_IN, here].mean()))
    far, near = (max(column) for column in zip(*stages, strict=True))
    return float(max(far / links.nic, near / links.nvlink))


def _integers(sizes: Any) -> tuple[int, ...]:
    return tuple(round(float(size)) for size in sizes)

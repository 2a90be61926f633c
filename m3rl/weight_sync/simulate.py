"""How long a sync will take on a cluster, worked out from its plan; nothing is sent.

The model:
- GPUs are numbered trainer ranks first, then replica after replica; `gpus_per_node` share a node.
- All replicas are synced at once, and all ranks begin a round when the last has ended the one
  before: the sync is the sum over rounds, a round the slowest of what any GPU does in it.
- A GPU sends and receives `nic` bytes/s across nodes and `nvlink` bytes/s inside one, all at the
  same time; the network between nodes is never the limit.
- What workers pass on travels one round behind, beside that round's copies.
- A trainer rank reads FP32 and writes what it sends; a worker reads what arrived, writes what it
  stores and hashes that: at `memory` bytes/s, beside the links.
- The host posts a message in `post_s`, beside the links; a round costs `round_s` on top.

The floor is the longest stage of an ideal pipeline: trainer ranks send equally much, the workers
of a node receive equally much, and each byte enters a node once for each replica. Its links are
those of the model, so the ratio of the two is what the plan itself costs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from m3rl.weight_sync.layout import Layout, volume
from m3rl.weight_sync.plan import CopyOp, Plan, copies, in_rounds, ops_digest
from m3rl.weight_sync.relay import RelayedPlan, by_bucket, relay

WIRES = ("bf16", "mxfp8")
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
        wire: 'bf16', or 'mxfp8': what is stored in MXFP8 is quantised by the trainer.

    Raises:
        LayoutError, PlanError: see `copies`.
        ValueError: unknown `wire`.
    """
    if wire not in WIRES:
        raise ValueError(f"wire={wire!r} is unknown; use one of {WIRES}")
    ops = copies(senders, receivers, chunk_bytes)
    cluster = _Cluster(len(senders), len(receivers), num_replicas, links or Links())
    times = dict.fromkeys((op.bucket for op in ops), 1) | dict(repeats or {})
    ideal = {nodes: relay(ops, nodes, chunk_bytes) for nodes in set(cluster.worker_nodes)}
    chosen = ideal if is_relayed else dict.fromkeys(ideal, _unrelayed(ops, chunk_bytes))
    work = _work(chosen, cluster, wire)
    totals = _totals(work, times)
    ideal_totals = totals if is_relayed else _totals(_work(ideal, cluster, wire), times)
    workers = cluster.gpus(0)
    return Projection(
        sent_bytes=_integers((totals[_NIC_OUT] + totals[_NVLINK_OUT])[: len(senders)]),
        received_bytes=_integers((totals[_NIC_IN] + totals[_NVLINK_IN])[workers]),
        num_copies=sum(times[op.bucket] for op in chosen[cluster.worker_nodes[0]].plan.ops),
        num_rounds=sum(times[bucket] * (each.shape[1] - 1) for bucket, each in work.items()),
        seconds=_seconds(work, times, cluster.links),
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


class _Ops:
    """Ops of one bucket as arrays."""

    def __init__(self, ops: Sequence[CopyOp], wire: str) -> None:
        sizes = np.array([volume(op.bounds) for op in ops], float)
        plain = np.array([op.nbytes for op in ops], float)
        is_quantized = np.array([op.storage == "mxfp8" for op in ops], bool)
        self.sender = np.array([op.sender for op in ops], int)
        self.receiver = np.array([op.receiver for op in ops], int)
        self.round = np.array([op.round - ops[0].round for op in ops], int)
        self.stored = np.where(is_quantized, sizes * _MXFP8_BYTES, plain)
        self.wired = self.stored if wire == "mxfp8" else plain
        self.exported = 4 * sizes + self.wired

    def passed(self, onward: Sequence[tuple[int, ...]]) -> _Ops:
        """What their receivers pass on, in the next round."""
        which = np.repeat(np.arange(len(onward)), [len(workers) for workers in onward])
        passed = copy.copy(self)
        for name, values in vars(self).items():
            setattr(passed, name, values[which])
        passed.sender = passed.receiver
        passed.receiver = np.array([worker for workers in onward for worker in workers], int)
        passed.round = passed.round + 1
        return passed


def _work(
    plans: Mapping[tuple[int, ...], RelayedPlan], cluster: _Cluster, wire: str
) -> dict[str, Any]:
    """Bucket -> [kind, round, GPU]: bytes, and for posts a number.

    The last round is that of the last passes alone.
    """
    found: dict[str, Any] = {}
    for nodes, relayed in plans.items():
        onward = iter(relayed.onward)
        for bucket, ops in by_bucket(relayed.plan.ops).items():
            copies = _Ops(ops, wire)
            passes = copies.passed(list(islice(onward, len(ops))))
            work = np.zeros((6, ops[-1].round - ops[0].round + 2, cluster.num_gpus))
            for replica, theirs in enumerate(cluster.worker_nodes):
                if theirs == nodes:
                    workers = cluster.gpus(replica)
                    _add(work, copies, copies.sender, workers, cluster.links)
                    _add(work, passes, workers[passes.sender], workers, cluster.links)
                    np.add.at(work[_MEMORY], (copies.round, copies.sender), copies.exported)
            found[bucket] = _longer(found.get(bucket), work)
    return found


def _add(work: Any, ops: _Ops, source: Any, workers: Any, links: Links) -> None:
    target = workers[ops.receiver]
    is_near = source // links.gpus_per_node == target // links.gpus_per_node
    np.add.at(work, (np.where(is_near, _NVLINK_OUT, _NIC_OUT), ops.round, source), ops.wired)
    np.add.at(work, (np.where(is_near, _NVLINK_IN, _NIC_IN), ops.round, target), ops.wired)
    np.add.at(work[_MEMORY], (ops.round, target), ops.wired + 2 * ops.stored)
    is_large = ops.wired > links.pack_bytes
    # A message: each large op, and the first small one of a pair and round.
    pair = (ops.round * len(work[0, 0]) + source) * len(work[0, 0]) + target
    _, first_small = np.unique(np.where(is_large, -1, pair), return_index=True)
    is_posted = is_large.copy()
    is_posted[first_small] = True
    for gpu in (source, target):
        np.add.at(work[_POSTS], (ops.round[is_posted], gpu[is_posted]), 1)


def _longer(a: Any, b: Any) -> Any:
    """The sum of two arrays of work; the one with fewer rounds has none in the others."""
    if a is None:
        return b
    long, short = (a, b) if a.shape[1] >= b.shape[1] else (b, a)
    long[:, : short.shape[1]] += short
    return long


def _totals(work: Mapping[str, Any], times: Mapping[str, int]) -> Any:
    """[kind, GPU], all rounds."""
    return sum(times[bucket] * each.sum(axis=1) for bucket, each in work.items())


def _seconds(work: Mapping[str, Any], times: Mapping[str, int], links: Links) -> float:
    unit = [1 / rate for rate in (links.nic, links.nic, links.nvlink, links.nvlink, links.memory)]
    cost = np.array([*unit, links.post_s])[:, None, None]
    total = tail = 0.0
    for bucket, each in work.items():
        *slowest, tail = (each * cost).max(axis=(0, 2)).tolist()
        # The last passes of a bucket travel beside the first round of the next one.
        slowest[0] = max(slowest[0], tail)
        total += times[bucket] * (sum(slowest) + links.round_s * len(slowest))
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

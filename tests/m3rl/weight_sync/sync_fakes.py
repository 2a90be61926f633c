"""A small model, engines that store it, and both ends of a sync in this process or in others."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore

from benchmarks.remote import RemoteProcess
from inference.kernels.tensor_hash import combine, tensor_hash
from m3rl.types import Receiver, TensorSlot
from m3rl.weight_sync.layout import Bounds, extents, whole
from m3rl.weight_sync.plan import CopyOp
from m3rl.weight_sync.send import Sender
from m3rl.weight_sync.sync import WeightSync
from m3rl.weight_sync.transport import WIRE_DTYPES

BIAS = "model.layers.1.block_sparse_moe.e_score_correction_bias"
EXPERT = "model.layers.1.block_sparse_moe.experts.{}.w1.weight"
EMBEDDING = "model.embed_tokens.weight"

# name -> dtype, global shape, bucket; a router weight and a bias that stay float32 among bfloat16.
TENSORS: dict[str, tuple[str, tuple[int, ...], str]] = {
    EMBEDDING: ("bfloat16", (11, 6), "pre"),
    "model.layers.0.mlp.gate_proj.weight": ("bfloat16", (8, 6), "layer.0"),
    "model.layers.0.input_layernorm.weight": ("bfloat16", (6,), "layer.0"),
    **{EXPERT.format(e): ("bfloat16", (5, 6), "layer.1") for e in range(4)},
    "model.layers.1.block_sparse_moe.gate.weight": ("float32", (4, 6), "layer.1"),
    BIAS: ("float32", (4,), "layer.1"),
    "lm_head.weight": ("bfloat16", (11, 6), "post"),
}


def weights(seed: int) -> dict[str, Tensor]:
    """All tensors of the model, other values for another seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(WIRE_DTYPES[dtype])
        for name, (dtype, shape, _) in TENSORS.items()
    }


def rows(shape: tuple[int, ...], rank: int, world: int) -> Bounds:
    """Every world-th part of the rows; tensors with fewer than two rows per rank are held whole."""
    if shape[0] < 2 * world:
        return whole(shape)
    return ((shape[0] * rank // world, shape[0] * (rank + 1) // world), *whole(shape[1:]))


def layout(rank: int = 0, world: int = 1) -> list[TensorSlot]:
    """What one of `world` row-sharded ranks holds."""
    return [
        TensorSlot(name, dtype, shape, rows(shape, rank, world), bucket)
        for name, (dtype, shape, bucket) in TENSORS.items()
    ]


def cut(tensor: Tensor, bounds: Bounds) -> Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in bounds)]


def hash_of(name: str, tensor: Tensor, ops: Sequence[CopyOp]) -> int:
    """Hash of a whole tensor as a sync with these ops computes it."""
    grain = next(op.grain for op in ops if op.name == name)
    return tensor_hash(tensor, name=name, unit=math.gcd(grain, 16 // tensor.element_size()))


def wire_hash_of(tensors: dict[str, Tensor], ops: Sequence[CopyOp]) -> int:
    """Of a whole model."""
    return combine(hash_of(name, tensor, ops) for name, tensor in tensors.items())


@dataclasses.dataclass(frozen=True)
class FakePlan:
    names: list[str]
    places: list[Tensor]


class FakeEngine:
    """Stores tensors, records events, and lets `fault` damage what was just written.

    `fault(engine, names)` is told the tensors of each part that came into place.
    """

    def __init__(
        self,
        slots: Sequence[TensorSlot],
        fault: Callable[[FakeEngine, list[str]], None] | None = None,
        *,
        has_shadow: bool = False,
    ) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.fault = fault
        self.has_shadow = has_shadow
        self.tensors = {
            slot.name: torch.zeros(extents(slot.bounds), dtype=WIRE_DTYPES[slot.dtype])
            for slot in slots
        }
        self.loaded = (
            {name: tensor.clone() for name, tensor in self.tensors.items()}
            if has_shadow
            else self.tensors
        )
        """Where loads go."""
        self.version: int | None = None
        self.serves = False
        self.paused = False
        self.loading: tuple[int, FakePlan] | None = None
        self.written_parts: list[int] = []
        self.events: list[str] = []
        self.num_loads = 0

    def weight_layout(self) -> list[TensorSlot]:
        return list(self.slots.values())

    def plan_load(self, parts: Sequence[tuple[str, Bounds]]) -> FakePlan:
        places = []
        for name, bounds in parts:
            origin = self.slots[name].bounds
            here = tuple((a - s, b - s) for (a, b), (s, _) in zip(bounds, origin, strict=True))
            places.append(cut(self.loaded[name], here))
        return FakePlan([name for name, _ in parts], places)

    def begin_load(self, version: int, plan: FakePlan) -> None:
        assert self.loading is None, "a load is open"
        self.loading, self.written_parts = (version, plan), []
        if not self.has_shadow:
            self.serves = False
        self.num_loads += 1
        self.events.append("begin_load")

    def written(self, first: int, last: int) -> None:
        assert self.loading is not None, "no load is open"
        self.written_parts += range(first, last)
        self.events += ["write"] * (last - first)
        if self.fault is not None:
            self.fault(self, self.loading[1].names[first:last])

    def commit(self) -> None:
        assert self.loading is not None, "no load is open"
        version, plan = self.loading
        assert sorted(self.written_parts) == list(range(len(plan.names)))
        if self.has_shadow:
            assert self.paused
            for name, tensor in self.loaded.items():
                self.tensors[name].copy_(tensor)
        self.version, self.serves, self.loading = version, True, None
        self.events.append("commit")

    def abort_load(self) -> None:
        if self.loading is not None:
            self.loading = None
            if not self.has_shadow:
                self.version = None
            self.events.append("abort_load")

    def pause(self) -> None:
        self.paused = True
        self.events.append("pause")

    def resume(self) -> None:
        assert self.serves
        self.paused = False
        self.events.append("resume")


_stores: dict[int, HashStore] = {}


def store_without_sockets(
    host: str, port: int, size: None, is_master: bool, *_: Any, **options: Any
) -> HashStore:
    """Takes the place of TCPStore where all members are threads: no socket, no name server."""
    if is_master:
        os.close(options["master_listen_fd"])
        _stores[port] = HashStore()
    return _stores[port]


class TrainerRank:
    """A Sender over a whole set of weights of which it shows its shard."""

    def __init__(self, rank: int, world: int, *, is_replicated: bool = False) -> None:
        self.weights = weights(0)
        held = layout() if is_replicated else layout(rank, world)
        self.sender = Sender(rank, held, self.read)

    def read(self, name: str, bounds: Bounds) -> Tensor:
        return cut(self.weights[name], bounds)

    def load(self, seed: int) -> None:
        self.weights = weights(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sender, name)


class Worker:
    """An engine and the receiver attached to it."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.receiver: Any = None

    def attach(self, receiver: Receiver) -> None:
        receiver.bind(self.engine)
        self.receiver = receiver

    def __getattr__(self, name: str) -> Any:
        return getattr(self.receiver, name)


class LocalWorker(Worker):
    """A worker of this process that answers one call after the other, as an engine thread does."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.node = f"node {id(self)}"
        """Of its own, as long as nothing else is said."""
        self._thread = ThreadPoolExecutor(1)
        self.before: dict[str, Callable[[], None]] = {}

    def call(self, method: str, *args: Any) -> Future[Any]:
        def run() -> Any:
            self.before.get(method, lambda: None)()
            if method == "node":
                return self.node
            return getattr(self.receiver, method)(*args)

        return self._thread.submit(run)


class LocalSenders:
    """Trainer ranks of this process."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self.ranks = list(ranks)
        self.num_ranks = len(self.ranks)
        self._threads = [ThreadPoolExecutor(4) for _ in self.ranks]

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        return self._threads[rank].submit(getattr(self.ranks[rank], method), *args)

    def load(self, seed: int) -> None:
        for rank in self.ranks:
            rank.load(seed)


def local_sync(
    engines: dict[int, list[FakeEngine]],
    ranks: Sequence[Any] | None = None,
    *,
    connect: bool = True,
    **options: Any,
) -> tuple[WeightSync, LocalSenders, dict[int, list[LocalWorker]]]:
    """A driver over engines of this process, connected."""
    senders = LocalSenders([TrainerRank(0, 1)] if ranks is None else ranks)
    workers = {r: [LocalWorker(engine) for engine in each] for r, each in engines.items()}
    options = {
        "timeout_s": 5.0,
        "min_replicas": 1,
        "verify": True,
        "pause": lambda r: [engine.pause() for engine in engines[r]],
        "resume": lambda r: [engine.resume() for engine in engines[r]],
    } | options
    sync = WeightSync(senders, workers, host="127.0.0.1", **options)
    if connect:
        for replica in engines:
            sync.connect(replica)
    return sync, senders, workers


def assert_holds(engine_tensors: dict[str, Tensor], slots: Sequence[TensorSlot], seed: int) -> None:
    """The engine holds exactly its part of the weights of `seed`, bit for bit."""
    truth = weights(seed)
    assert sorted(engine_tensors) == sorted(slot.name for slot in slots)
    for slot in slots:
        expected = cut(truth[slot.name], slot.bounds)
        assert engine_tensors[slot.name].dtype == expected.dtype, slot.name
        assert torch.equal(engine_tensors[slot.name], expected), slot.name


class RemoteSenders:
    """Trainer ranks in processes of their own."""

    def __init__(self, ranks: Sequence[RemoteProcess]) -> None:
        self.ranks = list(ranks)
        self.num_ranks = len(self.ranks)

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        return self.ranks[rank].call(method, *args)

    def load(self, seed: int) -> None:
        for rank in self.ranks:
            rank.call("load", seed).result(30)


class ReplicaBody(Worker):
    """What a replica's process runs; after `die_in_write` it kills itself amid a stream."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(FakeEngine(layout(rank, world)))

    def events(self) -> list[str]:
        return self.engine.events

    def pause(self) -> None:
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    def snapshot(self) -> tuple[int | None, dict[str, Tensor]]:
        # Copies: what goes through the pipe is moved to shared memory.
        held = {name: tensor.clone() for name, tensor in self.engine.tensors.items()}
        return self.engine.version, held

    def die_in_write(self, name: str) -> None:
        def fault(engine: FakeEngine, written: list[str]) -> None:
            if name in written:
                os.kill(os.getpid(), signal.SIGKILL)

        self.engine.fault = fault

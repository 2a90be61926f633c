"""A small model, engines that store it, and both ends of a sync in this process or in others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore

from inference.kernels.tensor_hash import tensor_hash
from m3rl.types import Receiver, TensorSlot
from m3rl.weight_sync.layout import WIRE_DTYPES, Bounds, extents, starts, whole
from m3rl.weight_sync.send import Sender
from m3rl.weight_sync.sync import WeightSync

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


class FakeEngine:
    """Stores tensors, records events, and does to a written tensor whatever `fault` says."""

    def __init__(
        self,
        slots: Sequence[TensorSlot],
        fault: Callable[[FakeEngine, str, Tensor], tuple[str, Tensor] | None] | None = None,
    ) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.fault = fault
        self.tensors = {
            slot.name: torch.zeros(extents(slot.bounds), dtype=WIRE_DTYPES[slot.dtype])
            for slot in slots
        }
        self.version: int | None = None
        self.serves = False
        self.loading: int | None = None
        self.events: list[str] = []
        self.num_loads = 0

    def weight_layout(self) -> list[TensorSlot]:
        return list(self.slots.values())

    def begin_load(self, version: int) -> None:
        assert self.loading is None, "a load is open"
        self.serves, self.loading = False, version
        self.num_loads += 1
        self.events.append("begin_load")

    def write(self, name: str, bounds: Bounds, tensor: Tensor) -> None:
        kept = (name, tensor) if self.fault is None else self.fault(self, name, tensor)
        if kept is None:
            return
        name, tensor = kept
        slot = self.slots[name]
        here = tuple((a - s, b - s) for (a, b), (s, _) in zip(bounds, slot.bounds, strict=True))
        cut(self.tensors[name], here).copy_(tensor)
        self.events.append("write")

    def weights_hash(self) -> dict[str, int]:
        self.events.append("hash")
        return {
            name: tensor_hash(
                self.tensors[name], name=name, offsets=starts(slot.bounds), shape=slot.shape
            )
            for name, slot in self.slots.items()
        }

    def commit(self) -> None:
        assert self.loading is not None, "no load is open"
        self.version, self.serves, self.loading = self.loading, True, None
        self.events.append("commit")

    def abort_load(self) -> None:
        if self.loading is not None:
            self.version, self.loading = None, None
            self.events.append("abort_load")

    def pause(self) -> None:
        self.events.append("pause")

    def resume(self) -> None:
        assert self.serves
        self.events.append("resume")

    def snapshot(self) -> dict[str, Tensor]:
        return self.tensors


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

    def attach(self, receiver: Receiver) -> None:
        receiver.bind(self.engine)
        self.receiver: Any = receiver

    def __getattr__(self, name: str) -> Any:
        return getattr(self.receiver, name)


class LocalWorker(Worker):
    """A worker of this process that answers one call after the other, as an engine thread does."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self._thread = ThreadPoolExecutor(1)
        self.before: dict[str, Callable[[], None]] = {}

    def call(self, method: str, *args: Any) -> Future[Any]:
        def run() -> Any:
            self.before.get(method, lambda: None)()
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


class RemoteProcess:
    """An object in a process of its own; calls on it run there, four at a time."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self._process.start()
        theirs.close()
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._next = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._pending[number] = future
            try:
                self._pipe.send((number, method, args))
            except OSError:
                self._pending.pop(number)
                future.set_exception(RuntimeError("the process died"))
        return future

    def attach(self, receiver: Receiver) -> None:
        self.call("attach", receiver).result(30)

    def kill(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGKILL)

    def end(self) -> None:
        self._process.kill()
        self._process.join()

    def _listen(self) -> None:
        while True:
            try:
                number, result, error = self._pipe.recv()
            except (EOFError, OSError):
                break
            future = self._pending.pop(number)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        with self._lock:
            for future in self._pending.values():
                future.set_exception(RuntimeError("the process died"))
            self._pending.clear()
            self._pipe.close()


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
        return self.engine.version, self.engine.snapshot()

    def die_in_write(self, name: str) -> None:
        def fault(engine: FakeEngine, written: str, tensor: Tensor) -> tuple[str, Tensor]:
            if written == name:
                os.kill(os.getpid(), signal.SIGKILL)
            return written, tensor

        self.engine.fault = fault


def _serve(pipe: Any, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    body = make(*args)
    lock = threading.Lock()

    def run(number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            answer = (number, getattr(body, method)(*args), None)
        except Exception as error:
            answer = (number, None, error)
        with lock:
            pipe.send(answer)

    with ThreadPoolExecutor(4) as threads:
        while True:
            try:
                number, method, args = pipe.recv()
            except EOFError:
                return
            threads.submit(run, number, method, args)

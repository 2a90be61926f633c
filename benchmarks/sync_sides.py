"""The two sides of `benchmarks.weight_sync`, each in a process and on a GPU of its own.

A trainer rank has all or its rows of the published tensors, in wire dtypes, at fixed addresses; the
replica has the runtime's parameters, without an engine around them.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from inference.config import EngineConfig, ModelConfig
from inference.engine.coverage import WeightSlot
from inference.engine.loading import LoadPlan, WeightLoader
from inference.engine.weights import WeightMemory
from inference.kernels.copy_table import CopyTable
from inference.kernels.mxfp8 import MXFP8Tensor, QuantizeTable, hash_tensor, quantize, tensors_of
from inference.kernels.tensor_hash import tensor_hash
from inference.models.minimax_m3 import MiniMaxM3
from inference.models.weights import TensorSpec, published_tensors
from inference.parallel.config import ParallelConfig
from m3rl.types import TensorSlot
from m3rl.weight_sync.layout import Bounds, extents, name_order
from m3rl.weight_sync.send import Sender
from m3rl.weight_sync.transport import wire_bytes

BUFFER_BYTES = 1 << 30
"""Of a packed broadcast, as vLLM's nccl engine has it."""
MESSAGE_BYTES = 1 << 30
"""Of the raw copy."""


def model_config(raw: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict(raw, source="benchmarks.weight_sync")


def wire_dtype(spec: TensorSpec) -> torch.dtype:
    return torch.float32 if spec.is_fp32 else torch.bfloat16


class Side:
    """What both have: their tensors in one order, and a group for baselines."""

    def __init__(self, raw: dict[str, Any], device: str) -> None:
        self.config = model_config(raw)
        self.device = torch.device(device)
        self.specs = list(published_tensors(self.config))
        self.begin_thread()

    def begin_thread(self) -> None:
        """The current device belongs to a thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def join(self, backend: str, rank: int, world: int, port: int) -> None:
        """The default group, of all sides."""
        dist.init_process_group(
            backend,
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world,
            device_id=self.device if backend == "nccl" else None,
        )

    def num_tensors(self) -> int:
        return len(self.specs)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, run: Callable[[], None], reps: int) -> list[float]:
        """Microseconds of each run, which all sides begin together."""
        times = []
        for rep in range(reps + 1):
            dist.barrier()
            self.synchronize()
            begin = time.perf_counter()
            run()
            self.synchronize()
            if rep:
                times.append((time.perf_counter() - begin) * 1e6)
        return times

    def raw_copy(self, num_bytes: int, reps: int) -> list[float]:
        """A few large messages from rank 0 to the last rank, both of which do nothing else."""
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        size = min(MESSAGE_BYTES, num_bytes)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]

        def run() -> None:
            for i, first in enumerate(range(0, num_bytes, size)):
                message = buffers[i % 2][: min(size, num_bytes - first)]
                if rank == 0:
                    dist.send(message, last)
                elif rank == last:
                    dist.recv(message, 0)

        return self.timed(run, reps)

    def peer_copy(self, source: str, num_bytes: int, reps: int) -> list[float]:
        """Microseconds of as many bytes from another GPU, by this process, which has both."""
        size = min(MESSAGE_BYTES, num_bytes)
        origin = torch.empty(size, dtype=torch.uint8, device=source)
        out, times = torch.empty_like(origin, device=self.device), []
        for rep in range(reps + 1):
            self.synchronize()
            begin = time.perf_counter()
            for first in range(0, num_bytes, size):
                count = min(size, num_bytes - first)
                out[:count].copy_(origin[:count], non_blocking=True)
            self.synchronize()
            if rep:
                times.append((time.perf_counter() - begin) * 1e6)
        return times

    def extra_bytes(self) -> int:
        """Peak of device memory since `mark_memory`, above what was held then; restarts nothing."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.max_memory_allocated(self.device) - self._held

    def mark_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._held = torch.cuda.memory_allocated(self.device)

    def packed(self, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Ranges of tensors that fill a buffer; a larger tensor is alone in one."""
        first = total = 0
        for i, size in enumerate(sizes):
            if total and total + size > BUFFER_BYTES:
                yield first, i
                first, total = i, 0
            total += size
        yield first, len(sizes)

    def streams(self, overlapped: bool) -> list[Any]:
        """In which buffers are handled in turn: two work side by side."""
        if self.device.type != "cuda":
            return [contextlib.nullcontext()]
        count = 2 if overlapped else 1
        return [torch.cuda.stream(torch.cuda.Stream(self.device)) for _ in range(count)]


class TrainerSide(Side):
    """Trainer rank `rank` of `world`: rows of each tensor."""

    def __init__(self, raw: dict[str, Any], device: str, rank: int = 0, world: int = 1) -> None:
        super().__init__(raw, device)
        self._bounds: dict[str, Bounds] = {}
        for spec in self.specs:
            rows = spec.shape[0]
            part = (rows * rank // world, rows * (rank + 1) // world)
            self._bounds[spec.name] = (part, *((0, size) for size in spec.shape[1:]))
        self.weights = self._stacked()
        layout = []
        generator = torch.Generator(device=self.device)
        for number, spec in enumerate(self.specs):
            tensor, bounds = self.weights[spec.name], self._bounds[spec.name]
            generator.manual_seed(number * world + rank)
            tensor.normal_(0, 0.02, generator=generator)
            dtype = str(tensor.dtype).removeprefix("torch.")
            layout.append(TensorSlot(spec.name, dtype, spec.shape, bounds, spec.bucket))
        self.sender = Sender(rank, layout, self.read, stays=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sender"], name)

    def _stacked(self) -> dict[str, Tensor]:
        """Memory for this rank's parts: experts' in one piece for all of them, w1 beside w3, as
        transformers has them as one parameter."""
        stacks: dict[str, list[TensorSpec]] = {}
        for spec in sorted(self.specs, key=lambda spec: name_order(spec.name)):
            stack = re.sub(r"experts\.\d+\.w[13]\.", "experts.w13.", spec.name)
            stacks.setdefault(re.sub(r"experts\.\d+\.w2\.", "experts.w2.", stack), []).append(spec)
        found = {}
        for specs in stacks.values():
            shapes = [extents(self._bounds[spec.name]) for spec in specs]
            sizes = [math.prod(shape) for shape in shapes]
            memory = torch.empty(sum(sizes), dtype=wire_dtype(specs[0]), device=self.device)
            for spec, shape, part in zip(specs, shapes, memory.split(sizes), strict=True):
                found[spec.name] = part.view(shape)
        return {spec.name: found[spec.name] for spec in self.specs}

    def read(self, name: str, bounds: Bounds) -> Tensor:
        held = self._bounds[name]
        here = tuple(
            slice(start - low, stop - low)
            for (start, stop), (low, _) in zip(bounds, held, strict=True)
        )
        return self.weights[name][here]

    @torch.no_grad()
    def step(self) -> None:
        """Change every weight, exactly undone by the next call."""
        for tensor in self.weights.values():
            tensor.neg_()
        self.synchronize()  # a sync begins when the step is done

    def hashes(self, quantized: Sequence[str]) -> dict[str, int]:
        """Of this rank's part of each tensor, as the replica should hold it, element by element."""
        found = {}
        for spec in self.specs:
            tensor = self.weights[spec.name]
            offsets = tuple(start for start, _ in self._bounds[spec.name])
            where: dict[str, Any] = {"name": spec.name, "offsets": offsets, "shape": spec.shape}
            is_quantized = spec.name in quantized
            found[spec.name] = (
                hash_tensor(quantize(tensor), **where)
                if is_quantized
                else tensor_hash(tensor, **where)
            )
        return found

    def packed_broadcast(self, reps: int, overlapped: bool) -> list[float]:
        tensors = [wire_bytes(tensor) for tensor in self.weights.values()]
        sizes = [tensor.numel() for tensor in tensors]
        size = max(BUFFER_BYTES, *sizes)
        streams = self.streams(overlapped)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]

        def run() -> None:
            for i, (first, last) in enumerate(self.packed(sizes)):
                with streams[i % len(streams)]:
                    end, buffer = 0, buffers[i % 2]
                    for tensor in tensors[first:last]:
                        buffer[end : end + tensor.numel()].copy_(tensor)
                        end += tensor.numel()
                    dist.broadcast(buffer[:end], 0)

        return self.timed(run, reps)

    def broadcast_one(self, number: int) -> None:
        dist.broadcast(self.weights[self.specs[number].name], 0)
        self.synchronize()

    def broadcast_all(self) -> None:
        """One tensor after the other."""
        for number in range(self.num_tensors()):
            self.broadcast_one(number)


class ReplicaSide(Side):
    """The runtime's parameters, and the state machine that an engine has for its loads."""

    def __init__(self, raw: dict[str, Any], device: str, quantization: str) -> None:
        super().__init__(raw, device)
        config = EngineConfig(device=device, dtype="bfloat16", quantization=quantization)
        config = config.resolve(self.config)
        self._model = MiniMaxM3(self.config, torch.bfloat16, self.device, 4096, config.quantization)
        self._memory = WeightMemory(self._model, self.config, config, ParallelConfig(), 0)
        self._loader = WeightLoader(self._memory)
        self._slots = {slot.name: slot for slot in self._memory.layout}
        self._receiver: Any = None
        self.commit = self._loader.commit
        self.abort_load = self._loader.abort
        self.begin_load = self._loader.begin
        self.written = self._loader.written
        self.has_shadow = False

    def weight_layout(self) -> list[WeightSlot]:
        return self._memory.layout

    def plan_load(self, parts: Sequence[tuple[str, Bounds]]) -> LoadPlan:
        return self._loader.plan(parts)

    def attach(self, receiver: Any) -> None:
        receiver.bind(self)
        self._receiver = receiver

    def receive(self, method: str, *args: Any) -> Any:
        """A method of the receiver."""
        return getattr(self._receiver, method)(*args)

    def state(self) -> tuple[str, str]:
        """Of the receiver, and of the weights."""
        return self._receiver.state.value, self._loader.state.value

    def quantized(self) -> list[str]:
        return [slot.name for slot in self._memory.layout if slot.storage == "mxfp8"]

    def hashes(self) -> dict[str, int]:
        return self._memory.hashes()

    def packed_broadcast(self, reps: int, overlapped: bool) -> list[float]:
        """Unpacked and loaded tensor by tensor, as a checkpoint's are."""
        dtypes = [wire_dtype(spec) for spec in self.specs]
        sizes = [
            torch.Size(s.shape).numel() * d.itemsize
            for s, d in zip(self.specs, dtypes, strict=True)
        ]
        size = max(BUFFER_BYTES, *sizes)
        streams = self.streams(overlapped)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]

        def run() -> None:
            self._loader.begin(0)
            for i, (first, last) in enumerate(self.packed(sizes)):
                with streams[i % len(streams)]:
                    end, buffer = 0, buffers[i % 2]
                    dist.broadcast(buffer[: sum(sizes[first:last])], 0)
                    for j in range(first, last):
                        wire = buffer[end : end + sizes[j]]
                        self._write(self.specs[j], wire.view(dtypes[j]))
                        end += sizes[j]
            self.synchronize()
            self._loader.commit()

        return self.timed(run, reps)

    def begin(self) -> None:
        self._loader.begin(0)

    def broadcast_one(self, number: int) -> None:
        """One tensor, loaded when it is there."""
        spec = self.specs[number]
        tensor = torch.empty(spec.shape, dtype=wire_dtype(spec), device=self.device)
        dist.broadcast(tensor, 0)
        self._write(spec, tensor)
        self.synchronize()

    def receive_alone(self, reps: int) -> dict[str, list[float]]:
        """All tensors, whole and on the device, into the parameters.

        Returns:
            Microseconds of each repetition: 'device' of the work, 'host' of launching it, 'floor'
            of one copy of the same bytes, 'writes' of a write a tensor, as a checkpoint is loaded;
            and in 'differ' how many tensors the two ways left different.
        """
        sources = {
            spec.name: torch.empty(spec.shape, dtype=wire_dtype(spec), device=self.device).normal_()
            for spec in self.specs
        }
        parts = [(spec.name, tuple((0, size) for size in spec.shape)) for spec in self.specs]
        pairs = [
            (sources[name], place)
            for (name, _), place in zip(parts, self.plan_load(parts).places, strict=True)
        ]
        copies = CopyTable([(x, p) for x, p in pairs if isinstance(p, Tensor)])
        quantizes = [(x, p) for x, p in pairs if isinstance(p, MXFP8Tensor)]
        quantize_table = QuantizeTable(quantizes) if quantizes else None
        times: dict[str, list[float]] = {"device": [], "host": [], "floor": [], "writes": []}

        def fill() -> None:
            begin = time.perf_counter()
            copies.launch(0, len(copies))
            if quantize_table is not None:
                quantize_table.launch(0, len(quantizes))
            times["host"].append((time.perf_counter() - begin) * 1e6)

        def write_all() -> None:
            self._loader.begin(0)
            for spec in self.specs:
                self._write(spec, sources[spec.name])
            self.synchronize()
            self._loader.commit()

        num_bytes = sum(x.numel() * x.element_size() for x in sources.values())
        source = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        out = torch.empty_like(source)
        for _ in range(reps + 2):
            for name, run in (
                ("device", fill),
                ("floor", lambda: out.copy_(source)),
                ("writes", write_all),
            ):
                self.synchronize()
                begin = time.perf_counter()
                run()
                self.synchronize()
                times[name].append((time.perf_counter() - begin) * 1e6)
        written = self.hashes()
        for tensor in self._memory.views.values():
            for part in tensors_of(tensor):
                part.view(torch.uint8).fill_(7)
        fill()
        filled = self.hashes()
        differ = sum(filled[name] != written[name] for name in filled)
        return {name: each[2:] for name, each in times.items()} | {"differ": [float(differ)]}

    def _write(self, spec: TensorSpec, tensor: Tensor) -> None:
        bounds = tuple((0, size) for size in spec.shape)
        self._loader.write(spec.name, bounds, tensor.view(spec.shape))

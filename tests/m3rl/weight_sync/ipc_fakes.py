"""CUDA IPC's part played by the host: memory of any process of this user is read where it lies."""

from __future__ import annotations

import ctypes
import itertools
import os
import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m3rl.weight_sync import ipc
from m3rl.weight_sync.ipc_memory import MappingError, Spot
from tests.m3rl.weight_sync.sync_fakes import ReplicaBody, TrainerRank

_libc = ctypes.CDLL(None, use_errno=True)


class _Run(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def read_memory(pid: int, address: int, out: Tensor) -> None:
    """Bytes of another process, as a mapped GPU's."""
    size, end = out.numel(), 0
    while end < size:
        here = _Run(out.data_ptr() + end, size - end)
        there = _Run(address + end, size - end)
        count = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            raise MappingError(f"process {pid}: {os.strerror(ctypes.get_errno())}")
        end += count


@dataclass(eq=False)
class Mark:
    """A point of a device that comes nearer with every look at it."""

    memory: HostMemory
    looks: int
    is_past: bool = False

    def query(self) -> bool:
        self.looks -= 1
        if self.looks < 0:
            self.memory.run_to(self)
        return self.is_past


class HostMemory:
    """Stands in for `ipc_memory.CudaMemory`; copies begin late, in order, and see what lies there
    then."""

    lag = 2
    """Looks at a mark before it is reached."""
    owners_that_map_nothing: Sequence[str] = ()

    def __init__(self, device: torch.device, owner: str) -> None:
        self.device = torch.device("cpu")
        self.gpu = f"GPU of {owner}"
        self.owner = owner
        self.num_opened = itertools.count(1)
        self.opened: dict[int, tuple[int, int]] = {}
        """Address here -> (process, address there)."""
        self.queue: deque[tuple[Mark, Sequence[tuple[Tensor, int]]]] = deque()
        self.num_copied = 0
        self.gone: list[int] = []
        self.shared: set[int] = set()
        self.is_closed = False

    def mark(self) -> Mark:
        mark = Mark(self, self.lag)
        self.queue.append((mark, ()))
        return mark

    def follow(self, mark: Mark) -> None:
        self.run_to(mark)

    def share(self, wires: Sequence[Tensor]) -> list[Spot]:
        found = []
        for wire in wires:
            memory = wire.untyped_storage().data_ptr()
            self.shared.add(memory)
            handle = pickle.dumps((os.getpid(), memory))
            found.append(Spot(memory, handle, wire.data_ptr() - memory))
        return found

    def freed(self) -> list[int]:
        gone, self.gone = self.gone, []
        return gone

    def open(self, handle: bytes) -> int:
        if self.owner in self.owners_that_map_nothing:
            raise MappingError("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        address = next(self.num_opened) << 48
        self.opened[address] = pickle.loads(handle)
        return address

    def release(self, address: int) -> None:
        del self.opened[address]

    def copy(self, parts: Sequence[tuple[Tensor, int]], after: Mark) -> Mark:
        mark = Mark(self, self.lag)
        self.queue.append((mark, list(parts)))
        return mark

    def run_to(self, end: Mark) -> None:
        while not end.is_past:
            mark, parts = self.queue.popleft()
            for wire, address in parts:
                pid, memory = self.opened[address >> 48 << 48]
                read_memory(pid, memory + address % (1 << 48), wire)
                self.num_copied += 1
            mark.is_past = True

    def close(self) -> None:
        if self.queue:
            self.run_to(self.queue[-1][0])
        self.opened.clear()
        self.is_closed = True


class IpcRank(TrainerRank):
    """A trainer rank in a process of its own."""

    def __init__(self, rank: int, world: int) -> None:
        ipc.CudaMemory = HostMemory
        super().__init__(rank, world)


class IpcReplica(ReplicaBody):
    """A worker in a process of its own."""

    def __init__(self, rank: int, world: int) -> None:
        ipc.CudaMemory = HostMemory
        super().__init__(rank, world)

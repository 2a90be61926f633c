"""GPU memory of other processes of this host, mapped here with CUDA IPC and read by copy engines.

Called through the driver, and not through torch's shared storages: those count their readers in
files, and keep memory whose reader died for ever. A handle stands for a whole allocation, which is
a segment of torch's allocator, so few of them travel, once each.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from m3rl.weight_sync.errors import NotMappableError, TransportError
from m3rl.weight_sync.lane import POLL_S

logger = logging.getLogger(__name__)

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
# CU_POINTER_ATTRIBUTE_: BUFFER_ID, IS_LEGACY_CUDA_IPC_CAPABLE, RANGE_START_ADDR
ATTRIBUTES = (ctypes.c_int * 3)(7, 10, 11)
DRAIN_S = 5.0
"""Longest wait, on leaving, for copies that were begun."""


class Spot(NamedTuple):
    """Where bytes lie, for other processes."""

    allocation: int
    """Of this process; never the number of another one."""
    handle: bytes
    """Of the allocation."""
    offset: int
    """In it, in bytes."""


class MappingError(Exception):
    """Memory of another process cannot be mapped; says why."""


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaMemory:
    """This process's use of one GPU for a group; its copies have a stream of their own."""

    def __init__(self, device: torch.device, owner: str) -> None:
        """
        Raises:
            TransportError: it is no GPU.
        """
        if device.type != "cuda":
            raise TransportError(
                f"{owner} keeps its weights on {device}, CUDA IPC maps memory of GPUs; use "
                "backend='gloo'"
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._owner = owner
        self._stream = torch.cuda.Stream(self.device)  # its context exists from here on
        self._driver = _driver()
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), index)
        self._number = number.value
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._number)
        self._handles: dict[int, tuple[int, bytes]] = {}
        """Address and handle of each allocation that was shared."""
        self._opened: list[int] = []
        self._last: torch.cuda.Event | None = None

    @property
    def gpu(self) -> str:
        """Name of the GPU, the same in all processes."""
        return f"GPU {torch.cuda.get_device_properties(self.device).uuid}"

    def mark(self) -> torch.cuda.Event:
        """The present end of the current stream."""
        return torch.cuda.current_stream(self.device).record_event()

    def follow(self, mark: torch.cuda.Event) -> None:
        """What the current stream is given next comes after the mark."""
        torch.cuda.current_stream(self.device).wait_event(mark)

    def share(self, wires: Sequence[Tensor]) -> list[Spot]:
        """
        Args:
            wires: [bytes] uint8 each, on the device.

        Raises:
            NotMappableError: one lies in memory that cannot be shared.
        """
        with self._entered():
            return [self._spot(wire.data_ptr()) for wire in wires]

    def freed(self) -> list[int]:
        """Allocations shared before that are no more; each is told once."""
        with self._entered():
            gone = [
                allocation
                for allocation, (address, _) in self._handles.items()
                if self._attributes(address)[0] != allocation
            ]
        for allocation in gone:
            del self._handles[allocation]
        return gone

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process; returns its address here.

        Raises:
            MappingError: the driver cannot.
        """
        address = ctypes.c_uint64()
        raw = _Handle.from_buffer_copy(handle)
        with self._entered():
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), raw, LAZY_PEER_ACCESS)
        self._opened.append(address.value)
        return address.value

    def release(self, address: int) -> None:
        """Unmap what `open` gave, of which no copy is under way."""
        self._opened.remove(address)
        with self._entered():
            self._call("cuIpcCloseMemHandle", address)

    def copy(
        self, parts: Sequence[tuple[Tensor, int]], after: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Begin to fill wires from mapped memory, (wire, address) each.

        Args:
            after: they may be written from this mark on.
        """
        self._stream.wait_event(after)
        with self._entered():
            for wire, address in parts:
                self._call(
                    "cuMemcpyAsync",
                    wire.data_ptr(),
                    address,
                    wire.numel(),
                    self._stream.cuda_stream,
                )
        self._last = self._stream.record_event()
        return self._last

    def close(self) -> None:
        """Unmap everything, when the copies are done."""
        end = time.monotonic() + DRAIN_S
        try:
            while self._last is not None and not self._last.query():
                if time.monotonic() > end:
                    logger.error("%s: copies go on, nothing is unmapped", self._owner)
                    return
                time.sleep(POLL_S)
            while self._opened:
                self.release(self._opened[-1])
            self._call("cuDevicePrimaryCtxRelease_v2", self._number)
        except (MappingError, RuntimeError) as error:  # of a device that has failed before
            logger.error("%s: not all memory is unmapped: %s", self._owner, error)
        self._handles.clear()

    def _spot(self, address: int) -> Spot:
        allocation, is_capable, begin = self._attributes(address)
        if not is_capable:
            raise NotMappableError(
                f"{self._owner}: CUDA IPC does not share memory that torch's allocator has by "
                "expandable_segments or cudaMallocAsync; take it out of PYTORCH_CUDA_ALLOC_CONF, "
                "or set weight_sync.transport: nccl"
            )
        if allocation not in self._handles:
            handle = _Handle()
            try:
                self._call("cuIpcGetMemHandle", ctypes.byref(handle), begin)
            except MappingError as error:
                raise NotMappableError(
                    f"{self._owner} cannot share memory of {self.gpu}: {error}; set "
                    "weight_sync.transport: nccl"
                ) from error
            self._handles[allocation] = begin, bytes(handle)
        return Spot(allocation, self._handles[allocation][1], address - begin)

    def _attributes(self, address: int) -> tuple[int, int, int]:
        """Number of the allocation (0: there is none), whether it can be shared, its address."""
        values = (ctypes.c_uint64 * 3)()
        first = ctypes.addressof(values)
        places = (ctypes.c_void_p * 3)(first, first + 8, first + 16)
        self._call("cuPointerGetAttributes", 3, ATTRIBUTES, places, address)
        return values[0], values[1], values[2]

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """With the GPU's context: a thread has none until torch did something there."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._driver, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.byref(text))
            raise MappingError(f"{name}: {(text.value or b'error %d' % status).decode()}")


def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    address = ctypes.c_uint64
    for name, arguments in {
        "cuDeviceGet": (pointer, number),
        "cuDevicePrimaryCtxRetain": (pointer, number),
        "cuDevicePrimaryCtxRelease_v2": (number,),
        "cuCtxPushCurrent_v2": (pointer,),
        "cuCtxPopCurrent_v2": (pointer,),
        "cuPointerGetAttributes": (ctypes.c_uint, pointer, pointer, address),
        "cuIpcGetMemHandle": (pointer, address),
        "cuIpcOpenMemHandle_v2": (pointer, _Handle, ctypes.c_uint),
        "cuIpcCloseMemHandle": (address,),
        "cuMemcpyAsync": (address, address, size, pointer),
        "cuGetErrorName": (number, pointer),
    }.items():
        getattr(driver, name).argtypes = arguments
    return driver

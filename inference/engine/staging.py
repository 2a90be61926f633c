"""Arrays of a step, from the host to the device and back, one copy each way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes: kernels may load 16 at once from where an array begins."""
NUM_BUFFERS = 3
"""Steps whose copies may be under way at the same time; the engine runs one step ahead."""


def offsets(arrays: Sequence[np.ndarray]) -> list[int]:
    """Where each array begins in the packed bytes; the last entry is the whole size."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // ALIGNMENT) * ALIGNMENT)
    return starts


def views(packed: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """The arrays as tensors that lie in `packed` (uint8)."""
    return [
        packed[start : start + array.nbytes].view(_dtype(array)).view(array.shape)
        for start, array in zip(offsets(arrays), arrays, strict=False)
    ]


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


class Staging:
    """Copies to the device through pinned memory, so that the host never waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * NUM_BUFFERS
        self._is_read: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._next = 0

    def send(self, arrays: Sequence[np.ndarray], into: Tensor | None = None) -> list[Tensor]:
        """The arrays on the device; `into` (uint8, large enough) keeps their addresses fixed."""
        if self.device.type == "cpu":
            return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        starts = offsets(arrays)
        host = self._free_buffer(starts[-1])
        packed = host.numpy()
        for start, array in zip(starts, arrays, strict=False):
            packed[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
        if into is None:
            into = torch.empty(starts[-1], dtype=torch.uint8, device=self.device)
        into[: starts[-1]].copy_(host[: starts[-1]], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._is_read[self._next] = event
        self._next = (self._next + 1) % NUM_BUFFERS
        return views(into, arrays)

    def _free_buffer(self, size: int) -> Tensor:
        event = self._is_read[self._next]
        if event is not None:
            event.synchronize()
        if self._buffers[self._next].numel() < size:
            self._buffers[self._next] = torch.empty(
                max(size, 1 << 16), dtype=torch.uint8, pin_memory=True
            )
        return self._buffers[self._next]


class Fetch:
    """A tensor on its way to the host; `wait` gives it as an array."""

    def __init__(
        self, tensor: Tensor, wait_for: Callable[[torch.cuda.Event], None] | None = None
    ) -> None:
        """`wait_for`: how to wait for the device, if not simply by `synchronize`."""
        self._wait_for = wait_for or torch.cuda.Event.synchronize
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cpu":
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> np.ndarray:
        if self._event is not None:
            self._wait_for(self._event)
        return self._host.numpy()

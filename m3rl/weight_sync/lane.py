"""In what order a rank's part of a sync happens on its device, beside all else there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

POLL_S = 20e-6
"""Between two looks at a device that is not done: little beside a sync."""


class Lane:
    """A CUDA stream of its own; on the CPU the calling thread, which waits for all it does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What the block begins comes after what the caller's own stream was given before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """The present end of the lane; None: it has been reached."""
        return None if self._stream is None else self._stream.record_event()

    def drain(self, limit_s: float) -> bool:
        """Wait for everything in the lane; False when it is not done within `limit_s`."""
        mark, end = self.mark(), time.monotonic() + limit_s
        while mark is not None and not mark.query():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True

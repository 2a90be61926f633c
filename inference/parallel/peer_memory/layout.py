"""Memory of each rank that all ranks of a group read and write, and how it is divided.

regions  [2, NUM_BLOCKS, REGION_BYTES]  what blocks of a launch show to the other ranks
flags    [NUM_BLOCKS, ranks] int64      which of them have come, see `kernel.py`
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

REGION_BYTES = 8192
NUM_BLOCKS = 1024
DATA_BYTES = 2 * NUM_BLOCKS * REGION_BYTES
RELEASED = 1 << 62
"""A flag after which nobody is waited for."""


def memory_bytes(num_ranks: int) -> int:
    """Bytes on each rank."""
    return DATA_BYTES + NUM_BLOCKS * num_ranks * 8


@dataclass(slots=True)
class PeerMemory:
    """One rank's view of it. Launches follow one another on one stream, alike on all ranks."""

    rank: int
    buffers: list[Tensor]
    """Of each rank, `memory_bytes` uint8 as they are mapped here; the flags are 0 when the first
    launch of any rank begins."""
    kept: tuple[object, ...] = ()
    """Held as long as the memory is used."""
    addresses: tuple[int, ...] = field(init=False)
    """Where they begin."""
    count_B: Tensor = field(init=False)
    """int64: launches that each block has taken part in."""
    released: Tensor = field(init=False)
    """What `release` puts in place of the flags; pinned."""
    side: torch.cuda.Stream | None = field(init=False)
    """For `release`, while a launch waits."""

    def __post_init__(self) -> None:
        device = self.buffers[self.rank].device
        self.addresses = tuple(buffer.data_ptr() for buffer in self.buffers)
        self.count_B = torch.zeros(NUM_BLOCKS, dtype=torch.int64, device=device)
        # Of another priority than the streams of launches, so it cannot be one of them.
        on_cuda = device.type == "cuda"
        self.released = torch.full((self.flags.numel(),), RELEASED, dtype=torch.int64)
        self.side = None
        if on_cuda:
            self.released = self.released.pin_memory()
            self.side = torch.cuda.Stream(device, priority=-3)  # type: ignore[no-untyped-call]

    @property
    def flags(self) -> Tensor:
        """Of this rank; the other ranks write them."""
        return self.buffers[self.rank][DATA_BYTES:].view(torch.int64)

    def release(self) -> None:
        """Let this rank's launches end without the others, with any result; for good.

        From any thread, and while the device waits in one.
        """
        # By the copy engine: launches that wait may fill the device.
        with torch.cuda.stream(self.side):
            self.flags.copy_(self.released, non_blocking=True)


def num_blocks(tensor: Tensor, copies: int = 1) -> int:
    """Regions that hold a tensor so many times over."""
    return -(-tensor.numel() * tensor.itemsize * copies // REGION_BYTES)


def part_tile(memory: PeerMemory, parts: Tensor) -> int:
    """Values of one rank's part in a region, which has some of each."""
    ranks = 1 << (len(memory.buffers) - 1).bit_length()
    return REGION_BYTES // parts.itemsize // ranks

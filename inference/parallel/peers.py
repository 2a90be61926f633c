"""Memory that GPUs of one machine have in common, for small collectives in one launch each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from inference.parallel.peer_memory import PeerMemory, memory_bytes
from inference.parallel.watch import ParallelError, first_line

Gather = Callable[[Any], list[Any]]
"""What all ranks have, in order, for one's own."""


def reachable_ranks(rank: int, gather: Gather) -> list[set[int]]:
    """Of each rank, those whose memory its current CUDA device can read, itself among them."""
    count = torch.cuda.device_count()
    device_of = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(count)}
    own = torch.cuda.current_device()
    # A device that this process sees is one of this machine.
    uuids = gather(str(torch.cuda.get_device_properties(own).uuid))
    found = {rank}
    for peer, uuid in enumerate(uuids):
        device = device_of.get(uuid, own)
        if device != own and torch.cuda.can_device_access_peer(own, device):
            found.add(peer)
    return gather(found)


def can_share(ranks: Sequence[int], reachable: Sequence[set[int]]) -> bool:
    """Whether each of several ranks reads the memory of all of them."""
    return len(ranks) > 1 and all(reachable[rank].issuperset(ranks) for rank in ranks)


def make_memory(group: dist.ProcessGroup) -> PeerMemory:
    """Map a piece of every rank's memory on all ranks of `group`, which all call this.

    The ranks must wait for one another before the first launch.

    Raises:
        ParallelError: the driver refuses.
    """
    size, num_ranks = memory_bytes(group.size()), group.size()
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        own = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(own, group)
        buffers = [handle.get_buffer(peer, (size,), torch.uint8) for peer in range(num_ranks)]
    except RuntimeError as error:
        raise ParallelError(
            f"rank {dist.get_rank()}: the memory of {num_ranks} GPUs that reach one another could "
            f"not be mapped ({first_line(error)}); ParallelGroups.create(..., "
            "use_peer_memory=False) does without"
        ) from error
    assert buffers[group.rank()].data_ptr() == own.data_ptr(), "a buffer begins where it is mapped"
    memory = PeerMemory(group.rank(), buffers, kept=(own, handle))
    # Loads the kernel that must be there when a launch waits for a rank that is gone.
    memory.release()
    torch.cuda.synchronize()
    memory.flags.zero_()
    torch.cuda.synchronize()
    return memory

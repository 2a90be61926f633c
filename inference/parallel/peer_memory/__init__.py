"""Small collectives through memory that the ranks of one machine have in common.

Every rank calls them in the same order with the same sizes; a launch waits, on the device, for the
launches of the others, and for a rank that is gone until `PeerMemory.release`. There is no
reference: what NCCL or gloo compute from the same tensors is one.

Where a tensor does not fit, which depends on sizes alone and so is the same on all ranks, the
caller is to use something else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.parallel.peer_memory.layout import (
    PeerMemory,
    memory_bytes,
    num_blocks,
    part_tile,
)

__all__ = ["PeerMemory", "add_parts", "all_reduce", "fits", "gather", "memory_bytes"]

MAX_BYTES = 4 << 20
"""That a rank reads from others; more is faster in pieces, which NCCL overlaps."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def fits(memory: PeerMemory, *tensors: Tensor) -> bool:
    """Whether to read so much from each other rank: `tensors`, or for `add_parts` one part."""
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    return 0 < num_bytes * (len(memory.buffers) - 1) <= MAX_BYTES


def all_reduce(memory: PeerMemory, x: Tensor) -> None:
    """x becomes the sum over the ranks: FP32, ascending, one rounding; equal bits on all.

    Args:
        x: contiguous, any shape.
    """
    from inference.parallel.peer_memory import kernel

    _expect(x.dtype in DTYPES and x.is_contiguous(), "all_reduce", x)
    kernel.all_reduce(memory, x, num_blocks(x))


def gather(memory: PeerMemory, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each [n, ...] becomes [ranks · n, ...], those of all ranks in order.

    Args:
        tensors: one to three, contiguous; the last dimension fills whole 32-bit words.
    """
    from inference.parallel.peer_memory import kernel

    for x in tensors:
        _expect(x.shape[-1] * x.itemsize % 4 == 0 and x.is_contiguous(), "gather", x)
    out = [x.new_empty((len(memory.buffers) * len(x), *x.shape[1:])) for x in tensors]
    pairs = list(zip(tensors, out, strict=True))
    kernel.gather(memory, pairs, sum(num_blocks(x) for x in tensors))
    return out


def add_parts(memory: PeerMemory, parts_RC: Tensor, y_SC: Tensor) -> None:
    """y += Σ over the ranks of the part that is for this one: FP32, ascending, y itself last, one
    rounding.

    Args:
        parts_RC: [ranks · n, C] contiguous: n rows for each rank in order.
        y_SC: [S, C] contiguous, S ≤ n; later rows of a part are nobody's.
    """
    from inference.parallel.peer_memory import kernel

    _expect(parts_RC.dtype in DTYPES and parts_RC.is_contiguous(), "add_parts", parts_RC)
    _expect(y_SC.dtype == parts_RC.dtype and y_SC.is_contiguous(), "add_parts", y_SC)
    part = parts_RC.numel() // len(memory.buffers)
    kernel.add_parts(memory, parts_RC, y_SC, -(-part // part_tile(memory, parts_RC)))


def _expect(is_fine: bool, op: str, tensor: Tensor) -> None:
    if not is_fine:
        raise ValueError(
            f"{op} through the memory of peers: a tensor {tuple(tensor.shape)} of {tensor.dtype} "
            f"with strides {tensor.stride()}; it must be contiguous, of whole words, and floating "
            "where it is summed"
        )

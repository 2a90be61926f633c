"""Hashes of what a trainer rank sends, as the receivers will hold it.

Computed beside the sending, in a lane of their own, from weights that are read anew: what a fault
between reading and sending changes is seen, and a replica that dies takes no hash with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inference.kernels.mxfp8 import BLOCK_SIZE, MXFP8Tensor, QuantizeTable
from inference.kernels.tensor_hash import HashPart, HashTable, combine
from m3rl.weight_sync.errors import NonFiniteError
from m3rl.weight_sync.lane import Lane
from m3rl.weight_sync.layout import Bounds, extents, volume
from m3rl.weight_sync.plan import CopyOp
from m3rl.weight_sync.rounds import Range, Slots
from m3rl.weight_sync.send_rounds import Weights
from m3rl.weight_sync.verify import OpHash, hash_parts

BATCH_BYTES = 256 << 20
"""Copied and quantised at a time, where hashing needs that."""

PartKey = tuple[str, Bounds, str, int]


def part_key(op: CopyOp) -> PartKey:
    """What ops of one hash have in common."""
    return op.name, op.bounds, op.storage, op.grain


class SendHashes:
    """Hashes the distinct rectangles of a share; those of MXFP8 also as the receiver holds them."""

    def __init__(self, ops: Sequence[CopyOp], weights: Weights) -> None:
        self._weights = weights
        self._lane = Lane(weights.device)
        self._ops = list({part_key(op): op for op in ops}.values())
        copied = range(0 if weights.stays else len(self._ops))
        self._batches = list(_batches(self._ops, copied))
        slots = Slots(self._ops, self._batches, copied, weights.device)
        self._tensors = [
            slots.tensor(i) if i in copied else weights.of(op) for i, op in enumerate(self._ops)
        ]
        self._copied = copied
        scratch = _Scratch(self._ops, self._batches, weights.device)
        quantizes: list[tuple[Tensor, MXFP8Tensor]] = []
        parts: list[HashPart] = []
        self._work: list[tuple[Range, Range]] = []
        """Of each batch, ranges of what is quantised and of what is hashed."""
        self._parts_of: list[Range] = []
        """The first part of each op is of its wire bits, others of what is made of them."""
        for first, last in self._batches:
            before = len(quantizes), len(parts)
            for i in range(first, last):
                op, tensor, first_part = self._ops[i], self._tensors[i], len(parts)
                parts += hash_parts(op, tensor, weights.shapes[op.name])
                if op.storage == "mxfp8":
                    quantizes.append((tensor, scratch.tensor(i)))
                    parts += hash_parts(op, scratch.tensor(i), weights.shapes[op.name])
                self._parts_of.append((first_part, len(parts)))
            self._work.append(((before[0], len(quantizes)), (before[1], len(parts))))
        self._quantizes = QuantizeTable(quantizes) if quantizes else None
        self._hashes = HashTable(parts)

    def compute(self) -> dict[PartKey, OpHash]:
        """Hashes of the present weights; waits for the device.

        Raises:
            NonFiniteError: NaN or infinity among them.
        """
        with torch.no_grad(), self._lane.entered():
            self._hashes.reset()
            for (first, last), (quantizes, parts) in zip(self._batches, self._work, strict=True):
                for i in range(first, last):
                    if i in self._copied:
                        self._tensors[i].copy_(self._weights.of(self._ops[i]))
                if self._quantizes is not None:
                    self._quantizes.launch(*quantizes)
                self._hashes.launch(*parts)
            values, flags = self._hashes.read(), self._hashes.flags.tolist()
        found = {}
        for op, (first, last) in zip(self._ops, self._parts_of, strict=True):
            if flags[first]:
                raise NonFiniteError(
                    f"{self._weights.owner}: NaN or infinity in {op}; such weights are not served"
                )
            wire, stored = values[first], values[first + 1 : last]
            found[part_key(op)] = OpHash(wire, combine(stored) if stored else wire)
        return found


class _Scratch:
    """Memory for what is quantised of a batch; every batch uses the same."""

    def __init__(
        self, ops: Sequence[CopyOp], batches: Sequence[Range], device: torch.device
    ) -> None:
        self._ops = ops
        self._starts: dict[int, int] = {}
        size = 0
        for first, last in batches:
            end = 0
            for i in range(first, last):
                if ops[i].storage == "mxfp8":
                    self._starts[i] = end
                    end += volume(ops[i].bounds)
            size = max(size, end)
        self._values = torch.empty(size, dtype=torch.float8_e4m3fn, device=device)
        self._scale = torch.empty(size // BLOCK_SIZE, dtype=torch.uint8, device=device)

    def tensor(self, i: int) -> MXFP8Tensor:
        start, shape = self._starts[i], extents(self._ops[i].bounds)
        stop = start + volume(self._ops[i].bounds)
        return MXFP8Tensor(
            self._values[start:stop].view(shape),
            self._scale[start // BLOCK_SIZE : stop // BLOCK_SIZE].view(
                (*shape[:-1], shape[-1] // BLOCK_SIZE)
            ),
        )


def _batches(ops: Sequence[CopyOp], copied: range) -> Iterator[Range]:
    """Consecutive ops for which at most BATCH_BYTES, or one op, are copied and quantised."""
    first = size = 0
    for i, op in enumerate(ops):
        cost = op.nbytes if i in copied or op.storage == "mxfp8" else 0
        if size and size + cost > BATCH_BYTES:
            yield first, i
            first, size = i, 0
        size += cost
    yield first, len(ops)

"""Hashes of what a trainer rank sends, as the receivers will hold it.

Computed beside the sending, in a lane of their own, from weights that are read anew: what a fault
between reading and sending changes is seen, and a replica that dies takes no hash with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from inference.kernels.mxfp8 import BLOCK_SIZE, MXFP8Tensor, QuantizeTable
from inference.kernels.tensor_hash import HashPart, HashTable
from m3rl.weight_sync.errors import NonFiniteError
from m3rl.weight_sync.lane import Lane
from m3rl.weight_sync.layout import extents, volume
from m3rl.weight_sync.plan import CopyOp
from m3rl.weight_sync.rounds import Range, Slots
from m3rl.weight_sync.send_rounds import Weights
from m3rl.weight_sync.verify import Found, hash_parts

BATCH_BYTES = 256 << 20
"""Copied and quantised at a time, where hashing needs that."""


class SendHashes:
    """Hashes the distinct rectangles of a share; those of MXFP8 also as the receiver holds them."""

    def __init__(self, ops: Sequence[CopyOp], weights: Weights) -> None:
        self._weights = weights
        self._lane = Lane(weights.device)
        distinct: dict[object, CopyOp] = {}
        keys = [(op.name, op.bounds, op.storage, op.grain) for op in ops]
        for key, op in zip(keys, ops, strict=True):
            distinct.setdefault(key, op)
        numbers = {key: i for i, key in enumerate(distinct)}
        self._number_P = np.array([numbers[key] for key in keys], int)
        """Op -> number of its rectangle."""
        # As they are read, however they travel.
        self._ops = [dataclasses.replace(op, wire="plain") for op in distinct.values()]
        copied = range(0 if weights.stays else len(self._ops))
        self._batches = list(_batches(self._ops, copied))
        batches = [range(*batch) for batch in self._batches]
        slots = Slots(self._ops, batches, copied, weights.device)
        self._tensors = [
            slots.tensor(i) if i in copied else weights.of(op) for i, op in enumerate(self._ops)
        ]
        self._copied = copied
        scratch = _Scratch(self._ops, self._batches, weights.device)
        quantizes: list[tuple[Tensor, MXFP8Tensor]] = []
        parts: list[HashPart] = []
        self._work: list[tuple[Range, Range]] = []
        """Of each batch, ranges of what is quantised and of what is hashed."""
        firsts: list[int] = []
        for first, last in self._batches:
            before = len(quantizes), len(parts)
            for i in range(first, last):
                op, tensor = self._ops[i], self._tensors[i]
                firsts.append(len(parts))
                parts += hash_parts(op, tensor, weights.shapes[op.name])
                if op.storage == "mxfp8":
                    quantizes.append((tensor, scratch.tensor(i)))
                    parts += hash_parts(op, scratch.tensor(i), weights.shapes[op.name])
            self._work.append(((before[0], len(quantizes)), (before[1], len(parts))))
        self._quantizes = QuantizeTable(quantizes) if quantizes else None
        self._hashes = HashTable(parts)
        self._found = Found(self._hashes)
        self._first_parts = np.array(firsts)
        """Of each rectangle: of its wire bits. Those behind it are of what is made of them."""

    def compute(self) -> np.ndarray:
        """Hashes of the present weights; waits for the device.

        Returns:
            `OpHash` of each op of the share, [ops, 2] uint64.

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
            self._found.fetch()
            self._lane.drain(math.inf)
        first_P = self._first_parts
        bad = np.flatnonzero(self._found.flags[first_P])
        if bad.size:
            raise NonFiniteError(
                f"{self._weights.owner}: NaN or infinity in {self._ops[bad[0]]}; such weights are "
                "not served"
            )
        wire = self._found.sums[first_P]
        rest = np.add.reduceat(self._found.sums, first_P) - wire  # modulo 2^64
        has_more = np.diff(first_P, append=len(self._hashes)) > 1
        return np.stack((wire, np.where(has_more, rest, wire)), 1)[self._number_P]


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

"""What is hashed of a sync, and what a replica's tensors must hash to.

A hash takes 16 bytes at a time where no cut of the tensor's last dimension (`CopyOp.grain`) forbids
it; how many elements it takes goes into it. So the sums of both sides of a plan compare, and those
of two plans that cut a tensor's columns alike.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inference.kernels.mxfp8 import BLOCK_SIZE, SCALE_SUFFIX, MXFP8Tensor
from inference.kernels.tensor_hash import HashPart, HashTable, hash_part
from m3rl.weight_sync.errors import VerificationError
from m3rl.weight_sync.layout import Bounds, starts
from m3rl.weight_sync.plan import CopyOp, Plan
from m3rl.weight_sync.relay import source_of

HASH_BYTES = 16
"""That a hash takes at a time, at most."""


def hash_parts(op: CopyOp, held: Tensor | MXFP8Tensor, shape: tuple[int, ...]) -> list[HashPart]:
    """What is hashed of an op's rectangle as it is held: it, or its values and its scales.

    Args:
        shape: of the whole tensor.
    """
    offsets = starts(op.bounds)
    if isinstance(held, Tensor):
        unit = math.gcd(op.grain, HASH_BYTES // held.element_size())
        return [
            hash_part(
                held, name=op.name, offsets=offsets, shape=shape, unit=unit, check_finite=True
            )
        ]
    return [
        hash_part(
            held.values,
            name=op.name,
            offsets=offsets,
            shape=shape,
            unit=math.gcd(op.grain, HASH_BYTES),
        ),
        hash_part(
            held.scale,
            name=op.name + SCALE_SUFFIX,
            offsets=(*offsets[:-1], offsets[-1] // BLOCK_SIZE),
            shape=(*shape[:-1], shape[-1] // BLOCK_SIZE),
            unit=math.gcd(max(1, op.grain // BLOCK_SIZE), HASH_BYTES),
        ),
    ]


class Found:
    """What a table has found, on the host after one copy."""

    def __init__(self, table: HashTable) -> None:
        self._table = table
        device = table.sums.device
        is_pinned = device.type == "cuda"
        with torch.cuda.device(device) if is_pinned else nullcontext():
            self._host = torch.zeros((2, len(table)), dtype=torch.int64, pin_memory=is_pinned)

    def fetch(self) -> None:
        """Copy what the table holds; on CUDA enqueued in the current stream."""
        found = torch.stack((self._table.sums, self._table.flags))
        self._host.copy_(found, non_blocking=True)

    @property
    def sums(self) -> np.ndarray:
        """[parts] uint64, of the last `fetch`, once the device has passed it."""
        return self._host[0].numpy().view(np.uint64)

    @property
    def flags(self) -> np.ndarray:
        """[parts] int64, not 0 where a part is not finite."""
        return self._host[1].numpy()


class TensorSums:
    """Adds up the hashes of parts by the tensors that they are of."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: of each part's tensor."""
        numbers = {name: i for i, name in enumerate(sorted(set(names)))}
        self._tensor_P = np.array([numbers[name] for name in names])
        self._count = len(numbers)

    def add_up(self, hashes_P: np.ndarray) -> bytes:
        """The uint64 sum of each tensor, in the order of their names: a few bytes to be sent."""
        sums = np.zeros(self._count, np.uint64)
        np.add.at(sums, self._tensor_P, hashes_P)  # modulo 2^64
        return sums.tobytes()


class OpHash(NamedTuple):
    """Of one rectangle."""

    wire: int
    """Of the bits that are sent."""
    stored: int
    """Of what the receiver holds then: the same bits, or the MXFP8 bytes made of them."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Hashes that a sync must end with."""

    by_worker: list[bytes]
    """For each worker what it should say that it holds, see `TensorSums`."""
    wire: int
    """Of the whole model's wire bits: the same for every sharding of trainer and replica."""


class HashSums:
    """Adds up, for one plan, the hashes of the rectangles that are sent; where each of them counts
    is worked out once."""

    def __init__(self, plan: Plan, num_workers: int) -> None:
        shares: defaultdict[int, list[CopyOp]] = defaultdict(list)
        for op in plan.ops:
            if op.via < 0:
                shares[op.sender].append(op)
        assert num_workers == len({op.receiver for op in plan.ops}), "a plan is for all workers"
        self._ops = [op for sender in sorted(shares) for op in shares[sender]]
        rectangles: dict[tuple[str, Bounds], int] = {}
        self._rectangle_P = np.array(
            [rectangles.setdefault((op.name, op.bounds), len(rectangles)) for op in self._ops]
        )
        sources = source_of(self._ops)
        arriving = [(op.receiver, op.name, k) for k, op in enumerate(self._ops)] + [
            (op.receiver, op.name, sources[op.via, op.name, op.bounds])
            for op in plan.ops
            if op.via >= 0
        ]
        tensors = sorted({(worker, name) for worker, name, _ in arriving})
        numbers = {tensor: i for i, tensor in enumerate(tensors)}
        self.names = [
            [name for _, name in each]
            for _, each in itertools.groupby(tensors, key=lambda tensor: tensor[0])
        ]
        """Of the tensors of each worker, in order."""
        self._ends = np.cumsum([len(names) for names in self.names])
        self._tensor_Q = np.array([numbers[worker, name] for worker, name, _ in arriving])
        self._source_Q = np.array([k for _, _, k in arriving])
        """Of all that comes to a worker, passed on or not, which op sends it."""
        self._num_rectangles = len(rectangles)

    def expected(self, by_sender: Sequence[np.ndarray]) -> Expected:
        """Hashes per worker and tensor, and once over the model.

        Args:
            by_sender: for each trainer rank `OpHash`es of its ops in order, [ops, 2] uint64.

        Raises:
            VerificationError: two trainer ranks hold different bits of the same rectangle.
        """
        wire_P, stored_P = np.concatenate(by_sender).T
        once = np.zeros(self._num_rectangles, np.uint64)
        once[self._rectangle_P] = wire_P
        differing = np.flatnonzero(once[self._rectangle_P] != wire_P)
        if differing.size:
            op = self._ops[differing[0]]
            senders = sorted(
                {o.sender for o in self._ops if (o.name, o.bounds) == (op.name, op.bounds)}
            )
            raise VerificationError(
                f"trainer ranks {' and '.join(map(str, senders))} hold different bits of {op}; "
                "the trainer's replicas have drifted apart"
            )
        sums = np.zeros(self._ends[-1], np.uint64)
        np.add.at(sums, self._tensor_Q, stored_P[self._source_Q])  # modulo 2^64
        by_worker = [each.tobytes() for each in np.split(sums, self._ends[:-1])]
        return Expected(by_worker, int(once.sum(dtype=np.uint64)))


def differing_tensors(names: Sequence[str], one: bytes, other: bytes) -> list[str]:
    """Names of the tensors in which two `TensorSums` of the same tensors differ."""
    here, there = (np.frombuffer(each, np.uint64) for each in (one, other))
    return [names[i] for i in np.flatnonzero(here != there)]

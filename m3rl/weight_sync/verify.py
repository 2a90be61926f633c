"""What is hashed of a sync, and what a replica's tensors must hash to.

A hash takes 16 bytes at a time where no cut of the tensor's last dimension (`CopyOp.grain`) forbids
it; how many elements it takes goes into it. So the sums of both sides of a plan compare, and those
of two plans that cut a tensor's columns alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from inference.kernels.mxfp8 import BLOCK_SIZE, SCALE_SUFFIX, MXFP8Tensor
from inference.kernels.tensor_hash import HashPart, hash_part
from m3rl.weight_sync.errors import VerificationError
from m3rl.weight_sync.layout import Bounds, starts
from m3rl.weight_sync.plan import CopyOp, Plan

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


class OpHash(NamedTuple):
    """Of one rectangle."""

    wire: int
    """Of the bits that are sent."""
    stored: int
    """Of what the receiver holds then: the same bits, or the MXFP8 bytes made of them."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Hashes that a sync must end with."""

    by_worker: list[dict[str, int]]
    """For each worker, hash of the part of each tensor that it holds, as it is stored there."""
    wire: int
    """Of the whole model's wire bits: the same for every sharding of trainer and replica."""


class HashSums:
    """Adds up, for one plan, the hashes of the rectangles that are sent; where each of them counts
    is worked out once."""

    def __init__(self, plan: Plan, num_workers: int) -> None:
        shares: defaultdict[int, list[CopyOp]] = defaultdict(list)
        for op in plan.ops:
            shares[op.sender].append(op)
        self._num_workers = num_workers
        self._ops = [op for sender in sorted(shares) for op in shares[sender]]
        tensors: dict[tuple[int, str], int] = {}
        rectangles: dict[tuple[str, Bounds], int] = {}
        self._tensor_P = np.array(
            [tensors.setdefault((op.receiver, op.name), len(tensors)) for op in self._ops]
        )
        self._rectangle_P = np.array(
            [rectangles.setdefault((op.name, op.bounds), len(rectangles)) for op in self._ops]
        )
        self._tensors = list(tensors)
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
        sums = np.zeros(len(self._tensors), np.uint64)
        np.add.at(sums, self._tensor_P, stored_P)  # modulo 2^64
        by_worker: list[dict[str, int]] = [{} for _ in range(self._num_workers)]
        for (worker, name), total in zip(self._tensors, sums.tolist(), strict=True):
            by_worker[worker][name] = total
        return Expected(by_worker, int(once.sum(dtype=np.uint64)))

"""What a replica's tensors must hash to, from the hashes of the rectangles sent to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from inference.kernels.tensor_hash import combine
from m3rl.weight_sync.errors import VerificationError
from m3rl.weight_sync.layout import Bounds
from m3rl.weight_sync.plan import Plan


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


def expected_hashes(
    plan: Plan, num_workers: int, by_sender: Sequence[Sequence[OpHash]]
) -> Expected:
    """Add the rectangles' hashes up per worker and tensor, and once over the model.

    Args:
        by_sender: for each trainer rank, the hashes of each of its ops, in their order.

    Raises:
        VerificationError: two trainer ranks hold different bits of the same rectangle.
    """
    parts: list[defaultdict[str, list[int]]] = [defaultdict(list) for _ in range(num_workers)]
    once: dict[tuple[str, Bounds], tuple[int, int]] = {}
    for sender, hashes in enumerate(by_sender):
        for op, value in zip(plan.sends(sender), hashes, strict=True):
            parts[op.receiver][op.name].append(value.stored)
            other, seen = once.setdefault((op.name, op.bounds), (sender, value.wire))
            if seen != value.wire:
                raise VerificationError(
                    f"trainer ranks {other} and {sender} hold different bits of {op}; "
                    "the trainer's replicas have drifted apart"
                )
    return Expected(
        [{name: combine(values) for name, values in tensors.items()} for tensors in parts],
        combine(value for _, value in once.values()),
    )

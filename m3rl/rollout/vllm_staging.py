"""How a vLLM worker receives the weights of a sync, and what memory that takes.

whole     all that it is sent, beside what serves: loaded at the commit
layers    a few buckets at a time ('pre', 'layer.N', 'post'), each loaded when it is complete,
          while the replica is paused: a sync that breaks off leaves no version
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from m3rl.types import TensorSlot

Staging = Literal["whole", "layers"]
ITEMSIZE = {"float32": 4, "bfloat16": 2}

EXPERT = re.compile(r"\.experts\.(\d+)\.")
LAYER = re.compile(r"\.layers\.(\d+)\.")


def num_buckets_staged(num_ranks: int) -> int:
    """Buckets that a worker of a replica of `num_ranks` holds at a time with staging by layers.

    A bucket's memory is posted again no sooner than two of the worker's rounds after the bucket's
    last one: it is loaded in between. One rank alone has a round of the next bucket there. Where
    ranks pass on to one another, what is passed comes a round after the bucket's own, beside the
    next bucket, and the rounds of a worker are those of all in which it has a part: of three
    buckets that follow, one has a round strictly in between. `LayeredPlan.check_rounds` proves it
    of each plan.
    """
    return 2 if num_ranks == 1 else 4


def bytes_of_buckets(
    slots: Iterable[TensorSlot], *, num_ranks: int, shares_experts: bool
) -> dict[str, int]:
    """What a worker is sent in a sync, by bucket.

    Args:
        slots: whole tensors of the checkpoint, in the dtypes of the wire.
        shares_experts: each rank has its share of the experts; else all ranks are sent all.
    """
    buckets: dict[str, int] = {}
    experts: dict[str, dict[int, int]] = {}
    for slot in slots:
        nbytes = math.prod(slot.shape) * ITEMSIZE[slot.dtype]
        expert = EXPERT.search(slot.name) if shares_experts else None
        if expert is None:
            buckets[slot.bucket] = buckets.get(slot.bucket, 0) + nbytes
        else:
            of_bucket = experts.setdefault(slot.bucket, {})
            of_bucket[int(expert[1])] = of_bucket.get(int(expert[1]), 0) + nbytes
    for bucket, sizes in experts.items():
        own = -(-len(sizes) // num_ranks)
        buckets[bucket] = buckets.get(bucket, 0) + own * max(sizes.values())
    return buckets


def own_slots(
    slots: Iterable[TensorSlot], experts: Mapping[int, frozenset[int]]
) -> list[TensorSlot]:
    """Those that a worker needs.

    Args:
        experts: layer -> those of its experts that the worker holds; a layer that is not there has
            all of its own.
    """

    def is_own(name: str) -> bool:
        expert, layer = EXPERT.search(name), LAYER.search(name)
        if expert is None or layer is None:
            return True
        return int(expert[1]) in experts.get(int(layer[1]), {int(expert[1])})

    return [slot for slot in slots if is_own(slot.name)]


def run_of_experts(num_experts: int, rank: int, num_ranks: int) -> frozenset[int]:
    """Those of a layer that vLLM gives to a rank, unless it is told otherwise: ranks have runs of
    equal length, the first ones one more where that does not come out even."""
    size, more = divmod(num_experts, num_ranks)
    first = rank * size + min(rank, more)
    return frozenset(range(first, first + size + (rank < more)))

"""How a vLLM worker receives the weights of a sync, and what memory that takes.

whole     all that it is sent, beside what serves: loaded at the commit
layers    a few buckets at a time ('pre', 'layer.N', 'post'), each loaded when it is complete,
          while the replica is paused: a sync that breaks off leaves no version
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from m3rl.types import TensorSlot

Staging = Literal["whole", "layers"]
STAGINGS: tuple[str, ...] = get_args(Staging)

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


def staged_bytes(
    slots: Iterable[TensorSlot], itemsize: int, *, num_ranks: int, shares_experts: bool
) -> tuple[int, int]:
    """What a worker is sent in a sync, in all and in its largest bucket.

    Args:
        slots: whole tensors of the checkpoint.
        itemsize: bytes of an element, FP32 tensors apart.
        shares_experts: each rank has its share of the experts; else all ranks are sent all.
    """
    buckets: dict[str, int] = {}
    experts: dict[str, dict[int, int]] = {}
    for slot in slots:
        nbytes = math.prod(slot.shape) * (4 if slot.dtype == "float32" else itemsize)
        expert = EXPERT.search(slot.name) if shares_experts else None
        if expert is None:
            buckets[slot.bucket] = buckets.get(slot.bucket, 0) + nbytes
        else:
            of_bucket = experts.setdefault(slot.bucket, {})
            of_bucket[int(expert[1])] = of_bucket.get(int(expert[1]), 0) + nbytes
    for bucket, sizes in experts.items():
        own = -(-len(sizes) // num_ranks)
        buckets[bucket] = buckets.get(bucket, 0) + own * max(sizes.values())
    return sum(buckets.values()), max(buckets.values(), default=0)


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

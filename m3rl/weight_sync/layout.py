"""Who holds which part of which published tensor: rectangles, their checks and their digest.

rank's layout = [TensorSlot(name, dtype, global shape, bounds, bucket, storage), ...]
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise, product
from typing import Any

from inference.config import MXFP8_BLOCK_SIZE as BLOCK_SIZE
from m3rl.types import TensorSlot
from m3rl.weight_sync.errors import LayoutError

Bounds = tuple[tuple[int, int], ...]
Layout = Sequence[TensorSlot]

STORAGES = ("plain", "mxfp8")
WIRES = ("bf16", "mxfp8")
"""How tensors travel that the receiver holds in MXFP8; all others do in their own dtype."""
WIRE_BYTES = {"float32": 4, "bfloat16": 2}
"""Of an element, by the dtypes that can be sent."""


def bucket_order(bucket: str) -> tuple[int, int]:
    """Place of a bucket in a sync: 'pre', then 'layer.0', 'layer.1', ..., then 'post'.

    Raises:
        LayoutError: another spelling.
    """
    if bucket in ("pre", "post"):
        return (0 if bucket == "pre" else 2, 0)
    kind, _, layer = bucket.partition(".")
    if kind != "layer" or not layer.isdecimal():
        raise LayoutError(f"bucket {bucket!r} is not 'pre', 'layer.<number>' or 'post'")
    return (1, int(layer))


@cache
def name_order(name: str) -> str:
    """For sorting: experts by their numbers, as they lie in memory."""
    return re.sub(r"\d+", lambda number: number[0].zfill(6), name)


def extents(bounds: Bounds) -> tuple[int, ...]:
    """Size of a rectangle along each dimension."""
    return tuple(stop - start for start, stop in bounds)


def starts(bounds: Bounds) -> tuple[int, ...]:
    return tuple(start for start, _ in bounds)


def whole(shape: Sequence[int]) -> Bounds:
    """The rectangle that is all of a tensor."""
    return tuple((0, size) for size in shape)


def volume(bounds: Bounds) -> int:
    """Elements in a rectangle; 1 for a scalar's, which has no dimension."""
    count = 1
    for start, stop in bounds:  # planning asks often, and math.prod takes three times as long
        count *= stop - start
    return count


def wire_of(storage: str, wire: str) -> str:
    """How a tensor that is held in `storage` travels, with one of WIRES for all: as it is held, or
    'plain'.

    Raises:
        ValueError: another `wire`.
    """
    if wire not in WIRES:
        raise ValueError(f"wire={wire!r} is not known; use one of {WIRES}")
    return storage if wire == "mxfp8" else "plain"


def wire_size(bounds: Bounds, dtype: str, storage: str) -> int:
    """Bytes of a rectangle as it travels: in `dtype`, or values and scales of MXFP8."""
    count = volume(bounds)
    return count + count // BLOCK_SIZE if storage == "mxfp8" else count * WIRE_BYTES[dtype]


def intersect(a: Bounds, b: Bounds) -> Bounds | None:
    """The rectangle common to two rectangles of one tensor, None where they only touch or miss."""
    both = tuple(
        (max(a_start, b_start), min(a_stop, b_stop))
        for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True)
    )
    return both if all(start < stop for start, stop in both) else None


def contains(outer: Bounds, inner: Bounds) -> bool:
    return intersect(outer, inner) == inner


def first_overlap(rectangles: Iterable[Bounds]) -> tuple[Bounds, Bounds] | None:
    """Two of the rectangles that share an element, None when they are disjoint."""
    active: list[Bounds] = []
    for rectangle in sorted(rectangles):
        # Sorted by their first row: what ends before this one begins can overlap no later one.
        active = [other for other in active if not other or other[0][1] > rectangle[0][0]]
        for other in active:
            if intersect(other, rectangle) is not None:
                return other, rectangle
        active.append(rectangle)
    return None


def covers(outer: Bounds, parts: Sequence[Bounds]) -> bool:
    """Whether disjoint `parts`, all inside `outer`, leave nothing of it out."""
    return sum(volume(part) for part in parts) == volume(outer)


def by_name(layout: Layout) -> dict[str, list[TensorSlot]]:
    """Slots of each tensor, in the layout's order."""
    slots: dict[str, list[TensorSlot]] = defaultdict(list)
    for slot in layout:
        slots[slot.name].append(slot)
    return dict(slots)


def as_slots(described: Iterable[Any]) -> tuple[TensorSlot, ...]:
    """What an engine says it holds (objects with TensorSlot's fields) as TensorSlots.

    An engine that knows of no storage holds what it is sent.
    """
    return tuple(
        TensorSlot(
            slot.name,
            str(slot.dtype).removeprefix("torch."),
            tuple(int(size) for size in slot.shape),
            tuple((int(start), int(stop)) for start, stop in slot.bounds),
            slot.bucket,
            getattr(slot, "storage", "plain"),
        )
        for slot in described
    )


def quantized_storage(storage: str) -> tuple[str, ...]:
    """What a digest adds for a tensor that is not held as it is sent."""
    return () if storage == "plain" else (storage,)


def layout_digest(layout: Layout) -> str:
    """SHA-256 of the layout as canonical JSON, whatever the order of its slots."""
    rows = sorted(
        [s.name, s.dtype, list(s.shape), s.bounds, s.bucket, *quantized_storage(s.storage)]
        for s in layout
    )
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def check_layout(layout: Layout, owner: str) -> None:
    """Refuse a layout that cannot be true.

    Args:
        owner: whose it is, for the message.

    Raises:
        LayoutError: nothing held; unknown dtype, storage or bucket; bounds outside the shape or
            empty, or through a block of MXFP8; a part held twice.
    """
    if not layout:
        raise LayoutError(f"{owner} holds no tensor; its weights are not allocated yet")
    for slot in layout:
        fault = _fault(slot)
        if fault:
            raise LayoutError(f"{owner}: {slot.name}: {fault}")
        bucket_order(slot.bucket)
    for name, slots in by_name(layout).items():
        check_same_tensor(slots, [owner] * len(slots))
        twice = first_overlap(slot.bounds for slot in slots)
        if twice is not None:
            raise LayoutError(f"{owner}: {name}: holds a part twice, in {twice[0]} and {twice[1]}")


def check_same_tensor(slots: Sequence[TensorSlot], owners: Sequence[str]) -> None:
    """Refuse slots of one name that disagree about dtype, global shape or bucket.

    Raises:
        LayoutError: names the tensor, both owners and both values.
    """
    for slot, owner in zip(slots, owners, strict=True):
        for field in ("dtype", "shape", "bucket"):
            here, there = getattr(slot, field), getattr(slots[0], field)
            if here != there:
                raise LayoutError(
                    f"{slot.name}: {field} is {there} on {owners[0]} and {here} on {owner}; "
                    "both sides must hold the same tensor"
                )


def grid_cells(bounds: Bounds, cuts: Sequence[Sequence[int]]) -> Iterator[Bounds]:
    """The pieces of a rectangle between cutting planes, in row-major order.

    Args:
        cuts: per dimension, ascending places to cut at; those outside the rectangle do nothing.
    """
    edges = (
        [start, *planes[bisect_right(planes, start) : bisect_left(planes, stop)], stop]
        for (start, stop), planes in zip(bounds, cuts, strict=True)
    )
    return product(*map(pairwise, edges))


def even_parts(bounds: Bounds, max_elements: int, block: int) -> Iterator[Bounds]:
    """Cut a rectangle into even pieces of at most `max_elements`, along its first dimensions; the
    last one at multiples of `block` only."""
    if volume(bounds) <= max_elements:
        yield bounds
        return
    dim = next(d for d, size in enumerate(extents(bounds)) if size > 1)
    unit = block if dim == len(bounds) - 1 else 1
    start, stop = bounds[dim]
    num_units = (stop - start) // unit
    units_per_piece = max(1, max_elements * num_units // volume(bounds))
    num_pieces = -(-num_units // units_per_piece)
    edges = [start + unit * (num_units * i // num_pieces) for i in range(num_pieces + 1)]
    for first, last in pairwise(edges):
        yield from even_parts(
            (*bounds[:dim], (first, last), *bounds[dim + 1 :]), max_elements, block
        )


def _fault(slot: TensorSlot) -> str | None:
    if slot.dtype not in WIRE_BYTES:
        return f"dtype {slot.dtype} cannot be sent; use one of {sorted(WIRE_BYTES)}"
    if len(slot.bounds) != len(slot.shape):
        return f"bounds {slot.bounds} do not fit shape {slot.shape}"
    if not all(
        0 <= start < stop <= size
        for (start, stop), size in zip(slot.bounds, slot.shape, strict=True)
    ):
        return f"bounds {slot.bounds} are empty or reach outside shape {slot.shape}"
    if slot.storage not in STORAGES:
        return f"storage {slot.storage!r} is not known; use one of {STORAGES}"
    if slot.storage == "mxfp8":
        if slot.dtype != "bfloat16":
            return f"held in MXFP8 and sent as {slot.dtype}; it is quantised from bfloat16 alone"
        if any(edge % BLOCK_SIZE for edge in slot.bounds[-1]):
            return f"bounds {slot.bounds} cut a block of MXFP8 ({BLOCK_SIZE} columns)"
    return None

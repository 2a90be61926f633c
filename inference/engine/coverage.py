"""Which rectangles of which published tensors arrived in a weight load, each element once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Bounds = tuple[tuple[int, int], ...]
"""Start and stop along each dimension."""
Part = tuple[str, Bounds]
"""A rectangle of a published tensor, by name."""


class WeightLoadError(ValueError):
    """A weight that does not fit, came twice, or did not come."""


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A rectangle of a published tensor that this engine holds."""

    name: str
    """Published checkpoint name without the `language_model.` prefix."""
    dtype: str
    """'float32', 'bfloat16': what `write` takes, no other."""
    shape: tuple[int, ...]
    """Global shape."""
    bounds: Bounds
    """Start and stop along each dimension of what is held here."""
    bucket: str
    """Tensors that travel together: 'pre', 'layer.0', …, 'post'."""
    storage: str = "plain"
    """'plain': as written. 'mxfp8': quantised from what is written, in blocks of 32 along the last
    dimension, which bounds must not cut; or written as an `MXFP8Tensor`, byte for byte."""


class Coverage:
    """The proof that every element of every slot was written exactly once.

    Rectangles of one tensor never overlap (checked as they come), so they cover it when their
    volumes add up to its own.
    """

    def __init__(self, slots: Iterable[WeightSlot]) -> None:
        self._slots = {slot.name: slot for slot in slots}
        self._written: dict[str, list[Bounds]] = {name: [] for name in self._slots}
        self.has_begun = False
        """Whether anything may have been written."""

    def check(self, name: str, bounds: Bounds) -> None:
        """Raise WeightLoadError when `bounds` of `name` cannot be written, or not once more."""
        slot = self._slots.get(name)
        if slot is None:
            raise WeightLoadError(
                f"{name!r} is no tensor of this model; names are published names without the "
                "'language_model.' prefix, see weight_layout()"
            )
        if len(bounds) != len(slot.bounds) or not all(
            low <= start < stop <= high
            for (start, stop), (low, high) in zip(bounds, slot.bounds, strict=True)
        ):
            raise WeightLoadError(
                f"{name}: bounds {bounds} are empty or outside of {slot.bounds}, which is what "
                "this engine holds"
            )
        for other in self._written[name]:
            if _overlap(bounds, other):
                raise WeightLoadError(
                    f"{name}: bounds {bounds} overlap {other}, which were written before in the "
                    "same load; every element is sent once"
                )

    def add(self, name: str, bounds: Bounds) -> None:
        """Count a checked rectangle as written."""
        self._written[name].append(bounds)
        self.has_begun = True

    def missing(self) -> list[str]:
        """'name (12 of 64 elements written)' of every slot that is not whole."""
        report = []
        for name, slot in self._slots.items():
            count = sum(map(volume, self._written[name]))
            if count != volume(slot.bounds):
                report.append(f"{name} ({count} of {volume(slot.bounds)} elements written)")
        return report


class PlannedParts:
    """The proof that every part of a plan was written exactly once.

    Whoever has the plan writes without asking, so that something may be written from the start.
    """

    has_begun = True

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._is_written = bytearray(len(parts))

    def add(self, first: int, last: int) -> None:
        """Count parts `first` to `last` - 1. WeightLoadError: there are none such, or twice."""
        if not 0 <= first <= last <= len(self._parts):
            raise WeightLoadError(
                f"parts {first} to {last} - 1 are not among the {len(self._parts)} of the plan"
            )
        twice = self._is_written.find(1, first, last)
        if twice >= 0:
            name, bounds = self._parts[twice]
            raise WeightLoadError(f"part {twice} of the plan, {name} {bounds}, was written twice")
        self._is_written[first:last] = b"\1" * (last - first)

    def missing(self) -> list[str]:
        """'name (12 of 64 elements written)' of every tensor that is not whole."""
        if self._is_written.find(0) < 0:  # of thousands of parts, while requests wait
            return []
        totals: dict[str, int] = {}
        counts: dict[str, int] = {}
        for (name, bounds), is_written in zip(self._parts, self._is_written, strict=True):
            size = volume(bounds)
            totals[name] = totals.get(name, 0) + size
            counts[name] = counts.get(name, 0) + is_written * size
        return [
            f"{name} ({counts[name]} of {total} elements written)"
            for name, total in totals.items()
            if counts[name] != total
        ]


def volume(bounds: Bounds) -> int:
    """Elements inside `bounds`."""
    return math.prod(stop - start for start, stop in bounds)


def _overlap(a: Bounds, b: Bounds) -> bool:
    return all(max(p, r) < min(q, s) for (p, q), (r, s) in zip(a, b, strict=True))

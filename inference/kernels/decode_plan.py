"""How the pages of a batch of decodes are spread over the programs of a kernel.

A decode reads all its pages, and the programs of a launch should read equally many. The pages that
the completions of a group share are read once for all of them; the others once for each request.
Made on the host once a step, used by every layer.

Suffixes: `R` decodes · `U` units · `X` shared units.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SHARED_ROWS = 16
"""Most requests that read a shared page together; a larger group is cut into such parts."""
MIN_SHARED_PAGES = 4
"""Fewer shared pages than this are left to each request."""
MIN_UNIT_PAGES = 2
"""Pages of a shared unit when workers abound: each unit loads the queries of a whole group."""


@dataclass(slots=True)
class WorkUnits:
    """Runs of pages, one program each. Unused units at the end have no pages."""

    own_U3: Tensor
    """[U, 3] int32: (request, first logical page, number of pages), ordered by request and page."""
    own_start_R1: Tensor
    """[R + 1] int32: request r has the units `own_start_R1[r]` to `own_start_R1[r + 1]`."""
    shared_X4: Tensor
    """[X, 4] int32: (first request, number of requests, first logical page, number of pages): what
    neighbouring requests read together, at most `SHARED_ROWS` of them; X is 0 where no launch for
    shared pages is needed."""
    shared_R3: Tensor
    """[R, 3] int32: (first shared unit, number of shared units, place among the requests that
    share); number 0 where nothing is shared."""


@dataclass(slots=True)
class DecodePlan:
    """Units for the two kinds of kernels that read every page of a decode."""

    index: WorkUnits
    """One program reads a page for all heads (one index key head)."""
    dense: WorkUnits
    """One program reads a page of one KV head: `num_kv_heads` programs a unit."""


@dataclass(slots=True)
class HostUnits:
    """`WorkUnits` as arrays, before they are copied to the device."""

    own_U3: np.ndarray
    own_start_R1: np.ndarray
    shared_X4: np.ndarray
    shared_R3: np.ndarray

    def to(self, device: torch.device | str) -> WorkUnits:
        arrays = (self.own_U3, self.own_start_R1, self.shared_X4, self.shared_R3)
        return WorkUnits(*(torch.from_numpy(array).to(device) for array in arrays))


def plan_units(
    num_pages_R: np.ndarray,
    group_start_G1: np.ndarray | None,
    shared_pages_G: np.ndarray | None,
    num_workers: int,
    *,
    num_shared_workers: int | None = None,
    capacity: int | None = None,
    shared_capacity: int | None = None,
) -> HostUnits:
    """Cut the pages of each decode into units of nearly equal size.

    Args:
        num_pages_R: [R] pages that hold keys of each decode; 0 for a padding row.
        group_start_G1: [G + 1] bounds of groups of neighbouring decodes; None: no groups.
        shared_pages_G: [G] leading pages that all decodes of the group have in common, and that
            all their query tokens see whole; a prefill chunk of the same step may write them.
        num_workers: how many units the launch wants; never fewer units than decodes with pages.
        num_shared_workers: the same for the launch over shared pages; None: `num_workers`.
        capacity: exact number of own units for a captured launch; None takes as many as needed.
        shared_capacity: the same for shared units (None: none if nothing is shared).
    """
    num_rows = len(num_pages_R)
    parts_P3 = _sharing_parts(group_start_G1, shared_pages_G)
    first_R = np.zeros(num_rows, np.int64)
    shared_R3 = np.zeros((num_rows, 3), np.int32)
    count_P, size_P = parts_P3[:, 1], parts_P3[:, 2]
    # Y runs over the requests that share.
    place_Y = np.arange(count_P.sum()) - np.repeat(np.cumsum(count_P) - count_P, count_P)
    row_Y = np.repeat(parts_P3[:, 0], count_P) + place_Y
    first_R[row_Y] = np.repeat(size_P, count_P)

    own_UX, own_start_R1 = _cut(num_pages_R - first_R, num_workers)
    own_U3 = np.stack([own_UX[:, 0], own_UX[:, 1] + first_R[own_UX[:, 0]], own_UX[:, 2]], 1)
    most_units = max(1, int(size_P.sum()) // MIN_UNIT_PAGES)
    shared_UX, shared_start_P1 = _cut(size_P, min(num_shared_workers or num_workers, most_units))
    part_X = shared_UX[:, 0]
    shared_X4 = np.concatenate([parts_P3[part_X, :2], shared_UX[:, 1:]], 1)
    shared_R3[row_Y, 0] = np.repeat(shared_start_P1[:-1], count_P)
    shared_R3[row_Y, 1] = np.repeat(np.diff(shared_start_P1), count_P)
    shared_R3[row_Y, 2] = place_Y
    return HostUnits(
        _padded(own_U3, capacity),
        own_start_R1.astype(np.int32),
        _padded(shared_X4, shared_capacity),
        shared_R3,
    )


def _sharing_parts(
    group_start_G1: np.ndarray | None, shared_pages_G: np.ndarray | None
) -> np.ndarray:
    """[P, 3] (first request, requests, shared pages): groups that share, in parts small enough."""
    if group_start_G1 is None or shared_pages_G is None:
        return np.zeros((0, 3), np.int64)
    parts = [
        (first, min(SHARED_ROWS, stop - first), pages)
        for start, stop, pages in zip(
            group_start_G1[:-1].tolist(),
            group_start_G1[1:].tolist(),
            shared_pages_G.tolist(),
            strict=True,
        )
        if stop - start > 1 and pages >= MIN_SHARED_PAGES
        for first in range(start, stop, SHARED_ROWS)
    ]
    return np.array(parts, np.int64).reshape(-1, 3)


def _cut(num_pages_R: np.ndarray, num_workers: int) -> tuple[np.ndarray, np.ndarray]:
    """[U, 3] (row, first page, pages), [R + 1] first unit of each row; U <= max(workers, rows)."""
    units_R = -(-num_pages_R // _unit_size(num_pages_R, num_workers))
    start_R1 = np.concatenate([[0], np.cumsum(units_R)])
    row_U = np.repeat(np.arange(len(num_pages_R)), units_R)
    place_U = np.arange(len(row_U)) - start_R1[row_U]
    # Sizes within a row differ by one page at most.
    base_U, extra_U = (
        np.divmod(num_pages_R[row_U], units_R[row_U]) if len(row_U) else (row_U, row_U)
    )
    first_U = place_U * base_U + np.minimum(place_U, extra_U)
    return np.stack([row_U, first_U, base_U + (place_U < extra_U)], 1), start_R1


def _unit_size(num_pages_R: np.ndarray, num_workers: int) -> int:
    """Nearly the fewest pages a unit with which all rows together need at most `num_workers` units.

    With more rows than workers every row is one unit.
    """
    most = int(num_pages_R.max(initial=0))
    num_rows = int((num_pages_R > 0).sum())
    if num_workers <= num_rows:
        return max(1, most)
    total = int(num_pages_R.sum())
    least = max(1, -(-total // num_workers))
    # With this size Σ ceil(n / size) <= total / size + rows <= workers.
    enough = min(max(1, most), max(least, -(-total // (num_workers - num_rows))))
    size_C = np.unique(np.linspace(least, enough, 32).astype(np.int64))
    is_enough_C = (-(-num_pages_R // size_C[:, None])).sum(1) <= num_workers
    return int(size_C[is_enough_C.argmax()]) if is_enough_C.any() else max(1, most)


def _padded(units_UX: np.ndarray, capacity: int | None) -> np.ndarray:
    if capacity is None:
        return units_UX.astype(np.int32)
    assert len(units_UX) <= capacity, f"{len(units_UX)} units, room for {capacity}"
    padded = np.zeros((capacity, units_UX.shape[1]), np.int32)
    padded[: len(units_UX)] = units_UX
    return padded

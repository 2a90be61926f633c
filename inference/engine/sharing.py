"""Which running decodes share pages, and how their pages are spread over a kernel's programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from inference.engine.rows import RunningRows
from inference.kernels.decode_plan import DecodePlan, HostUnits, WorkUnits, plan_units


@dataclass(slots=True)
class HostPlan:
    """A `DecodePlan` on the host."""

    index: HostUnits
    dense: HostUnits

    @property
    def arrays(self) -> list[np.ndarray]:
        return [
            array
            for units in (self.index, self.dense)
            for array in (units.own_U3, units.own_start_R1, units.shared_X4, units.shared_R3)
        ]

    def on_device(self, tensors: Sequence[Tensor]) -> DecodePlan:
        """The same with `arrays` as they lie on the device."""
        return DecodePlan(WorkUnits(*tensors[:4]), WorkUnits(*tensors[4:8]))


@dataclass(frozen=True, slots=True)
class Workers:
    """How many units a kind of kernel wants."""

    own: int
    shared: int
    """Of the launch over pages that requests share."""


class DecodePlanner:
    """Plans the decodes of each step; who shares is found anew only when the rows change."""

    def __init__(self, page_size: int, index: Workers, dense: Workers) -> None:
        self._workers = (index, dense)
        self._page_size = page_size
        self._key = b""
        self._groups: tuple[np.ndarray, np.ndarray] | None = None

    def plan(
        self,
        rows: RunningRows,
        rows_R: np.ndarray,
        seq_len_R: np.ndarray,
        *,
        num_rows: int | None = None,
    ) -> HostPlan:
        """Units for the decodes in `rows_R`.

        With `num_rows` all arrays have the shapes that any plan of so many rows fits in, for a
        captured step.
        """
        num_pages_R = -(-seq_len_R[: len(rows_R)].astype(np.int64) // self._page_size)
        if num_rows is not None:
            num_pages_R = np.append(num_pages_R, np.zeros(num_rows - len(rows_R), np.int64))
        start_G1, shared_G = self.groups(rows, rows_R) or (None, None)
        units = [
            plan_units(
                num_pages_R,
                start_G1,
                shared_G,
                workers.own,
                num_shared_workers=workers.shared,
                capacity=None if num_rows is None else max(workers.own, num_rows),
                shared_capacity=None if num_rows is None else max(workers.shared, num_rows),
            )
            for workers in self._workers
        ]
        return HostPlan(*units)

    def plan_padding(self, num_rows: int) -> HostPlan:
        """Units for rows without keys, an empty one each."""
        no_pages_R = np.zeros(num_rows, np.int64)
        units = [
            plan_units(no_pages_R, None, None, workers.own, capacity=num_rows)
            for workers in self._workers
        ]
        return HostPlan(*units)

    def groups(self, rows: RunningRows, rows_R: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """(bounds [G + 1] of neighbours in one group, pages [G] that all of them share).

        None when nobody shares.
        """
        key = rows_R.tobytes() + rows.ticket[rows_R].tobytes()
        if key != self._key:
            self._key, self._groups = key, _find_groups(rows, rows_R)
        return self._groups


def _find_groups(rows: RunningRows, rows_R: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    group_R = rows.group[rows_R]
    is_joined = (group_R[1:] == group_R[:-1]) & (group_R[1:] >= 0)
    if not is_joined.any():
        return None
    bounds_G1 = np.concatenate([[0], np.flatnonzero(~is_joined) + 1, [len(rows_R)]])
    shared_G = np.zeros(len(bounds_G1) - 1, np.int64)
    for g in np.flatnonzero(np.diff(bounds_G1) > 1).tolist():
        members = rows_R[bounds_G1[g] : bounds_G1[g + 1]]
        table = rows.page_table_MN[members, : int(rows.num_pages[members].min())]
        is_same_N = (table == table[0]).all(0)
        shared_G[g] = is_same_N.argmin() if not is_same_N.all() else len(is_same_N)
    return bounds_G1, shared_G

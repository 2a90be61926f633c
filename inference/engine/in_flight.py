"""A step that was launched and whose tokens the host does not know yet.

    schedule -> launch -> (the next step is scheduled and launched) -> settle

Between launch and settle the rows hold `PENDING` in place of each sampled token. What may take a
request out of its row (an abort, a pause, a preemption) settles first; only the end of a request is
found out late: its row then computed one token too many, and nobody takes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inference.engine.rows import RunningRows
from inference.engine.sampler import PendingSample
from inference.engine.scheduler import Schedule


@dataclass(slots=True)
class StepInFlight:
    """What is needed to settle a step."""

    schedule: Schedule
    rows_S: np.ndarray
    """Rows that sample in it."""
    places_S: np.ndarray
    """Place of the token that each of them samples."""
    tickets_R: np.ndarray
    """Who was in the rows of the schedule."""
    version: int
    """Policy version that computed it."""
    sample: PendingSample

    def is_there(self, rows: RunningRows) -> np.ndarray:
        """[R] bool: the row still has the request that it had, not ended by the step before."""
        rows_R = self.schedule.rows_R
        return rows.is_taken[rows_R] & (rows.ticket[rows_R] == self.tickets_R)

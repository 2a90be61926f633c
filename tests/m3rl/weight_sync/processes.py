"""Objects in processes of their own that are there at once, where `tests.forked` can have it so."""

from __future__ import annotations

from benchmarks.remote import RemoteProcess
from tests.forked import PROCESSES


class ForkedProcess(RemoteProcess):
    """A RemoteProcess, started as `PROCESSES` are."""

    start_method = PROCESSES.get_start_method()

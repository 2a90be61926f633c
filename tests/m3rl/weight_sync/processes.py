"""Processes on CPU, forked from one that has imported all they use: 20 ms each, not 2 s."""

from __future__ import annotations

import multiprocessing

from benchmarks.remote import RemoteProcess

USED = ("m3rl.weight_sync.sync", "tests.m3rl.weight_sync.layout_sides")

multiprocessing.get_context("forkserver").set_forkserver_preload([*USED])


class ForkedProcess(RemoteProcess):
    """A RemoteProcess that is there at once."""

    start_method = "forkserver"

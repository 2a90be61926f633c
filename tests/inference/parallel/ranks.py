"""Real processes, one a rank, that meet over gloo and run what the test asks of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from inference.parallel.config import ParallelConfig
from inference.parallel.groups import ParallelGroups
from tests.forked import PROCESSES

Answer = tuple[str, Any]
"""('ok', result), ('error', message) or ('died', exit code)."""


class Ranks:
    """`world` processes; they live until `close`, whatever a call does to them."""

    def __init__(self, world: int, folder: Path) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = PROCESSES.Pipe()
            store = str(folder / "store")
            process = PROCESSES.Process(
                target=_serve, args=(rank, world, store, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Answer]:
        """`function(rank, *args)` on every rank at the same time."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return [self._answer(rank, timeout_s) for rank in range(len(self._pipes))]

    def results(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As `run`; an error on any rank is one here."""
        answers = self.run(function, *args)
        assert [kind for kind, _ in answers] == ["ok"] * len(answers), answers
        return [result for _, result in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _answer(self, rank: int, timeout_s: float) -> Answer:
        assert self._pipes[rank].poll(timeout_s), f"rank {rank} did not answer in {timeout_s} s"
        try:
            return self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join()
            return "died", self._processes[rank].exitcode


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = ("ok", function(rank, *args))
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}")
        pipe.send(answer)


_groups: dict[ParallelConfig, ParallelGroups] = {}


def groups_for(config: ParallelConfig) -> ParallelGroups:
    """Made once in each process."""
    if config not in _groups:
        _groups[config] = ParallelGroups.create(config, timeout_s=30)
    return _groups[config]

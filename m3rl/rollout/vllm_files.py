"""What an engine of vLLM has on its host: shared memory, sockets, the file by which workers met.

A process that is killed leaves them behind, and vLLM the last also where it ends in order.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = "/dev/shm/"
PREFIXES = ("psm_", "vllm_dist_")
"""Of shared memory that Python's `SharedMemory` and vLLM's CPU workers name."""
DEATH_TIMEOUT_S = 5.0
"""Longest wait for killed processes to be gone: a dying one may still write a file."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """Of one engine, on the host that it runs on."""

    pids: frozenset[int]
    """Its processes that are killed before `remove` is called."""
    paths: frozenset[str]
    """Files and folders that they made, and nobody else uses."""

    def remove(self) -> None:
        """Wait until the processes are gone, then delete what is left of the files.

        Raises:
            OSError: one cannot be deleted.
        """
        deadline = time.monotonic() + DEATH_TIMEOUT_S
        while any(map(is_running, self.pids)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for path in map(Path, self.paths):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def own_folder() -> str:
    """A new folder for the sockets of the engine that this process makes next."""
    folder = tempfile.mkdtemp(prefix=f"m3rl-vllm-{os.getpid()}-")
    os.environ["VLLM_RPC_BASE_PATH"] = folder
    return folder


def files_of_process(meeting: str = "") -> EngineFiles:
    """What this process shares.

    Args:
        meeting: `init_process_group`'s address, of a worker.
    """
    paths = set(_mapped())
    if meeting.startswith("file://"):
        paths.add(meeting.removeprefix("file://"))
    return EngineFiles(frozenset({os.getpid()}), frozenset(paths))


def together(files: Collection[EngineFiles], folder: str, others: EngineFiles) -> EngineFiles:
    """Those of all processes of an engine.

    Args:
        folder: `own_folder`.
        others: what its process shared before there was the engine.
    """
    paths = frozenset({folder}).union(*(each.paths for each in files)) - others.paths
    return EngineFiles(frozenset().union(*(each.pids for each in files)), paths)


def _mapped() -> list[str]:
    """Shared memory of this process that has a name still."""
    fields = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = {each[5] for each in fields if len(each) == 6}
    return [
        path
        for path in paths
        if path.startswith(tuple(SHARED_MEMORY + prefix for prefix in PREFIXES))
        and not path.endswith(" (deleted)")
    ]


def is_running(pid: int) -> bool:
    """Whether a process of this host is there, and no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"

"""What trainer ranks do together: meet, add numbers up, agree.

accelerate owns the device and the default process group; weight sync has groups of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from m3rl.grpo.loss import LossTotals
from m3rl.parallel.mesh import RankMesh

_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class RankGroup:
    """The ranks of one trainer, seen from one of them.

    Args:
        device: 'cuda' takes the GPU that the process sees, or of several that of its rank.
        init_method: where the ranks meet, 'tcp://host:port' of a `TCPStore` that listens already
            and outlives them (`m3rl.rendezvous.Rendezvous`); unused by one rank.
        timeout_s: how long a collective waits for the other ranks.
        ep, cp: ranks that split the experts, and the tokens of a packed row.

    Raises:
        ValueError: `ep` or `cp` does not divide `size`.
        RuntimeError: the process already belongs to a group of another size, or sees no GPU.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        init_method: str | None,
        *,
        device: str,
        num_threads: int,
        timeout_s: float,
        ep: int = 1,
        cp: int = 1,
    ) -> None:
        self.rank = rank
        self.size = size
        if device == "cuda":
            if not torch.cuda.is_available():
                raise RuntimeError(
                    f"train.device is cuda and trainer rank {rank} sees no GPU; set train.device: "
                    "cpu, or start it where there is one"
                )
            # What cuBLAS needs to add in a fixed order; read when CUDA starts.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if size > 1:
            _join(rank, size, init_method, device, timeout_s)
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
        self.accelerator = Accelerator(cpu=device == "cpu", mixed_precision="no")
        torch.set_num_threads(num_threads)
        if (self.accelerator.num_processes, self.accelerator.process_index) != (size, rank):
            raise RuntimeError(
                f"accelerate sees rank {self.accelerator.process_index} of "
                f"{self.accelerator.num_processes}, not {rank} of {size}; "
                "are RANK and WORLD_SIZE set in the environment?"
            )
        self.mesh: RankMesh | None = None
        """How the ranks share the policy; None: there is one."""
        if size > 1:
            timeout = timedelta(seconds=timeout_s)
            self.mesh = RankMesh.of(rank, size, ep=ep, cp=cp, device=self.device, timeout=timeout)

    @property
    def num_sharers(self) -> int:
        """Ranks that compute one packed row together."""
        return 1 if self.mesh is None else self.mesh.cp

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks, a new tensor with the same bits on all of them."""
        result = values.clone()
        if self.size > 1:
            dist.all_reduce(result)
        return result

    def sum_array(self, values: np.ndarray) -> np.ndarray:
        """Elementwise sum over ranks of a host array."""
        return self.sum(torch.from_numpy(values).to(self.device)).cpu().numpy()

    def total(self, totals: LossTotals) -> LossTotals:
        """Totals of all ranks, added in rank order."""
        if self.size == 1:
            return totals
        gathered: list[LossTotals | None] = [None] * self.size
        dist.all_gather_object(gathered, totals)
        result = LossTotals()
        for part in gathered:
            assert part is not None
            result.add(part)
        return result

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1:
            dist.destroy_process_group()
            AcceleratorState._reset_state(reset_partial_state=True)
            for name in _ENVIRONMENT:
                os.environ.pop(name, None)


def _join(rank: int, size: int, init_method: str | None, device: str, timeout_s: float) -> None:
    if init_method is None:
        raise ValueError(f"{size} trainer ranks need an init_method to meet at")
    url = urlsplit(init_method)
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        raise ValueError(f"trainer ranks meet at tcp://host:port, not at {init_method!r}")
    timeout = timedelta(seconds=timeout_s)
    # Every rank is a client of the store: torch's own tcp:// would have rank 0 listen, on a port
    # that another program may have taken since it was found free.
    store = TCPStore(url.hostname, url.port, is_master=False, timeout=timeout)
    # accelerate believes in these rather than in the group that exists already.
    os.environ |= dict(zip(_ENVIRONMENT, map(str, (rank, rank, size, size)), strict=True))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside, torch adds in a fixed order also with several threads (scatters and gathers).

    It would fill fresh memory with NaN too, at the cost of writing everything twice.
    """
    before = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fills

"""What trainer ranks do together: meet, add numbers up, agree.

accelerate owns the device and the default process group; weight sync has groups of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from m3rl.grpo.loss import LossTotals

_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class RankGroup:
    """The ranks of one trainer, seen from one of them.

    Args:
        init_method: where the ranks meet, 'tcp://host:port' or 'file://path'; unused by one rank.
        timeout_s: how long a collective waits for the other ranks.

    Raises:
        RuntimeError: the process already belongs to a group of another size.
    """

    def __init__(
        self, rank: int, size: int, init_method: str | None, *, num_threads: int, timeout_s: float
    ) -> None:
        self.rank = rank
        self.size = size
        if size > 1:
            _join(rank, size, init_method, timeout_s)
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
        self.accelerator = Accelerator(cpu=True, mixed_precision="no")
        torch.set_num_threads(num_threads)
        if (self.accelerator.num_processes, self.accelerator.process_index) != (size, rank):
            raise RuntimeError(
                f"accelerate sees rank {self.accelerator.process_index} of "
                f"{self.accelerator.num_processes}, not {rank} of {size}; "
                "are RANK and WORLD_SIZE set in the environment?"
            )

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

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over ranks; a rank without one adds zeros.

        One all-reduce a parameter, in a fixed order, not DDP's buckets: nothing has to be
        multiplied back, and a resumed process adds in the same order (DDP regroups its buckets
        after the first step).
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.size > 1:
                dist.all_reduce(parameter.grad)

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


def _join(rank: int, size: int, init_method: str | None, timeout_s: float) -> None:
    if init_method is None:
        raise ValueError(f"{size} trainer ranks need an init_method to meet at")
    # accelerate believes in these rather than in the group that exists already.
    os.environ |= dict(zip(_ENVIRONMENT, map(str, (rank, rank, size, size)), strict=True))
    dist.init_process_group(
        "gloo",
        init_method=init_method,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside, torch adds in a fixed order also with several threads (scatters and gathers)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)

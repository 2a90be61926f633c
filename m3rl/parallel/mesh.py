"""Which ranks of a trainer do what together."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from m3rl.weight_sync.trainer_layout import TrainerShards


@dataclass(frozen=True, slots=True)
class RankMesh:
    """The ranks of a sharded trainer, seen from one of them."""

    rank: int
    split: TrainerShards
    """How they hold the policy."""
    cp: int
    """Ranks that share the tokens of each packed row."""
    device: torch.device
    ranks: DeviceMesh
    """All of them, 1-D."""
    expert_ranks: DeviceMesh
    """Those that hold parts of the same experts, 1-D."""
    expert_groups: dist.ProcessGroup | None
    """One rank of each expert group: together they hold all experts. None: there is one group."""
    sharers: dist.ProcessGroup | None
    """The ranks that compute one packed row. None: each its own."""

    @classmethod
    def of(
        cls, rank: int, size: int, *, ep: int, cp: int, device: torch.device, timeout: timedelta
    ) -> RankMesh:
        """Called by all ranks, once the default process group stands.

        Args:
            timeout: how long a collective of a part of the ranks waits for the others.

        Raises:
            ValueError: `ep` or `cp` does not divide the ranks.
        """
        for name, parts in (("ep", ep), ("cp", cp)):
            if size % parts:
                raise ValueError(
                    f"train.parallel.{name}={parts} does not divide train.num_ranks={size}"
                )
        kind = device.type
        ranks = init_device_mesh(kind, (size,))
        by_expert = by_row = None
        if ep > 1:
            by_expert = init_device_mesh(kind, (size // ep, ep), mesh_dim_names=("same", "group"))
        if cp > 1:
            by_row = init_device_mesh(kind, (size // cp, cp), mesh_dim_names=("share", "place"))
        for mesh in (by_expert, by_row):
            for group in () if mesh is None else mesh.get_all_groups():
                _set_timeout(group, timeout)
        return cls(
            rank=rank,
            split=TrainerShards(size, ep=ep),
            cp=cp,
            device=device,
            ranks=ranks,
            expert_ranks=ranks if by_expert is None else by_expert["same"],
            expert_groups=None if by_expert is None else by_expert["group"].get_group(),
            sharers=None if by_row is None else by_row["place"].get_group(),
        )

    @property
    def size(self) -> int:
        return self.split.world

    @property
    def num_shares(self) -> int:
        """Packed rows that are computed at the same time."""
        return self.size // self.cp

    @property
    def share(self) -> int:
        """Which of them this rank computes."""
        return self.rank // self.cp

    @property
    def place(self) -> int:
        """Which range of its tokens."""
        return self.rank % self.cp

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks, on the device; the same bits on all of them."""
        total = values.to(self.device, copy=True)
        dist.all_reduce(total)
        return total


def _set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """A mesh makes its groups with torch's own timeout, whatever the default group has."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)

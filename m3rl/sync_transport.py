"""What carries the weights from trainer ranks to replicas, by where both keep them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from m3rl.config import ConfigError

if TYPE_CHECKING:
    import torch


def gpu_of(device: torch.device) -> str | None:
    """The same for a GPU in all processes of all machines; None: it is the host."""
    if device.type != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def choose_transport(
    wanted: Literal["auto", "nccl", "gloo"], gpus: Mapping[str, str | None]
) -> Literal["nccl", "gloo"]:
    """NCCL where every member has a GPU of its own, unless gloo is wanted.

    Args:
        gpus: `gpu_of` the weights of each trainer rank and each worker, by name.

    Raises:
        ConfigError: NCCL is wanted and cannot connect them; says which member is in the way.
    """
    if wanted == "gloo":
        return "gloo"
    obstacle = _obstacle(gpus)
    if obstacle is None:
        return "nccl"
    if wanted == "nccl":
        raise ConfigError(
            f"weight_sync.transport: nccl carries weights between GPUs, one for each member, but "
            f"{obstacle}; set auto or gloo"
        )
    return "gloo"


def _obstacle(gpus: Mapping[str, str | None]) -> str | None:
    members: dict[str, list[str]] = defaultdict(list)
    for name, gpu in gpus.items():
        if gpu is None:
            return f"{name} keeps its weights in the host's memory"
        members[gpu].append(name)
    shared = next((names for names in members.values() if len(names) > 1), None)
    return None if shared is None else f"{' and '.join(shared)} share one GPU"

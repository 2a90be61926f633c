"""What carries the weights from trainer ranks to replicas, by where both keep them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from m3rl.config import ConfigError
from m3rl.host import this_host

if TYPE_CHECKING:
    import torch


Kind = Literal["ipc", "nccl", "gloo"]


def gpu_of(device: torch.device) -> str | None:
    """Names a GPU and, after an @, its host: the same in all processes of all machines; None: it
    is the host's memory."""
    if device.type != "cuda":
        return None
    import torch

    return f"{torch.cuda.get_device_properties(device).uuid}@{this_host()}"


def choose_transport(
    wanted: Literal["auto", "ipc", "nccl", "gloo"], gpus: Mapping[str, str | None]
) -> Kind:
    """CUDA IPC where all members are on GPUs of one host, NCCL where every one has a GPU of its
    own, unless another is wanted.

    Args:
        gpus: `gpu_of` the weights of each trainer rank and each worker, by name.

    Raises:
        ConfigError: what is wanted cannot connect them; says which member is in the way.
    """
    obstacles = _obstacles(gpus)
    if wanted == "auto":
        return next(kind for kind, obstacle in obstacles.items() if obstacle is None)
    if obstacles[wanted] is not None:
        others = [kind for kind, obstacle in obstacles.items() if obstacle is None]
        raise ConfigError(
            f"weight_sync.transport: {wanted} {CARRIES[wanted]}, but {obstacles[wanted]}; set auto "
            f"or {' or '.join(others)}"
        )
    return wanted


def fallbacks(
    wanted: Literal["auto", "ipc", "nccl", "gloo"], gpus: Mapping[str, str | None]
) -> tuple[Kind, ...]:
    """What may carry the weights instead of the chosen transport, should that turn out not to
    reach one member from another when they connect; nothing where it was asked for by name."""
    if wanted != "auto":
        return ()
    able = [kind for kind, obstacle in _obstacles(gpus).items() if obstacle is None]
    return tuple(able[1:])


def _obstacles(gpus: Mapping[str, str | None]) -> dict[Kind, str | None]:
    """What is in the way of each transport, the best first."""
    return {"ipc": _obstacle_to_ipc(gpus), "nccl": _obstacle_to_nccl(gpus), "gloo": None}


CARRIES = {
    "ipc": "carries weights between GPUs of one host",
    "nccl": "carries weights between GPUs, one for each member",
}


def _obstacle_to_ipc(gpus: Mapping[str, str | None]) -> str | None:
    if on_host := _on_host(gpus):
        return on_host
    hosts: dict[str, str] = {}
    for name, gpu in gpus.items():
        assert gpu is not None, "none is on the host"
        hosts.setdefault(gpu.partition("@")[2], name)
    if len(hosts) < 2:
        return None
    (_, first), (host, other) = list(hosts.items())[:2]
    return f"{other} is on another host ({host}) than {first}"


def _obstacle_to_nccl(gpus: Mapping[str, str | None]) -> str | None:
    if on_host := _on_host(gpus):
        return on_host
    members: dict[str | None, list[str]] = defaultdict(list)
    for name, gpu in gpus.items():
        members[gpu].append(name)
    shared = next((names for names in members.values() if len(names) > 1), None)
    return None if shared is None else f"{' and '.join(shared)} share one GPU"


def _on_host(gpus: Mapping[str, str | None]) -> str | None:
    name = next((name for name, gpu in gpus.items() if gpu is None), None)
    return None if name is None else f"{name} keeps its weights in the host's memory"

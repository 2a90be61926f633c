"""A trainer rank's own part of a checkpoint: optimizer tensors, step count, random generators."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from m3rl.checkpoint import CheckpointError, sync_path
from m3rl.parallel.mesh import RankMesh
from m3rl.parallel.save import raise_together


def save_rank_state(
    path: Path,
    mesh: RankMesh | None,
    optimizer_tensors: dict[str, Tensor],
    step: int,
    *,
    ep: int,
) -> None:
    """Write a trainer rank's part of a checkpoint; every rank calls it at the same time.

    Args:
        mesh: None: there is one rank.
        optimizer_tensors: what this rank holds of the optimizer's state, by name; may be empty.
        step: optimizer steps taken.
        ep: ranks that split the experts.

    Raises:
        CheckpointError: on all ranks, if one could not write or rank 0 does not see what another
            wrote; names it.
    """
    rank, world_size = (0, 1) if mesh is None else (mesh.rank, mesh.size)
    if optimizer_tensors:
        raise_together(mesh, _optimizer_fault(path / "optimizer", optimizer_tensors, mesh))
    state = {"step": step, "world_size": world_size, "ep": ep, "rng": rng_state()}
    raise_together(mesh, _write_fault(_state_file(path, rank), state))
    raise_together(mesh, _unseen_state(path, world_size) if rank == 0 else None)


def _state_file(path: Path, rank: int) -> Path:
    return path / "ranks" / f"{rank:05d}.pt"


def _optimizer_fault(path: Path, tensors: dict[str, Tensor], mesh: RankMesh | None) -> str | None:
    """Write what all ranks hold; why this one could not. Where one could not, all come back."""
    try:
        with _quiet():
            state_dict_saver.save(tensors, checkpoint_id=path, no_dist=mesh is None)
    except CheckpointException as error:  # torch raises it on all ranks, with the fault of each
        own = error.failures.get(0 if mesh is None else mesh.rank)
        return own and f"cannot write its part of {path}: {type(own[0]).__name__}: {own[0]}"
    return None


def _write_fault(file: Path, state: dict[str, Any]) -> str | None:
    try:
        file.parent.mkdir(exist_ok=True)
        torch.save(state, file)
        sync_path(file)
    except (OSError, RuntimeError) as error:  # torch's writer raises either
        return f"cannot write {file}: {error}"
    return None


def _unseen_state(path: Path, world_size: int) -> str | None:
    """What rank 0 does not see of the states of all ranks."""
    unseen = [rank for rank in range(world_size) if not _state_file(path, rank).is_file()]
    if not unseen:
        return None
    return (
        f"does not see the state of trainer ranks {unseen} in {path}; it must lie on a file system "
        "that the hosts of all trainer ranks share (run.dir)"
    )


def load_rank_state(
    path: Path, rank: int, world_size: int, optimizer_tensors: dict[str, Tensor], *, ep: int
) -> int:
    """Restore what `save_rank_state` wrote: optimizer state in place, RNGs of the process.

    Args:
        optimizer_tensors: allocated tensors to be filled; names and shapes as they were saved.

    Returns:
        Optimizer steps taken.

    Raises:
        CheckpointError: the checkpoint was written by another number of ranks or with experts split
            over another one, or it lacks this rank.
    """
    file = _state_file(path, rank)
    written = sorted((path / "ranks").glob("*.pt"))
    if len(written) != world_size or file not in written:
        raise CheckpointError(
            f"{path} was written by {len(written)} trainer ranks and this run has {world_size}; "
            f"resume it with train.num_ranks={len(written)}"
        )
    state = torch.load(file, weights_only=True)
    if state["ep"] != ep:
        raise CheckpointError(
            f"{path} was written with the experts split over {state['ep']} trainer ranks and this "
            f"run splits them over {ep}; resume it with train.parallel.ep={state['ep']}"
        )
    if state["step"] > 0:
        with _quiet():
            state_dict_loader.load(
                optimizer_tensors, checkpoint_id=path / "optimizer", no_dist=world_size == 1
            )
    set_rng_state(state["rng"])
    return int(state["step"])


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Said although `no_dist` says so already.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def rng_state() -> dict[str, Any]:
    """State of every random generator of the process, as plain values and tensors."""
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [version, list(internal), gauss],
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put every random generator of the process where `rng_state` found it."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    saved = state["numpy"]
    key = saved["key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, saved["pos"], saved["has_gauss"], saved["gauss"]))

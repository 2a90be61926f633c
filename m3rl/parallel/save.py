"""A sharded model written by all of its ranks at the same time, in files of whole tensors.

Each tensor is dealt to one of the ranks that own a part of it, so that all write about as many
bytes. In a round every rank puts one file together, tensor by tensor, and writes it: it holds that
file on the host, and on the device one tensor beside what it sends. All know everyone's files from
the start; what they tell one another is whether they could write theirs.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from inference.models.weights import CheckpointError as RuntimeCheckpointError
from inference.models.weights import (
    own_copy,
    refuse_weights,
    shard_name,
    write_index,
    write_shard,
)
from m3rl.checkpoint import CheckpointError, model_directory, sync_path, writing_path
from m3rl.parallel.mesh import RankMesh
from m3rl.parallel.shards import Shards


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file that one rank writes."""

    rank: int
    tensors: tuple[str, ...]
    num_bytes: int


def save_together(
    path: Path, shards: Shards, dtypes: Mapping[str, torch.dtype], *, max_shard_bytes: int
) -> None:
    """Write published tensors into directory `path`, which holds no weights; all ranks call it.

    Args:
        dtypes: of all tensors, by name, in the order in which each rank's files have them.
        max_shard_bytes: of a file, unless one tensor alone is larger.

    Raises:
        CheckpointError: on all ranks, once one could not write or does not see what the others
            wrote; names it. What was written so far stays behind.
    """
    mesh = shards.mesh
    raise_together(mesh, _entry_fault(path, mesh))
    sizes = {name: shards.num_bytes(name, dtype) for name, dtype in dtypes.items()}
    owners = {name: shards.owners(name) for name in dtypes}
    rounds = plan_rounds(deal(sizes, owners, mesh.size), sizes, max_shard_bytes)
    files = [file for one in rounds for file in one]
    names = {file: shard_name(place, len(files)) for place, file in enumerate(files)}
    for one in rounds:
        mine = _collected(shards, one, dtypes)
        fault = None
        if mine:
            (file,) = (file for file in one if file.rank == mesh.rank)
            fault = _write_fault(path / names[file], mine)
        raise_together(mesh, fault)
    fault = None
    if mesh.rank == 0:
        fault = _missing_part(path, names) or _index_fault(path, names, sizes)
    raise_together(mesh, fault)


@contextmanager
def shared_model_directory(path: Path, mesh: RankMesh | None) -> Iterator[Path]:
    """`model_directory` of rank 0, filled inside by all ranks, whose hosts share its file system.

    Args:
        mesh: None: there is one rank.

    Raises:
        CheckpointError: on all ranks, if `path` holds something that is no part of a model.
    """
    with ExitStack() as stack:
        fault = None
        if mesh is None or mesh.rank == 0:
            try:
                stack.enter_context(model_directory(path))
            except (CheckpointError, OSError) as error:
                fault = str(error)
        raise_together(mesh, fault)
        yield writing_path(path)


def raise_together(mesh: RankMesh | None, fault: str | None) -> None:
    """Called by all ranks at the same time; with what went wrong on this one, if anything did.

    Raises:
        CheckpointError: on all, if it did on one.
    """
    if mesh is None:
        if fault is not None:
            raise CheckpointError(fault)
        return
    if int(mesh.sum(torch.tensor(int(fault is not None)))) == 0:
        return
    faults: list[str | None] = [None] * mesh.size
    dist.all_gather_object(faults, fault and f"on {socket.gethostname()}: {fault}")
    told = "; ".join(f"trainer rank {rank} {fault}" for rank, fault in enumerate(faults) if fault)
    raise CheckpointError(told)


def deal(
    sizes: Mapping[str, int], owners: Mapping[str, Sequence[int]], num_ranks: int
) -> list[list[str]]:
    """Names that each rank writes, in the order given: each an owner's, the largest dealt first, to
    the one with the fewest bytes so far."""
    dealt_bytes = [0] * num_ranks
    writer = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        writer[name] = min(owners[name], key=lambda rank: (dealt_bytes[rank], rank))
        dealt_bytes[writer[name]] += sizes[name]
    return [[name for name in sizes if writer[name] == rank] for rank in range(num_ranks)]


def plan_rounds(
    dealt: Sequence[Sequence[str]], sizes: Mapping[str, int], max_shard_bytes: int
) -> list[list[TensorFile]]:
    """Files that are written at the same time, at most one a rank, round after round."""
    per_rank = [_files(rank, names, sizes, max_shard_bytes) for rank, names in enumerate(dealt)]
    num_rounds = max(map(len, per_rank))
    return [[files[i] for files in per_rank if i < len(files)] for i in range(num_rounds)]


def _files(
    rank: int, names: Sequence[str], sizes: Mapping[str, int], max_shard_bytes: int
) -> list[TensorFile]:
    groups: list[list[str]] = []
    held = 0
    for name in names:
        if not groups or held + sizes[name] > max_shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += sizes[name]
    return [TensorFile(rank, tuple(group), sum(sizes[n] for n in group)) for group in groups]


def _collected(
    shards: Shards, files: Sequence[TensorFile], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """The tensors of this rank's file among those of a round, on the host."""
    mine: dict[str, Tensor] = {}
    for place in range(max(len(file.tensors) for file in files)):
        wanted = {f.rank: f.tensors[place] for f in files if place < len(f.tensors)}
        tensor = shards.exchange({rank: (name, dtypes[name]) for rank, name in wanted.items()})
        if tensor is not None:
            mine[wanted[shards.mesh.rank]] = own_copy(tensor)
    return mine


def _entry_fault(path: Path, mesh: RankMesh) -> str | None:
    if not path.is_dir():
        return (
            f"there is no {path}; all trainer ranks write it, so it must lie on a file system that "
            "their hosts share (run.dir)"
        )
    try:
        if mesh.rank == 0:
            refuse_weights(path)
    except RuntimeCheckpointError as error:
        return str(error)
    return None


def _write_fault(file: Path, tensors: dict[str, Tensor]) -> str | None:
    try:
        write_shard(file, tensors)
        sync_path(file)  # by its writer: the host of another rank does not have its pages
    except (RuntimeCheckpointError, OSError) as error:
        return str(error)
    return None


def _missing_part(path: Path, names: Mapping[TensorFile, str]) -> str | None:
    """What rank 0 does not see of the files of all ranks."""
    for file, name in names.items():
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size is None or size < file.num_bytes:
            found = "is not there" if size is None else f"has {size} bytes"
            return (
                f"{path / name}, {file.num_bytes} bytes that trainer rank {file.rank} wrote, "
                f"{found}; the directory must lie on a file system that the hosts of all trainer "
                "ranks share (run.dir)"
            )
    return None


def _index_fault(
    path: Path, names: Mapping[TensorFile, str], sizes: Mapping[str, int]
) -> str | None:
    if len(names) == 1:
        return None
    places = {tensor: name for file, name in names.items() for tensor in file.tensors}
    try:
        write_index(path, {tensor: places[tensor] for tensor in sizes}, sum(sizes.values()))
    except OSError as error:
        return str(error)
    return None

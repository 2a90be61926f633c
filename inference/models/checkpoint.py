"""Safetensors files of a checkpoint directory: what is in them, reading it, writing it.

Knows files, headers and shards; which names a model has is known by `weights.py` alone.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; names the file and, where known, the tensor."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor inside a safetensors file, not yet read."""

    file: Path
    name: str
    dtype: str
    """As safetensors spells it: 'F32', 'BF16', 'F8_E4M3', …"""
    shape: tuple[int, ...]


def list_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in directory `path`, by stored name; reads headers only.

    Raises:
        CheckpointError: no safetensors there, several without an index, an index that names a file
            or tensor that does not exist, or a file outside `path`, a truncated or foreign file, a
            Git LFS pointer.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; give the directory of a checkpoint")
    index = path / INDEX_FILE
    if index.exists():
        return _list_indexed(index)
    if not (path / SINGLE_FILE).exists() and (path / "adapter_config.json").exists():
        raise CheckpointError(
            f"{path} holds adapters, not a model; merge them into their base (`m3rl merge`) and "
            "give that directory"
        )
    files = [path / SINGLE_FILE] if (path / SINGLE_FILE).exists() else [*path.glob("*.safetensors")]
    if not files:
        raise CheckpointError(f"{path} holds no safetensors file; is the download complete?")
    if len(files) > 1:
        raise CheckpointError(
            f"{path} holds {len(files)} safetensors files but no {INDEX_FILE}; which belong "
            "together is not known, add the index"
        )
    return read_header(files[0])


def _list_indexed(index: Path) -> dict[str, StoredTensor]:
    content = index.read_bytes()
    _refuse_pointer(index, content)
    try:
        weight_map = json.loads(content)["weight_map"]
        places = {str(name): index.parent / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index with a weight_map: {error!r}") from None
    for name, file in weight_map.items():
        # As written: a download cache links the shards to files that lie elsewhere.
        if PurePath(file).is_absolute() or ".." in PurePath(file).parts:
            raise CheckpointError(f"{index} puts {name} into {file}, outside the checkpoint")
    tensors = {}
    headers: dict[Path, dict[str, StoredTensor]] = {}
    for name, file in places.items():
        if file not in headers:
            headers[file] = read_header(file)
        if name not in headers[file]:
            raise CheckpointError(f"{file} lacks {name}, which {index.name} puts there")
        tensors[name] = headers[file][name]
    return tensors


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, after checking that the file is as long as they need."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(len(_LFS_POINTER))
            _refuse_pointer(file, start)
            length = int.from_bytes(start[:8], "little")
            if size < 8 + length:
                raise CheckpointError(f"{file} is truncated within its header ({size} bytes)")
            stream.seek(8)
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
        }
        ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist; is the download complete?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} has no header of a safetensors file: {error!r}") from None
    for name, end in ends.items():
        if end > size:
            raise CheckpointError(
                f"{file} is truncated: {name} ends at byte {end}, the file at byte {size}"
            )
    return tensors


def _refuse_pointer(file: Path, content: bytes) -> None:
    if content.startswith(_LFS_POINTER):
        raise CheckpointError(f"{file} is a Git LFS pointer; fetch the file itself (git lfs pull)")


def read_tensors(stored: Iterable[tuple[str, StoredTensor]]) -> Iterator[tuple[str, Tensor]]:
    """Read tensors one at a time, memory-mapped, under the names given with them."""
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}
        for name, place in stored:
            try:
                if place.file not in handles:
                    opened = safe_open(place.file, framework="pt")
                    handles[place.file] = stack.enter_context(opened)
                tensor = handles[place.file].get_tensor(place.name)
            except SafetensorError as error:
                raise CheckpointError(f"{place.file}: cannot read {place.name}: {error}") from None
            yield name, tensor


def write_checkpoint(
    path: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int,
    prefix: str = "",
) -> None:
    """Write published tensors, in the order given, as safetensors into directory `path`.

    One file `model.safetensors`, or shards and `model.safetensors.index.json` once
    `max_shard_bytes` is passed. At most one shard is in memory. `prefix` goes before every name.

    Raises:
        CheckpointError: the directory already holds weights, a name comes twice, or a file cannot
            be written (a full disk); what was written so far stays behind.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    refuse_weights(folder)
    shards: list[list[str]] = []
    total_size = 0
    for shard in _shards(tensors, max_shard_bytes, prefix):
        total_size += sum(tensor.nbytes for tensor in shard.values())
        if repeated := [name for names in shards for name in names if name in shard]:
            raise CheckpointError(f"{repeated[0]} was given twice")
        write_shard(folder / f"shard-{len(shards):05}.safetensors", shard)
        shards.append(list(shard))
    if not shards:
        raise CheckpointError(f"no tensor to write into {folder}")
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = shard_name(i, len(shards))
        (folder / f"shard-{i:05}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        write_index(folder, weight_map, total_size)


def refuse_weights(folder: Path) -> None:
    """Of a directory that is to be written.

    Raises:
        CheckpointError: it holds weights.
    """
    if present := sorted(file.name for file in folder.glob("*.safetensors*")):
        raise CheckpointError(f"{folder} already holds {present[0]}; write into an empty directory")


def shard_name(place: int, num_shards: int) -> str:
    """Of the file at `place`, from 0, of a checkpoint of so many."""
    return (
        SINGLE_FILE if num_shards == 1 else f"model-{place + 1:05}-of-{num_shards:05}.safetensors"
    )


def write_index(folder: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write which file holds each tensor.

    Args:
        total_size: bytes of all tensors.
    """
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(
    tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int, prefix: str
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, held = {}, 0
        if prefix + name in shard:
            raise CheckpointError(f"{prefix + name} was given twice")
        shard[prefix + name] = own_copy(tensor)
        held += tensor.nbytes
    if shard:
        yield shard


def own_copy(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and not a view: safetensors refuses tensors that share memory."""
    tensor = tensor.detach().cpu().contiguous()
    is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.clone()


def write_shard(file: Path, shard: dict[str, Tensor]) -> None:
    """Write one safetensors file with the mode that the umask gives: safetensors renames a
    temporary file of mode 0600.

    Args:
        shard: see `own_copy`.

    Raises:
        CheckpointError: it cannot be written (a full disk); nothing of it stays behind.
    """
    try:
        file.touch()
        mode = stat.S_IMODE(file.stat().st_mode)
        save_file(shard, file, metadata={"format": "pt"})
        file.chmod(mode)
    except (SafetensorError, OSError) as error:
        file.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {file}: {error}") from error

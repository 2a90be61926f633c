"""Checkpoints of a run directory: all or nothing, verified before use.

    checkpoints/step_000012/   a model path: published weights in FP32, config.json, tokenizer
        optimizer/             torch.distributed.checkpoint
        ranks/00000.pt         step count and RNGs of each trainer rank
        state.json             what the driver needs to go on
        manifest.json
    checkpoints/.faulty_step_000013/   set aside when a run went on from an older one
    checkpoints/latest         text: the name of the newest complete checkpoint

`latest` is for people and scripts. A run goes by the numbers and the manifests, since a kill
between the two renames of a save leaves `latest` one behind.

Every trainer rank writes files of the weights and of its own state. A checkpoint is written under a
temporary name and becomes visible by one rename, after its manifest (size and SHA-256 of every
file) and all bytes are on disk. A crash at any moment leaves the previous ones as they were.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3rl.errors import M3rlError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"
LATEST = "latest"
MODEL_CONFIG = "config.json"
MODEL_FILES = (
    MODEL_CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""What may lie beside the weights and belongs to the model; written into every checkpoint."""
MIN_FREE_BYTES = 1 << 20
"""With less left, a failure to write is put down to the full disk."""
NUM_HASHERS = 16
"""Files that are hashed at the same time."""
_TEMPORARY = ".writing_"
_REPLACED = ".replaced_"
_FAULTY = ".faulty_"
_STEP = re.compile(r"step_(\d{6,})")


class CheckpointError(M3rlError):
    """A checkpoint could not be written, or none can be used."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    state: dict[str, Any]
    """What the driver passed to `save`."""


def save(
    run_dir: str | Path,
    step: int,
    write: Callable[[Path], None],
    state: dict[str, Any],
    *,
    keep: int,
) -> Path:
    """Write the checkpoint of `step` and delete those behind the newest `keep`.

    Checkpoints of later steps, which only a user can have put there, are left alone.

    Args:
        write: puts files and folders into the given empty directory; returns when every rank has.
        state: JSON values: everything the driver needs to go on.
        keep: how many complete checkpoints remain, this one included; at least 1.

    Returns:
        The directory of the checkpoint.

    Raises:
        CheckpointError: the disk is full or refuses to be written. Older checkpoints are intact and
            what was written of this one is removed. Other errors of `write` pass through after the
            same clean-up.
    """
    if keep < 1:
        raise ValueError(f"checkpoint.keep={keep} must be at least 1")
    folder = Path(run_dir) / "checkpoints"
    temporary = folder / f"{_TEMPORARY}{_name(step)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        temporary.mkdir()
        write(temporary)
        _write_text(temporary / STATE, json.dumps(state, indent=1))
        _write_text(temporary / MANIFEST, json.dumps(_manifest(temporary, step), indent=1))
        _sync_tree(temporary)
        final = _publish(folder, temporary, step)
    except BaseException as error:
        is_full = _is_disk_full(error, folder)
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) or is_full:
            raise CheckpointError(_write_failure(folder, step, error, is_full)) from error
        raise
    _prune(folder, step, keep)
    return final


def find_latest(run_dir: str | Path) -> Checkpoint | None:
    """The newest checkpoint whose every file has the size and hash of its manifest.

    Incomplete newer ones are renamed to `.faulty_step_…` with a warning that names the fault: what
    is saved from here on is then the newest again.

    Returns:
        None when the run has not completed any checkpoint yet.

    Raises:
        CheckpointError: there are checkpoints and none is complete: starting again from nothing is
            for the user to decide.
    """
    folder = Path(run_dir) / "checkpoints"
    if not folder.is_dir():
        return None
    for unfinished in sorted(folder.glob(f"{_TEMPORARY}*")):
        logger.warning("%s was never completed (interrupted while saving); ignored", unfinished)
    faults: dict[Path, str] = {}
    for step in _steps(folder):
        path = folder / _name(step)
        fault = find_fault(path)
        if fault is None:
            if faults:
                logger.warning("falling back to the checkpoint of step %d: %s", step, path)
                _set_aside(folder, list(faults), path)
            return Checkpoint(step, path, json.loads((path / STATE).read_text()))
        logger.warning("checkpoint %s is not complete: %s", path, fault)
        faults[path] = fault
    if faults:
        listed = "; ".join(f"{path.name}: {fault}" for path, fault in faults.items())
        raise CheckpointError(
            f"no checkpoint in {folder} is complete ({listed}); restore one, or delete "
            "them to start the run from its first step"
        )
    return None


def newest_step(run_dir: str | Path) -> int | None:
    """Step of the newest checkpoint that is whole by the sizes of its files, which is what can be
    told at once; None: there is none."""
    folder = Path(run_dir) / "checkpoints"
    steps = _steps(folder) if folder.is_dir() else []
    return next(
        (step for step in steps if find_fault(folder / _name(step), with_hashes=False) is None),
        None,
    )


def find_fault(path: Path, *, with_hashes: bool = True) -> str | None:
    """What is wrong with a checkpoint directory, or None if every file is as its manifest says.

    Args:
        with_hashes: also read every file; otherwise only look at the sizes.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is not a manifest"
    for name in (STATE, MODEL_CONFIG):
        if name not in files:
            return f"{MANIFEST} does not list {name}"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        size = file.stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
    if not with_hashes:
        return None
    for name, sha256 in zip(files, _all_sha256([path / name for name in files]), strict=True):
        if sha256 != files[name]["sha256"]:
            return f"the content of {name} does not match its hash"
    return None


@contextmanager
def model_directory(path: Path) -> Iterator[Path]:
    """A new directory to be filled inside, `writing_path(path)`, which becomes `path` all or
    nothing at the end; an older model there is replaced.

    A kill between the two renames leaves the older model as `.replaced_…` until the next call.

    Raises:
        CheckpointError: `path` holds something that is no part of a model.
    """
    path = path.resolve()
    if foreign := find_foreign(path):
        raise CheckpointError(f"{path} holds {foreign}, which is no part of a model; it stays")
    temporary = writing_path(path)
    replaced = path.with_name(f"{_REPLACED}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _sync_tree(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    temporary.rename(path)
    sync_path(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def writing_path(path: Path) -> Path:
    """Where `model_directory(path)` is filled."""
    path = path.resolve()
    return path.with_name(f"{_TEMPORARY}{path.name}")


def write_model_directory(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a `model_directory`."""
    with model_directory(path) as temporary:
        write(temporary)


def find_foreign(path: Path) -> str | None:
    """Name of something in directory `path` that is no part of a model, if there is any."""
    if path.exists() and not path.is_dir():
        return "a file"
    for entry in sorted(path.iterdir()) if path.exists() else ():
        if entry.name not in MODEL_FILES and ".safetensors" not in entry.suffixes:
            return entry.name
    return None


def read_model_files(path: Path) -> dict[str, bytes]:
    """Contents, by name, of those `MODEL_FILES` that lie in `path`."""
    return {name: (path / name).read_bytes() for name in MODEL_FILES if (path / name).exists()}


def _set_aside(folder: Path, faulty: list[Path], chosen: Path) -> None:
    """Take `faulty` checkpoints out of the count and name the `chosen` one the latest."""
    for path in faulty:
        aside = folder / f"{_FAULTY}{path.name}"
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        logger.warning("%s is kept as %s; delete it when you are done with it", path.name, aside)
    _point_to(chosen)
    sync_path(folder)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Delete what is older than the `keep`-th complete checkpoint from `step` down."""
    num_complete = 0
    for old in (s for s in _steps(folder) if s <= step):
        path = folder / _name(old)
        if num_complete >= keep:
            shutil.rmtree(path)
        elif old == step or find_fault(path, with_hashes=False) is None:
            num_complete += 1


def _publish(folder: Path, temporary: Path, step: int) -> Path:
    final = folder / _name(step)
    replaced = folder / f"{_REPLACED}{_name(step)}"
    if final.exists():  # the same step again, after a resume from an older checkpoint
        final.rename(replaced)
    temporary.rename(final)
    _point_to(final)
    sync_path(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def _point_to(checkpoint: Path) -> None:
    pointer = checkpoint.with_name(f".{LATEST}")
    _write_text(pointer, checkpoint.name + "\n")
    pointer.rename(checkpoint.with_name(LATEST))


def _remove_leftovers(folder: Path) -> None:
    for prefix in (_TEMPORARY, _REPLACED):
        for leftover in folder.glob(f"{prefix}*"):
            shutil.rmtree(leftover)


def _is_disk_full(error: BaseException, folder: Path) -> bool:
    """safetensors raises an error of its own with the text inside, torch's writer one without."""
    if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
        return True
    is_left = folder.is_dir() and shutil.disk_usage(folder).free >= MIN_FREE_BYTES
    return isinstance(error, Exception) and not is_left


def _write_failure(folder: Path, step: int, error: BaseException, is_full: bool) -> str:
    reason = "the disk is full" if is_full else str(error)
    kept = [_name(s) for s in _steps(folder)] if folder.is_dir() else []
    return (
        f"could not save the checkpoint of step {step} in {folder}: {reason}. "
        f"Older checkpoints are intact ({', '.join(kept) or 'there are none'}); free space or set "
        "checkpoint.keep lower"
    )


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _steps(folder: Path) -> list[int]:
    """Steps that have a directory under their final name, newest first."""
    matches = (_STEP.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir())
    return sorted((int(m.group(1)) for m in matches if m), reverse=True)


def _manifest(path: Path, step: int) -> dict[str, Any]:
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    entries = {
        str(file.relative_to(path)): {"bytes": file.stat().st_size, "sha256": sha256}
        for file, sha256 in zip(files, _all_sha256(files), strict=True)
    }
    return {"step": step, "files": entries}


def _all_sha256(files: list[Path]) -> list[str]:
    """Hashing lets go of the interpreter, so threads share the work."""
    with ThreadPoolExecutor(NUM_HASHERS) as pool:
        return list(pool.map(_sha256, files))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_tree(path: Path) -> None:
    for entry in sorted(path.rglob("*")):
        sync_path(entry)
    sync_path(path)


def sync_path(path: Path) -> None:
    """Returns once the bytes of a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

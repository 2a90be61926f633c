"""Safetensors files of a checkpoint folder by their headers alone; standard library only."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

READABLE_DTYPES = ("F32", "BF16", "F16")
COMPARED_BYTES = 64 << 20
"""Read at a time where stored tensors are compared."""


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of the checkpoint at `path`.

    Raises:
        ValueError: there are none, or the index is broken.
    """
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file() and (path / "adapter_config.json").is_file():
        raise ValueError(
            f"{path}: holds adapters, not weights; `m3rl merge {path} OUT` merges them into their "
            "base: then name OUT"
        )
    if not index.is_file():
        raise ValueError(
            f"{path}: neither model.safetensors nor model.safetensors.index.json; copy the weights "
            "there, or make some with `m3rl sft CONFIG sft.init=random`"
        )
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{index}: not a safetensors index ({error}); copy it again") from None
    return [path / name for name in sorted(names)]


def read_header(file: Path) -> dict[str, Any]:
    """Entries of a safetensors header by tensor name.

    Raises:
        ValueError: the file is missing, no safetensors file, or shorter than its header says.
    """
    if not file.is_file():
        raise ValueError(f"{file}: missing; the index names it, copy it again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{file}: cut inside its header ({size:,} bytes); copy it again")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{file}: not a safetensors file; copy it again") from None
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise ValueError(f"{file}: {name} has no dtype, shape and place; copy the file again")
    needed = 8 + length + max((e["data_offsets"][1] for e in header.values()), default=0)
    if size != needed:
        raise ValueError(
            f"{file}: has {size:,} bytes where its header says {needed:,}; "
            "it is truncated or damaged, copy it again"
        )
    return header


def hold_the_same(one: tuple[Path, str], other: tuple[Path, str]) -> bool:
    """Whether two stored tensors, each (file, name), have one dtype, one shape and the same bytes.

    Raises:
        ValueError: see `read_header`.
    """
    entries = [(file, read_header(file)[name]) for file, name in (one, other)]
    (_, a), (_, b) = entries
    if (a["dtype"], a["shape"]) != (b["dtype"], b["shape"]):
        return False
    left = a["data_offsets"][1] - a["data_offsets"][0]
    with one[0].open("rb") as here, other[0].open("rb") as there:
        for stream, (_, entry) in zip((here, there), entries, strict=True):
            start = 8 + struct.unpack("<Q", stream.read(8))[0]
            stream.seek(start + entry["data_offsets"][0])
        while left > 0:
            size = min(left, COMPARED_BYTES)
            if here.read(size) != there.read(size):
                return False
            left -= size
    return True

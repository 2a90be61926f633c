"""Published tensors in a checkpoint: what is there, whether it is right, and its values.

Which tensors there are, and where each lives, stands in `name_map.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor

from inference.config import ModelConfig
from inference.kernels.mxfp8 import BLOCK_SIZE, MAX_SCALE, SCALE_SUFFIX, MXFP8Tensor
from inference.models.checkpoint import (
    CheckpointError,
    StoredTensor,
    list_tensors,
    own_copy,
    read_tensors,
    refuse_weights,
    shard_name,
    write_checkpoint,
    write_index,
    write_shard,
)
from inference.models.name_map import (
    Placement,
    TensorSpec,
    published_tensors,
    runtime_placement,
    transformers_placement,
)

__all__ = [
    "CheckpointError",
    "Placement",
    "PublishedTensor",
    "TensorSpec",
    "check_checkpoint",
    "own_copy",
    "published_tensors",
    "read_checkpoint",
    "read_plain",
    "refuse_weights",
    "runtime_placement",
    "shard_name",
    "transformers_placement",
    "write_checkpoint",
    "write_index",
    "write_shard",
]

TEXT_PREFIX = "language_model."
_VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")

logger = logging.getLogger(__name__)


@overload
def read_checkpoint(
    path: str | Path,
    config: ModelConfig,
    *,
    allow_mxfp8: Literal[False] = False,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, Tensor]]: ...
@overload
def read_checkpoint(
    path: str | Path,
    config: ModelConfig,
    *,
    allow_mxfp8: bool,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, Tensor | MXFP8Tensor]]: ...
def read_checkpoint(
    path: str | Path,
    config: ModelConfig,
    *,
    allow_mxfp8: bool = False,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, Tensor]] | Iterator[tuple[str, Tensor | MXFP8Tensor]]:
    """Every published tensor of the text model once, in the order of `published_tensors`.

    Names may carry the `language_model.` prefix; vision and MTP tensors are skipped with a notice.
    Dtypes are as stored. Names and shapes are all checked before the first tensor is read.

    Args:
        allow_mxfp8: give tensors that are stored in MXFP8 (any of those that the released
            checkpoint quantises) as `MXFP8Tensor`; False: refuse them.
        only: names that are wanted; None: all. All are checked.

    Raises:
        CheckpointError: an unknown or missing name, a wrong shape, a quantised tensor that is not
            allowed or not MXFP8, a truncated file; names the file and the tensor.
    """
    plan = check_checkpoint(path, config, allow_mxfp8=allow_mxfp8)
    return _read([one for one in plan if only is None or one.spec.name in only])


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """Where a checkpoint stores a published tensor."""

    spec: TensorSpec
    stored: StoredTensor
    scale: StoredTensor | None
    """Of an MXFP8 tensor."""


def check_checkpoint(
    path: str | Path, config: ModelConfig, *, allow_mxfp8: bool
) -> list[PublishedTensor]:
    """As `read_checkpoint`, which reads what is found here."""
    folder = Path(path)
    stored = _text_tensors(list_tensors(folder))
    specs = published_tensors(config)
    if missing := [spec.name for spec in specs if spec.name not in stored]:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(specs)} tensors of its config.json, "
            f"the first is {missing[0]}"
        )
    expected = {spec.name for spec in specs}
    for name, tensor in stored.items():
        if name not in expected and name.removesuffix(SCALE_SUFFIX) not in expected:
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} is no tensor of the model in config.json; only "
                "published names are read (not those that transformers' save_pretrained writes)"
            )
    return [
        _checked(spec, stored[spec.name], stored.get(spec.name + SCALE_SUFFIX), allow_mxfp8)
        for spec in specs
    ]


def _read(plan: Sequence[PublishedTensor]) -> Iterator[tuple[str, Tensor | MXFP8Tensor]]:
    places = [(one.spec.name, place) for one in plan for place in (one.stored, one.scale) if place]
    tensors = read_tensors(places)
    for one in plan:
        name, tensor = next(tensors)
        if one.scale is None:
            yield name, tensor
            continue
        _, scale = next(tensors)
        if bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise CheckpointError(f"{one.stored.file}: {one.stored.name} holds NaN")
        if (largest := int(scale.max())) > MAX_SCALE:
            raise CheckpointError(
                f"{one.scale.file}: {one.scale.name} holds the byte {largest}; one above "
                f"{MAX_SCALE} means NaN (255) or weights too large to serve"
            )
        yield name, MXFP8Tensor(tensor, scale)


def read_plain(
    path: str | Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    ignored: Container[str] = (),
    only: Container[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a checkpoint of any architecture, in the order of `shapes`, dtypes as stored.

    Args:
        shapes: of every tensor that it must hold, by name.
        ignored: names that it may hold besides.
        only: names that are wanted; None: all. All are checked.

    Raises:
        CheckpointError: an unknown or missing name, a wrong shape, another dtype than F32, BF16 or
            F16, a truncated file; names the file and the tensor.
    """
    folder = Path(path)
    stored = list_tensors(folder)
    if missing := [name for name in shapes if name not in stored]:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(shapes)} tensors of its config.json, "
            f"the first is {missing[0]}"
        )
    for name, tensor in stored.items():
        if name not in shapes and name not in ignored:
            raise CheckpointError(
                f"{tensor.file}: {name} is no tensor of the model that transformers makes of "
                "config.json"
            )
        if name in shapes and tensor.shape != shapes[name]:
            raise CheckpointError(
                f"{tensor.file}: {name} has shape {list(tensor.shape)}, config.json asks for "
                f"{list(shapes[name])}"
            )
        if name in shapes and tensor.dtype not in ("F32", "BF16", "F16"):
            raise CheckpointError(
                f"{tensor.file}: {name} is stored as {tensor.dtype}; only F32, BF16 and F16 are "
                "read, so give the unquantised checkpoint"
            )
    return read_tensors([(n, stored[n]) for n in shapes if only is None or n in only])


def _text_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Stored tensors of the text model by published name."""
    text: dict[str, StoredTensor] = {}
    num_vision = num_mtp = 0
    for stored_name, tensor in stored.items():
        name = stored_name.removeprefix(TEXT_PREFIX)
        if name.startswith(_VISION_PREFIXES):
            num_vision += 1
        elif "mtp" in name.split("."):
            num_mtp += 1
        elif name in text:
            raise CheckpointError(
                f"{tensor.file}: {name} is stored with and without the prefix {TEXT_PREFIX!r}"
            )
        else:
            text[name] = tensor
    if num_vision or num_mtp:
        logger.info("skipped %d vision and %d MTP tensors: text only", num_vision, num_mtp)
    return text


def _checked(
    spec: TensorSpec, tensor: StoredTensor, scale: StoredTensor | None, allow_mxfp8: bool
) -> PublishedTensor:
    if tensor.shape != spec.shape:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)}, config.json asks for "
            f"{list(spec.shape)}"
        )
    if tensor.dtype == "F8_E4M3" and allow_mxfp8:
        _check_scale(spec, tensor, scale)
        return PublishedTensor(spec, tensor, scale)
    if tensor.dtype not in ("F32", "BF16", "F16"):
        allowed = "F32, BF16, F16 and MXFP8 are" if allow_mxfp8 else "F32, BF16 and F16 are"
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} is stored as {tensor.dtype}; only {allowed} read, so "
            "give the unquantised checkpoint"
        )
    if scale is not None:
        raise CheckpointError(
            f"{scale.file}: {scale.name} are scales of a weight that is stored as {tensor.dtype}"
        )
    if spec.is_fp32 and tensor.dtype != "F32":
        logger.warning(
            "%s: %s is stored as %s, not FP32: experts may be chosen differently",
            tensor.file,
            tensor.name,
            tensor.dtype,
        )
    return PublishedTensor(spec, tensor, None)


def _check_scale(spec: TensorSpec, tensor: StoredTensor, scale: StoredTensor | None) -> None:
    """Refuse an FP8 tensor that is not MXFP8, or never quantised."""
    if not spec.is_quantized("mxfp8_released"):
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} is stored as {tensor.dtype}; no MXFP8 checkpoint "
            "quantises it"
        )
    if scale is None:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} is stored as {tensor.dtype} and its scales "
            f"{tensor.name}{SCALE_SUFFIX} are missing"
        )
    if spec.shape[-1] % BLOCK_SIZE:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has K={spec.shape[-1]}, no multiple of MXFP8's block of "
            f"{BLOCK_SIZE}"
        )
    shape = (*spec.shape[:-1], spec.shape[-1] // BLOCK_SIZE)
    if scale.dtype != "U8" or scale.shape != shape:
        raise CheckpointError(
            f"{scale.file}: {scale.name} is {scale.dtype} {list(scale.shape)}; scales of MXFP8 are "
            f"U8 {list(shape)}, other formats of FP8 are not read"
        )

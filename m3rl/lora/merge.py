"""A checkpoint of a run becomes a model directory: `m3rl merge`.

Adapters are merged into the model that they were trained on, tensor by tensor, to the bits that
their trainer computed with; a checkpoint that holds all weights is rounded to the dtype asked for.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from inference.config import ConfigError as ModelError
from inference.config import ModelConfig
from inference.kernels.mxfp8 import MXFP8Tensor, dequantize, quantize
from inference.kernels.tensor_hash import combine, tensor_hash, unit_of
from inference.models.weights import CheckpointError as RuntimeCheckpointError
from inference.models.weights import (
    Placement,
    TensorSpec,
    published_tensors,
    read_checkpoint,
    read_plain,
    transformers_placement,
    write_checkpoint,
)
from m3rl.checkpoint import (
    LATEST,
    MANIFEST,
    MODEL_CONFIG,
    CheckpointError,
    find_fault,
    read_model_files,
    write_model_directory,
)
from m3rl.lora.adapters import merge_into
from m3rl.lora.files import CONFIG_FILE, StoredAdapters
from m3rl.model_layout import HEAD, is_m3, whole_layout

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MAX_SHARD_BYTES = 5 << 30

logger = logging.getLogger(__name__)


def merge_checkpoint(
    source: Path, target: Path, *, base: Path | None = None, dtype: str = "bfloat16"
) -> None:
    """Write the model that checkpoint `source` stands for as directory `target`, all or nothing.

    One tensor and one file are in memory. The tensors of M3's router stay FP32.

    Args:
        source: a checkpoint, or a run directory, whose latest one is taken.
        base: the model that adapters were trained on; None: where it was then.
        dtype: of `DTYPES`.

    Raises:
        CheckpointError: `target` exists; `source` is incomplete, or `base` another model than the
            adapters were trained on.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists; give a path that does not")
    source = _checkpoint(source)
    is_adapted = (source / CONFIG_FILE).is_file()
    if base is not None and not is_adapted:
        raise CheckpointError(f"{source} holds all weights, no adapters; leave the base out")
    files = read_model_files(source)
    files[MODEL_CONFIG] = _without_quantization(files[MODEL_CONFIG])

    def write(folder: Path) -> None:
        tensors = _merged(source, base) if is_adapted else _stored(source)
        fp32 = _fp32_names(source)
        rounded = ((n, t if n in fp32 else t.to(DTYPES[dtype])) for n, t in tensors)
        write_checkpoint(folder, rounded, max_shard_bytes=MAX_SHARD_BYTES)
        for name, content in files.items():
            (folder / name).write_bytes(content)

    try:
        write_model_directory(target, write)
    except RuntimeCheckpointError as error:
        raise CheckpointError(str(error)) from error
    logger.info("%s: the model of %s in %s", target, source, dtype)


def _checkpoint(path: Path) -> Path:
    """The checkpoint meant by `path`, once it is known to be whole."""
    latest = path / "checkpoints" / LATEST
    if latest.is_file():
        path = latest.with_name(latest.read_text().strip())
    if not (path / MODEL_CONFIG).is_file():
        raise CheckpointError(
            f"{path} is neither a checkpoint nor a run directory with one (no {MODEL_CONFIG}); "
            "give for example RUN/checkpoints/step_000040"
        )
    if (path / MANIFEST).is_file() and (fault := find_fault(path)) is not None:
        raise CheckpointError(f"{path} is not complete: {fault}; take another checkpoint")
    return path


def _model(path: Path) -> ModelConfig:
    try:
        return ModelConfig.from_pretrained(path)
    except ModelError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _without_quantization(content: bytes) -> bytes:
    """A config.json for weights that are not quantised."""
    raw = json.loads(content)
    sections = [s for s in (raw, raw.get("text_config")) if s and "quantization_config" in s]
    for section in sections:
        del section["quantization_config"]
    return (json.dumps(raw, indent=2) + "\n").encode() if sections else content


def _fp32_names(source: Path) -> set[str]:
    """Tensors that stay FP32 in every checkpoint."""
    if not is_m3(source):
        return set()
    return {spec.name for spec in published_tensors(_model(source)) if spec.is_fp32}


def _stored(source: Path) -> Iterator[tuple[str, Tensor]]:
    if is_m3(source):
        return read_checkpoint(source, _model(source))
    shapes = {slot.name: slot.shape for slot in whole_layout(source, "float32")}
    return read_plain(source, shapes, ignored=(HEAD,))


def _merged(source: Path, base: Path | None) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors in the dtype of its trainer.

    Raises:
        CheckpointError: behind the last one, if the base is another one.
    """
    adapters = StoredAdapters.open(source)
    base = Path(adapters.model_path) if base is None else base
    if not (base / MODEL_CONFIG).is_file():
        raise CheckpointError(
            f"{source} holds adapters of the model {base}, which is not there; name the directory "
            "where it is now with --base"
        )
    model = _model(base)
    if model != _model(source):
        raise CheckpointError(f"{base} is another model than {source} was trained on; see --base")
    places, hashes = transformers_placement(model), []
    specs = {spec.name: spec for spec in published_tensors(model)}
    merge = _merger(adapters)
    for name, tensor in read_checkpoint(base, model, allow_mxfp8=True):
        held = _as_held(specs[name], tensor, adapters)
        unit = unit_of(held.dtype, held.shape[-1:])
        hashes.append(tensor_hash(held, name=name, unit=unit))
        yield name, merge(places[name], held)
    if (found := f"{combine(hashes):016x}") != adapters.base_hash:
        raise CheckpointError(
            f"the weights in {base} have the hash {found}, and those that {source} was trained on "
            f"{adapters.base_hash}; name that model's directory with --base"
        )


def _as_held(spec: TensorSpec, tensor: Tensor | MXFP8Tensor, adapters: StoredAdapters) -> Tensor:
    """A tensor of the base as its trainer held it."""
    dtype = torch.float32 if spec.is_fp32 else DTYPES[adapters.dtype]
    if adapters.mxfp8_experts and spec.role == "expert" and isinstance(tensor, Tensor):
        tensor = quantize(tensor.bfloat16())
    return dequantize(*tensor, dtype) if isinstance(tensor, MXFP8Tensor) else tensor.to(dtype)


def _merger(adapters: StoredAdapters) -> Callable[[Placement, Tensor], Tensor]:
    """(place of a published tensor, its base) -> it with its adapter, if it has one.

    Tensors of one parameter follow one another, so one pair is kept at a time.
    """
    found: dict[str, tuple[Tensor, Tensor] | None] = {}

    def merge(place: Placement, base: Tensor) -> Tensor:
        if place.param not in found:
            found.clear()
            found[place.param] = adapters.pair(place.param)
        pair = found[place.param]
        if pair is None:
            return base
        a, b = pair
        if a.ndim == 3:
            expert, *rows = place.index
            a, b = a[expert], b[expert][tuple(rows)]
        else:
            b = b[place.index]
        out = torch.empty_like(base)
        merge_into(base, a, b, adapters.scale, out)
        return out

    return merge

"""A BF16 checkpoint becomes an MXFP8 one: `python -m inference.quantize IN OUT`.

Names, dtypes and `quantization_config` are those of the released MXFP8 checkpoint, and the bytes
are those that an engine makes of the same weights when it receives them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from inference.config import ConfigError, ModelConfig
from inference.kernels.mxfp8 import BLOCK_SIZE, MAX_SCALE, SCALE_SUFFIX, quantize
from inference.models.checkpoint import (
    CheckpointError,
    StoredTensor,
    list_tensors,
    read_tensors,
    write_checkpoint,
)
from inference.models.config_json import read_json
from inference.models.weights import PublishedTensor, TensorSpec, check_checkpoint

SCOPES = {"experts": "mxfp8", "released": "mxfp8_released"}
"""What is quantised, as `EngineConfig.quantization` names it."""
MAX_SHARD_BYTES = 5 * 10**9
NEVER_QUANTIZED = (
    "lm_head",
    "model.embed_tokens",
    "vision_tower",
    "multi_modal_projector",
    "patch_merge_mlp",
)
_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")

logger = logging.getLogger(__name__)


def quantize_checkpoint(
    source: str | Path, target: str | Path, *, scope: str = "experts", device: str = "cpu"
) -> None:
    """Write the checkpoint in directory `source` in MXFP8 as directory `target`.

    Wider weights are rounded to BF16 first; what is not quantised stays as it is, as do the other
    files in `source`. In memory is at most a layer, at most 5 GB of it. `target` appears when
    it is complete: until then it is `.NAME.PID.partial` beside it, which every exception removes.
    One that is there already is refused, never removed: the process may run on another machine.

    Args:
        scope: 'experts', the routed ones; 'released', also attention with the index projections,
            dense MLPs and shared experts.
        device: where the bytes are computed, 'cpu' or 'cuda'.

    Raises:
        CheckpointError: `target` exists, lies in `source` or has a partial folder beside it;
            `source` cannot be read or is quantised already; a weight is NaN, infinite or too large
            for the kernels, or its K no multiple of 32, by name; there is no such device.
        ConfigError: config.json is not a MiniMax-M3's.
    """
    source, target = _checked_paths(source, target)
    if scope not in SCOPES:
        raise CheckpointError(f"scope={scope!r}; use one of {', '.join(SCOPES)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise CheckpointError(f"device={device!r}, but torch sees no CUDA device; use 'cpu'")
    config = ModelConfig.from_pretrained(source)
    raw = read_json(source / "config.json")
    for section in (raw, raw.get("text_config") or {}):
        if found := section.get("quantization_config"):
            method = found.get("quant_method") if isinstance(found, dict) else found
            raise CheckpointError(
                f"{source} is quantised already (quant_method {method!r}); give the BF16 checkpoint"
            )
    published = check_checkpoint(source, config, allow_mxfp8=False)
    is_quantized = [one.spec.is_quantized(SCOPES[scope]) for one in published]
    for one, is_it in zip(published, is_quantized, strict=True):
        if is_it and one.spec.shape[-1] % BLOCK_SIZE:
            raise CheckpointError(
                f"{one.stored.file}: {one.stored.name} has K={one.spec.shape[-1]}, which is no "
                f"multiple of {BLOCK_SIZE}, the block of a scale"
            )
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        write_checkpoint(
            partial,
            _tensors(source, published, is_quantized, device),
            max_shard_bytes=_shard_bytes(published),
        )
        _copy_files(source, partial)
        raw["quantization_config"] = quantization_config(
            {one.stored.name: one.spec for one in published}, SCOPES[scope]
        )
        (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    logger.info("%s: %d of %d tensors in MXFP8", target, sum(is_quantized), len(published))


def _checked_paths(source: str | Path, target: str | Path) -> tuple[Path, Path]:
    for name, path in (("IN", source), ("OUT", target)):
        if not str(path):
            raise CheckpointError(f"{name} is empty; give the path of a directory")
    source, target = Path(source), Path(target)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists; give a path that does not")
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a directory; give that of a MiniMax-M3 checkpoint")
    if target.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{target} lies in {source}; give a path outside it")
    partial = re.compile(rf"\.{re.escape(target.name)}\.(\d+)\.partial")
    for folder in target.parent.glob(".*.partial"):
        if found := partial.fullmatch(folder.name):
            raise CheckpointError(
                f"{folder} is there: process {found[1]} is making {target}, or was killed before "
                "it had; remove the folder if it no longer runs"
            )
    return source, target


def quantization_config(specs: Mapping[str, TensorSpec], quantization: str) -> dict[str, Any]:
    """As the released checkpoint has it; every other module that is not quantised is listed too.

    `specs`: published tensors by stored name; `quantization`: as `EngineConfig` names it.
    """
    ignored = [
        name.removesuffix(".weight")
        for name, spec in specs.items()
        if _is_module(spec) and not spec.is_quantized(quantization)
    ]
    return {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, BLOCK_SIZE],
        "ignored_layers": [*NEVER_QUANTIZED, *ignored],
    }


def _is_module(spec: TensorSpec) -> bool:
    """A linear layer that a reader of `ignored_layers` might take for a quantised one."""
    is_router = spec.role == "router" and len(spec.shape) == 2
    return is_router or spec.is_quantized("mxfp8_released")


def _shard_bytes(published: Sequence[PublishedTensor]) -> int:
    """Of BF16 tensors, a layer's: a shard is in memory until it is written."""
    sizes: dict[str, int] = defaultdict(int)
    for one in published:
        sizes[one.spec.bucket] += torch.Size(one.spec.shape).numel() * 2
    return min(MAX_SHARD_BYTES, max(sizes.values()))


def _tensors(
    source: Path, published: Sequence[PublishedTensor], is_quantized: Sequence[bool], device: str
) -> Iterator[tuple[str, Tensor]]:
    """Everything that the new checkpoint stores, one read at a time."""
    bucket = None
    for one, is_it in zip(published, is_quantized, strict=True):
        if one.spec.bucket != bucket:
            bucket = one.spec.bucket
            logger.info("%s", bucket)
        stored, tensor = one.stored, _read(one.stored)
        if not is_it:
            if not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"{stored.file}: {stored.name} holds NaN or infinite values")
            yield stored.name, tensor
            continue
        try:
            values, scale = quantize(tensor.to(device).to(torch.bfloat16))
        except ValueError as error:
            raise CheckpointError(f"{stored.file}: {stored.name}: {error}") from None
        if bool((scale > MAX_SCALE).any()):
            raise CheckpointError(
                f"{stored.file}: {stored.name} holds magnitudes above "
                f"{448 * 2 ** (MAX_SCALE - 127)}, the largest that the engine serves in MXFP8"
            )
        yield stored.name, values
        yield stored.name + SCALE_SUFFIX, scale
    text = {one.stored.name for one in published}
    for name, stored in list_tensors(source).items():
        if name not in text:
            yield name, _read(stored)


def _read(stored: StoredTensor) -> Tensor:
    """One tensor; its file is not kept open, so that no more of it stays mapped."""
    [(_, tensor)] = read_tensors([(stored.name, stored)])
    return tensor


def _copy_files(source: Path, target: Path) -> None:
    """Tokenizer, generation config and whatever else lies beside the weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name != "config.json" and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, target / file.name)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """As Ctrl-C, and once only: a second SIGTERM does not stop the cleaning up."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m inference.quantize", description="Quantise a BF16 checkpoint to MXFP8."
    )
    parser.add_argument("source", metavar="IN", help="directory of a published BF16 checkpoint")
    parser.add_argument("target", metavar="OUT", help="directory to make; must not exist")
    parser.add_argument(
        "--scope",
        choices=list(SCOPES),
        default="experts",
        help="experts: the routed ones (default); released: also attention, dense MLPs and shared "
        "experts, as in the released MXFP8 checkpoint",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where it is computed"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        quantize_checkpoint(
            options.source, options.target, scope=options.scope, device=options.device
        )
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        print(f"error: stopped by {signal.Signals(number).name}", file=sys.stderr)
        return 128 + number
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Of which tensors a model consists, from its files alone: what trainer and replicas both hold.

MiniMax-M3: the published names that its config.json gives. Any other architecture: the names of its
own checkpoint, from the safetensors headers, in the order of the forward pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inference.config import ModelConfig
from inference.models.name_map import published_tensors
from m3rl.errors import M3rlError
from m3rl.types import TensorSlot
from m3rl.weight_files import READABLE_DTYPES, hold_the_same, read_header, weight_files

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Tied embeddings are stored under both names by some, with the same values."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class ModelLayoutError(M3rlError):
    """The files of a model do not say what it consists of."""


def read_model_config(path: Path) -> dict[str, Any]:
    """Content of config.json.

    Raises:
        ModelLayoutError: it is missing or no JSON object.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ModelLayoutError(f"{file}: missing; model.path names a checkpoint folder")
    return _read_object(file)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelLayoutError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ModelLayoutError(f"{file}: holds no JSON object")
    return content


def is_m3(path: Path) -> bool:
    """Whether the model at `path` is a MiniMax-M3, which the bundled runtime and trainer know.

    Raises:
        ModelLayoutError: see `read_model_config`.
    """
    model_type = read_model_config(path).get("model_type")
    if not isinstance(model_type, str):
        raise ModelLayoutError(
            f"{path / 'config.json'}: model_type is {model_type!r}, no name of an architecture"
        )
    return model_type.startswith("minimax_m3")


def stop_ids(path: Path) -> tuple[int, ...]:
    """Tokens that end a completion: eos_token_id of config.json and generation_config.json.

    Raises:
        ModelLayoutError: see `read_model_config`.
    """
    raw = read_model_config(path)
    found = [part.get("eos_token_id") for part in (raw, raw.get("text_config") or {})]
    generation = path / "generation_config.json"
    if generation.is_file():
        found.append(_read_object(generation).get("eos_token_id"))
    ids = [one if isinstance(one, list) else [one] for one in found if one is not None]
    tokens = [token for each in ids for token in each]
    if odd := [token for token in tokens if type(token) is not int]:
        raise ModelLayoutError(
            f"{path / 'config.json'}: eos_token_id has {odd[0]!r}, no token id; write its number"
        )
    return tuple(dict.fromkeys(tokens))


def max_positions(path: Path) -> int:
    """Tokens of the longest sequence that the model has positions for.

    Raises:
        ModelLayoutError: config.json does not say.
    """
    if is_m3(path):
        return ModelConfig.from_pretrained(path).max_position_embeddings
    positions = read_model_config(path).get("max_position_embeddings")
    if not isinstance(positions, int) or isinstance(positions, bool) or positions < 1:
        raise ModelLayoutError(
            f"{path / 'config.json'}: max_position_embeddings is {positions!r}, no number of tokens"
        )
    return positions


def whole_layout(path: Path, dtype: str) -> list[TensorSlot]:
    """Every tensor of the text model at `path` as one slot, in the order of the forward pass.

    Args:
        dtype: of the wire, 'float32' or 'bfloat16'; what M3 keeps in FP32 is 'float32' anyway.

    Raises:
        ModelLayoutError: no readable weight files (not needed for M3), a tensor twice, one that is
            no floating-point tensor, or a tied head with values of its own.
    """
    if is_m3(path):
        return [
            _slot(spec.name, "float32" if spec.is_fp32 else dtype, spec.shape, spec.bucket)
            for spec in published_tensors(ModelConfig.from_pretrained(path))
        ]
    found: dict[str, tuple[int, ...]] = {}
    files: dict[str, Path] = {}
    try:
        headers = [(file, read_header(file)) for file in weight_files(path)]
    except ValueError as error:
        raise ModelLayoutError(str(error)) from None
    for file, header in headers:
        for name, entry in header.items():
            if entry["dtype"] not in READABLE_DTYPES:
                raise ModelLayoutError(
                    f"{file}: {name} is {entry['dtype']}; {', '.join(READABLE_DTYPES)} can be "
                    "trained and synced"
                )
            if name in found:
                raise ModelLayoutError(f"{file}: {name} is in another file, too")
            found[name] = tuple(entry["shape"])
            files[name] = file
    is_tied = read_model_config(path).get("tie_word_embeddings") is True
    if is_tied and {EMBEDDING, HEAD} <= found.keys():
        del found[HEAD]
        if not hold_the_same((files[EMBEDDING], EMBEDDING), (files[HEAD], HEAD)):
            raise ModelLayoutError(
                f"{path}: config.json ties embedding and head (tie_word_embeddings: true), and "
                f"{HEAD} has other values than {EMBEDDING}; set tie_word_embeddings: false there"
            )
    return layout_of(found, dtype)


def layout_of(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> list[TensorSlot]:
    """Tensors of a checkpoint that is no M3 as whole slots, in the order of the forward pass."""
    return [_slot(name, dtype, shapes[name], _bucket(name)) for name in sorted(shapes, key=_order)]


def _slot(name: str, dtype: str, shape: tuple[int, ...], bucket: str) -> TensorSlot:
    return TensorSlot(name, dtype, shape, tuple((0, size) for size in shape), bucket)


def _bucket(name: str) -> str:
    layer = _LAYER.search(name)
    if layer is not None:
        return f"layer.{layer[1]}"
    return "pre" if "embed" in name else "post"


def _order(name: str) -> tuple[int, int, str]:
    bucket = _bucket(name)
    place = {"pre": 0, "post": 2}.get(bucket, 1)
    number = int(bucket.removeprefix("layer.")) if place == 1 else 0
    return place, number, re.sub(r"\d+", lambda digits: digits[0].zfill(6), name)

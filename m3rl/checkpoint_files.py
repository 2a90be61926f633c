"""Looks at a checkpoint folder without loading it: tokenizer, chat template, safetensors headers.

Standard library only: `m3rl check` must answer before torch or transformers could be imported.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m3rl.rollout.chat import END, MARKERS

READABLE_DTYPES = ("F32", "BF16", "F16")
SCALE_SUFFIX = "_scale_inv"
"""Behind the name of a tensor in MXFP8: its scales, which are no parameters."""


def tokenizer_problems(path: Path, vocab_size: int | None, eos_ids: Sequence[int]) -> list[str]:
    """What is wrong with tokenizer and chat template of the checkpoint at `path`."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return [f"{file}: missing; copy the tokenizer of the checkpoint there"]
    try:
        tokenizer = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return [f"{file}: not valid JSON ({error}); copy it again"]
    ids = {str(t["content"]): int(t["id"]) for t in tokenizer.get("added_tokens", [])}
    if missing := [marker for marker in MARKERS if marker not in ids]:
        return [
            f"{file}: lacks the markers {' '.join(missing)} as single tokens; use the tokenizer of "
            "an M3 checkpoint, or add them as added_tokens"
        ]
    problems = []
    if vocab_size is not None and (beyond := max(ids.values())) >= vocab_size:
        problems.append(
            f"{file}: has token id {beyond}, and config.json a vocab_size of {vocab_size}; "
            "they belong to different models"
        )
    if eos_ids and ids[END] not in eos_ids:
        problems.append(
            f"{file}: {END} is token {ids[END]}, and the model ends at eos_token_id "
            f"{list(eos_ids)}; add it to eos_token_id in config.json or generation_config.json"
        )
    return problems + _template_problems(path)


def _template_problems(path: Path) -> list[str]:
    if (path / "chat_template.jinja").is_file():
        return []
    settings = path / "tokenizer_config.json"
    if settings.is_file():
        try:
            if json.loads(settings.read_text(encoding="utf-8")).get("chat_template"):
                return []
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            return [f"{settings}: not valid JSON ({error}); copy it again"]
    return [f"{path / 'chat_template.jinja'}: missing; copy the chat template of the checkpoint"]


def weight_problems(path: Path, num_parameters: int, *, allow_mxfp8: bool = False) -> list[str]:
    """What is wrong with the weight files, from their headers: missing, cut, or another model's.

    The runtime reads MXFP8 too (`allow_mxfp8`), and says itself what is wrong with its scales.
    """
    try:
        files = weight_files(path)
    except ValueError as error:
        return [str(error)]
    problems: list[str] = []
    text_parameters = 0
    for file in files:
        try:
            tensors = read_header(file)
        except ValueError as error:
            problems.append(str(error))
            continue
        for tensor, entry in tensors.items():
            if not _is_text(tensor) or (allow_mxfp8 and tensor.endswith(SCALE_SUFFIX)):
                continue
            text_parameters += math.prod(entry["shape"])
            if entry["dtype"] not in (*READABLE_DTYPES, *(["F8_E4M3"] if allow_mxfp8 else [])):
                return [
                    f"{file}: {tensor} is {entry['dtype']}; the trainer reads "
                    f"{', '.join(READABLE_DTYPES)}: use the BF16 checkpoint (MXFP8 is for "
                    "policy.lora, `m3rl rollout` and `m3rl eval`)"
                ]
    if not problems and text_parameters != num_parameters:
        problems.append(
            f"{path}: the weight files hold {text_parameters:,} parameters of the text model, and "
            f"config.json describes {num_parameters:,}; they belong to different models, or files "
            "are missing"
        )
    return problems


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
    needed = 8 + length + max((e["data_offsets"][1] for e in header.values()), default=0)
    if size != needed:
        raise ValueError(
            f"{file}: has {size:,} bytes where its header says {needed:,}; "
            "it is truncated or damaged, copy it again"
        )
    return header


def _is_text(name: str) -> bool:
    """A tensor of the text model; vision and multi-token-prediction tensors are not read."""
    return name.removeprefix("language_model.").startswith(("model.", "lm_head."))

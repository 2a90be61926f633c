"""Looks at a checkpoint folder without loading it: tokenizer, chat template, safetensors headers.

Standard library only: `m3rl check` must answer before torch or transformers could be imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m3rl.rollout.markers import END, MARKERS
from m3rl.weight_files import READABLE_DTYPES, read_header, weight_files

SCALE_SUFFIX = "_scale_inv"
"""Behind the name of a tensor in MXFP8: its scales, which are no parameters."""


def tokenizer_problems(path: Path, vocab_size: int | None, eos_ids: Sequence[int]) -> list[str]:
    """What is wrong with tokenizer and chat template of the checkpoint at `path`."""
    tokenizer, faults = _read_tokenizer(path)
    if faults:
        return faults
    file = path / "tokenizer.json"
    ids = {str(t["content"]): int(t["id"]) for t in tokenizer.get("added_tokens", [])}
    if missing := [marker for marker in MARKERS if marker not in ids]:
        return [
            f"{file}: lacks the markers {' '.join(missing)} as single tokens; use the tokenizer of "
            "an M3 checkpoint, or add them as added_tokens"
        ]
    problems = _vocabulary_problems(file, ids, vocab_size)
    if eos_ids and ids[END] not in eos_ids:
        problems.append(
            f"{file}: {END} is token {ids[END]}, and the model ends at eos_token_id "
            f"{list(eos_ids)}; add it to eos_token_id in config.json or generation_config.json"
        )
    return problems + _template_problems(path)


def own_tokenizer_problems(
    path: Path, vocab_size: int | None, stop_ids: Sequence[int]
) -> list[str]:
    """The same for a model of another architecture, whose dialogues have markers of their own.

    Args:
        stop_ids: tokens at which the model ends a completion.
    """
    tokenizer, faults = _read_tokenizer(path)
    if faults:
        return faults
    file = path / "tokenizer.json"
    ids = {str(t["content"]): int(t["id"]) for t in tokenizer.get("added_tokens", [])}
    problems = _vocabulary_problems(file, ids, vocab_size)
    if not stop_ids:
        problems.append(
            f"{path}: neither config.json nor generation_config.json has an eos_token_id; give the "
            "token that ends a turn"
        )
    return problems + _template_problems(path)


def _read_tokenizer(path: Path) -> tuple[dict[str, Any], list[str]]:
    """(content of tokenizer.json, what is wrong with the file)."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return {}, [f"{file}: missing; copy the tokenizer of the checkpoint there"]
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return {}, [f"{file}: not valid JSON ({error}); copy it again"]
    return content, []


def _vocabulary_problems(file: Path, ids: Mapping[str, int], vocab_size: int | None) -> list[str]:
    if vocab_size is None or not ids or (beyond := max(ids.values())) < vocab_size:
        return []
    return [
        f"{file}: has token id {beyond}, and config.json a vocab_size of {vocab_size}; "
        "they belong to different models"
    ]


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


def _is_text(name: str) -> bool:
    """A tensor of the text model; vision and multi-token-prediction tensors are not read."""
    return name.removeprefix("language_model.").startswith(("model.", "lm_head."))

"""What the scripts of the tiny models share: a byte-level tokenizer, how files are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

NUM_BYTES = 256


def ids_of(markers: Mapping[str, bool]) -> dict[str, int]:
    """Token id of each marker: they follow the bytes, in order."""
    return {text: NUM_BYTES + place for place, text in enumerate(markers)}


def byte_tokenizer(markers: Mapping[str, bool]) -> Tokenizer:
    """Bytes as tokens 0-255, without merges, then the markers.

    Args:
        markers: text -> whether `skip_special_tokens` drops it.
    """
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    result = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.decoder = decoders.ByteLevel()
    for text, special in markers.items():
        token = AddedToken(text, special=special, normalized=False)
        result.add_special_tokens([token]) if special else result.add_tokens([token])
    return result


def write_model_files(
    directory: Path,
    *,
    config: dict[str, Any],
    special_tokens: Mapping[str, str],
    generation: dict[str, Any],
    markers: Mapping[str, bool],
    chat_template: str,
) -> None:
    """Write the five files into `directory`, which is made if need be.

    Args:
        special_tokens: 'eos_token', ... -> text.
        generation: token ids of generation_config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special_tokens,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 0.95}
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer),
        ("generation_config.json", generation | sampling),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    byte_tokenizer(markers).save(str(directory / "tokenizer.json"), pretty=True)

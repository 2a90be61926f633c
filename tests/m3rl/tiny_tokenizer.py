"""A character-level tokenizer with M3's markers and a short chat template, as checkpoint files."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from m3rl.rollout.markers import MARKERS

CHAT_TEMPLATE = (
    "]~!b[{% for m in messages %}]~b]{{ 'ai' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ '</mm:think>' if m['role'] == 'assistant' }}{{ m['content'] }}[e~[\n{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n</mm:think>{% endif %}"
)
PROMPT_OVERHEAD = 14
"""Tokens of a dialogue with an empty user message: 6 markers, 2 role names, 3 line ends."""


def character_tokenizer(markers: tuple[str, ...] = MARKERS) -> Tokenizer:
    """One token a printable ASCII character; ids follow the order of `string.printable`."""
    vocabulary = {"<unk>": 0} | {c: i + 1 for i, c in enumerate(string.printable)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(m, special=False, normalized=False) for m in markers])
    return tokenizer


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer | None = None, template: str | None = CHAT_TEMPLATE
) -> Path:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or character_tokenizer()).save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "[e~[",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder

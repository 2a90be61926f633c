"""Tokens that give a dialogue its structure: M3's, or those of a tokenizer and its template."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from m3rl.config import ConfigError

BEGIN = "]~!b["
ROLE = "]~b]"
END = "[e~["
NAMESPACE = "]<]minimax[>["
THINK = "<mm:think>"
THINK_END = "</mm:think>"
MARKERS = (BEGIN, ROLE, END, NAMESPACE, THINK, THINK_END)
"""M3's structural markers; a tokenizer must have each as one token."""
FORBIDDEN = (BEGIN, ROLE, END, NAMESPACE)
"""Markers that a user's message may not contain: they would forge the structure of the dialogue."""
_ANSWER = "yes"


@dataclass(frozen=True, slots=True)
class Markers:
    """What a `ChatFormat` must know of them."""

    forbidden: tuple[str, ...]
    """Those that a user's message may not contain."""
    end_id: int
    """Ends an assistant's turn."""
    end_ids: frozenset[int]
    """All tokens at which a completion ends."""
    think: str
    think_end: str
    think_end_id: int | None
    """None: it is no token of its own."""


def m3_markers(tokenizer: Any, source: str) -> Markers:
    """
    Raises:
        ConfigError: a marker is missing or splits.
    """
    problems = []
    for marker in MARKERS:
        ids = tokenizer.encode(marker, add_special_tokens=False)
        if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
            problems.append(f"{marker} becomes {ids}")
    if problems:
        raise ConfigError(
            f"{source}: the tokenizer lacks markers of MiniMax-M3 as single tokens "
            f"({'; '.join(problems)}); use the tokenizer of an M3 checkpoint, or add them"
        )
    end_id: int = tokenizer.convert_tokens_to_ids(END)
    return Markers(
        forbidden=FORBIDDEN,
        end_id=end_id,
        end_ids=frozenset([end_id]),
        think=THINK,
        think_end=THINK_END,
        think_end_id=tokenizer.convert_tokens_to_ids(THINK_END),
    )


def own_markers(tokenizer: Any, source: str, stop_ids: Sequence[int]) -> Markers:
    """Those of any other tokenizer: its special tokens, and the one that its chat template puts
    behind an answer.

    Args:
        stop_ids: tokens at which the model ends a completion.

    Raises:
        ConfigError: there is no chat template, or it ends a turn with none of `stop_ids`.
    """
    require_template(tokenizer, source)
    added = tokenizer.added_tokens_decoder
    special = [str(token.content) for token in added.values() if token.special]
    think, think_end = "<think>", "</think>"
    return Markers(
        forbidden=tuple(special),
        end_id=_end_of_answer(tokenizer, source, stop_ids),
        end_ids=frozenset(stop_ids),
        think=think,
        think_end=think_end,
        think_end_id=_single(tokenizer, think_end),
    )


def require_template(tokenizer: Any, source: str) -> None:
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{source}: no chat template; put the checkpoint's chat_template.jinja there"
        )


def _end_of_answer(tokenizer: Any, source: str, stop_ids: Collection[int]) -> int:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    behind = text[text.rfind(_ANSWER) + len(_ANSWER) :] if _ANSWER in text else ""
    ids = tokenizer.encode(behind, add_special_tokens=False)
    found = next((int(token) for token in ids if token in stop_ids), None)
    if found is None:
        raise ConfigError(
            f"{source}: the chat template puts {behind!r} behind an answer, and the model ends at "
            f"eos_token_id {sorted(stop_ids)}; give eos_token_id in generation_config.json the "
            "token that ends a turn"
        )
    return found


def _single(tokenizer: Any, marker: str) -> int | None:
    ids = tokenizer.encode(marker, add_special_tokens=False)
    return int(ids[0]) if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None

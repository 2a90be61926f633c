"""Text to token ids and back, at the edges only: the checkpoint's own tokenizer and chat template.

Between the edges ids are never decoded and encoded again: the trainer trains on the ids that the
engine sampled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m3rl.config import ConfigError
from m3rl.model_layout import is_m3, stop_ids
from m3rl.rollout.markers import Markers, m3_markers, own_markers, require_template

Message = dict[str, str]


class ChatFormat:
    """The tokenizer and chat template of one checkpoint.

    `drift_samples` counts the samples whose next turn could not be continued from their own ids.
    """

    def __init__(self, tokenizer: Any, source: str, markers: Markers | None = None) -> None:
        """
        Args:
            tokenizer: a transformers fast tokenizer with a chat template.
            source: where it came from, for error messages.
            markers: of its dialogues; None: M3's.

        Raises:
            ConfigError: a marker is missing or splits, or there is no usable chat template.
        """
        self.tokenizer = tokenizer
        self.drift_samples = 0
        self._markers = m3_markers(tokenizer, source) if markers is None else markers
        require_template(tokenizer, source)
        self.end_id = self._markers.end_id
        self.think_end_id = self._markers.think_end_id
        sample = self.render([{"role": "user", "content": "x"}])
        if "x" not in sample:
            raise ConfigError(f"{source}: the chat template drops the user's message")
        self.starts_thinking = sample.rstrip().endswith(self._markers.think)
        """The prompt opens the thinking block, so a completion begins inside it."""

    @classmethod
    def load(cls, path: str | Path) -> ChatFormat:
        """Read tokenizer.json, tokenizer_config.json and the chat template of a checkpoint.

        Raises:
            ConfigError: no tokenizer there, or one that cannot speak the model's format.
        """
        if not (Path(path) / "tokenizer.json").is_file():
            raise ConfigError(f"{path}: no tokenizer.json there; model.path names a checkpoint")
        tokenizer = _read_tokenizer(Path(path))
        if _speaks_m3(Path(path)):
            return cls(tokenizer, str(path))
        return cls(tokenizer, str(path), own_markers(tokenizer, str(path), stop_ids(Path(path))))

    def render(self, messages: Sequence[Message]) -> str:
        """The dialogue as text, up to where the next assistant turn begins."""
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return text

    def encode(self, text: str) -> np.ndarray:
        """[T] int32 ids of rendered text; the template writes all markers, so none is added."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def encode_prompt(self, text: str) -> np.ndarray:
        """[P] int32 ids of a dialogue of one user message."""
        return self.encode_prompts([text])[0]

    def encode_prompts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Like `encode_prompt`, for many at once.

        Raises:
            ValueError: a message contains a structural marker.
        """
        for text in texts:
            if found := [marker for marker in self._markers.forbidden if marker in text]:
                raise ValueError(
                    f"the message {text!r:.200} contains {found[0]}, a marker of the dialogue's "
                    "own structure; remove it"
                )
        rendered = [self.render([{"role": "user", "content": text}]) for text in texts]
        if not rendered:
            return []
        encoded = self.tokenizer(rendered, add_special_tokens=False, return_attention_mask=False)
        return [np.asarray(ids, np.int32) for ids in encoded["input_ids"]]

    def encode_answer(self, text: str) -> np.ndarray:
        """[T] int32 ids of a whole assistant turn, its end marker included."""
        return np.append(self.encode(text), np.int32(self.end_id))

    def decode(self, ids: np.ndarray) -> str:
        """Text of completion ids without the end marker that closes it; others stay visible."""
        if len(ids) and int(ids[-1]) in self._markers.end_ids:
            ids = ids[:-1]
        return self._text(ids)

    def answer(self, text: str) -> str:
        """What a completion says after thinking; empty while the thinking is not closed."""
        _, marker, after = text.rpartition(self._markers.think_end)
        if not marker and (self.starts_thinking or self._markers.think in text):
            return ""
        return after.strip()

    def next_turn(self, ids: np.ndarray, messages: Sequence[Message]) -> np.ndarray | None:
        """Prompt of the next turn: the ids so far, untouched, then those of what is new.

        Args:
            ids: prompt and sampled tokens of all turns so far.
            messages: the dialogue so far, the new message of the environment included.

        Returns:
            Ids that begin with `ids`, or None when the template rewrites earlier turns; such a
            sample is counted in `drift_samples` and must be masked.
        """
        so_far, whole = self._text(ids), self.render(messages)
        if not whole.startswith(so_far):
            self.drift_samples += 1
            return None
        new = self.encode(whole[len(so_far) :])
        joined: np.ndarray = np.concatenate([ids, new])
        return joined

    def _text(self, ids: np.ndarray) -> str:
        text: str = self.tokenizer.decode(
            ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


def _read_tokenizer(path: Path) -> Any:
    """The class that the checkpoint names. AutoTokenizer finds every one, and imports all of
    transformers' models for it, which takes seconds; the plain one is had without."""
    options = path / "tokenizer_config.json"
    named = json.loads(options.read_text("utf-8")) if options.is_file() else {}
    if named.get("tokenizer_class") == "PreTrainedTokenizerFast":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def _speaks_m3(path: Path) -> bool:
    """Whether the tokenizer at `path` is an M3's, or lies there without a model."""
    return not (path / "config.json").is_file() or is_m3(path)

"""Stop strings, found while the tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class StopMatcher:
    """The text of one completion so far, and where a stop string begins in it."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._longest = max(map(len, stop))
        self.has_matched = False
        self.text = ""
        """Text up to the first stop string, once there is one."""

    def push(self, token_id: int) -> bool:
        """Append a sampled token; True when a stop string is complete (wherever in the token)."""
        piece = self._stream.step(self._tokenizer, token_id)
        if not piece:
            return False
        start = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        found = [at for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if not found:
            return False
        self.text = self.text[: min(found)]
        self.has_matched = True
        return True

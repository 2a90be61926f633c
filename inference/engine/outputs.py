"""From a request that leaves the engine to what its caller gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from inference.engine.request import FinishReason, LiveRequest, RequestOutput

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def make_output(
    live: LiveRequest,
    reason: FinishReason,
    *,
    error: str | None,
    captured: tuple[np.ndarray | None, np.ndarray | None],
    tokenizer: Tokenizer | None,
) -> RequestOutput:
    """The result of a request that was taken out of the running rows."""
    params, start = live.request.params, live.num_prompt
    token_ids = live.tokens[start:]
    routing, blocks = captured
    return RequestOutput(
        request_id=live.request_id,
        group_id=live.request.group_id,
        prompt_ids=live.request.prompt_ids,
        token_ids=token_ids,
        text=None if tokenizer is None else _text(live, token_ids, tokenizer),
        logprobs=live.logprobs[start:] if params.logprobs else None,
        raw_logprobs=live.raw_logprobs[start:] if params.raw_logprobs else None,
        version_spans=np.array(live.version_spans, np.int64).reshape(-1, 2),
        finish_reason=reason,
        error=error,
        seed=live.seed,
        num_cached_tokens=max(0, live.num_cached_tokens),
        routing=routing if params.routing else None,
        blocks=blocks if params.blocks else None,
    )


def _text(live: LiveRequest, token_ids: np.ndarray, tokenizer: Tokenizer) -> str:
    if live.stop_matcher is not None and live.stop_matcher.has_matched:
        return live.stop_matcher.text
    return tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

"""Requests as vLLM takes them, and what comes out of them as everybody else knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from m3rl.rollout.backend import Generated
from m3rl.types import FinishReason, GenerationRequest

FINISH_REASONS: dict[str | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "error": "error",
}


def check_request(
    request: GenerationRequest,
    *,
    max_model_len: int,
    vocab_size: int,
    has_tokenizer: bool,
    records_routing: bool,
) -> None:
    """
    Raises:
        ValueError: this engine could never serve `request`; vLLM itself would shorten some.
    """
    name, ids, sampling = f"request {request.request_id!r}", request.prompt_ids, request.sampling
    if len(ids) == 0:
        raise ValueError(f"{name}: the prompt is empty; give at least one token id")
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"{name}: token ids {int(ids.min())} to {int(ids.max())} are not all in the vocabulary "
            f"of {vocab_size}"
        )
    total = len(ids) + sampling.max_tokens
    if total > max_model_len:
        raise ValueError(
            f"{name}: a prompt of {len(ids)} tokens and max_tokens={sampling.max_tokens} make "
            f"{total}, above max_model_len={max_model_len}; shorten the request or raise "
            "rollout.backend.engine.max_model_len"
        )
    if sampling.stop and not has_tokenizer:
        raise ValueError(
            f"{name}: stop={sampling.stop} needs a tokenizer, and the model's folder has no "
            "tokenizer.json"
        )
    if sampling.capture_routing and not records_routing:
        raise ValueError(
            f"{name} asks for routing, which the engine does not record; set "
            "rollout.capture_routing before it starts"
        )
    if sampling.capture_blocks:
        raise ValueError(
            f"{name} asks for the selected blocks of sparse attention, which vLLM does not give; "
            "set rollout.capture_blocks: false, or rollout.backend.kind: m3"
        )


def sampling_params(request: GenerationRequest, eos_token_ids: Sequence[int]) -> Any:
    """vLLM's SamplingParams of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        seed=request.seed,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(eos_token_ids) or None,
        ignore_eos=True,  # vLLM's own notion of it; ours are stop_token_ids
        detokenize=bool(sampling.stop),
        include_stop_str_in_output=True,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=not sampling.use_prefix_cache,
    )


def scoring_params() -> Any:
    """vLLM's SamplingParams of a prompt whose log-probabilities are wanted."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=True,
    )


def generated(
    request: GenerationRequest,
    completion: Any,
    *,
    num_cached_tokens: int,
    version: int | None,
    moe_layers: Sequence[int] | None = None,
) -> Generated:
    """
    Args:
        completion: vLLM's CompletionOutput.
        version: the one that serves, for a message.
        moe_layers: of which routing is wanted; None: all.

    Raises:
        RuntimeError: vLLM recorded the experts of fewer tokens than had a forward pass.
    """
    token_ids = np.asarray(completion.token_ids, np.int32)
    logprobs = sampled_logprobs(completion.logprobs, len(token_ids))
    reason, error = FINISH_REASONS[completion.finish_reason], None
    is_finite = np.isfinite(logprobs)
    if not is_finite.all():
        reason, count = "error", int(np.argmin(is_finite))
        error = (
            f"non-finite log-probability of completion token {count} with policy version "
            f"{version}; the weights, or the keys of this prompt, hold NaN or Inf"
        )
        token_ids, logprobs = token_ids[:count], logprobs[:count]
    spans = [
        (span.start, int(span.version))
        for span in completion.weight_versions or []
        if span.start < len(token_ids)
    ]
    return Generated(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reason,
        version_spans=np.asarray(spans, np.int64).reshape(-1, 2),
        seed=request.seed,
        num_cached_tokens=num_cached_tokens,
        routing=_routing(request, completion, len(token_ids), moe_layers),
        error=error,
    )


def sampled_logprobs(flat: Any, count: int) -> np.ndarray:
    """[count] float32 from vLLM's FlatLogprobs, where the sampled token comes first."""
    if flat is None or not count:
        return np.zeros(0, np.float32)
    return np.asarray(flat.logprobs, np.float32)[np.asarray(flat.start_indices[:count])]


def prompt_scores(flat: Any, num_tokens: int) -> np.ndarray:
    """[num_tokens - 1] float32 from vLLM's prompt log-probabilities; the first token has none."""
    starts = np.asarray(flat.start_indices[1:num_tokens])
    return np.asarray(flat.logprobs, np.float32)[starts]


def _routing(
    request: GenerationRequest,
    completion: Any,
    num_sampled: int,
    moe_layers: Sequence[int] | None,
) -> np.ndarray | None:
    """[P + T - 1, MoE layers, A] uint8 from vLLM's [tokens, layers, A]."""
    if not request.sampling.capture_routing or not num_sampled:
        return None
    count = len(request.prompt_ids) + num_sampled - 1  # the last token had no forward pass
    recorded = completion.routed_experts
    if recorded is None or len(recorded) < count:
        raise RuntimeError(
            f"request {request.request_id!r}: vLLM recorded the experts of "
            f"{0 if recorded is None else len(recorded)} tokens, and {count} had a forward pass; "
            "set rollout.capture_routing: false"
        )
    layers = slice(None) if moe_layers is None else list(moe_layers)
    return np.asarray(recorded[:count], np.uint8)[:, layers]

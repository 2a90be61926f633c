"""What a caller asks of the engine, what it gets back, and what the engine keeps in between.

`P` prompt tokens · `T` sampled tokens · `A` experts per token · `K` KV heads.
"""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from inference.config import EngineConfig, ModelConfig

if TYPE_CHECKING:
    from inference.engine.scheduler import Group
    from inference.engine.stop import StopMatcher

FinishReason = Literal["stop", "length", "abort", "error"]

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled; checked when made, never changed."""

    temperature: float = 1.0
    """0 takes the likeliest token; its logprob is then the one at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    """Strings that end the completion; its text is cut before them, its token ids are not."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion, besides the model's EOS; the token stays in the ids."""
    ignore_eos: bool = False
    seed: int | None = None
    """None: the engine draws one and reports it."""
    logprobs: bool = True
    """Of the distribution really sampled from (after temperature and truncation)."""
    raw_logprobs: bool = False
    """At temperature 1, untruncated."""
    routing: bool = False
    """Return the experts of every token that had a forward pass."""
    blocks: bool = False
    """Return the selected key blocks of every token that had a forward pass."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise ValueError(f"stop={self.stop!r} is one string; write stop=({self.stop!r},)")
        object.__setattr__(self, "stop", tuple(self.stop))
        ids = tuple(operator.index(i) for i in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        _check(self, "temperature", 0.0 <= self.temperature < math.inf, "a finite number >= 0")
        _check(self, "top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]; 1 keeps all tokens")
        _check(self, "top_k", self.top_k >= 0, ">= 0; 0 keeps all tokens")
        _check(self, "min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]; 0 keeps all tokens")
        _check(self, "max_tokens", self.max_tokens >= 1, "at least 1")
        _check(self, "stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings")
        _check(self, "stop_token_ids", all(i >= 0 for i in ids), "token ids >= 0")
        in_range = self.seed is None or -(2**63) <= operator.index(self.seed) < 2**63
        _check(self, "seed", in_range, "a 64-bit signed integer, or None for a fresh one")


def _check(params: SamplingParams, name: str, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"SamplingParams: {name}={getattr(params, name)!r} must be {rule}")


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Request:
    """One completion asked of the engine, in token ids."""

    request_id: str
    prompt_ids: np.ndarray
    """[P] int32; a list of ints is taken too."""
    params: SamplingParams
    group_id: str | None
    """Requests of one group have the same prompt and share the pages of it."""
    use_prefix_cache: bool

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | np.ndarray,
        params: SamplingParams | None = None,
        group_id: str | None = None,
        use_prefix_cache: bool = True,
    ) -> None:
        object.__setattr__(self, "request_id", request_id)
        object.__setattr__(self, "prompt_ids", _as_token_ids(request_id, prompt_ids))
        object.__setattr__(self, "params", SamplingParams() if params is None else params)
        object.__setattr__(self, "group_id", group_id)
        object.__setattr__(self, "use_prefix_cache", use_prefix_cache)


def _as_token_ids(request_id: str, prompt_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    if isinstance(prompt_ids, str):
        raise ValueError(
            f"request {request_id!r}: prompt_ids is text; the engine takes token ids, "
            "encode the prompt first or use inference.LLM"
        )
    ids = np.asarray(prompt_ids)
    if ids.size == 0:
        raise ValueError(f"request {request_id!r}: the prompt is empty; give at least one token id")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"request {request_id!r}: prompt_ids has dtype {ids.dtype} and shape {ids.shape}; "
            "give a flat list of integers"
        )
    if int(ids.min()) < 0 or int(ids.max()) > _INT32_MAX:
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise ValueError(f"request {request_id!r}: {bad} is not a token id")
    return ids.astype(np.int32)


@dataclass(slots=True, eq=False)
class RequestOutput:
    """A finished request. Arrays, never lists of ints."""

    request_id: str
    group_id: str | None
    prompt_ids: np.ndarray
    """[P] int32: exactly what was asked."""
    token_ids: np.ndarray
    """[T] int32: exactly what was sampled, the EOS or stop token included."""
    text: str | None
    """Decoded without special tokens and cut before a stop string; None without a tokenizer."""
    logprobs: np.ndarray | None
    """[T] float32, of the distribution sampled from; None when not asked for."""
    raw_logprobs: np.ndarray | None
    """[T] float32, at temperature 1 and untruncated; None when not asked for."""
    version_spans: np.ndarray
    """[n, 2] int64: (first completion token, policy version that sampled from there on)."""
    finish_reason: FinishReason
    """'stop' alone means complete."""
    error: str | None
    seed: int
    num_cached_tokens: int
    """Prompt tokens whose keys were there already when the request was first admitted."""
    routing: np.ndarray | None
    """[P + T - 1, MoE layers, A] uint8: experts of each token that had a forward pass."""
    blocks: np.ndarray | None
    """[P + T - 1, sparse layers, K, topk] int32: selected blocks, -1 padded."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request inside the engine. While it runs, `RunningRows` holds its arrays, else it does."""

    request: Request
    seed: int
    stop_ids: np.ndarray
    """int64: tokens that end the completion."""
    tokens: np.ndarray
    """int32: prompt and sampled tokens, up to date while the request waits."""
    logprobs: np.ndarray
    """float32, by token as `tokens`; places of the prompt mean nothing."""
    raw_logprobs: np.ndarray
    row: int = -1
    """Row in `RunningRows`; -1 while waiting."""
    version_spans: list[tuple[int, int]] = field(default_factory=list)
    num_cached_tokens: int = -1
    """-1 before the first admission."""
    page_keys: list[bytes] = field(default_factory=list)
    """Prefix-cache keys of the leading full pages, as far as they were computed."""
    group: Group | None = None
    stop_matcher: StopMatcher | None = None
    has_stale_pages: bool = False
    """The pages were written, in part or whole, by an older policy version: never shared."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def max_total(self) -> int:
        """Most tokens this request can ever have, prompt included."""
        return self.num_prompt + self.request.params.max_tokens

    @property
    def has_sampled(self) -> bool:
        return bool(self.version_spans)


def make_live(request: Request, eos_token_ids: Sequence[int]) -> LiveRequest:
    """The engine's state of a new request: its seed drawn if none was given, its stop tokens."""
    params = request.params
    stop_ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= set(eos_token_ids)
    return LiveRequest(
        request=request,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        stop_ids=np.array(sorted(stop_ids), np.int64),
        tokens=request.prompt_ids,
        logprobs=np.zeros(len(request.prompt_ids), np.float32),
        raw_logprobs=np.zeros(len(request.prompt_ids), np.float32),
    )


def check_request(
    request: Request, model: ModelConfig, config: EngineConfig, *, has_text: bool
) -> None:
    """Raise ValueError when the engine could never serve `request`. `config` is resolved."""
    name, ids, params = f"request {request.request_id!r}", request.prompt_ids, request.params
    highest = max(int(ids.max()), *params.stop_token_ids, 0)
    if highest >= model.vocab_size:
        raise ValueError(
            f"{name}: token id {highest} is outside the vocabulary of {model.vocab_size}"
        )
    assert config.max_model_len is not None, "EngineConfig.resolve fills it in"
    total = len(ids) + params.max_tokens
    if total > config.max_model_len:
        raise ValueError(
            f"{name}: a prompt of {len(ids)} tokens and max_tokens={params.max_tokens} make "
            f"{total}, above max_model_len={config.max_model_len} (num_pages={config.num_pages} of "
            f"{config.page_size} tokens, max_position_embeddings="
            f"{model.max_position_embeddings}); shorten the request or raise the limit"
        )
    if params.stop and not has_text:
        raise ValueError(
            f"{name}: stop={params.stop} needs a tokenizer; give one to the engine, or use "
            "stop_token_ids"
        )
    for asked, has, option in (
        (params.routing, config.capture_routing, "capture_routing"),
        (params.blocks, config.capture_blocks, "capture_blocks"),
    ):
        if asked and not has:
            raise ValueError(
                f"{name} asks for what the engine does not record; "
                f"make the engine with {option}=True"
            )

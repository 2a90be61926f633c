"""The nouns that travel between the rooms, and the legend of the shape suffixes.

`P` prompts · `G` completions of a group · `T` tokens · `B` rows of a training batch · `S` positions
of a row ·
`C` hidden · `V` vocabulary · `L` layers · `A` experts per token · `K` KV heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

FinishReason = Literal["stop", "length", "abort", "error"]
SOLVED = 1.0
"""Scorers give partial credit; only this is a solution."""
RewardStatus = Literal["unscored", "ok", "error", "timeout", "nonfinite"]
SampleId = tuple[int, int]
"""(prompt ordinal, sample index)"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One item of the prompt stream, rendered and tokenised once."""

    ordinal: int
    """Place in the run's stream of prompts, from 0, never reused: the key of every random
    choice."""
    ids: np.ndarray
    """[P] int32: exactly what the engine receives and the trainer trains on."""
    text: str
    """The user's message, before the chat template."""
    environment: str
    """Name under which rewards and metrics of this prompt are grouped."""
    payload: dict[str, Any]
    """What the reward needs (an answer, an entry of the dataset)."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How completions are drawn; the same for all requests of a call."""

    temperature: float
    top_p: float
    top_k: int
    """0 keeps all tokens."""
    min_p: float
    max_tokens: int
    stop: tuple[str, ...] = ()
    capture_routing: bool = False
    capture_blocks: bool = False
    use_prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion asked of a generation backend."""

    request_id: str
    group_id: str
    prompt_ordinal: int
    sample_index: int
    prompt_ids: np.ndarray
    seed: int
    sampling: SamplingSettings


@dataclass(slots=True)
class Completion:
    """The sampled tokens of one rollout and everything known about them; a row of the Parquet
    files."""

    prompt_ordinal: int
    sample_index: int
    group_id: str
    prompt_ids: np.ndarray
    """[P] int32"""
    completion_ids: np.ndarray
    """[T] int32: the engine's own ids, never re-encoded text."""
    text: str
    logprobs: np.ndarray
    """[T] float32: of the distribution really sampled from (after temperature and truncation)."""
    loss_mask: np.ndarray
    """[T] bool: True where the policy sampled the token."""
    finish_reason: FinishReason
    version_spans: np.ndarray
    """[n, 2] int64: (first completion token, policy version that sampled from there on)."""
    seed: int
    turn_starts: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int32))
    """[turns] int32: completion token at which each turn of the policy begins."""
    reward: float = float("nan")
    """NaN while unscored and when scoring failed; never a silent zero."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_status: RewardStatus = "unscored"
    routing: np.ndarray | None = None
    """[P + T - 1, MoE layers, A] uint8: experts of each token that had a forward pass."""
    blocks: np.ndarray | None = None
    """[P + T - 1, sparse layers, K, topk] int32: selected blocks, -1 padded."""

    @property
    def sample_id(self) -> SampleId:
        return (self.prompt_ordinal, self.sample_index)


@dataclass(slots=True)
class Group:
    """The completions of one prompt (G of them, fewer when some were dropped)."""

    prompt: Prompt
    completions: list[Completion]


@dataclass(slots=True)
class TrainBatch:
    """Right-padded rows for one or more optimizer steps; row b is sample `sample_ids[b]`.

    `logprobs_BS[b, s]` and the masks speak about token `ids_BS[b, s]` (not about its successor);
    the first token of a row is never trained on.
    """

    sample_ids: list[SampleId]
    ids_BS: np.ndarray
    """int64, padded on the right with 0; padding is known by `length_B`, never by value."""
    length_B: np.ndarray
    """int64: real tokens of each row."""
    loss_mask_BS: np.ndarray
    """bool"""
    behaviour_logprobs_BS: np.ndarray
    """float32: recorded by the engine; 0 where loss_mask is False."""
    advantages_B: np.ndarray
    """float32"""
    temperature: float
    denominator: float
    """Trained tokens of all rows; an optimizer step divides its loss by those of its own rows."""
    routing: list[np.ndarray | None] | None = None
    blocks: list[np.ndarray | None] | None = None
    kl_coef: float | None = None
    """Of the loss's KL term, where it adapts; None: that of the settings."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A rectangle of a published tensor that one rank holds."""

    name: str
    """Published checkpoint name without the `language_model.` prefix."""
    dtype: str
    """'float32', 'bfloat16'"""
    shape: tuple[int, ...]
    """Global shape."""
    bounds: tuple[tuple[int, int], ...]
    """Start and stop along each dimension of what this rank holds."""
    bucket: str
    """Tensors that travel together: 'pre', 'layer.0', …, 'post'."""
    storage: str = "plain"
    """'plain': held as it is sent; 'mxfp8': quantised there, in blocks of 32 along the last
    dimension. A trainer rank's are all plain."""


class LoadPlan(Protocol):
    """What an engine answers to the parts in which its loads will come."""

    @property
    def places(self) -> Sequence[Any]:
        """The memory of each part, the same as long as the engine lives: a tensor, or where the
        engine quantises a named tuple of them, `values` and `scale`."""


@runtime_checkable
class SharedPlaces(LoadPlan, Protocol):
    """Where places are the memory of others later on: what is `written` is read before it returns.

    Only the rounds of the plan can be received so, all of them; nothing is kept that could be given
    to another replica, or changed by a delta.
    """

    def check_rounds(self, rounds: Sequence[Sequence[int]]) -> None:
        """Prove that no part comes over one that is not read. The next round is under way when one
        is `written`, and the one after that is not.

        Args:
            rounds: numbers of the parts that each brings.

        Raises:
            ValueError: one would.
        """


class WeightTarget(Protocol):
    """The engine's side of a weight sync.

    A sync begins a load with a plan, fills the plan's places, tells with `written` which are done,
    and commits or aborts. Any thread may call these, one at a time.
    """

    @property
    def has_shadow(self) -> bool:
        """Whether a load fills a second copy while the engine serves: then only `commit` needs a
        pause, and an aborted load harms nothing. Else the pause precedes `begin_load`."""

    @property
    def version(self) -> int | None:
        """Policy version that serves; None: no whole one does."""

    def weight_layout(self) -> Iterable[Any]:
        """Objects with the fields of TensorSlot."""

    def plan_load(self, parts: Sequence[tuple[str, tuple[tuple[int, int], ...]]]) -> LoadPlan:
        """Parts by published name and bounds; together all that the engine holds, once."""

    def begin_load(self, version: int, plan: Any = None) -> None: ...
    def abort_load(self) -> None: ...

    def written(self, first: int, last: int) -> None:
        """Parts `first` to `last` - 1 of the plan are in place; each once."""

    def commit(self) -> None: ...


@runtime_checkable
class GivingTarget(Protocol):
    """A WeightTarget that keeps what it serves as it was sent."""

    def serving_places(self) -> Sequence[Any]:
        """The memory of `version`, by slot of `weight_layout`, in the forms of LoadPlan.places: for
        another worker to take it from there, and never to be written."""


class Receiver(Protocol):
    """Runs inside a replica's worker process; made by weight_sync, carried there by the trainer.

    `bind` is called once by the replica; everything else is called by name through
    `RemoteReceiver.call`.
    """

    def bind(self, target: WeightTarget) -> None: ...


class RemoteReceiver(Protocol):
    """The driver's handle on the receiver of one replica."""

    def attach(self, receiver: Receiver) -> None:
        """Ship `receiver` to the replica and bind it to its engine."""

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the attached receiver there; the future ends with its result or its
        error."""


class SenderGroup(Protocol):
    """The driver's handle on the trainer ranks' sending side."""

    num_ranks: int

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]: ...

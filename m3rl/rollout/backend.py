"""What a generation backend is: token ids in, token ids and log-probabilities out, on replicas that
can be re-synced.

Two implementations: `m3_backend` (the bundled runtime) and, for those who outgrow it, vLLM.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from m3rl.errors import M3rlError
from m3rl.types import FinishReason, GenerationRequest, RemoteReceiver, TensorSlot

PauseMode = Literal["drain", "keep", "recompute"]


class BackendError(M3rlError):
    """The pool of replicas cannot do what was asked; the message names the replica and its
    fault."""


@dataclass(slots=True)
class Generated:
    """What came out of one request; text exists only at the edges, so there is none here."""

    request_id: str
    token_ids: np.ndarray
    """[T] int32: a sampled end-of-sequence token is included."""
    logprobs: np.ndarray
    """[T] float32: log-probability of each token under the distribution it was sampled from."""
    finish_reason: FinishReason
    version_spans: np.ndarray
    """[n, 2] int64: (first token, policy version from there on)."""
    seed: int
    num_cached_tokens: int = 0
    routing: np.ndarray | None = None
    blocks: np.ndarray | None = None
    error: str | None = None


@dataclass(slots=True)
class ReplicaHealth:
    """`is_alive` False: the process is gone, does not answer, or its engine failed (`detail` says
    which)."""

    replica: int
    is_alive: bool
    version: int | None
    detail: str


@dataclass(slots=True)
class GenerationOutcome:
    """Everything that finished, and what was lost with replicas that died or stopped answering."""

    generated: dict[str, Generated] = field(default_factory=dict)
    lost: list[GenerationRequest] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    """Replica -> why it was given up; its process is already killed."""


class GenerationBackend(Protocol):
    """A pool of replicas. A replica generates only after a complete set of weights was committed to
    it."""

    num_replicas: int

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        timeout_s: float,
        replicas: Collection[int] | None = None,
    ) -> GenerationOutcome:
        """Finish all requests; requests of a group go to one replica, all submitted before its
        first step. None goes to another than `replicas` (None: all).

        A replica that dies, fails or is silent for `timeout_s` is killed and reported, never waited
        for.
        """

    def abort(self, request_ids: Sequence[str]) -> int:
        """Stop running requests; returns how many were known (unknown ids are logged)."""

    def pause(self, mode: PauseMode, replica: int | None = None) -> None: ...

    def resume(self, replica: int | None = None) -> None: ...

    def weight_layout(self, replica: int) -> list[list[TensorSlot]]:
        """What each rank of the replica holds, under published names."""

    def gpus(self) -> dict[str, str | None]:
        """`sync_transport.gpu_of` the weights of each rank of the living replicas, by name."""

    def prompt_lengths(self) -> tuple[int, int]:
        """Of a prompt: tokens of which sparse attention keeps all, and the most there can be."""

    def prompt_logprobs(self, replica: int, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Of each prompt, [n - 1] float32: log-probability of every token but the first, at
        temperature 1. Computed at once, also by a replica that is paused."""

    def receivers(self, replica: int) -> list[RemoteReceiver]:
        """Those of the replica's ranks, in order."""

    def load(self, path: str, version: int, replicas: Sequence[int] | None = None) -> None:
        """Replicas (None: all) read a checkpoint from disk: collecting and evaluating without a
        trainer."""

    def drop(self, replica: int) -> None:
        """End one replica for good (or until `restart`); the others take its share."""

    def restart(self, replica: int) -> None:
        """Replace a lost replica by a fresh one without weights; it must be synced before it
        serves."""

    def stats(self) -> dict[str, float]:
        """`engine/*` figures, averaged or summed over the living replicas."""

    def health(self) -> list[ReplicaHealth]: ...

    def close(self) -> None:
        """End every replica process; safe to call twice."""

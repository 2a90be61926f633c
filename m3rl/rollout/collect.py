"""From prompts to scored groups: seeds, requests, lost replicas, rewards.

    prompts ─▶ requests (one seed a completion) ─▶ backend ─▶ completions ─▶ rewards ─▶ groups
                      ▲                               │ lost with a replica
                      └───────── heal, re-issue ──────┘

A completion is known by its sample id (prompt ordinal, sample index) from the first line to the
last, and everything random about it follows from (run seed, sample id, turn): a re-issued request
is the same request.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from m3rl.rollout.backend import BackendError, Generated, GenerationBackend
from m3rl.types import Completion, GenerationRequest, Group, Prompt, SamplingSettings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CollectStats:
    """Faults met and mended while collecting, and refills: `fault/*` and some `data/*` of the
    step's metrics."""

    requeued_samples: int = 0
    failed_samples: int = 0
    refills: int = 0
    """Rounds in which new prompts took the place of groups without a signal."""
    refilled_prompts: int = 0
    missing_groups: int = 0
    """Groups without a signal in whose place none came."""
    reward_s: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        return {
            "fault/requeued_samples": float(self.requeued_samples),
            "fault/failed_samples": float(self.failed_samples),
            "data/resampled_batches": float(self.refills),
            "data/resampled_prompts": float(self.refilled_prompts),
            "data/missing_groups": float(self.missing_groups),
        }

    def add(self, other: CollectStats) -> None:
        self.requeued_samples += other.requeued_samples
        self.failed_samples += other.failed_samples
        self.refills += other.refills
        self.refilled_prompts += other.refilled_prompts
        self.reward_s += other.reward_s
        self.failures |= other.failures


TRAINING, EVALUATION = 0, 1
"""Streams of prompts, each numbered from 0; their random choices are apart."""


def sample_seed(
    run_seed: int, stream: int, prompt_ordinal: int, sample_index: int, turn: int = 0
) -> int:
    """63-bit seed of one turn of one completion (blake2b of the five numbers)."""
    key = np.array([run_seed, stream, prompt_ordinal, sample_index, turn], "<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


class Collector:
    """Generates and scores groups on a backend, healing lost replicas on the way."""

    def __init__(
        self,
        backend: GenerationBackend,
        *,
        run_seed: int,
        decode: Callable[[np.ndarray], str],
        score: Callable[[Sequence[tuple[Prompt, Completion]]], None],
        heal: Callable[..., bool],
        timeout_s: float,
        serving: Callable[[], Collection[int]] | None = None,
    ) -> None:
        """
        Args:
            decode: completion ids to the text that rewards and people read.
            score: fills reward, reward_parts and reward_status of each completion.
            heal: brings lost replicas back at the current policy version; False when one is given
                up for good.
            timeout_s: longest wait for a call to the backend.
            serving: replicas that may generate, asked for before they do; None: all that live.
        """
        self._backend = backend
        self._run_seed = run_seed
        self._decode = decode
        self._score = score
        self._heal = heal
        self._timeout_s = timeout_s
        self._serving = serving

    def collect(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: SamplingSettings,
        *,
        stream: int = TRAINING,
    ) -> tuple[list[Group], CollectStats]:
        """Groups in the order of `prompts`.

        Completions that were aborted or failed are in their groups, unscored and counted.

        Raises:
            BackendError: no replica is left.
        """
        stats = CollectStats()
        by_ordinal = {prompt.ordinal: prompt for prompt in prompts}
        requests = [
            self._request(prompt, index, sampling, stream)
            for prompt in prompts
            for index in range(group_size)
        ]
        generated = self._generate(requests, stats)
        completions = [
            self._completion(request, by_ordinal[request.prompt_ordinal], generated)
            for request in requests
        ]
        usable = [c for c in completions if c.finish_reason in ("stop", "length")]
        stats.failed_samples = len(completions) - len(usable)
        for error in {g.error for g in generated.values() if g.error}:
            logger.warning("a completion failed: %s", error)
        begin = time.perf_counter()
        self._score([(by_ordinal[c.prompt_ordinal], c) for c in usable])
        stats.reward_s = time.perf_counter() - begin
        groups = [
            Group(prompt, [c for c in completions if c.prompt_ordinal == prompt.ordinal])
            for prompt in prompts
        ]
        return groups, stats

    def collect_refilled(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: SamplingSettings,
        *,
        take: Callable[[int], list[Prompt]],
        has_signal: Callable[[Group], bool],
        max_rounds: int,
    ) -> tuple[list[Group], CollectStats]:
        """Groups of `prompts`, then of further ones in place of those without a signal (dynamic
        sampling, arXiv:2503.14476).

        Every round generates for exactly as many new prompts as groups with a signal are missing,
        so none is wasted; after `max_rounds` of them the rest stays missing.

        Args:
            take: that many prompts more of the training stream.

        Returns:
            All groups, also those without a signal, which metrics and records are about too.

        Raises:
            BackendError: no replica is left.
        """
        groups, stats = self.collect(prompts, group_size, sampling)
        missing = len(prompts) - sum(map(has_signal, groups))
        while missing and stats.refills < max_rounds:
            more, of_round = self.collect(take(missing), group_size, sampling)
            of_round.refills, of_round.refilled_prompts = 1, missing
            stats.add(of_round)
            groups += more
            missing -= sum(map(has_signal, more))
        stats.missing_groups = missing
        return groups, stats

    def _generate(
        self, requests: Sequence[GenerationRequest], stats: CollectStats
    ) -> dict[str, Generated]:
        generated: dict[str, Generated] = {}
        remaining = list(requests)
        while remaining:
            serving = None if self._serving is None else self._serving()
            outcome = self._backend.generate(remaining, timeout_s=self._timeout_s, replicas=serving)
            generated.update(outcome.generated)
            remaining = outcome.lost
            stats.requeued_samples += len(remaining)
            stats.failures |= outcome.failures
            if outcome.failures:
                self._heal(*outcome.failures)
            if remaining and not any(health.is_alive for health in self._backend.health()):
                reasons = "; ".join(f"replica {r}: {why}" for r, why in stats.failures.items())
                raise BackendError(f"no replica is left to generate on ({reasons})")
        return generated

    def _request(
        self, prompt: Prompt, sample_index: int, sampling: SamplingSettings, stream: int
    ) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"{prompt.ordinal}.{sample_index}",
            group_id=str(prompt.ordinal),
            prompt_ordinal=prompt.ordinal,
            sample_index=sample_index,
            prompt_ids=prompt.ids,
            seed=sample_seed(self._run_seed, stream, prompt.ordinal, sample_index),
            sampling=sampling,
        )

    def _completion(
        self, request: GenerationRequest, prompt: Prompt, generated: dict[str, Generated]
    ) -> Completion:
        result = generated[request.request_id]
        return Completion(
            prompt_ordinal=request.prompt_ordinal,
            sample_index=request.sample_index,
            group_id=request.group_id,
            prompt_ids=prompt.ids,
            completion_ids=result.token_ids,
            text=_cut(self._decode(result.token_ids), request.sampling.stop),
            logprobs=result.logprobs,
            loss_mask=np.ones(len(result.token_ids), np.bool_),
            finish_reason=result.finish_reason,
            version_spans=result.version_spans,
            seed=result.seed,
            routing=result.routing,
            blocks=result.blocks,
        )


def _cut(text: str, stop: Sequence[str]) -> str:
    """What stands before the stop string that ended the completion."""
    places = [text.find(string) for string in stop if string in text]
    return text[: min(places)] if places else text

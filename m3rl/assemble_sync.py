"""From a configuration to a run's weight sync: what carries it, how replicas pause, the probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from m3rl.config import Config
from m3rl.data import PromptSet
from m3rl.launch import TrainerRanks
from m3rl.rollout.backend import GenerationBackend
from m3rl.sync_transport import choose_transport, fallbacks
from m3rl.weight_sync.probe import Probe, probe_batch, probe_prompts, scores_of
from m3rl.weight_sync.sync import WeightSync

MAX_PROBE_ERROR = {"float32": 1e-3, "bfloat16": 0.15}
"""By the dtype that trainer and runtime compute with."""
MAX_PROBE_ERROR_FP8 = 0.3
"""Where the runtime holds weights or pages in FP8."""


def weight_sync(
    config: Config,
    ranks: TrainerRanks,
    backend: GenerationBackend,
    prompts: PromptSet,
    *,
    host: str,
) -> WeightSync:
    """The driver of all syncs from `ranks` to `backend`; nothing is connected yet.

    Args:
        prompts: what the probe's text is made of.
        host: see WeightSync.

    Raises:
        ConfigError: `weight_sync.transport` cannot connect them.
    """
    options = config.weight_sync
    gpus = ranks.gpus() | backend.gpus()
    return WeightSync(
        ranks,
        {replica: backend.receivers(replica) for replica in range(backend.num_replicas)},
        pause=lambda replica: backend.pause(options.pause, replica),
        resume=backend.resume,
        host=host,
        timeout_s=options.timeout_s,
        min_replicas=0,  # counted by the trainer, after lost ones are brought back
        verify=options.verify,
        chunk_bytes=options.chunk_mib << 20,
        backend=choose_transport(options.transport, gpus),
        fallbacks=fallbacks(options.transport, gpus),
        wire=options.wire,
        delta_full_every=options.delta_full_every if options.delta else 1,
        probe=_probe(config, ranks, backend, prompts),
    )


def _probe(
    config: Config, ranks: TrainerRanks, backend: GenerationBackend, prompts: PromptSet
) -> Probe | None:
    options = config.weight_sync.probe
    if options.every == 0:
        return None
    num_kept, longest = backend.prompt_lengths()
    text_ids = np.concatenate([prompt.ids for prompt in prompts.first(options.prompts)])
    return Probe(
        probe_prompts(text_ids, options.prompts, num_kept=num_kept, longest=longest),
        trainer=_trainer_scores(ranks),
        replica=backend.prompt_logprobs,
        every=options.every,
        max_error=max_probe_error(config) if options.max_error is None else options.max_error,
    )


def max_probe_error(config: Config) -> float:
    """The default of `weight_sync.probe.max_error`."""
    if config.rollout.backend.has_fp8:
        return MAX_PROBE_ERROR_FP8
    return MAX_PROBE_ERROR[config.policy.dtype]


def _trainer_scores(ranks: TrainerRanks) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    def scores(prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        batch = probe_batch(prompts)
        return scores_of(batch, ranks.all("logprobs", batch)[0])

    return scores

"""Groups become the rows of a training batch, and rows are shared out over ranks and micro-batches.

Every row carries its sample id and keeps its index in the batch; whatever is computed per row
anywhere goes back to that index, so no order of arrival, sharding or packing can attach a number to
another sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from m3rl.grpo.advantage import AdvantageKind, group_advantages
from m3rl.types import Completion, Group, TrainBatch

TruncatedRule = Literal["keep", "mask"]


def build_batch(
    groups: Sequence[Group],
    *,
    temperature: float,
    advantage: AdvantageKind,
    skip_zero_variance: bool,
    truncated: TruncatedRule,
) -> TrainBatch:
    """Make one right-padded batch of the completions that can teach something, sorted by sample id.

    Advantages come from all scored completions of a prompt, before anything is left out or sharded.
    Left out are unscored, aborted and failed completions (they belong to no baseline either),
    groups with fewer than two scored completions, groups of equal rewards if `skip_zero_variance`,
    completions cut by the length limit if `truncated` is 'mask', and rows without a sampled token.
    `batch_metrics` counts them. The batch may end up with zero rows.

    Args:
        temperature: of the sampling; the trainer divides its logits by it. Above 0.
        truncated: 'keep' trains on completions that ended by length, 'mask' does not.

    Raises:
        ValueError: a completion that is not its group's, arrays whose lengths differ, a repeated
            sample id, temperature 0.
    """
    if temperature <= 0:
        raise ValueError(
            f"temperature={temperature} was used for sampling: greedy completions have no "
            "log-probability to train on; sample with rollout.temperature above 0"
        )
    rows: list[tuple[Completion, float]] = []
    for completion, value, is_flat in _with_advantages(groups, advantage):
        is_masked = truncated == "mask" and completion.finish_reason == "length"
        if not (is_masked or (skip_zero_variance and is_flat)) and completion.loss_mask.any():
            rows.append((completion, value))
    rows.sort(key=lambda row: row[0].sample_id)
    return _pad(rows, temperature)


def _pad(rows: list[tuple[Completion, float]], temperature: float) -> TrainBatch:
    completions = [completion for completion, _ in rows]
    lengths = [len(c.prompt_ids) + len(c.completion_ids) for c in completions]
    shape = (len(rows), max(lengths, default=0))
    batch = TrainBatch(
        sample_ids=[c.sample_id for c in completions],
        ids_BS=np.zeros(shape, np.int64),
        length_B=np.asarray(lengths, np.int64),
        loss_mask_BS=np.zeros(shape, bool),
        behaviour_logprobs_BS=np.zeros(shape, np.float32),
        advantages_B=np.asarray([value for _, value in rows], np.float32),
        temperature=float(temperature),
        denominator=float(sum(int(c.loss_mask.sum()) for c in completions)),
        routing=_captured([c.routing for c in completions]),
        blocks=_captured([c.blocks for c in completions]),
    )
    for b, c in enumerate(completions):
        start, stop = len(c.prompt_ids), lengths[b]
        batch.ids_BS[b, :start] = c.prompt_ids
        batch.ids_BS[b, start:stop] = c.completion_ids
        batch.loss_mask_BS[b, start:stop] = c.loss_mask
        batch.behaviour_logprobs_BS[b, start:stop] = np.where(c.loss_mask, c.logprobs, 0.0)
    return batch


def _captured(arrays: list[np.ndarray | None]) -> list[np.ndarray | None] | None:
    return arrays if any(a is not None for a in arrays) else None


def _with_advantages(
    groups: Sequence[Group], advantage: AdvantageKind
) -> list[tuple[Completion, float, bool]]:
    """Scored completions of prompts that have at least two: (it, advantage, all rewards equal)."""
    scored = [c for group in groups for c in _checked(group) if _is_scored(c)]
    seen: set[tuple[int, int]] = set()
    count: dict[int, int] = {}
    for c in scored:
        if c.sample_id in seen:
            raise ValueError(f"sample {c.sample_id} occurs twice in one batch")
        seen.add(c.sample_id)
        count[c.prompt_ordinal] = count.get(c.prompt_ordinal, 0) + 1
    scored = [c for c in scored if count[c.prompt_ordinal] >= 2]
    result = group_advantages(
        [c.reward for c in scored], [c.prompt_ordinal for c in scored], kind=advantage
    )
    flat = result.is_zero_variance_B.tolist()
    return list(zip(scored, result.values_B.tolist(), flat, strict=True))


def _is_scored(completion: Completion) -> bool:
    return bool(np.isfinite(completion.reward)) and completion.finish_reason in ("stop", "length")


def _checked(group: Group) -> Iterable[Completion]:
    for c in group.completions:
        if c.prompt_ordinal != group.prompt.ordinal:
            raise ValueError(
                f"sample {c.sample_id} lies in the group of prompt {group.prompt.ordinal}; "
                "group completions by prompt_ordinal, not by position"
            )
        if len(c.prompt_ids) == 0 or not np.array_equal(c.prompt_ids, group.prompt.ids):
            raise ValueError(
                f"sample {c.sample_id} was generated from {len(c.prompt_ids)} prompt ids that are "
                f"not the {len(group.prompt.ids)} ids of prompt {group.prompt.ordinal}"
            )
        sizes = {len(c.completion_ids), len(c.logprobs), len(c.loss_mask)}
        if len(sizes) != 1:
            raise ValueError(
                f"sample {c.sample_id}: {len(c.completion_ids)} completion ids, {len(c.logprobs)} "
                f"logprobs and {len(c.loss_mask)} mask entries must be equally many"
            )
        yield c


def batch_metrics(
    groups: Sequence[Group], batch: TrainBatch, *, advantage: AdvantageKind
) -> dict[str, float]:
    """Statistics of advantages (`adv/*`; none without a scored group) and of what `batch` kept."""
    metrics: dict[str, float] = {}
    with_advantages = _with_advantages(groups, advantage)
    is_flat = {c.prompt_ordinal: flat for c, _, flat in with_advantages}
    if with_advantages:
        values = np.asarray([value for _, value, _ in with_advantages])
        metrics = {
            "adv/mean": float(values.mean()),
            "adv/std": float(values.std()),
            "adv/min": float(values.min()),
            "adv/max": float(values.max()),
            "adv/abs_mean": float(np.abs(values).mean()),
            "adv/zero_frac": sum(is_flat.values()) / len(is_flat),
        }
    num_completions = sum(len(g.completions) for g in groups)
    num_scored = sum(_is_scored(c) for g in groups for c in g.completions)
    return metrics | {
        "data/unscored_completions": float(num_completions - num_scored),
        "data/dropped_groups": float(len(groups) - len(is_flat)),
        "data/train_rows": float(len(batch.sample_ids)),
        "data/loss_tokens": batch.denominator,
    }


def split_minibatches(num_rows: int, num_updates: int) -> list[np.ndarray]:
    """Cut rows into at most `num_updates` runs of nearly equal size, in row order, none empty."""
    return [rows for rows in np.array_split(np.arange(num_rows), num_updates) if len(rows)]


def shard_rows(rows: np.ndarray, length_B: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Give every row to one rank so that tokens are balanced; a pure function of its arguments.

    Longest row first, each to the rank with the fewest tokens so far (the lowest of equals). A rank
    may get none.

    Args:
        rows: indices into the batch.
        length_B: tokens of every row of the batch.

    Returns:
        Row indices of each rank, ascending.
    """
    tokens = [0] * num_ranks
    shards: list[list[int]] = [[] for _ in range(num_ranks)]
    for row in sorted(rows.tolist(), key=lambda r: (-int(length_B[r]), r)):
        rank = min(range(num_ranks), key=lambda r: (tokens[r], r))
        shards[rank].append(row)
        tokens[rank] += int(length_B[row])
    return [np.asarray(sorted(shard), np.int64) for shard in shards]


def sharding_metrics(
    minibatches: Sequence[np.ndarray], length_B: np.ndarray, num_ranks: int, max_tokens: int
) -> dict[str, float]:
    """`perf/padding_frac` of all micro-batches, `perf/seqlen_imbalance`: busiest rank over mean."""
    padded, tokens_R = 0, np.zeros(num_ranks)
    for rows in minibatches:
        for rank, shard in enumerate(shard_rows(rows, length_B, num_ranks)):
            tokens_R[rank] += length_B[shard].sum()
            for micro in micro_batches(shard, length_B, max_tokens):
                padded += len(micro) * int(length_B[micro].max())
    if not padded:
        return {}
    return {
        "perf/padding_frac": float(1 - tokens_R.sum() / padded),
        "perf/seqlen_imbalance": float(tokens_R.max() / tokens_R.mean()),
    }


def micro_batches(rows: np.ndarray, length_B: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Pack rows of similar length so that rows x longest row stays within `max_tokens`.

    A single row longer than `max_tokens` is a micro-batch of its own: rows are never cut.
    """
    if max_tokens < 1:
        raise ValueError(f"micro_batch_tokens={max_tokens} must be at least 1")
    packed: list[list[int]] = []
    for row in sorted(rows.tolist(), key=lambda r: (-int(length_B[r]), r)):
        # Longest first: the first row of a micro-batch sets its width.
        width = int(length_B[packed[-1][0]]) if packed else 0
        if packed and (len(packed[-1]) + 1) * width <= max_tokens:
            packed[-1].append(row)
        else:
            packed.append([row])
    return [np.asarray(micro, np.int64) for micro in packed]

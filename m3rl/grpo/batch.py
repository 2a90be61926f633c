"""Groups become the rows of a training batch, and rows are shared out over ranks and micro-batches.

Every row carries its sample id and keeps its index in the batch; whatever is computed per row
anywhere goes back to that index, so no order of arrival, sharding or packing can attach a number to
another sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from m3rl.grpo.advantage import AdvantageKind, group_advantages
from m3rl.grpo.filters import TruncatedRule, is_flat, is_scored, is_trained
from m3rl.types import Completion, Group, SampleId, TrainBatch


def build_batch(
    groups: Sequence[Group],
    *,
    temperature: float,
    advantage: AdvantageKind,
    skip_zero_variance: bool,
    truncated: TruncatedRule,
    rewards: Mapping[SampleId, float] | None = None,
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
        rewards: shaped rewards of scored completions, for their advantages; None: their own, which
            also say which groups have equal rewards.

    Raises:
        ValueError: a completion that is not its group's, arrays whose lengths differ, a repeated
            sample id, temperature 0, a reward that `group_advantages` refuses.
    """
    if temperature <= 0:
        raise ValueError(
            f"temperature={temperature} was used for sampling: greedy completions have no "
            "log-probability to train on; sample with rollout.temperature above 0"
        )
    rows = [
        (completion, value)
        for completion, value, flat in _with_advantages(groups, advantage, rewards)
        if is_trained(completion, truncated) and not (skip_zero_variance and flat)
    ]
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
    groups: Sequence[Group],
    advantage: AdvantageKind,
    rewards: Mapping[SampleId, float] | None,
) -> list[tuple[Completion, float, bool]]:
    """Scored completions of prompts that have at least two: (it, advantage, all rewards equal)."""
    scored = [c for group in groups for c in _checked(group) if is_scored(c)]
    seen: set[SampleId] = set()
    of_prompt: dict[int, list[float]] = {}
    for c in scored:
        if c.sample_id in seen:
            raise ValueError(f"sample {c.sample_id} occurs twice in one batch")
        seen.add(c.sample_id)
        of_prompt.setdefault(c.prompt_ordinal, []).append(c.reward)
    scored = [c for c in scored if len(of_prompt[c.prompt_ordinal]) >= 2]
    result = group_advantages(
        [c.reward if rewards is None else rewards[c.sample_id] for c in scored],
        [c.prompt_ordinal for c in scored],
        kind=advantage,
    )
    flat = [is_flat(of_prompt[c.prompt_ordinal]) for c in scored]
    return list(zip(scored, result.values_B.tolist(), flat, strict=True))


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
    groups: Sequence[Group],
    batch: TrainBatch,
    *,
    advantage: AdvantageKind,
    rewards: Mapping[SampleId, float] | None = None,
) -> dict[str, float]:
    """Statistics of advantages (`adv/*`; none without a scored group) and of what `batch` kept."""
    metrics: dict[str, float] = {}
    with_advantages = _with_advantages(groups, advantage, rewards)
    flat_prompts = {c.prompt_ordinal: flat for c, _, flat in with_advantages}
    if with_advantages:
        values = np.asarray([value for _, value, _ in with_advantages])
        metrics = {
            "adv/mean": float(values.mean()),
            "adv/std": float(values.std()),
            "adv/min": float(values.min()),
            "adv/max": float(values.max()),
            "adv/abs_mean": float(np.abs(values).mean()),
            "adv/zero_frac": sum(flat_prompts.values()) / len(flat_prompts),
        }
    num_completions = sum(len(g.completions) for g in groups)
    num_scored = sum(is_scored(c) for g in groups for c in g.completions)
    return metrics | {
        "data/unscored_completions": float(num_completions - num_scored),
        "data/dropped_groups": float(len(groups) - len(flat_prompts)),
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


def plan_micro_batches(
    rows: np.ndarray, length_B: np.ndarray, num_ranks: int, max_tokens: int
) -> list[list[np.ndarray]]:
    """The micro-batches of each rank, equally many on all: a pure function of its arguments.

    Ranks meet in collectives within every forward pass, so a rank that needs fewer has empty ones
    at the end; its fullest come first, as those of the others do.

    Args:
        rows: indices into the batch.
        length_B: tokens of every row of the batch.
        max_tokens: of one micro-batch.

    Raises:
        ValueError: see `pack_rows`.
    """
    plan = [
        pack_rows(shard, length_B, max_tokens) for shard in shard_rows(rows, length_B, num_ranks)
    ]
    most = max(map(len, plan))
    empty = np.zeros(0, np.int64)
    return [packed + [empty] * (most - len(packed)) for packed in plan]


def pack_rows(rows: np.ndarray, length_B: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Fill micro-batches of up to `max_tokens` tokens: longest row first, each into the first with
    room for it.

    Returns:
        Row indices of each, ascending; the fullest first.

    Raises:
        ValueError: a row is longer than `max_tokens`; rows are never cut.
    """
    room: list[int] = []
    packed: list[list[int]] = []
    for row in sorted(rows.tolist(), key=lambda r: (-int(length_B[r]), r)):
        length = int(length_B[row])
        if length > max_tokens:
            raise ValueError(
                f"row {row} has {length} tokens and policy.micro_batch_tokens={max_tokens}; rows "
                f"are never cut: raise it to {length}, or leave out longer rows"
            )
        place = next((i for i, free in enumerate(room) if free >= length), len(room))
        if place == len(room):
            room.append(max_tokens)
            packed.append([])
        packed[place].append(row)
        room[place] -= length
    fullest_first = sorted(range(len(packed)), key=lambda i: (room[i], i))
    return [np.asarray(sorted(packed[i]), np.int64) for i in fullest_first]


def sharding_metrics(
    minibatches: Sequence[np.ndarray], length_B: np.ndarray, num_ranks: int, max_tokens: int
) -> dict[str, float]:
    """`perf/padding_frac`: share of computed tokens that are no row's (the one token of an empty
    micro-batch); `perf/rank_wait_frac`: share of the ranks' time that they wait for the one with
    the most tokens in a micro-batch, as if time were tokens; `perf/seqlen_imbalance`: tokens of the
    busiest rank over the mean."""
    num_empty, paced, tokens_R = 0, 0, np.zeros(num_ranks)
    for rows in minibatches:
        plan = plan_micro_batches(rows, length_B, num_ranks, max_tokens)
        tokens_RK = np.array([[length_B[micro].sum() for micro in packed] for packed in plan])
        tokens_R += tokens_RK.sum(1)
        paced += int(tokens_RK.max(0).sum())
        num_empty += sum(not len(micro) for packed in plan for micro in packed)
    if not tokens_R.any():
        return {}
    return {
        "perf/rank_wait_frac": float(1 - tokens_R.sum() / (num_ranks * paced)),
        "perf/padding_frac": float(num_empty / (num_empty + tokens_R.sum())),
        "perf/seqlen_imbalance": float(tokens_R.max() / tokens_R.mean()),
    }

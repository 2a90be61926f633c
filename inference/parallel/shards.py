"""Which rectangle of each published tensor a rank holds, and where in its parameters."""

from __future__ import annotations

from dataclasses import dataclass

from inference.config import ModelConfig
from inference.models.name_map import (
    Placement,
    TensorSpec,
    published_tensors,
    runtime_placement,
)
from inference.parallel.config import ParallelConfig, local_config

Bounds = tuple[tuple[int, int], ...]
"""Start and stop along each dimension."""

_SPLIT_DIM = {
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "index_q_proj": 0,
    "o_proj": 1,
    "gate_proj": 0,
    "up_proj": 0,
    "down_proj": 1,
    "w1": 0,
    "w3": 0,
    "w2": 1,
    "lm_head": 0,
}
"""Dimension that ranks split, by the last module of a published name; others are whole."""
_KV = ("k_proj", "v_proj", "index_q_proj")
"""Split by KV head; more ranks than heads hold copies."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of one published tensor."""

    bounds: Bounds
    """Of the published tensor."""
    placement: Placement
    """Where it lies in the rank's parameters."""


def runtime_shards(config: ModelConfig, parallel: ParallelConfig, rank: int) -> dict[str, Shard]:
    """Published name -> what `rank` holds of it; experts held elsewhere are not in it.

    Parameters are those of `inference.models.minimax_m3.MiniMaxM3` for `local_config`, with only
    the rank's experts in `w13` and `w2`, and its vocabulary rows in `lm_head`.

    Raises:
        ConfigError: the model cannot be split this way.
    """
    parallel.check(config)
    places = runtime_placement(local_config(config, parallel))
    held = parallel.experts(config.num_local_experts, rank)
    shards = {}
    for spec in published_tensors(config):
        place = places[spec.name]
        if spec.role == "expert":
            expert, *rows = place.index
            if expert not in held:
                continue
            assert isinstance(expert, int), "the first index of an expert's place is its id"
            place = Placement(place.param, (expert - held.start, *rows))
        shards[spec.name] = Shard(shard_bounds(spec, config, parallel, rank), place)
    return shards


def shard_bounds(
    spec: TensorSpec, config: ModelConfig, parallel: ParallelConfig, rank: int
) -> Bounds:
    """The rectangle of a published tensor that `rank` holds, if it holds any of it.

    Exact splits only: `parallel` must have been checked against `config`.
    """
    module = spec.name.split(".")[-2]
    if module not in _SPLIT_DIM:
        return tuple((0, size) for size in spec.shape)
    if spec.role == "expert":
        parts, part = parallel.width_ranks, parallel.width_rank(rank)
    else:
        parts, part = parallel.tp, parallel.tp_rank(rank)
    if module in _KV and parts > config.num_key_value_heads:
        part = part * config.num_key_value_heads // parts
        parts = config.num_key_value_heads
    return tuple(
        (size * part // parts, size * (part + 1) // parts) if i == _SPLIT_DIM[module] else (0, size)
        for i, size in enumerate(spec.shape)
    )

"""How many ranks split what (`ParallelConfig`); standard library only, for commands that check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from inference.config import MXFP8_BLOCK_SIZE, ConfigError, ModelConfig


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes of the three ways to split; `check` holds them against a model."""

    tp: int = 1
    """Ranks that split attention, MLPs and head of the same requests."""
    dp: int = 1
    """Groups of tp ranks with requests of their own."""
    ep: int | None = None
    """Groups that split the experts, dp · d with d | tp; None: every rank is one."""

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        groups = [self.dp * d for d in range(1, self.tp + 1) if self.tp % d == 0]
        if self.expert_groups not in groups:
            raise ConfigError(
                f"ep={self.ep} does not divide into tp={self.tp}, dp={self.dp}: it must be dp "
                f"times a divisor of tp; use one of {groups}"
            )

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tp * self.dp

    @property
    def expert_groups(self) -> int:
        """`ep`, filled in."""
        return self.world if self.ep is None else self.ep

    @property
    def width_ranks(self) -> int:
        """Ranks of one expert group; each holds a part of the width of all its experts."""
        return self.world // self.expert_groups

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def dp_rank(self, rank: int) -> int:
        return rank // self.tp

    def expert_group(self, rank: int) -> int:
        return rank // self.width_ranks

    def width_rank(self, rank: int) -> int:
        return rank % self.width_ranks

    def experts(self, num_experts: int, rank: int) -> range:
        """Ids of the experts that a rank holds (a part of)."""
        count = num_experts // self.expert_groups
        first = self.expert_group(rank) * count
        return range(first, first + count)

    def check(self, model: ModelConfig, quantization: str = "none") -> None:
        """Raise ConfigError, naming the values that do, unless `model` can be split this way.

        Args:
            quantization: 'none', or what is kept in MXFP8: 'mxfp8' (routed experts) or
                'mxfp8_released' (attention and other MLPs too). Groups of 32 are never cut.
        """
        experts = MXFP8_BLOCK_SIZE if quantization != "none" else 1
        others = MXFP8_BLOCK_SIZE if quantization == "mxfp8_released" else 1
        fault = _tp_fault(model, self.tp, others)
        if fault is not None:
            values = _that_do(
                range(1, model.num_attention_heads + 1), lambda tp: _tp_fault(model, tp, others)
            )
            raise ConfigError(f"tp={self.tp} {fault}; use one of {values}")
        fault = self._ep_fault(model, self.expert_groups, experts)
        if fault is not None:
            groups = (self.dp * d for d in range(1, self.tp + 1) if self.tp % d == 0)
            values = _that_do(groups, lambda ep: self._ep_fault(model, ep, experts))
            raise ConfigError(
                f"ep={self.expert_groups} (tp={self.tp}, dp={self.dp}) {fault}; "
                + (f"use one of {values}" if values else "no ep does with this tp and dp")
            )

    def _ep_fault(self, model: ModelConfig, ep: int, group: int) -> str | None:
        if model.num_local_experts % ep:
            return f"does not divide num_local_experts={model.num_local_experts}"
        ranks = self.world // ep
        return _cut_fault("intermediate_size", model.intermediate_size, ranks, group)


def local_config(config: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """The model whose layers are as wide as one rank's: fewer heads, narrower MLPs and experts.

    Experts and vocabulary are counted whole in it, since tokens and routing name them whole.
    """
    tp, kv_heads = parallel.tp, max(1, config.num_key_value_heads // parallel.tp)
    return dataclasses.replace(
        config,
        num_attention_heads=config.num_attention_heads // tp,
        num_key_value_heads=kv_heads,
        index_n_heads=kv_heads,
        dense_intermediate_size=config.dense_intermediate_size // tp,
        shared_intermediate_size=config.shared_intermediate_size // tp,
        intermediate_size=config.intermediate_size // parallel.width_ranks,
    )


def _tp_fault(model: ModelConfig, tp: int, group: int) -> str | None:
    """Why `tp` ranks cannot split the layers; None when they can. `group`: never cut along K."""
    if model.num_attention_heads % tp:
        return f"does not divide num_attention_heads={model.num_attention_heads}"
    kv_heads = model.num_key_value_heads
    if kv_heads % tp and tp % kv_heads:
        return f"neither divides nor is a multiple of num_key_value_heads={kv_heads}"
    if model.vocab_size % tp:
        return f"does not divide vocab_size={model.vocab_size}"
    for name, size in (
        ("num_attention_heads * head_dim", model.num_attention_heads * model.head_dim),
        ("dense_intermediate_size", model.dense_intermediate_size),
        ("shared_intermediate_size", model.shared_intermediate_size),
    ):
        if fault := _cut_fault(name, size, tp, group):
            return fault
    return None


def _cut_fault(name: str, size: int, ranks: int, group: int) -> str | None:
    if ranks > 1 and size % (ranks * group):
        whole = f" in whole MXFP8 groups of {group}" if group > 1 else ""
        return f"leaves {ranks} ranks that cannot split {name}={size}{whole}"
    return None


def _that_do(values: Iterable[int], fault: Callable[[int], str | None]) -> list[int]:
    return [value for value in values if fault(value) is None]

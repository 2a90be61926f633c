"""What a trainer rank holds that trains adapters on a frozen model (`m3rl.lora`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

from inference.config import MXFP8_BLOCK_SIZE, ModelConfig
from m3rl.lora.settings import LoraSettings
from m3rl.plan_trainer import FP32, Rank, TrainerMemory, TrainerSetting
from m3rl.sync_plan import trainer_parameters
from m3rl.weight_sync.layout import volume
from m3rl.weight_sync.trainer_layout import TrainerShards, held_region


def plan_rank(setting: TrainerSetting) -> TrainerMemory:
    """Add up the busiest rank.

    Raises:
        LayoutError: `ep` does not divide ranks or experts.
    """
    return (Rank(setting) if setting.lora is None else LoraRank(setting, setting.lora)).plan()


@cache
def _targets(model: ModelConfig, shards: TrainerShards, lora: LoraSettings) -> tuple[int, int]:
    """(elements of all adapters, elements that a rank owns of the weights they adapt)."""
    adapted = {*lora.modules, *lora.parameters}
    adapters = owned = 0
    for each in trainer_parameters(model):
        if each.name.split(".", 3)[-1].removesuffix(".weight") in adapted:
            region = held_region(each.shape, each.is_experts, shards, 0)
            stacked = math.prod(each.shape[:-2])
            adapters += each.times * stacked * lora.rank * sum(each.shape[-2:])
            owned += each.times * (0 if region is None else volume(region))
    return adapters, owned


class LoraRank(Rank):
    """Every rank has all adapters; the base lies in the wire's dtype, or its experts in MXFP8."""

    def __init__(self, setting: TrainerSetting, lora: LoraSettings) -> None:
        super().__init__(setting)
        self.lora = lora
        self.adapters, self.owned = _targets(setting.model, setting.shards, lora)

    def lasting(self) -> tuple[dict[str, int], int]:
        setting, on_targets = self.setting, self.setting.width * self.owned
        adam = 2 * FP32 * self.adapters
        uses = {
            "frozen weights": self.on_wire("own") - self.experts("own"),
            "frozen experts": self.frozen_experts(),
            "base of adapted weights": on_targets,
            "adapters": FP32 * self.adapters,
            "AdamW moments": 0 if setting.offload else adam,
            "weights before an update": on_targets if setting.compares else 0,
            "what was sent": on_targets if setting.remembers_sent else 0,
        }
        return uses, adam if setting.offload else 0

    def experts(self, field: str) -> int:
        """Bytes in the wire's dtype."""
        return sum(
            self.times[bucket] * self.unit_bytes(units["experts"], field)
            for bucket, units in self.units.items()
            if "experts" in units
        )

    def frozen_experts(self) -> int:
        """In MXFP8 a rank has all of its group's, else FSDP cuts them."""
        if not self.lora.mxfp8_experts:
            return self.experts("own")
        values = self.experts("whole") // self.setting.width
        return values + values // MXFP8_BLOCK_SIZE

    def moments(self) -> Iterator[tuple[str, dict[str, int]]]:
        # The backward pass ends before the embedding.
        return (moment for moment in super().moments() if "embedding" not in moment[0])

    def gradients(self, *buckets: str) -> int:
        return FP32 * self.adapters

    def staged(self) -> int:
        return 2 * FP32 * self.adapters if self.setting.offload else 0

    def head_weights(self) -> dict[str, int]:
        head = self.model.vocab_size * self.model.hidden_size
        return {"gathered weights": 2 * self.setting.width * head * self.is_sharded}

    def weights_of(self, buckets: list[str]) -> dict[str, int]:
        width, units = self.setting.width, dict(self.units[buckets[-1]])
        experts = units.get("experts")
        matrix = 2 * self.model.intermediate_size * self.model.hidden_size
        made = 0
        if experts is not None and self.lora.mxfp8_experts:
            del units["experts"]
            made = width * matrix
        elif experts is not None and self.lora.parameters:
            made = width * experts.whole
        gathered = 2 * sum(self.unit_bytes(unit, "whole") for unit in units.values())
        return {
            "gathered weights": gathered * self.is_sharded,
            "widened experts" if self.lora.mxfp8_experts else "gradients of experts": made,
        }

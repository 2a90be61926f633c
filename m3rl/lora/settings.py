"""What LoRA adapts; without torch, which the driver has no use for here."""

from __future__ import annotations

from dataclasses import dataclass

TARGETS = ("attention", "shared_experts", "experts")
"""Queries, keys, values and output of the main branch; MLPs of shared experts; of routed ones."""
LINEAR_TARGETS = {
    "attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    "shared_experts": ("mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj"),
}
"""Modules of a layer by their names in transformers."""
STACKED_TARGETS = {"experts": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")}
"""Parameters of a layer that stack a matrix of each expert."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Adapters A [r, in] and B [out, r] of each target: its weight is base + alpha / r · B · A.

    Their masters, and files, are FP32.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("attention",)
    """Of `TARGETS`."""
    mxfp8_experts: bool = False
    """Whether the frozen routed experts are held in MXFP8."""
    seed: int = 0
    """Of A."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets:
            raise ValueError(f"policy.lora.targets={list(self.targets)}; use some of {TARGETS}")
        if self.rank < 1:
            raise ValueError(f"policy.lora.rank={self.rank} must be at least 1")
        if self.mxfp8_experts and "experts" in self.targets:
            raise ValueError(
                "policy.lora.targets has experts and policy.lora.frozen_experts is mxfp8: adapted "
                "experts would be quantised anew in every step, and most of what adapters add "
                "would be rounded away; leave them out of the targets, or set frozen_experts: auto"
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def modules(self) -> tuple[str, ...]:
        """Of `LINEAR_TARGETS`, in a fixed order."""
        chosen = [LINEAR_TARGETS[name] for name in LINEAR_TARGETS if name in self.targets]
        return tuple(module for names in chosen for module in names)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Of `STACKED_TARGETS`."""
        chosen = [STACKED_TARGETS[name] for name in STACKED_TARGETS if name in self.targets]
        return tuple(parameter for names in chosen for parameter in names)

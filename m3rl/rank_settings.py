"""What trainer ranks are told; without transformers, which the driver has no use for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from m3rl.grpo.loss import LossSettings
from m3rl.index_alignment import IndexLossSettings
from m3rl.lora.settings import LoraSettings

COLLECTIVE_GRACE_S = 60.0
"""More than a driver needs to find out which rank has made it wait too long."""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW with a linear warm-up."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    """Decoupled, on matrices only: norms keep theirs."""
    grad_clip: float | None
    """Largest L2 norm of the whole gradient; None: unbounded."""
    warmup_steps: int
    offload: bool = False
    """Keep AdamW's moments in the host's memory."""

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        return self.lr * min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else self.lr


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a trainer rank needs to know; the same on all ranks."""

    loss: LossSettings
    optimizer: OptimizerSettings
    dtype: str
    """'float32' | 'bfloat16': of the weights in the forward pass and on the wire."""
    replay_routing: bool
    micro_batch_tokens: int
    """Most tokens of one forward pass."""
    old_logprobs: Literal["behaviour", "recompute"]
    """π_old: the engine's log-probabilities, or the trainer's own before the first update."""
    updates_per_batch: int
    seed: int
    num_threads: int
    device: Literal["cpu", "cuda"] = "cpu"
    replay_blocks: bool = False
    activation_checkpointing: bool = False
    lora: LoraSettings | None = None
    """Train adapters alone; None: all weights."""
    index_loss: IndexLossSettings = field(default_factory=IndexLossSettings)
    index_drift_every: int = 0
    """Optimizer steps between measurements of how far the choice of blocks has moved; 0: none."""
    ep: int = 1
    """Ranks that split the experts."""
    cp: int = 1
    """Ranks that split the tokens of a packed row."""
    timeout_s: float = 1800.0
    """How long the driver waits for what it has called on a rank."""

    @property
    def collective_timeout_s(self) -> float:
        """How long a collective waits for the other ranks: until the driver, who began to wait no
        later and knows which of them is silent, has ended the run."""
        return self.timeout_s + COLLECTIVE_GRACE_S

    def __post_init__(self) -> None:
        if self.old_logprobs not in ("behaviour", "recompute"):
            raise ValueError(
                f"grpo.old_logprobs={self.old_logprobs!r}; use 'behaviour' or 'recompute'"
            )
        if self.updates_per_batch < 1:
            raise ValueError(f"grpo.updates_per_batch={self.updates_per_batch} must be at least 1")

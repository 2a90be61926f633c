"""What the attention bench measures: M3's sizes on a GPU, small ones on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.kernels.harness import floor_us
from benchmarks.train_measure import TINY, K, model_config, published_config
from inference.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of every case, in tokens where nothing else is said."""

    device: torch.device
    dtype: torch.dtype
    config: ModelConfig
    """Of a model of one sparse layer."""
    checked_tokens: int
    """What is compared with FP32."""
    layer_tokens: tuple[int, ...]
    core_tokens: tuple[int, ...]
    peer_tokens: int
    """Up to here every dense backend is timed; beyond, the one that was fastest there."""
    expert_tokens: int
    checked_experts: int
    matrix: int
    """Rows and columns of the matrices whose product is the measure of the experts'."""
    logprob_tokens: int

    def floor_us(self, flop: float) -> float | None:
        """Least time of so many FLOP; unknown for a CPU."""
        return floor_us(0, flop) if self.device.type == "cuda" else None

    @classmethod
    def m3(cls) -> Shapes:
        return cls(
            device=torch.device("cuda"),
            dtype=torch.bfloat16,
            config=model_config(published_config(0, 1)),
            checked_tokens=4 * K,
            layer_tokens=(8 * K, 16 * K, 32 * K, 64 * K, 128 * K),
            core_tokens=(16 * K, 32 * K, 128 * K),
            peer_tokens=32 * K,
            expert_tokens=16 * K,
            checked_experts=16,
            matrix=8192,
            logprob_tokens=32 * K,
        )

    @classmethod
    def tiny(cls) -> Shapes:
        return cls(
            device=torch.device("cpu"),
            dtype=torch.float32,
            config=model_config(published_config(0, 1, **TINY)),
            checked_tokens=21,
            layer_tokens=(24, 50),
            core_tokens=(24, 50),
            peer_tokens=24,
            expert_tokens=40,
            checked_experts=4,
            matrix=64,
            logprob_tokens=30,
        )

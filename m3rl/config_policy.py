"""How the trained model computes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from m3rl.config_file import Bool, Int, Section


class PolicyConfig(Section):
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What trainer and runtime compute with and a weight sync carries; masters are always FP32."""
    replay_routing: Bool = False
    """Train with the experts that the runtime chose; needs rollout.capture_routing."""
    replay_blocks: Bool = False
    """Train with the key blocks that the runtime chose; needs rollout.capture_blocks."""
    micro_batch_tokens: Int = Field(default=8192, ge=1)
    """Most tokens of one forward and backward pass of a trainer rank: packed samples, unpadded."""
    activation_checkpointing: Bool = True
    """Keep only the inputs of layers for the backward pass and compute the layers again there: a
    third more work, and memory that hardly grows with the number of layers."""

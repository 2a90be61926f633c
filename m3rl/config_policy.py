"""How the trained model computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from m3rl.config_file import Bool, Float, Int, Section, at_most
from m3rl.lora.settings import LoraSettings

if TYPE_CHECKING:
    from m3rl.config import Config

Target = Literal["attention", "shared_experts", "experts"]


class IndexLossConfig(Section):
    """Trains the index branch, which chooses key blocks and else is frozen."""

    coef: Annotated[
        Float, Field(ge=0), at_most(1e6, "the index branch has gradients of this loss alone")
    ] = 0.0
    """Weight of KL(attention over the chosen blocks, the index branch's) in each sparse layer, the
    mean over tokens and KV heads; 0: the index branch is frozen."""
    level: Literal["token", "block"] = "token"
    """Compare the weights of keys, as MSA was trained (arXiv:2606.13392), or of blocks, where the
    best key speaks for its block as it does in the choice."""


class LoraConfig(Section):
    rank: Int = Field(default=16, ge=1)
    """Rows of A and columns of B: what is added to a weight has this rank."""
    alpha: Float = Field(default=32.0, gt=0)
    """What is added is alpha / rank times B · A."""
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = ("attention",)
    """Weights that get adapters: attention (query, key, value and output of the main branch),
    shared_experts, experts (one adapter for each routed expert)."""
    frozen_experts: Literal["auto", "mxfp8"] = "auto"
    """How a trainer rank holds routed experts that are not adapted; auto: as policy.dtype; mxfp8:
    half as large, the bytes of an MXFP8 checkpoint or what replicas make of a BF16 one."""


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
    lora: LoraConfig | None = None
    """Train low-rank adapters on frozen weights, which have no FP32 masters then; `{}` for the
    defaults, null to train all weights."""
    index_loss: IndexLossConfig = IndexLossConfig()
    index_drift_every: Int = Field(default=0, ge=0)
    """Every so many optimizer steps, measure on samples of the first batch how many of the blocks
    chosen at first are not chosen any more (m3/block_drift); 0: never."""


def lora_settings(config: Config) -> LoraSettings | None:
    """What is adapted; None where all weights are trained."""
    lora = config.policy.lora
    if lora is None:
        return None
    return LoraSettings(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.targets,
        mxfp8_experts=lora.frozen_experts == "mxfp8",
        seed=config.run.seed,
    )


def lora_conflicts(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Message and keys of each contradiction."""
    lora = config.policy.lora
    if lora is None:
        return
    if lora.frozen_experts == "mxfp8" and "experts" in lora.targets:
        yield (
            "policy.lora.targets: experts would be quantised anew in every step with "
            "policy.lora.frozen_experts: mxfp8, which rounds most of what adapters add away; leave "
            "experts out, or set frozen_experts: auto",
            ("policy.lora.targets", "policy.lora.frozen_experts"),
        )
    if config.policy.index_loss.coef > 0:
        yield (
            f"policy.index_loss.coef: {config.policy.index_loss.coef} trains the index branch, and "
            "with policy.lora adapters alone are trained; set coef: 0, or policy.lora: null",
            ("policy.index_loss.coef", "policy.lora"),
        )
    if config.sft.init == "random":
        yield (
            "policy.lora: adapters need a trained base, and sft.init: random makes one without; "
            "set sft.init: path, or policy.lora: null",
            ("policy.lora", "sft.init"),
        )

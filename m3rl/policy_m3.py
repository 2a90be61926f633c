"""MiniMax-M3 as an architecture: transformers' modules with the forwards of `policy_layers`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig

from inference.config import ModelConfig
from inference.models.weights import published_tensors, read_checkpoint, transformers_placement
from m3rl.architecture import InitialScales, Unit, install_head
from m3rl.policy_layers import ATTENTION, install


class M3Architecture:
    """An `Architecture`.

    Args:
        trains_index: the index branch is trained too.
    """

    def __init__(self, config: ModelConfig, *, trains_index: bool) -> None:
        self.config = config
        self.specs = {spec.name: spec for spec in published_tensors(config)}
        self.placement = transformers_placement(config)
        self._trains_index = trains_index

    def build(self, master: torch.dtype, computing: torch.dtype) -> Any:
        """A new model; its layers compute in the dtype of their inputs and weights."""
        with torch.random.fork_rng():
            model = _transformers_model(self.config).to(master)
        frozen = {
            self.placement[name].param
            for name, s in self.specs.items()
            if s.role == "index" and not self._trains_index
        }
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        install(model)
        install_head(model.lm_head)
        return model

    def head(self, model: Any) -> Any:
        return model.lm_head

    def units(self, model: Any) -> Iterator[Unit]:
        """The embedding, each layer, its experts, its router and the head."""
        yield Unit(model.model.embed_tokens, in_backward=False)
        for layer in model.model.layers:
            if hasattr(layer.mlp, "experts"):
                yield Unit(layer.mlp.gate, is_fp32=True)
                yield Unit(layer.mlp.experts, stacks_experts=True)
            yield Unit(layer)
        yield Unit(model.lm_head)

    def read(self, path: str | Path, only: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
        """See `inference.models.weights.read_checkpoint`."""
        return read_checkpoint(path, self.config, only=only)

    def initial(self, scales: InitialScales) -> Mapping[str, float | Tensor]:
        """Norms begin at 0: they act as 1 + w."""
        return {place.param: _scale(place.param, scales) for place in self.placement.values()}


def _scale(param: str, scales: InitialScales) -> float:
    if "norm" in param:
        return 0.0
    if "embed_tokens" in param:
        return scales.embedding
    return scales.correction_bias if "e_score_correction_bias" in param else scales.matrices


def _transformers_model(config: ModelConfig) -> Any:
    # transformers never trains the embedding of its pad token, which is often the end token; and
    # packed samples need none.
    text_config = MiniMaxM3VLTextConfig(**config.to_transformers() | {"pad_token_id": None})
    text_config._attn_implementation = ATTENTION
    return MiniMaxM3VLForCausalLM(text_config)

"""What the runtime must know of a model (`ModelConfig`) and of its own limits (`EngineConfig`).

Standard library only: a command that just checks a configuration must not wait for torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.models.config_json import (
    DENSE_MLP,
    FLOAT_KEYS,
    FULL,
    INDEX_KEYS,
    INTEGER_KEYS,
    MOE,
    SPARSE,
    ConfigError,
    check_positive,
    read_json,
    read_model,
    token_list,
)

__all__ = ["DENSE_MLP", "FULL", "MOE", "SPARSE", "ConfigError", "EngineConfig", "ModelConfig"]


QUANTIZATIONS = ("none", "mxfp8", "mxfp8_released")
MXFP8_BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The text part of one MiniMax-M3: every number the forward pass needs."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    """Leading dims of each head that are rotated; the others pass."""
    swiglu_alpha: float
    swiglu_limit: float
    intermediate_size: int
    """Width of one routed expert."""
    dense_intermediate_size: int
    shared_intermediate_size: int
    """Total width of the shared expert."""
    num_local_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    layer_types: tuple[str, ...]
    """'full_attention' or 'minimax_m3_sparse', one a layer."""
    mlp_layer_types: tuple[str, ...]
    """'dense' or 'sparse' (MoE), one a layer."""
    index_n_heads: int
    index_head_dim: int
    index_block_size: int
    index_topk_blocks: int
    """Blocks a query reads, the local ones among them."""
    index_local_blocks: int
    swiglu_beta: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        _check_layers("layer_types", self.layer_types, (FULL, SPARSE), self.num_hidden_layers)
        _check_layers(
            "mlp_layer_types", self.mlp_layer_types, (DENSE_MLP, MOE), self.num_hidden_layers
        )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.index_n_heads != self.num_key_value_heads:
            raise ConfigError(
                f"index_n_heads={self.index_n_heads} differs from "
                f"num_key_value_heads={self.num_key_value_heads}; each KV head has one index head"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= min(
            self.head_dim, self.index_head_dim
        ):
            raise ConfigError(
                f"rotary_dim={self.rotary_dim} must be even, above 0 and at most head_dim="
                f"{self.head_dim} and index_head_dim={self.index_head_dim}"
            )
        if not 1 <= self.index_local_blocks <= self.index_topk_blocks:
            raise ConfigError(
                f"index_local_blocks={self.index_local_blocks} must be between 1 and "
                f"index_topk_blocks={self.index_topk_blocks}, which counts the local blocks"
            )
        if self.num_experts_per_tok > self.num_local_experts:
            raise ConfigError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds "
                f"num_local_experts={self.num_local_experts}"
            )
        for token in (self.bos_token_id, self.pad_token_id, *self.eos_token_ids):
            if token is not None and not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"special token id {token} is outside the vocabulary of {self.vocab_size}"
                )

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` of a checkpoint (and end tokens of its `generation_config.json`).

        Raises:
            ConfigError: no such file, no JSON object in it, or a model this runtime cannot run.
        """
        file = Path(path) / "config.json"
        config = cls.from_dict(read_json(file), source=str(file))
        generation = Path(path) / "generation_config.json"
        if not generation.exists():
            return config
        extra = token_list(read_json(generation).get("eos_token_id"), str(generation))
        merged = tuple(dict.fromkeys((*config.eos_token_ids, *extra)))
        return dataclasses.replace(config, eos_token_ids=merged)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str) -> ModelConfig:
        """Build from the content of a `config.json`; `source` opens every error message."""
        try:
            return cls(**read_model(raw))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Ids of the layers with MSA (block-sparse attention)."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == SPARSE)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Ids of the layers with routed experts."""
        return tuple(i for i, kind in enumerate(self.mlp_layer_types) if kind == MOE)

    @property
    def num_parameters(self) -> int:
        """Parameters of the text model, the correction bias included."""
        C, D = self.hidden_size, self.head_dim
        attention = 2 * C * D * (self.num_attention_heads + self.num_key_value_heads) + 2 * D
        index = self.index_head_dim * (C * (self.index_n_heads + 1) + 2)
        expert = 3 * C * self.intermediate_size
        moe = self.num_local_experts * (expert + C + 1) + 3 * C * self.shared_intermediate_size
        dense = 3 * C * self.dense_intermediate_size
        num_moe = len(self.moe_layers)
        return (
            2 * self.vocab_size * C
            + C
            + self.num_hidden_layers * (attention + 2 * C)
            + len(self.sparse_layers) * index
            + num_moe * moe
            + (self.num_hidden_layers - num_moe) * dense
        )

    def to_transformers(self) -> dict[str, Any]:
        """Keyword arguments of transformers' `MiniMaxM3VLTextConfig` for the same model."""
        factor = self.rotary_dim / self.head_dim
        if int(self.head_dim * factor) < self.rotary_dim:  # transformers rounds the product down
            factor = math.nextafter(factor, 1.0)
        same = (*INTEGER_KEYS, *FLOAT_KEYS, *INDEX_KEYS, "rotary_dim")
        return {
            **{key: getattr(self, key) for key in same},
            "layer_types": list(self.layer_types),
            "mlp_layer_types": list(self.mlp_layer_types),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": factor,
            },
            "tie_word_embeddings": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
            "pad_token_id": self.pad_token_id,
        }


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and switches of one engine."""

    dtype: str = "float32"
    """'float32' or 'bfloat16': weights, activations and pages. Router and head are FP32 always."""
    device: str = "cpu"
    """'cpu' (references, for tests and tiny models) or 'cuda' (kernels)."""
    kv_dtype: str = "auto"
    """Of key and value pages: 'auto' is `dtype`; 'float8_e4m3fn' halves them and their traffic."""
    index_dtype: str = "auto"
    """Of index-key pages, likewise."""
    quantization: str = "none"
    """Which weights are held in MXFP8, quantised from BF16 when written: 'none'; 'mxfp8', the
    routed experts; 'mxfp8_released', also attention with the index projections, the dense MLP and
    the shared expert, as in the released checkpoint."""
    shadow_weights: bool = False
    """Hold all weights twice: a load fills the second copy while the first one serves, and its
    commit copies them over in milliseconds."""
    num_pages: int = 512
    page_size: int | None = None
    """Tokens a page; None takes the model's `index_block_size`, the only value allowed."""
    max_model_len: int | None = None
    """Most tokens of one request, prompt and completion; None: as the model and the pages allow."""
    max_running_requests: int = 128
    max_tokens_per_step: int = 2048
    """Query tokens of one engine step: decodes and prefill chunks together."""
    enable_prefix_cache: bool = True
    capture_routing: bool = False
    """Keep room for the experts of every token, so that requests may ask for them."""
    capture_blocks: bool = False
    """Keep room for the selected blocks of every token, so that requests may ask for them; a
    tp rank has those of its own KV heads."""
    cuda_graph_sizes: tuple[int, ...] | None = None
    """Batch sizes of decode steps that are captured when first met; a smaller batch is padded to
    the next one, a larger one runs without a graph. None: powers of two and multiples of 16 up to
    `max_running_requests`; () never captures."""
    async_scheduling: bool | None = None
    """Plan and launch a step before the tokens of the one before are known, so that the device
    never waits for the host. None: on CUDA only."""

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype={self.dtype!r}; use 'float32' or 'bfloat16'")
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise ConfigError(f"device={self.device!r}; use 'cpu', 'cuda' or 'cuda:<number>'")
        for name in ("kv_dtype", "index_dtype"):
            if getattr(self, name) not in ("auto", "float8_e4m3fn"):
                raise ConfigError(f"{name}={getattr(self, name)!r}; use 'auto' or 'float8_e4m3fn'")
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(
                f"quantization={self.quantization!r}; use one of {', '.join(QUANTIZATIONS)}"
            )
        for size in self.cuda_graph_sizes or ():
            check_positive("cuda_graph_sizes", size)
        for name in ("num_pages", "max_running_requests", "max_tokens_per_step"):
            check_positive(name, getattr(self, name))
        for name in ("page_size", "max_model_len"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))

    def resolve(self, model: ModelConfig) -> EngineConfig:
        """The same config with everything filled in that was left to `model` or the device.

        Raises:
            ConfigError: a page size other than the block size, a length that the model or the
                pages cannot hold, or a width that MXFP8 cannot cut into blocks.
        """
        block = model.index_block_size
        if self.page_size not in (None, block):
            raise ConfigError(
                f"page_size={self.page_size}; a selected block is a page, so it must be the "
                f"index_block_size={block} of the model (leave page_size unset)"
            )
        _check_blocks(model, self.quantization)
        capacity = min(model.max_position_embeddings, self.num_pages * block)
        length = capacity if self.max_model_len is None else self.max_model_len
        if length > capacity:
            raise ConfigError(
                f"max_model_len={length} exceeds what is there: max_position_embeddings="
                f"{model.max_position_embeddings}, num_pages={self.num_pages} of {block} tokens; "
                f"use at most {capacity}, or more pages"
            )
        return dataclasses.replace(
            self,
            page_size=block,
            max_model_len=length,
            cuda_graph_sizes=self._graph_sizes(),
            async_scheduling=(
                self.device != "cpu" if self.async_scheduling is None else self.async_scheduling
            ),
        )

    def _graph_sizes(self) -> tuple[int, ...]:
        most = self.max_running_requests
        if self.cuda_graph_sizes is not None:
            return tuple(sorted({size for size in self.cuda_graph_sizes if size <= most}))
        return tuple(sorted({s for s in (1, 2, 4, 8, *range(16, most, 16)) if s < most} | {most}))


def _check_blocks(model: ModelConfig, quantization: str) -> None:
    """Refuse input widths of quantised weights that are no multiple of MXFP8's block."""
    if quantization == "none":
        return
    widths = {"hidden_size": model.hidden_size}
    if model.moe_layers:
        widths["intermediate_size"] = model.intermediate_size
    if quantization == "mxfp8_released":
        widths["num_attention_heads * head_dim"] = model.num_attention_heads * model.head_dim
        if model.moe_layers:
            widths["shared_intermediate_size"] = model.shared_intermediate_size
        if len(model.moe_layers) < model.num_hidden_layers:
            widths["dense_intermediate_size"] = model.dense_intermediate_size
    for name, width in widths.items():
        if width % MXFP8_BLOCK_SIZE:
            raise ConfigError(
                f"quantization={quantization!r}: {name}={width} is no multiple of "
                f"{MXFP8_BLOCK_SIZE}, the block of a scale; use quantization='none'"
            )


def _check_layers(name: str, kinds: tuple[str, ...], known: tuple[str, ...], layers: int) -> None:
    if len(kinds) != layers:
        raise ConfigError(f"{name} has {len(kinds)} entries for num_hidden_layers={layers}")
    for i, kind in enumerate(kinds):
        if kind not in known:
            raise ConfigError(f"{name}[{i}]={kind!r}; use one of {list(known)}")

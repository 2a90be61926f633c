"""Random tiny M3s for tests: published config.json, weights, and transformers as the oracle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference.config import ModelConfig
from inference.models.weights import (
    TEXT_PREFIX,
    TensorSpec,
    published_tensors,
    transformers_placement,
    write_checkpoint,
)

_SPARSE_DEFAULTS = {
    "use_sparse_attention": True,
    "sparse_num_index_heads": 2,
    "sparse_index_dim": 16,
    "sparse_block_size": 4,
    "sparse_topk_blocks": 2,
    "sparse_init_block": 0,
    "sparse_local_block": 1,
    "sparse_score_type": "max",
}


def tiny_config(*, num_dense_layers: int = 1, **changes: Any) -> dict[str, Any]:
    """Text part of a published config.json: 1 dense + 3 sparse MoE layers, block 4, top-k 2.

    `changes` replace any key of it or of its `sparse_attention_config`. The layer lists, the number
    of index heads, their dim and `rotary_dim` follow the layers, KV heads, head dim and rotary
    factor, unless changed themselves. A value of None removes the key.
    """
    text: dict[str, Any] = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_vl_text",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 97,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "use_gemma_norm": True,
        "attention_output_gate": False,
        "rope_theta": 5000000,
        "partial_rotary_factor": 0.5,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "tie_word_embeddings": False,
        "intermediate_size": 16,
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    sparse: dict[str, Any] = dict(_SPARSE_DEFAULTS)
    text |= {key: value for key, value in changes.items() if not key.startswith("sparse_")}
    flags = [int(layer >= num_dense_layers) for layer in range(text["num_hidden_layers"])]
    text.setdefault("moe_layer_freq", flags)
    text.setdefault("rotary_dim", int(text["head_dim"] * text["partial_rotary_factor"]))
    sparse |= {
        "sparse_num_index_heads": text["num_key_value_heads"],
        "sparse_index_dim": text["head_dim"],
        "sparse_attention_freq": flags,
        "sparse_disable_index_value": flags,
    }
    sparse |= {
        key: value
        for key, value in changes.items()
        if key.startswith("sparse_") and key != "sparse_attention_config"
    }
    text["sparse_attention_config"] = changes.get(
        "sparse_attention_config", {k: v for k, v in sparse.items() if v is not None}
    )
    removed = [key for key, value in changes.items() if value is None]
    return {key: value for key, value in text.items() if key not in removed}


def model_config(config_dict: Mapping[str, Any]) -> ModelConfig:
    """The runtime's reading of `config_dict`."""
    return ModelConfig.from_dict(config_dict, source="tiny config")


def random_tensors(
    config_dict: Mapping[str, Any], seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random weights by published name, scaled so that routing, blocks and logits vary by token."""
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: _random_tensor(spec, generator).to(torch.float32 if spec.is_fp32 else dtype)
        for spec in published_tensors(model_config(config_dict))
    }


def _random_tensor(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    values = torch.randn(spec.shape, generator=generator)
    if spec.name.endswith("e_score_correction_bias"):
        return values * 0.2  # of the size of the differences between sigmoid scores
    if len(spec.shape) == 1:
        return values * 0.2  # norms act as 1 + weight
    if spec.name == "model.embed_tokens.weight":
        return values
    return values * spec.shape[-1] ** -0.5


def random_checkpoint(
    path: Path,
    config_dict: Mapping[str, Any],
    seed: int,
    prefix: str = TEXT_PREFIX,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 1 << 40,
) -> dict[str, Tensor]:
    """Write a published-layout checkpoint into directory `path`; returns tensors by published name.

    With the prefix, config.json is in the multimodal form, the text part under `text_config`.
    """
    tensors = random_tensors(config_dict, seed, dtype)
    write_checkpoint(path, tensors.items(), max_shard_bytes=max_shard_bytes, prefix=prefix)
    released = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": dict(config_dict),
    }
    content = released if prefix else dict(config_dict)
    (Path(path) / "config.json").write_text(json.dumps(content, indent=2))
    return tensors


def transformers_model(config_dict: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """transformers' MiniMaxM3VLForCausalLM in FP32 with these weights, in eval mode.

    Its config is transformers' own reading of `config_dict`, so it is an oracle for ours too.
    """
    from transformers import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig

    ignored = ("architectures", "model_type")
    kwargs = {key: value for key, value in config_dict.items() if key not in ignored}
    config = MiniMaxM3VLTextConfig(**json.loads(json.dumps(kwargs)))
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    model = MiniMaxM3VLForCausalLM(config).float().eval()
    state = model.state_dict()
    placement = transformers_placement(model_config(config_dict))
    with torch.no_grad():
        for tensor in state.values():
            tensor.fill_(torch.nan)
        for name, tensor in tensors.items():
            placement[name].view(state).copy_(tensor)
    unplaced = [name for name, tensor in state.items() if torch.isnan(tensor).any()]
    assert not unplaced, f"no published tensor fills {unplaced}"
    return model

"""A small valid configuration and model folder for tests of everything around the loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from inference.config import ModelConfig
from m3rl.config import Config
from tests.m3rl.tiny_tokenizer import write_tokenizer

TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "model_type": "minimax_m3_vl_text",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "use_gemma_norm": True,
    "rope_theta": 10000,
    "rotary_dim": 4,
    "partial_rotary_factor": 0.5,
    "hidden_act": "swigluoai",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "tie_word_embeddings": False,
    "intermediate_size": 8,
    "dense_intermediate_size": 16,
    "shared_intermediate_size": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "routed_scaling_factor": 2.0,
    "moe_layer_freq": [0, 1],
    "bos_token_id": 101,
    "eos_token_id": 103,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_attention_freq": [0, 1],
        "sparse_num_index_heads": 1,
        "sparse_index_dim": 8,
        "sparse_block_size": 4,
        "sparse_topk_blocks": 2,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_score_type": "max",
        "sparse_disable_index_value": [0, 1],
    },
}
"""1 dense and 1 sparse MoE layer; its end of sequence is the test tokenizer's `[e~[`."""


def write_model(folder: Path, **changes: Any) -> Path:
    """config.json, tokenizer, chat template, and a weight file with the right number of values."""
    write_tokenizer(folder)
    text = TEXT_CONFIG | changes
    (folder / "config.json").write_text(json.dumps(text))
    count = ModelConfig.from_dict(text, source="test").num_parameters
    save_file(
        {"model.all": np.zeros(count, np.float32), "vision_tower.x": np.zeros(3, np.float32)},
        folder / "model.safetensors",
    )
    return folder


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    """A whole valid configuration as a mapping; `sections` replace or add top-level ones."""
    return {
        "run": {"name": "test", "dir": str(folder / "run")},
        "model": {"path": str(folder / "model")},
        "policy": {"dtype": "float32"},
        "data": {
            "train": {"kind": "reasoning_gym", "name": "spell_backward", "size": 20, "seed": 1},
            "eval": {"kind": "reasoning_gym", "name": "spell_backward", "size": 5, "seed": 500},
            "max_prompt_tokens": 100,
        },
        "rollout": {"group_size": 2, "prompts_per_step": 4, "max_tokens": 12},
    } | sections


def config(folder: Path, **sections: Any) -> Config:
    return Config.from_dict(settings(folder, **sections))

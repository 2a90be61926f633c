"""Random small models of other architectures than M3, as checkpoint folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "pad_token_id": 2,
    "eos_token_id": 2,
}
QWEN3 = {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}
LLAMA = {"model_type": "llama", "tie_word_embeddings": False, "attention_dropout": 0.5}
GEMMA3 = {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 64}
"""Its embedding scales what it looks up; a window that no sample fills is none."""
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "tie_word_embeddings": False,
}


def config_of(kind: dict[str, Any], **changes: Any) -> Any:
    """transformers' own reading of it."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**SHAPE | kind | changes)


def model_of(kind: dict[str, Any], seed: int = 0, **changes: Any) -> Any:
    """A model of transformers in FP32 whose logits vary by token, in eval mode."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(kind, **changes)).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 0.2 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
                parameter.add_(torch.randn(parameter.shape) * scale)
    return model


def write_any(path: Path, kind: dict[str, Any], seed: int = 0, **changes: Any) -> Any:
    """What transformers writes of `model_of`, which is returned."""
    model = model_of(kind, seed, **changes)
    model.save_pretrained(path)
    return model


def change_config(path: Path, **changes: Any) -> None:
    """Replace keys of the config.json in `path`."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))

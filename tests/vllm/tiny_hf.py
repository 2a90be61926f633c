"""Random tiny Qwen3s: other architectures, and transformers as the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCAB = 97  # vLLM pads it to 128 rows
EOS = 2


SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's CPU attention knows no 16
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


def write_qwen3(path: Path, seed: int, *, tied: bool) -> None:
    """A checkpoint of two layers in FP32, scaled so that logits vary by token."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    _write(Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied)), path, seed)


def write_qwen3_moe(path: Path, seed: int) -> None:
    """As `write_qwen3`, with two of four experts a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**SHAPE, **experts, norm_topk_prob=True, tie_word_embeddings=False)
    _write(Qwen3MoeForCausalLM(config), path, seed)


def _write(model: Any, path: Path, seed: int) -> None:
    model = model.float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1
            parameter.copy_(1 + 0.1 * values if is_norm else values * parameter.shape[-1] ** -0.5)
    model.save_pretrained(path)


def load_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], np.ndarray]:
    """The likeliest tokens up to EOS, and the log-probability of each at temperature 1."""
    ids, logprobs = list(prompt), []
    for _ in range(count):
        scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(scores.argmax()))
        logprobs.append(float(scores[ids[-1]]))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :], np.array(logprobs, np.float32)


@torch.no_grad()
def scores(model: Any, ids: Sequence[int]) -> np.ndarray:
    """[n - 1] float32: log-probability of every token but the first."""
    tokens = torch.tensor([list(ids)])
    logprobs = model(tokens).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(-1, tokens[0, 1:, None])[:, 0].numpy()

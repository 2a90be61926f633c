"""Write `tiny_qwen3/`: config, tokenizer and chat template of a Qwen3 small enough for one core.

    python configs/models/make_tiny_qwen3.py [OUTPUT_DIR]

The same script gives the same bytes. Weights are not made here: `m3rl sft` trains them from a seed.

Half a million parameters with the parts of a released small one: grouped queries, norms of queries
and keys, one matrix for embedding and head. The tokenizer is byte-level without merges: the id of a
byte is its value. Qwen3's markers follow, one token each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

# The value says whether Qwen3 flags the token special. Markers inside an answer (reasoning, tool
# calls) are not: `skip_special_tokens` keeps them.
MARKERS: dict[str, bool] = {
    "<|endoftext|>": True,  # padding
    "<|im_start|>": True,  # begins a turn
    "<|im_end|>": True,  # ends a turn: EOS
    "<tool_call>": False,
    "</tool_call>": False,
    "<think>": False,
    "</think>": False,
}
NUM_BYTES = 256
MARKER_IDS: dict[str, int] = {text: NUM_BYTES + place for place, text in enumerate(MARKERS)}
PAD, EOS = "<|endoftext|>", "<|im_end|>"
MAX_POSITIONS = 1024

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def model_config() -> dict[str, Any]:
    """`config.json` as Qwen3's are."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "float32",
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": NUM_BYTES + len(MARKERS),
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        # The released 1e6 is for 40,000 positions; here most of the frequencies would be flat.
        "rope_theta": 1000,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": MARKER_IDS[PAD],
        "eos_token_id": MARKER_IDS[EOS],
    }


def tokenizer() -> Tokenizer:
    """Bytes as tokens 0-255, then the markers."""
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    result = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.decoder = decoders.ByteLevel()
    for text, special in MARKERS.items():
        token = AddedToken(text, special=special, normalized=False)
        result.add_special_tokens([token]) if special else result.add_tokens([token])
    return result


def tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }


def generation_config() -> dict[str, Any]:
    return {
        "bos_token_id": MARKER_IDS[PAD],
        "eos_token_id": [MARKER_IDS[EOS], MARKER_IDS[PAD]],
        "pad_token_id": MARKER_IDS[PAD],
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
    }


def write(directory: Path) -> None:
    """Write the five files into `directory`, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", model_config()),
        ("tokenizer_config.json", tokenizer_config()),
        ("generation_config.json", generation_config()),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer().save(str(directory / "tokenizer.json"), pretty=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "tiny_qwen3")

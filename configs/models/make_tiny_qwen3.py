"""Write `tiny_qwen3/`: config, tokenizer and chat template of a Qwen3 small enough for one core.

    python configs/models/make_tiny_qwen3.py [OUTPUT_DIR]

The same script gives the same bytes. Weights are not made here: `m3rl sft` trains them from a seed.

Half a million parameters with the parts of a released small one: grouped queries, norms of queries
and keys, one matrix for embedding and head. The tokenizer is byte-level without merges: the id of a
byte is its value. Qwen3's markers follow, one token each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tiny_files import NUM_BYTES, ids_of, write_model_files

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
MARKER_IDS = ids_of(MARKERS)
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


def write(directory: Path) -> None:
    write_model_files(
        directory,
        config=model_config(),
        special_tokens={"eos_token": EOS, "pad_token": PAD},
        generation={
            "bos_token_id": MARKER_IDS[PAD],
            "eos_token_id": [MARKER_IDS[EOS], MARKER_IDS[PAD]],
            "pad_token_id": MARKER_IDS[PAD],
        },
        markers=MARKERS,
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "tiny_qwen3")

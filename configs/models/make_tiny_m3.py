"""Write `tiny_m3/`: config, tokenizer and chat template of a MiniMax-M3 small enough for one core.

    python configs/models/make_tiny_m3.py [OUTPUT_DIR]

The same script gives the same bytes. Weights are not made here: `m3rl sft` trains them from a seed.

The model has every part of the released one (a full-attention layer with a dense MLP, then
sparse-attention layers with routed and shared experts) and the released names. A query reads 4
blocks of 8 keys; a prompt of the demo has some 70 tokens, so the sparse layers leave blocks out.

The tokenizer is byte-level without merges: the id of a byte is its value, so a printable ASCII
character is one token and any text survives encode and decode. M3's markers follow, one token each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tiny_files import NUM_BYTES, ids_of, write_model_files

# In the order of their ids in M3; the value says whether M3 flags the token special. Markers inside
# an answer (reasoning, tool calls) are not: `skip_special_tokens` keeps them.
MARKERS: dict[str, bool] = {
    "]!p~[": True,  # padding
    "]~b]": True,  # begins a turn
    "[e~[": True,  # ends a turn: EOS
    "]<]image[>[": True,
    "]~!b[": True,  # begins the dialogue: BOS
    "]<]minimax[>[": False,  # before every tag of a tool call
    "<mm:think>": False,
    "</mm:think>": False,
}
MARKER_IDS = ids_of(MARKERS)
PAD, EOS, BOS = "]!p~[", "[e~[", "]~!b["

NUM_LAYERS = 4
IS_SPARSE = [0] + [1] * (NUM_LAYERS - 1)
NUM_KV_HEADS = 2
HEAD_DIM = 32
MAX_POSITIONS = 1024

# M3's order: BOS begins the dialogue; the caller's instructions go into a developer turn; a turn
# ends with EOS and a newline; an answer without reasoning begins with a bare `</mm:think>`. Unlike
# in M3, thinking is off unless `thinking_mode` asks for it: this model never learnt to reason.
CHAT_TEMPLATE = """\
{{- ']~!b[' -}}
{%- for message in messages -%}
{%- if message.role in ('system', 'developer') -%}
{{- ']~b]developer\\n' + message.content + '[e~[\\n' -}}
{%- elif message.role == 'user' -%}
{{- ']~b]user\\n' + message.content + '[e~[\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- ']~b]tool' -}}{%- endif -%}
{{- '\\n<response>' + message.content + '</response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '[e~[\\n' -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{{- ']~b]ai\\n' -}}
{%- if message.reasoning_content -%}{{- '<mm:think>' + message.reasoning_content -}}{%- endif -%}
{{- '</mm:think>' + message.content + '[e~[\\n' -}}
{%- else -%}
{{- raise_exception('unknown role ' ~ message.role ~ \
'; use system, developer, user, assistant or tool') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- ']~b]ai\\n' -}}
{%- if thinking_mode is defined and thinking_mode == 'enabled' -%}
{{- '<mm:think>' -}}
{%- elif thinking_mode is not defined or thinking_mode != 'adaptive' -%}
{{- '</mm:think>' -}}
{%- endif -%}
{%- endif -%}
"""


def model_config() -> dict[str, Any]:
    """`config.json` in the layout of the released text model."""
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_vl_text",
        "torch_dtype": "float32",
        "hidden_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": NUM_BYTES + len(MARKERS),
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "use_gemma_norm": True,
        "attention_output_gate": False,
        # The released 5e6 is for a million positions; here most of the 8 frequencies would be flat.
        "rope_theta": 1000,
        "rotary_dim": HEAD_DIM // 2,
        "partial_rotary_factor": 0.5,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "tie_word_embeddings": False,
        "dense_intermediate_size": 192,
        "intermediate_size": 48,
        "shared_intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "moe_layer_freq": IS_SPARSE,
        "num_mtp_modules": 0,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_attention_freq": IS_SPARSE,
            "sparse_num_index_heads": NUM_KV_HEADS,
            "sparse_index_dim": HEAD_DIM,
            "sparse_block_size": 8,
            "sparse_topk_blocks": 4,
            "sparse_init_block": 0,
            "sparse_local_block": 2,
            "sparse_score_type": "max",
            "sparse_disable_index_value": IS_SPARSE,
        },
        "bos_token_id": MARKER_IDS[BOS],
        "eos_token_id": MARKER_IDS[EOS],
        "pad_token_id": MARKER_IDS[PAD],
    }


def write(directory: Path) -> None:
    write_model_files(
        directory,
        config=model_config(),
        special_tokens={"bos_token": BOS, "eos_token": EOS, "pad_token": PAD},
        generation={
            "bos_token_id": MARKER_IDS[BOS],
            "eos_token_id": MARKER_IDS[EOS],
            "pad_token_id": MARKER_IDS[PAD],
        },
        markers=MARKERS,
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "tiny_m3")

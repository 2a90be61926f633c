"""Reads the `config.json` of a MiniMax-M3: what must be known or refused before any weight is read.

Two layouts are accepted, flat or under `text_config`: the published one (`sparse_attention_config`,
`moe_layer_freq`, `rope_theta`) and the one transformers saves (`layer_types`, `mlp_layer_types`,
`rope_parameters`). Nothing that changes numbers has a default here. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = (
    "MiniMaxM3SparseForConditionalGeneration",
    "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3VLForCausalLM",
)
SUPPORTED_MODEL_TYPES = ("minimax_m3_vl", "minimax_m3_vl_text")
FULL, SPARSE = "full_attention", "minimax_m3_sparse"
DENSE_MLP, MOE = "dense", "sparse"

INDEX_KEYS = {  # ours and transformers' name -> name inside the published sparse_attention_config
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
INTEGER_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "intermediate_size",
    "dense_intermediate_size",
    "shared_intermediate_size",
    "num_local_experts",
    "num_experts_per_tok",
)
FLOAT_KEYS = ("rms_norm_eps", "swiglu_alpha", "swiglu_limit", "routed_scaling_factor")
_FIXED = {  # the only values the forward pass implements; absent means these, as in every release
    "use_gemma_norm": (True,),
    "attention_output_gate": (False,),
    "tie_word_embeddings": (False,),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_head",),
    "hidden_act": ("swigluoai", "silu"),  # transformers writes 'silu' for the same activation
    "n_shared_experts": (1,),
    "swiglu_beta": (1.0,),  # transformers, and so the trainer, has no other
    "use_index_cache": (False,),
    "index_topk_freq": (1,),
}


class ConfigError(ValueError):
    """A configuration that cannot be run: what is wrong, where it stands, how to mend it."""


def check_positive(name: str, value: Any) -> None:
    """Refuse anything but a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; ConfigError when there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{file} does not exist; give the directory of a MiniMax-M3 checkpoint"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds a {type(content).__name__}, not a JSON object")
    return content


def read_model(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `ModelConfig` from either layout."""
    _check_architecture(raw)
    text = raw.get("text_config", raw)
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config is a {type(text).__name__}, not an object")
    _check_fixed(raw)
    _check_fixed(text)
    integers = {key: _integer(text, key) for key in INTEGER_KEYS}
    return {
        **integers,
        **{key: _number(text, key) for key in FLOAT_KEYS},
        **_read_rope(text, integers["head_dim"]),
        **_read_index(text),
        **_read_layer_types(text, raw, integers["num_hidden_layers"]),
        **_read_token_ids({**raw, **text}),
    }


def _check_architecture(raw: Mapping[str, Any]) -> None:
    names = raw.get("architectures")
    model_type = raw.get("model_type")
    unknown = [name for name in names or () if name not in SUPPORTED_ARCHITECTURES]
    if unknown:
        raise ConfigError(
            f"architectures names {unknown[0]!r}, which this runtime does not implement; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if model_type not in SUPPORTED_MODEL_TYPES and not (names and model_type is None):
        raise ConfigError(
            f"model_type={model_type!r} (architectures={names!r}) is not a MiniMax-M3; "
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )


def _check_fixed(settings: Mapping[str, Any]) -> None:
    for key, allowed in _FIXED.items():
        value = settings.get(key)
        if value is not None and value not in allowed:
            raise ConfigError(
                f"{key}={value!r} is not implemented; only {' or '.join(map(repr, allowed))} is"
            )


def _integer(section: Mapping[str, Any], key: str) -> int:
    if key not in section:
        raise ConfigError(f"{key} is missing; it is never guessed, add it to config.json")
    check_positive(key, section[key])
    return int(section[key])


def _number(section: Mapping[str, Any], key: str) -> float:
    if key not in section:
        raise ConfigError(f"{key} is missing; it is never guessed, add it to config.json")
    value = section[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{key}={value!r} must be a number above 0")
    return float(value)


def _read_rope(text: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope |= text.get(name) or {}
    kinds = {rope.pop("rope_type", "default"), rope.pop("type", "default")} - {"default"}
    unknown = {*kinds, *rope} - {"rope_theta", "partial_rotary_factor"}
    if unknown:
        raise ConfigError(
            f"rope scaling with {sorted(unknown)} is not implemented; only rope_type 'default' is"
        )
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope and text.get(key, rope[key]) != rope[key]:
            raise ConfigError(f"{key}={text[key]} contradicts rope_parameters.{key}={rope[key]}")
    merged = {**text, **rope}
    if merged.get("partial_rotary_factor") is None:
        return {
            "rope_theta": _number(merged, "rope_theta"),
            "rotary_dim": _integer(text, "rotary_dim"),
        }
    factor = _number(merged, "partial_rotary_factor")
    rotary_dim = int(head_dim * factor)
    if text.get("rotary_dim", rotary_dim) != rotary_dim:
        raise ConfigError(
            f"rotary_dim={text['rotary_dim']} contradicts partial_rotary_factor={factor}: "
            f"head_dim={head_dim} times it is {rotary_dim}"
        )
    return {"rope_theta": _number(merged, "rope_theta"), "rotary_dim": rotary_dim}


def _sparse_section(text: Mapping[str, Any]) -> Mapping[str, Any]:
    section = text.get("sparse_attention_config")
    return {} if section is None else section


def _read_index(text: Mapping[str, Any]) -> dict[str, int]:
    section = _sparse_section(text)
    if section.get("sparse_init_block", 0) != 0:
        raise ConfigError(
            f"sparse_init_block={section['sparse_init_block']} is not implemented; only 0 is"
        )
    if section.get("sparse_score_type", "max") != "max":
        raise ConfigError(
            f"sparse_score_type={section['sparse_score_type']!r} is not implemented; only 'max' is"
        )
    numbers = {}
    for key, published in INDEX_KEYS.items():
        if key in text and text[key] != section.get(published, text[key]):
            raise ConfigError(
                f"{key}={text[key]} contradicts sparse_attention_config.{published}="
                f"{section[published]}"
            )
        if published not in section and key not in text:
            raise ConfigError(f"sparse_attention_config.{published} (or {key}) is missing")
        numbers[key] = _integer(section, published) if published in section else _integer(text, key)
    return numbers


def _read_layer_types(
    text: Mapping[str, Any], raw: Mapping[str, Any], layers: int
) -> dict[str, tuple[str, ...]]:
    section = _sparse_section(text)
    allows_dense = raw.get("m3rl_allow_dense") is True or text.get("m3rl_allow_dense") is True
    enabled = section.get("use_sparse_attention", True)
    if enabled is not True:
        raise ConfigError(
            f"sparse_attention_config.use_sparse_attention={enabled!r} is not implemented; for "
            "a dense model write sparse_attention_freq of zeros and m3rl_allow_dense: true"
        )
    attention = _layer_list(
        text, "layer_types", section.get("sparse_attention_freq"), {0: FULL, 1: SPARSE}
    )
    if attention is None and allows_dense:
        attention = (FULL,) * layers
    if not allows_dense and SPARSE not in (attention or ()):
        raise ConfigError(
            "no layer is sparse: sparse_attention_config.sparse_attention_freq (or layer_types) is "
            "missing or all dense, and transformers would run full attention everywhere in "
            "silence; add the list, or m3rl_allow_dense: true if a dense model is meant"
        )
    mlp = _layer_list(text, "mlp_layer_types", text.get("moe_layer_freq"), {0: DENSE_MLP, 1: MOE})
    if attention is None or mlp is None:
        raise ConfigError(
            "moe_layer_freq (or mlp_layer_types) is missing; which layers have experts is never "
            "guessed (transformers would give experts to all of them)"
        )
    disable = section.get("sparse_disable_index_value")
    if disable is not None and any(
        kind == SPARSE and not off for kind, off in zip(attention, disable, strict=False)
    ):
        raise ConfigError(
            "sparse_disable_index_value has a 0 on a sparse layer: index values are not implemented"
        )
    return {"layer_types": attention, "mlp_layer_types": mlp}


def _layer_list(
    text: Mapping[str, Any], key: str, flags: Any, kinds: Mapping[int, str]
) -> tuple[str, ...] | None:
    """The kinds of the layers from transformers' list `key` or the published 0/1 `flags`."""
    named = None if text.get(key) is None else tuple(text[key])
    if flags is None:
        return named
    strange = [flag for flag in flags if flag not in kinds]
    if strange:
        raise ConfigError(f"the 0/1 list behind {key} holds {strange[0]!r}")
    published = tuple(kinds[flag] for flag in flags)
    if named is not None and named != published:
        raise ConfigError(f"{key} contradicts the published 0/1 list of the same layers")
    return published


def token_list(value: Any, source: str) -> tuple[int, ...]:
    """Token ids from the forms they are written in: absent, one, a list."""
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(f"{source}: token id {token!r} is not a whole number")
    return ids


def _read_token_ids(settings: Mapping[str, Any]) -> dict[str, Any]:
    ids: dict[str, Any] = {
        "eos_token_ids": token_list(settings.get("eos_token_id"), "eos_token_id")
    }
    for key in ("bos_token_id", "pad_token_id"):
        one = token_list(settings.get(key), key)
        ids[key] = one[0] if one else None
    return ids

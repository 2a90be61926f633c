"""The one name map: published tensors, and where each lives in the runtime and in transformers.

Published names are used without the `language_model.` prefix everywhere inside the project. A
`Placement` says which rectangle of which parameter *is* a published tensor, so loading, syncing and
exporting are all a copy into, or out of, a view. Imports no torch: commands that check use it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from inference.config import MOE, SPARSE, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from inference.kernels.mxfp8 import MXFP8Tensor

Role = Literal["expert", "dense", "router", "index"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One published tensor of the text model."""

    name: str
    shape: tuple[int, ...]
    bucket: str
    """'pre' (embedding), 'layer.0' …, 'post' (final norm, head)."""
    role: Role
    is_fp32: bool = False
    """Router weight and correction bias: FP32 in the checkpoint, on the wire and in memory."""

    def is_quantized(self, quantization: str) -> bool:
        """Whether `EngineConfig.quantization` has this tensor held in MXFP8."""
        if quantization == "mxfp8_released":
            return self.role == "expert" or self.name.endswith("_proj.weight")
        return quantization == "mxfp8" and self.role == "expert"


@dataclass(frozen=True, slots=True)
class Placement:
    """`tensors[param][index]` is the published tensor.

    Where it is held in MXFP8, these are its values, and `tensors[param + "_scale"][index]` are its
    scales: `index` leaves the last dimension whole.
    """

    param: str
    index: tuple[slice | int, ...] = ()

    def view(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The published tensor inside `tensors`; shares memory with it."""
        return tensors[self.param][self.index]

    def quantized_view(self, tensors: Mapping[str, Tensor]) -> MXFP8Tensor:
        """Values and scales of a published tensor inside `tensors`."""
        from inference.kernels.mxfp8 import MXFP8Tensor

        return MXFP8Tensor(self.view(tensors), tensors[f"{self.param}_scale"][self.index])


def published_tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of the text model, in the order of the forward pass."""
    C, V = config.hidden_size, config.vocab_size
    specs = [TensorSpec("model.embed_tokens.weight", (V, C), "pre", "dense")]
    for layer in range(config.num_hidden_layers):
        specs += _layer_tensors(config, layer)
    specs.append(TensorSpec("model.norm.weight", (C,), "post", "dense"))
    specs.append(TensorSpec("lm_head.weight", (V, C), "post", "dense"))
    return tuple(specs)


def _layer_tensors(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    def spec(name: str, *shape: int, role: Role = "dense", is_fp32: bool = False) -> TensorSpec:
        return TensorSpec(f"model.layers.{layer}.{name}", shape, f"layer.{layer}", role, is_fp32)

    C, D, Di = config.hidden_size, config.head_dim, config.index_head_dim
    H, K = config.num_attention_heads, config.num_key_value_heads
    yield spec("input_layernorm.weight", C)
    yield spec("self_attn.q_proj.weight", H * D, C)
    yield spec("self_attn.k_proj.weight", K * D, C)
    yield spec("self_attn.v_proj.weight", K * D, C)
    yield spec("self_attn.o_proj.weight", C, H * D)
    yield spec("self_attn.q_norm.weight", D)
    yield spec("self_attn.k_norm.weight", D)
    if config.layer_types[layer] == SPARSE:
        yield spec("self_attn.index_q_proj.weight", config.index_n_heads * Di, C, role="index")
        yield spec("self_attn.index_k_proj.weight", Di, C, role="index")
        yield spec("self_attn.index_q_norm.weight", Di, role="index")
        yield spec("self_attn.index_k_norm.weight", Di, role="index")
    yield spec("post_attention_layernorm.weight", C)
    if config.mlp_layer_types[layer] != MOE:
        yield spec("mlp.gate_proj.weight", config.dense_intermediate_size, C)
        yield spec("mlp.up_proj.weight", config.dense_intermediate_size, C)
        yield spec("mlp.down_proj.weight", C, config.dense_intermediate_size)
        return
    moe, E, I = "block_sparse_moe", config.num_local_experts, config.intermediate_size
    yield spec(f"{moe}.gate.weight", E, C, role="router", is_fp32=True)
    yield spec(f"{moe}.e_score_correction_bias", E, role="router", is_fp32=True)
    for e in range(E):
        yield spec(f"{moe}.experts.{e}.w1.weight", I, C, role="expert")
        yield spec(f"{moe}.experts.{e}.w2.weight", C, I, role="expert")
        yield spec(f"{moe}.experts.{e}.w3.weight", I, C, role="expert")
    yield spec(f"{moe}.shared_experts.gate_proj.weight", config.shared_intermediate_size, C)
    yield spec(f"{moe}.shared_experts.up_proj.weight", config.shared_intermediate_size, C)
    yield spec(f"{moe}.shared_experts.down_proj.weight", C, config.shared_intermediate_size)


def runtime_placement(config: ModelConfig) -> dict[str, Placement]:
    """Published name -> place in the parameters of `inference.models.minimax_m3.MiniMaxM3`.

    Fused there: `self_attn.qkv_proj` has rows [q | k | v | index_q | index_k], `gate_up_proj` has
    all gates then all ups, `experts.w13` is [E, 2 I, C] and `experts.w2` is [E, C, I].
    """
    D, Di = config.head_dim, config.index_head_dim
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    places = _stacked(
        "self_attn.qkv_proj.weight",
        {
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": kv,
            "self_attn.v_proj.weight": kv,
            "self_attn.index_q_proj.weight": config.index_n_heads * Di,
            "self_attn.index_k_proj.weight": Di,
        },
    )
    places |= _mlps(config)
    places |= _experts(config, "mlp.experts.w13", "mlp.experts.w2")
    places["block_sparse_moe.e_score_correction_bias"] = Placement("mlp.e_score_correction_bias")
    return {
        spec.name: _placed(spec, places, drop_prefix="model.") for spec in published_tensors(config)
    }


def transformers_placement(config: ModelConfig) -> dict[str, Placement]:
    """Published name -> place in the `state_dict()` of transformers' `MiniMaxM3VLForCausalLM`.

    `e_score_correction_bias` is a buffer there: a loop over `named_parameters()` misses it.
    """
    places = {
        f"self_attn.index_{kind}.weight": Placement(f"self_attn.indexer.{kind}.weight")
        for kind in ("q_proj", "k_proj", "q_norm", "k_norm")
    }
    places |= _mlps(config)
    places |= _experts(config, "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    bias = "e_score_correction_bias"
    places[f"block_sparse_moe.{bias}"] = Placement(f"mlp.gate.{bias}")
    return {spec.name: _placed(spec, places) for spec in published_tensors(config)}


def _stacked(param: str, sizes: Mapping[str, int]) -> dict[str, Placement]:
    """Places of tensors stacked along the rows of `param` in the order of `sizes`."""
    places, start = {}, 0
    for name, size in sizes.items():
        places[name] = Placement(param, (slice(start, start + size),))
        start += size
    return places


def _mlps(config: ModelConfig) -> dict[str, Placement]:
    """Dense MLP, shared expert and router weight, which both models keep under `mlp`."""
    places: dict[str, Placement] = {}
    for published, module, width in (
        ("mlp", "mlp", config.dense_intermediate_size),
        (
            "block_sparse_moe.shared_experts",
            "mlp.shared_experts",
            config.shared_intermediate_size,
        ),
    ):
        gate_up = (f"{published}.gate_proj.weight", f"{published}.up_proj.weight")
        places |= _stacked(f"{module}.gate_up_proj.weight", dict.fromkeys(gate_up, width))
        places[f"{published}.down_proj.weight"] = Placement(f"{module}.down_proj.weight")
    places["block_sparse_moe.gate.weight"] = Placement("mlp.gate.weight")
    return places


def _experts(config: ModelConfig, w13: str, w2: str) -> dict[str, Placement]:
    places, width = {}, config.intermediate_size
    for e in range(config.num_local_experts):
        name = f"block_sparse_moe.experts.{e}"
        places[f"{name}.w1.weight"] = Placement(w13, (e, slice(0, width)))
        places[f"{name}.w3.weight"] = Placement(w13, (e, slice(width, 2 * width)))
        places[f"{name}.w2.weight"] = Placement(w2, (e,))
    return places


def _placed(spec: TensorSpec, places: Mapping[str, Placement], drop_prefix: str = "") -> Placement:
    """Where `spec` lives, given the places of names inside a layer; other names stay themselves."""
    head, inner = "", spec.name
    if spec.bucket.startswith("layer."):
        _, _, layer, inner = spec.name.split(".", 3)
        head = f"model.layers.{layer}."
    place = places.get(inner, Placement(inner))
    return Placement((head + place.param).removeprefix(drop_prefix), place.index)

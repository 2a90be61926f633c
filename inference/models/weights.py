"""The one name map: published tensors, and where each lives in the runtime and in transformers.

Published names are used without the `language_model.` prefix everywhere inside the project. A
`Placement` says which rectangle of which parameter *is* a published tensor, so loading, syncing and
exporting are all a copy into, or out of, a view.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor

from inference.config import MOE, SPARSE, ModelConfig
from inference.kernels.mxfp8 import BLOCK_SIZE, MAX_SCALE, SCALE_SUFFIX, MXFP8Tensor
from inference.models.checkpoint import (
    CheckpointError,
    StoredTensor,
    list_tensors,
    read_tensors,
    write_checkpoint,
)

__all__ = [
    "CheckpointError",
    "Placement",
    "PublishedTensor",
    "TensorSpec",
    "check_checkpoint",
    "published_tensors",
    "read_checkpoint",
    "runtime_placement",
    "transformers_placement",
    "write_checkpoint",
]

Role = Literal["expert", "dense", "router", "index"]

TEXT_PREFIX = "language_model."
_VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")

logger = logging.getLogger(__name__)


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


@overload
def read_checkpoint(
    path: str | Path,
    config: ModelConfig,
    *,
    allow_mxfp8: Literal[False] = False,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, Tensor]]: ...
@overload
def read_checkpoint(
    path: str | Path,
    config: ModelConfig,
    *,
    allow_mxfp8: bool,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, Tensor | MXFP8Tensor]]: ...
def read_checkpoint(
    path: str | Path,
    config: ModelConfig,
    *,
    allow_mxfp8: bool = False,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, Tensor]] | Iterator[tuple[str, Tensor | MXFP8Tensor]]:
    """Every published tensor of the text model once, in the order of `published_tensors`.

    Names may carry the `language_model.` prefix; vision and MTP tensors are skipped with a notice.
    Dtypes are as stored. Names and shapes are all checked before the first tensor is read.

    Args:
        allow_mxfp8: give tensors that are stored in MXFP8 (any of those that the released
            checkpoint quantises) as `MXFP8Tensor`; False: refuse them.
        only: names that are wanted; None: all. All are checked.

    Raises:
        CheckpointError: an unknown or missing name, a wrong shape, a quantised tensor that is not
            allowed or not MXFP8, a truncated file; names the file and the tensor.
    """
    plan = check_checkpoint(path, config, allow_mxfp8=allow_mxfp8)
    return _read([one for one in plan if only is None or one.spec.name in only])


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """Where a checkpoint stores a published tensor."""

    spec: TensorSpec
    stored: StoredTensor
    scale: StoredTensor | None
    """Of an MXFP8 tensor."""


def check_checkpoint(
    path: str | Path, config: ModelConfig, *, allow_mxfp8: bool
) -> list[PublishedTensor]:
    """As `read_checkpoint`, which reads what is found here."""
    folder = Path(path)
    stored = _text_tensors(list_tensors(folder))
    specs = published_tensors(config)
    if missing := [spec.name for spec in specs if spec.name not in stored]:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(specs)} tensors of its config.json, "
            f"the first is {missing[0]}"
        )
    expected = {spec.name for spec in specs}
    for name, tensor in stored.items():
        if name not in expected and name.removesuffix(SCALE_SUFFIX) not in expected:
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} is no tensor of the model in config.json; only "
                "published names are read (not those that transformers' save_pretrained writes)"
            )
    return [
        _checked(spec, stored[spec.name], stored.get(spec.name + SCALE_SUFFIX), allow_mxfp8)
        for spec in specs
    ]


def _read(plan: Sequence[PublishedTensor]) -> Iterator[tuple[str, Tensor | MXFP8Tensor]]:
    places = [(one.spec.name, place) for one in plan for place in (one.stored, one.scale) if place]
    tensors = read_tensors(places)
    for one in plan:
        name, tensor = next(tensors)
        if one.scale is None:
            yield name, tensor
            continue
        _, scale = next(tensors)
        if bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise CheckpointError(f"{one.stored.file}: {one.stored.name} holds NaN")
        if (largest := int(scale.max())) > MAX_SCALE:
            raise CheckpointError(
                f"{one.scale.file}: {one.scale.name} holds the byte {largest}; one above "
                f"{MAX_SCALE} means NaN (255) or weights too large to serve"
            )
        yield name, MXFP8Tensor(tensor, scale)


def _text_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Stored tensors of the text model by published name."""
    text: dict[str, StoredTensor] = {}
    num_vision = num_mtp = 0
    for stored_name, tensor in stored.items():
        name = stored_name.removeprefix(TEXT_PREFIX)
        if name.startswith(_VISION_PREFIXES):
            num_vision += 1
        elif "mtp" in name.split("."):
            num_mtp += 1
        elif name in text:
            raise CheckpointError(
                f"{tensor.file}: {name} is stored with and without the prefix {TEXT_PREFIX!r}"
            )
        else:
            text[name] = tensor
    if num_vision or num_mtp:
        logger.info("skipped %d vision and %d MTP tensors: text only", num_vision, num_mtp)
    return text


def _checked(
    spec: TensorSpec, tensor: StoredTensor, scale: StoredTensor | None, allow_mxfp8: bool
) -> PublishedTensor:
    if tensor.shape != spec.shape:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)}, config.json asks for "
            f"{list(spec.shape)}"
        )
    if tensor.dtype == "F8_E4M3" and allow_mxfp8:
        _check_scale(spec, tensor, scale)
        return PublishedTensor(spec, tensor, scale)
    if tensor.dtype not in ("F32", "BF16", "F16"):
        allowed = "F32, BF16, F16 and MXFP8 are" if allow_mxfp8 else "F32, BF16 and F16 are"
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} is stored as {tensor.dtype}; only {allowed} read, so "
            "give the unquantised checkpoint"
        )
    if scale is not None:
        raise CheckpointError(
            f"{scale.file}: {scale.name} are scales of a weight that is stored as {tensor.dtype}"
        )
    if spec.is_fp32 and tensor.dtype != "F32":
        logger.warning(
            "%s: %s is stored as %s, not FP32: experts may be chosen differently",
            tensor.file,
            tensor.name,
            tensor.dtype,
        )
    return PublishedTensor(spec, tensor, None)


def _check_scale(spec: TensorSpec, tensor: StoredTensor, scale: StoredTensor | None) -> None:
    """Refuse an FP8 tensor that is not MXFP8, or never quantised."""
    if not spec.is_quantized("mxfp8_released"):
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} is stored as {tensor.dtype}; no MXFP8 checkpoint "
            "quantises it"
        )
    if scale is None:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} is stored as {tensor.dtype} and its scales "
            f"{tensor.name}{SCALE_SUFFIX} are missing"
        )
    if spec.shape[-1] % BLOCK_SIZE:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has K={spec.shape[-1]}, no multiple of MXFP8's block of "
            f"{BLOCK_SIZE}"
        )
    shape = (*spec.shape[:-1], spec.shape[-1] // BLOCK_SIZE)
    if scale.dtype != "U8" or scale.shape != shape:
        raise CheckpointError(
            f"{scale.file}: {scale.name} is {scale.dtype} {list(scale.shape)}; scales of MXFP8 are "
            f"U8 {list(shape)}, other formats of FP8 are not read"
        )

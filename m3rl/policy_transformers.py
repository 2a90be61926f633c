"""Any architecture whose model transformers has, with plain causal attention, over packed samples.

transformers' own modules compute, once for each packed row: positions are those in each sample, and
attention is `dense_varlen`, which keeps samples apart. Masters are FP32 (`PolicyWeights`); layers
get them rounded to the policy's dtype, exactly as replicas receive them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from inference.kernels.dense_varlen import dense_varlen
from inference.kernels.packing import Packing
from inference.models.weights import TensorSpec, read_plain
from m3rl.architecture import ArchitectureError, InitialScales, Unit, install_head
from m3rl.model_layout import HEAD, layout_of, read_model_config
from m3rl.policy_names import places_in
from m3rl.policy_probe import new_model, require_plain, without_memory

ATTENTION = "m3rl_packed"
"""Name of `packed_attention` among transformers' attention implementations."""
INCIDENTAL = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
"""Keys of config.json that do not change the model."""


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    packing: Packing,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention implementation of transformers over one packed row (`ATTENTION`).

    Args:
        query: [1, H, T, D]; `key` and `value` [1, K, T, D].
        attention_mask: None: what a token sees follows from `packing`.
        scaling: None: the inverse root of D.

    Returns:
        ([1, T, H, D], None)
    """
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return dense_varlen(q_THD, k_TKD, v_TKD, packing, scale=scale)[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_attention)


class TransformersArchitecture:
    """An `Architecture`, from the config.json in a folder.

    Args:
        recomputes: decoder layers but the last keep only their inputs for the backward pass.

    Raises:
        ArchitectureError: transformers does not know the model, or it needs what a policy does not
            do (`policy_probe`, `policy_names`).
    """

    def __init__(self, path: str | Path, *, recomputes: bool) -> None:
        self.config_json = read_model_config(Path(path))
        self._recomputes = recomputes
        self._config = _read_config(Path(path))
        require_plain(self._config)
        model = without_memory(self._config)
        self.placement, shapes = places_in(model)
        self.is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        self.specs = {
            slot.name: TensorSpec(slot.name, slot.shape, slot.bucket, "dense")
            for slot in layout_of(shapes, "float32")
        }

    @property
    def max_positions(self) -> int:
        positions: int = self._config.max_position_embeddings
        return positions

    def build(self, master: torch.dtype, computing: torch.dtype) -> Any:
        """A new model, see `Architecture.build`."""
        # None: grouped products, which there are none of in FP64.
        self._config._experts_implementation = "eager" if master == torch.float64 else None
        with torch.random.fork_rng():
            model = new_model(self._config).to(master)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if self.is_tied:  # else lost where modules are made without memory
            head._parameters["weight"] = embedding._parameters["weight"]
        model.eval()  # no noise; a layer alone trains, which has it recompute
        layers = _layers(model)
        for layer in layers[:-1] if self._recomputes else ():
            layer.training = layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(
                checkpoint, use_reentrant=False, preserve_rng_state=False
            )
        if computing == torch.bfloat16:
            self._require_no_fp32(model)
            for module in _computing(model, layers):
                _give(module, partial(_rounded, computing))
            if type(embedding) is nn.Embedding:
                _give(embedding, partial(_look_up, computing))
        install_head(head)
        return model

    def head(self, model: Any) -> Any:
        return model.get_output_embeddings()

    def units(self, model: Any) -> Iterator[Unit]:
        """Each layer, and embedding and head unless they are tied: then they belong to the root."""
        if not self.is_tied:
            yield Unit(model.get_input_embeddings(), in_backward=False)
        for layer in _layers(model):
            yield Unit(layer)
        if not self.is_tied:
            yield Unit(model.get_output_embeddings())

    def read(self, path: str | Path, only: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
        """See `inference.models.weights.read_plain`."""
        shapes = {name: spec.shape for name, spec in self.specs.items()}
        return read_plain(path, shapes, ignored=(HEAD,) if self.is_tied else (), only=only)

    def initial(self, scales: InitialScales) -> Mapping[str, float | Tensor]:
        """Vectors (norms, biases) begin as transformers makes them."""
        with torch.random.fork_rng():
            model = new_model(self._config).float()
        state: dict[str, Tensor] = model.state_dict()
        embedding = model.get_input_embeddings().weight
        embeddings = {name for name, p in model.named_parameters() if p is embedding}

        def of(param: str) -> float | Tensor:
            if state[param].ndim < 2:
                return state[param].clone()
            return scales.embedding if param in embeddings else scales.matrices

        return {place.param: of(place.param) for place in self.placement.values()}

    def is_same(self, path: str | Path) -> bool:
        """Whether the config.json in `path` describes the same model."""
        mine, other = self.config_json, read_model_config(Path(path))
        keys = (mine.keys() | other.keys()) - set(INCIDENTAL)
        return all(mine.get(key) == other.get(key) for key in keys)

    def _require_no_fp32(self, model: Any) -> None:
        """Tensors that stay FP32 where all else is BF16 would be rounded on the wire."""
        kept = {
            *(model._keep_in_fp32_modules or ()),
            *(model._keep_in_fp32_modules_strict or ()),
        }
        for place in self.placement.values():
            if kept & set(place.param.split(".")):
                raise ArchitectureError(
                    f"{type(model).__name__}: transformers keeps {place.param} in FP32, and "
                    "policy.dtype: bfloat16 rounds it; this architecture needs float32"
                )


def _read_config(path: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        known = type(config) in AutoModelForCausalLM._model_mapping
    except (ValueError, KeyError, OSError) as error:
        raise ArchitectureError(f"{path}: transformers cannot read config.json: {error}") from None
    if not known:
        raise ArchitectureError(
            f"{path}: transformers has no causal language model of model_type "
            f"{config.model_type!r}; only text models can be trained"
        )
    for key, value in config.to_dict().items():
        is_dropout = "dropout" in key or key.endswith("pdrop") or "jitter" in key
        if is_dropout and isinstance(value, float) and value > 0:
            setattr(config, key, 0.0)  # what is sampled is not dropped either
    # transformers never trains the embedding of its pad token, which is often the end token; and
    # packed samples need none.
    config.pad_token_id = None
    config.dtype = torch.float32
    config._attn_implementation = ATTENTION
    return config


def _layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def _computing(model: Any, layers: list[Any]) -> Iterator[Any]:
    """Modules that must be given rounded parameters: layers, and those with parameters of their own
    outside of them, but for head and an embedding that rounds what it looks up."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    others = {id(model.get_output_embeddings())}
    if type(model.get_input_embeddings()) is nn.Embedding:
        others.add(id(model.get_input_embeddings()))
    yield from layers
    for module in model.modules():
        has_own = any(p is not None for p in module._parameters.values())
        if has_own and id(module) not in inside | others:
            yield module


def _give(module: Any, forward: Callable[..., Any]) -> None:
    module.forward = MethodType(forward, module)


class _Caller(nn.Module):
    """Calls the forward of a module's class."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **options: Any) -> Any:
        return type(self.module).forward(self.module, *args, **options)


def _rounded(computing: torch.dtype, self: nn.Module, *args: Any, **options: Any) -> Any:
    """A module's forward with its masters rounded to the dtype of the wire, differentiably."""
    rounded = {f"module.{n}": p.to(computing) for n, p in self.named_parameters()}
    return functional_call(_Caller(self), rounded, args, options)


def _look_up(computing: torch.dtype, self: nn.Embedding, ids: Tensor) -> Tensor:
    # Rounding the rows that are looked up is rounding the table.
    return F.embedding(ids, self.weight).to(computing)

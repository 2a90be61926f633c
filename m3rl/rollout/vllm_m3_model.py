"""MiniMax-M3 with dense attention, as vLLM's CPU build runs it: transformers' model, our names.

vLLM puts its own attention and linear layers into transformers' model and leaves the rest of its
code as it is, router and experts among it. Only imported by vLLM, through its model registry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.transformers import TransformersForCausalLM

from inference.config import ModelConfig
from inference.models.name_map import Placement, published_tensors, transformers_placement


class DenseM3(TransformersForCausalLM):  # type: ignore[misc]
    """Takes published names, and drops those of the index branch."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._m3_config = ModelConfig.from_pretrained(vllm_config.model_config.model)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """
        Raises:
            KeyError: a name that M3 does not have.
        """
        specs = published_tensors(self._m3_config)
        unused = {spec.name for spec in specs if spec.role == "index"}
        places = transformers_placement(self._m3_config)
        used = ((name, tensor) for name, tensor in weights if name not in unused)
        return super().load_weights(
            stacked(used, {name: place for name, place in places.items() if name not in unused})
        )


def stacked(
    weights: Iterable[tuple[str, Tensor]], places: Mapping[str, Placement]
) -> Iterator[tuple[str, Tensor]]:
    """Parameters whose parts `weights` are, each when the last of its parts has come; one that
    lacks a part does not come."""
    parts: dict[str, list[str]] = defaultdict(list)
    for name, place in places.items():
        parts[place.param].append(name)
    arrived: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in weights:
        param = places[name].param
        arrived[param][name] = tensor
        if len(arrived[param]) == len(parts[param]):
            yield param, _stack([(places[n], t) for n, t in arrived.pop(param).items()])


def _stack(parts: Sequence[tuple[Placement, Tensor]]) -> Tensor:
    first, tensor = parts[0]
    if not first.index:
        return tensor
    sizes = [
        1 + max(_last(place.index[dim]) for place, _ in parts) for dim in range(len(first.index))
    ]
    # What an integer indexes is no dimension of the part.
    num_own = sum(isinstance(each, slice) for each in first.index)
    whole = torch.empty(*sizes, *tensor.shape[num_own:], dtype=tensor.dtype, device=tensor.device)
    for place, part in parts:
        whole[place.index] = part
    return whole


def _last(index: slice | int) -> int:
    return index if isinstance(index, int) else int(index.stop) - 1

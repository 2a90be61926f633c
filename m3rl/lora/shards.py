"""A sharded model some of whose tensors FSDP does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from m3rl.parallel.mesh import RankMesh
from m3rl.parallel.shards import Shards
from m3rl.types import TensorSlot
from m3rl.weight_sync.trainer_layout import Place


class LoraShards(Shards):
    """`Shards`, with:

    Args:
        prepare: what is done to the model before it is sharded.
        elsewhere: published name -> what this rank owns of a tensor that is no parameter then.
    """

    def __init__(
        self,
        tensors: list[TensorSlot],
        places: Mapping[str, Place],
        mesh: RankMesh,
        prepare: Callable[[Any], None],
        elsewhere: Callable[[str], Tensor | None],
    ) -> None:
        super().__init__(tensors, places, mesh)
        self._prepare = prepare
        self._elsewhere = elsewhere

    def build(self, make: Callable[[], Any]) -> Any:
        model = super().build(make)
        self._prepare(model)
        return model

    def view(self, name: str) -> Tensor:
        found = self._elsewhere(name)
        return super().view(name) if found is None else found

"""A policy of which only adapters are trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference.config import ModelConfig
from inference.kernels.mxfp8 import MXFP8Tensor
from inference.kernels.tensor_hash import combine
from inference.models.weights import CheckpointError as RuntimeCheckpointError
from inference.models.weights import read_checkpoint
from m3rl.checkpoint import CheckpointError
from m3rl.lora.adapters import Adapters, Own, hold_adapted_experts
from m3rl.lora.files import read_adapters, write_adapters
from m3rl.lora.frozen import (
    allocate_experts,
    fill,
    freeze,
    hold_experts_in_mxfp8,
    mxfp8_of,
    widened,
)
from m3rl.lora.settings import LoraSettings
from m3rl.lora.shards import LoraShards
from m3rl.parallel.mesh import RankMesh
from m3rl.policy import Policy
from m3rl.policy_packed import Forward
from m3rl.weight_sync.layout import whole
from m3rl.weight_sync.trainer_layout import expert_of


class LoraPolicy(Policy):
    """A `Policy` whose weights are frozen, but for what adapters add to their targets.

    Weights lie in the wire's dtype (FP32 for the router), those of targets merged; there are no
    masters but the adapters', which every rank has whole.

    Args:
        options: see `Policy`.
    """

    def __init__(self, config: ModelConfig, *, lora: LoraSettings, **options: Any) -> None:
        self._lora = lora
        super().__init__(config, **options)
        self._first_expert, self._num_experts = 0, config.num_local_experts
        if self.mesh is not None:
            self._num_experts //= self.mesh.split.ep
            self._first_expert = self.mesh.split.expert_group(self.mesh.rank) * self._num_experts
        self.adapters = Adapters(
            self.model,
            lora,
            self._shape,
            self._own,
            first_expert=self._first_expert,
            dtype=self._master_dtype,
        ).to(self._device)
        self._base_hash: str | None = None

    def _build(self) -> Any:
        model = super()._build()
        freeze(model, self.dtype, self._fp32)
        if self._shards is None:
            self._prepare(model)
        return model

    def _new_shards(self, mesh: RankMesh) -> LoraShards:
        return LoraShards(self._whole(), self._placement, mesh, self._prepare, self._widened)

    def _prepare(self, model: Any) -> None:
        if self._lora.mxfp8_experts:
            hold_experts_in_mxfp8(model)
        elif self._lora.parameters:
            hold_adapted_experts(model)

    @torch.no_grad()
    def load(self, path: str | Path) -> None:
        """Read the base from a published checkpoint, which may be MXFP8; adapters begin anew.

        Experts that are held in MXFP8 keep their bytes or are quantised (see `frozen.fill`); MXFP8
        that is held otherwise is widened.

        Raises:
            CheckpointError: see `inference.models.weights.read_checkpoint`; or a weight is not
                finite.
        """
        allocate_experts(self.model, self._device)
        only = None if self._shards is None else self._shards.read_names | self._experts_here()
        try:
            stored = read_checkpoint(path, self.config, allow_mxfp8=True, only=only)
            for name, tensor in stored:
                if isinstance(tensor, Tensor) and not torch.isfinite(tensor).all():
                    raise CheckpointError(f"{path}: {name} holds values that are not finite")
                self._put(name, tensor)
        except RuntimeCheckpointError as error:
            raise CheckpointError(str(error)) from error
        self.adapters.begin()
        self._base_hash = None

    def _experts_here(self) -> set[str]:
        """Of those in MXFP8, every rank of an expert group holds all."""
        here = range(self._first_expert, self._first_expert + self._num_experts)
        return {n for n in self._specs if self._lora.mxfp8_experts and expert_of(n) in here}

    def _put(self, name: str, tensor: Tensor | MXFP8Tensor) -> None:
        if (held := self._mxfp8(name)) is not None:
            fill(held, tensor)
        elif self._shards is not None:
            self._shards.put_published(name, widened(tensor, self.dtype))
        else:
            self._master(name).copy_(widened(tensor, self.dtype))

    def init_random(self, seed: int, **deviations: float) -> None:
        """Refused: adapters need a base that was trained."""
        raise ValueError("adapters need a trained base; load one, or leave policy.lora out")

    def sum_gradients(self) -> None:
        if self.mesh is not None:
            self.adapters.sum_gradients()

    def stepped(self) -> None:
        self.adapters.merge()

    def save_trained(self, path: str | Path, model_path: str | Path) -> None:
        """Rank 0 writes the adapters, as peft reads them, with the hash of their base."""
        base_hash = self.base_hash()
        if self.mesh is None or self.mesh.rank == 0:
            write_adapters(
                Path(path),
                self.adapters,
                base_hash=base_hash,
                model_path=str(model_path),
                dtype=self.dtype_name,
            )

    def load_trained(self, path: str | Path) -> None:
        """After `load` of the base: take adapters that `save_trained` wrote.

        Raises:
            CheckpointError: see `m3rl.lora.files.read_adapters`.
        """
        read_adapters(Path(path), self.adapters, base_hash=self.base_hash())
        self.adapters.merge()

    def frozen_copy(self) -> Forward:
        """The forward pass of the base; it has no weights of its own."""
        return self._without_adapters

    @torch.no_grad()
    def _without_adapters(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        with self.adapters.off():
            result: tuple[Tensor, Tensor] = self(*args, **options)
        return result

    @property
    def fixed_names(self) -> frozenset[str]:
        places = self._placement
        return frozenset(n for n in self._specs if places[n].param not in self.adapters.names)

    @property
    def wire_stays(self) -> bool:
        """Whether each `wire_view` is the policy's own memory: not where MXFP8 is widened."""
        return not self._lora.mxfp8_experts

    @torch.no_grad()
    def wire_state(self) -> dict[str, Tensor]:
        """Copies of what this rank owns of the adapted weights, by transformers' names."""
        return {name: memory.clone() for name, memory in self._adapted()}

    @torch.no_grad()
    def changed_frac(self, before: dict[str, Tensor]) -> float:
        """Share of all weights whose wire value differs from that in `before`, a `wire_state`; all
        ranks call it."""
        changed = torch.zeros((), dtype=torch.int64)
        for name, memory in self._adapted():
            changed += (memory != before[name]).sum().cpu()
        total = changed if self.mesh is None else self.mesh.sum(changed)
        return int(total) / self.config.num_parameters

    def master_hash(self) -> str:
        """64 bits over the bits of all adapters and of the base as it is held, 16 hex digits; all
        ranks call it."""
        return f"{combine((int(self.base_hash(), 16), self.adapters.hash())):016x}"

    def base_hash(self) -> str:
        """The same of the wire values of the base alone; computed once a load, by all ranks."""
        if self._base_hash is None:
            with self.adapters.off():
                self._base_hash = super().master_hash()
        return self._base_hash

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.model.lm_head.weight.device
        return device if self.mesh is None else self.mesh.device

    def _shape(self, param: str) -> tuple[int, ...]:
        if self._shards is not None:
            return self._shards.shape(param)
        return tuple(self._parameter(param).shape)

    def _own(self, param: str) -> Own | None:
        """What this rank owns of a parameter, transformers' name."""
        if self._shards is not None:
            region = self._shards.region(param, self._shards.mesh.rank)
            return None if region is None else (self._shards.memory[param], region)
        memory = self._parameter(param).data
        return memory, whole(memory.shape)

    def _parameter(self, param: str) -> Tensor:
        module, _, name = param.rpartition(".")
        parameter: Tensor = self.model.get_submodule(module)._parameters[name]
        return parameter

    def _adapted(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.adapters.names:
            if (own := self._own(name)) is not None:
                yield name, own[0]

    def _master(self, name: str) -> Tensor:
        """This rank's part of a published tensor: its memory, or values that MXFP8 stands for."""
        found = self._widened(name)
        return super()._master(name) if found is None else found

    def _widened(self, name: str) -> Tensor | None:
        """This rank's part of what MXFP8 stands for; None: the tensor is held otherwise."""
        held = self._mxfp8(name)
        if held is None:
            return None
        if self._shards is not None:
            rows = slice(*self._shards.bounds(name)[0])
            held = MXFP8Tensor(held.values[rows], held.scale[rows])
        return widened(held, self.dtype)

    def _mxfp8(self, name: str) -> MXFP8Tensor | None:
        """All of a published tensor of an expert that is here, if it is held so."""
        if not self._lora.mxfp8_experts or expert_of(name) is None:
            return None
        return mxfp8_of(self.model, self._placement[name], self._first_expert)

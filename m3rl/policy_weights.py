"""The weights of a policy: FP32 masters by published name, all of them here or this rank's part.

They are read, made, exported, sent and hashed; what computes with them is `policy.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inference.kernels.tensor_hash import combine, tensor_hash, unit_of
from inference.models.weights import CheckpointError as RuntimeCheckpointError
from inference.models.weights import write_checkpoint
from m3rl.architecture import Architecture, InitialScales
from m3rl.checkpoint import CheckpointError
from m3rl.parallel.mesh import RankMesh
from m3rl.parallel.save import save_together
from m3rl.parallel.shards import Shards
from m3rl.types import TensorSlot
from m3rl.weight_sync.layout import Bounds, starts, whole

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""float64 is for tests: its masters, and all arithmetic, are FP64 too."""
MAX_SHARD_BYTES = 5 << 30


class PolicyWeights(nn.Module):
    """transformers' model in `self.model`, NaN until `load` or `init_random`.

    Args:
        architecture: what the model is.
        dtype: of `DTYPES`: what the wire carries.
        mesh: the ranks that share the model; all call what says so at the same time. None: all of
            it is here, on the CPU at first.
        runs_model: methods, besides `forward`, that compute with the model.
    """

    def __init__(
        self,
        architecture: Architecture,
        dtype: str,
        mesh: RankMesh | None,
        runs_model: tuple[str, ...],
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ValueError(f"policy.dtype={dtype!r} is unknown; use one of {list(DTYPES)}")
        self.architecture = architecture
        self.dtype_name = dtype
        self.dtype = DTYPES[dtype]
        self._master_dtype = torch.promote_types(self.dtype, torch.float32)
        self.mesh = mesh
        self._specs = architecture.specs
        self._placement = architecture.placement
        self._published = {place.param for place in self._placement.values()}
        self._fp32 = {self._placement[s.name].param for s in self._specs.values() if s.is_fp32}
        self._shards: Shards | None = None
        self.model: Any
        if mesh is None:
            self.model = self._build()
        else:
            self._shards = self._new_shards(mesh)
            self.model = self._shards.build(self._build)
            units = architecture.units(self.model)
            self._shards.shard(self, units, self.dtype, methods=runs_model)
        with torch.no_grad():
            for tensor in self._masters().values():
                tensor.fill_(torch.nan)

    def _new_shards(self, mesh: RankMesh) -> Shards:
        return Shards(self._whole(), self._placement, mesh)

    def _build(self) -> Any:
        return self.architecture.build(self._master_dtype, self.dtype)

    @torch.no_grad()
    def load(self, path: str | Path) -> None:
        """Read all weights from a published checkpoint into the FP32 masters.

        Raises:
            CheckpointError: see `Architecture.read`; or a weight is not finite.
        """
        only = None if self._shards is None else self._shards.read_names
        try:
            for name, tensor in self.architecture.read(path, only):
                if not torch.isfinite(tensor).all():
                    raise CheckpointError(f"{path}: {name} holds values that are not finite")
                if self._shards is not None:
                    self._shards.put_published(name, tensor)
                else:
                    self._master(name).copy_(tensor)
        except RuntimeCheckpointError as error:
            raise CheckpointError(str(error)) from error

    @torch.no_grad()
    def save(self, path: str | Path, dtype: str) -> None:
        """Write all weights into a directory without any, under published names (see `export`);
        all ranks call it, and each writes files of its own.

        Raises:
            CheckpointError: there are weights already, a file cannot be written, or ranks do not
                see one another's files.
        """
        if self._shards is not None:
            dtypes = {name: self._stored_dtype(name, DTYPES[dtype]) for name in self._specs}
            save_together(Path(path), self._shards, dtypes, max_shard_bytes=MAX_SHARD_BYTES)
            return
        try:
            write_checkpoint(path, self.export(dtype), max_shard_bytes=MAX_SHARD_BYTES)
        except RuntimeCheckpointError as error:
            raise CheckpointError(str(error)) from error

    def save_trained(self, path: str | Path, model_path: str | Path) -> None:
        """Write into directory `path` what training changed of the model at `model_path`; all ranks
        call it."""
        self.save(path, "float32")

    def load_trained(self, path: str | Path) -> None:
        """After `load`: take what `save_trained` wrote."""
        self.load(path)

    def sum_gradients(self) -> None:
        """Before an optimizer step: add gradients over ranks, as far as backward passes did not."""

    def stepped(self) -> None:
        """After an optimizer step."""

    @torch.no_grad()
    def init_random(self, seed: int, *, std: float, embedding_std: float, bias_std: float) -> None:
        """Fresh weights, a function of `seed`: normal; norms so that they scale by 1.

        Args:
            std: of all matrices but the embedding.
            bias_std: of the router's correction bias.
        """
        generator = torch.Generator().manual_seed(seed)
        initial = self.architecture.initial(InitialScales(std, embedding_std, bias_std))
        for name, tensor in self._masters().items():
            shape = tensor.shape if self._shards is None else self._shards.shape(name)
            scale = initial[name]
            if isinstance(scale, Tensor):
                fresh = scale
            elif scale:
                fresh = torch.randn(shape, generator=generator) * scale
            else:
                fresh = torch.zeros(shape)
            if self._shards is None:
                tensor.copy_(fresh)
            else:
                self._shards.put(name, fresh)

    def _master(self, name: str) -> Tensor:
        """The FP32 memory of this rank's part of a published tensor."""
        if self._shards is not None:
            return self._shards.view(name)
        place = self._placement[name]
        whole: Tensor = attrgetter(place.param)(self.model).detach()
        return whole[place.index]

    def _masters(self) -> dict[str, Tensor]:
        """All weights of this rank, buffers included, by transformers' names, sharing the model's
        memory."""
        if self._shards is not None:
            return self._shards.memory
        state: dict[str, Tensor] = self.model.state_dict()
        return {name: tensor for name, tensor in state.items() if name in self._published}

    def layout(self) -> list[TensorSlot]:
        """What this rank holds of every published tensor, with the dtype it has on the wire; ranks
        together hold each element once."""
        slots = self._whole()
        return slots if self._shards is None else self._shards.layout(slots)

    def _whole(self) -> list[TensorSlot]:
        return [
            TensorSlot(
                name=spec.name,
                dtype="float32" if spec.is_fp32 else self.dtype_name,
                shape=spec.shape,
                bounds=tuple((0, size) for size in spec.shape),
                bucket=spec.bucket,
            )
            for spec in self._specs.values()
        ]

    @property
    def fixed_names(self) -> frozenset[str]:
        """Published tensors that training never changes."""
        return frozenset()

    @property
    def wire_stays(self) -> bool:
        """Whether each `wire_view` is the masters' own memory; updates and loads do not move it."""
        return self.dtype != torch.bfloat16

    @torch.no_grad()
    def wire_view(self, name: str, bounds: Bounds | None = None) -> Tensor:
        """What this rank holds of a published tensor, or a rectangle of it, in its wire dtype: the
        masters' own memory where they have that dtype, else rounded."""
        if name not in self._specs:
            raise KeyError(f"{name} is no published tensor of this model")
        view = self._master(name)
        if bounds is not None:
            held = starts(whole(view.shape) if self._shards is None else self._shards.bounds(name))
            view = view[tuple(slice(a - h, z - h) for (a, z), h in zip(bounds, held, strict=True))]
        return view.to(torch.float32 if self._specs[name].is_fp32 else self.dtype)

    @torch.no_grad()
    def export(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every published tensor once, in the order of the forward pass; all ranks call it, and on
        all but rank 0 it gives none.

        Args:
            dtype: 'float32' gives the masters themselves; None gives wire dtypes.
        """
        rounded = self.dtype if dtype is None else DTYPES[dtype]
        for name in self._specs:
            chosen = self._stored_dtype(name, rounded)
            if self._shards is None:
                yield name, self._master(name).to(chosen)
            elif (tensor := self._shards.gathered(name, chosen)) is not None:
                yield name, tensor

    def _stored_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Of a published tensor in files that hold others in `dtype`."""
        return self._master_dtype if self._specs[name].is_fp32 else dtype

    @torch.no_grad()
    def wire_state(self) -> dict[str, Tensor]:
        """Copies of all weights in wire dtype by transformers' names."""
        return {
            name: tensor.to(torch.float32 if name in self._fp32 else self.dtype, copy=True)
            for name, tensor in self._masters().items()
        }

    @torch.no_grad()
    def changed_frac(self, before: dict[str, Tensor]) -> float:
        """Share of all weights whose wire value differs from that in `before`, a `wire_state`; all
        ranks call it."""
        counts = torch.zeros(2, dtype=torch.int64)
        for name, tensor in self._masters().items():
            counts[0] += (tensor.to(before[name].dtype) != before[name]).sum().cpu()
            counts[1] += tensor.numel()
        changed, total = counts if self.mesh is None else self.mesh.sum(counts)
        return int(changed) / int(total)

    @torch.no_grad()
    def master_hash(self) -> str:
        """64 bits over the bits of all FP32 masters and the correction bias, as 16 hex digits; all
        ranks call it.

        That of a weight sync which carries FP32 and cuts no tensor's columns.
        """
        if self._shards is not None:
            return f"{self._shards.hash():016x}"
        return f"{combine(_hash(name, self._master(name)) for name in self._specs):016x}"


def _hash(name: str, tensor: Tensor) -> int:
    return tensor_hash(tensor, name=name, unit=unit_of(tensor.dtype, tensor.shape[-1:]))

"""A model sharded over trainer ranks by FSDP2, and what this rank owns of it.

Units of FSDP (`Architecture.units`) are layers and the like; what is left (the final norm) belongs
to the root. They are gathered in the wire's dtype, and gradients are summed in
FP32, undivided: a loss is already its share of a global mean. Routers stay FP32. Every rank holds
the correction bias and owns a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from inference.kernels.tensor_hash import combine, tensor_hash, unit_of
from m3rl.architecture import Unit
from m3rl.parallel.mesh import RankMesh
from m3rl.types import TensorSlot
from m3rl.weight_sync.layout import Bounds, starts, whole
from m3rl.weight_sync.trainer_layout import (
    Part,
    Place,
    cut_dim,
    held_parts,
    held_region,
    parameters_of,
    part_of,
)

_Slot = tuple[nn.Module, str]
"""A module and the name of a parameter in it."""


class Shards:
    """This rank's part of a model.

    Args:
        tensors: the published ones, whole.
        places: theirs in transformers' model.
    """

    def __init__(
        self, tensors: list[TensorSlot], places: Mapping[str, Place], mesh: RankMesh
    ) -> None:
        self.mesh = mesh
        self.memory: dict[str, Tensor] = {}
        """What this rank owns, by transformers' names in the order of its state dict."""
        self._slots = {slot.name: slot for slot in tensors}
        self._places = places
        self._parameters = parameters_of(tensors, places)
        self._parts = held_parts(tensors, places, mesh.split, mesh.rank)
        self._replicated: dict[str, Tensor] = {}
        """Buffers, by transformers' name."""

    def build(self, make: Callable[[], Any]) -> Any:
        """`make()`, a transformers model, of whose parameters there is no memory yet, with this
        rank's experts alone."""
        with init_empty_weights(include_buffers=False):
            model = make()
        for name, (shape, is_experts) in self._parameters.items():
            if is_experts:
                path, _, last = name.rpartition(".")
                module = model.get_submodule(path)
                stacked = getattr(module, last)
                own = stacked.data[: shape[0] // self.mesh.split.ep]
                setattr(module, last, nn.Parameter(own, stacked.requires_grad))
        return model

    def shard(
        self, root: Any, units: Iterable[Unit], dtype: torch.dtype, methods: tuple[str, ...]
    ) -> None:
        """Shard `root`, the module that runs `root.model`, and give the parameters memory.

        Args:
            units: of `root.model`, inner ones first.
            dtype: of the wire.
            methods: of `root`, besides its forward, that run the model.
        """
        tied = _tied(root)
        _fully_shard(root, units, self._expert_stacks(root.model), self.mesh, dtype)
        for method in methods:
            register_fsdp_forward_method(root, method)
        buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
        root.to_empty(device=self.mesh.device)
        for (module, name), others in tied:
            for other, its_name in others:
                other._parameters[its_name] = module._parameters[name]
        for name, buffer in root.named_buffers():
            buffer.copy_(buffers[name])
        state: dict[str, Any] = root.model.state_dict()
        for name, tensor in state.items():
            if name not in self._parameters:  # one that is tied to another
                continue
            if isinstance(tensor, DTensor):
                sharded: Any = tensor.detach()
                self.memory[name] = sharded.to_local()
            else:
                self._replicated[name] = tensor.detach()
                self.memory[name] = _cut(tensor.detach(), self.region(name, self.mesh.rank))

    def _expert_stacks(self, model: nn.Module) -> set[int]:
        named = dict(model.named_parameters())
        stacks = [name for name, (_, is_experts) in self._parameters.items() if is_experts]
        return {id(named[name]) for name in stacks if name in named}

    def shape(self, param: str) -> tuple[int, ...]:
        """Of all of a parameter or buffer, by transformers' name."""
        return self._parameters[param][0]

    @torch.no_grad()
    def put(self, param: str, values: Tensor) -> None:
        """Fill a parameter or buffer, transformers' name, from all of its values."""
        if param in self._replicated:
            self._replicated[param].copy_(values)
        else:
            self.memory[param].copy_(_cut(values, self.region(param, self.mesh.rank)))

    @torch.no_grad()
    def put_published(self, name: str, values: Tensor) -> None:
        """Fill a published tensor from all of its values."""
        place, part = self._places[name], self._parts.get(name)
        if place.param in self._replicated:
            self._replicated[place.param][place.index].copy_(values)
        elif part is not None:
            self.memory[place.param][part.place].copy_(_cut(values, part.bounds))

    @property
    def read_names(self) -> set[str]:
        """Published tensors of which `put_published` takes something."""
        return {n for n in self._slots if n in self._parts or self._param(n) in self._replicated}

    def layout(self, tensors: list[TensorSlot]) -> list[TensorSlot]:
        """`tensors`, which are whole, as far as this rank owns them."""
        parts = self._parts
        return [replace(s, bounds=parts[s.name].bounds) for s in tensors if s.name in parts]

    def bounds(self, name: str) -> Bounds:
        """What this rank owns of a published tensor."""
        return self._parts[name].bounds

    def view(self, name: str) -> Tensor:
        """The memory of that."""
        return self.memory[self._param(name)][self._parts[name].place]

    def gathered(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """A published tensor, put together on rank 0; None on the others. All ranks call it.

        It travels in `dtype`.
        """
        return self.exchange({0: (name, dtype)})

    def exchange(self, wanted: Mapping[int, tuple[str, torch.dtype]]) -> Tensor | None:
        """The published tensor that this rank wants, whole, if it does. All ranks call it at the
        same time with the same `wanted`.

        Args:
            wanted: rank -> name of a tensor, and the dtype that it travels in.

        Returns:
            On the mesh's device; the rank's own memory where that is all of it in that dtype.
        """
        operations = []
        pieces: list[tuple[int, Tensor, Tensor]] = []
        for receiver, (name, dtype) in wanted.items():
            is_owner = name in self._parts and receiver != self.mesh.rank
            if is_owner and not self._owns_all(receiver, name):
                own = self.view(name).to(dtype).contiguous()
                operations.append(dist.P2POp(dist.isend, own, receiver))
        mine = wanted.get(self.mesh.rank)
        if mine is not None and self._owns_all(self.mesh.rank, mine[0]):
            out = self.view(mine[0]).to(mine[1])
        elif mine is not None:
            out, pieces = self._begin(*mine)
            operations += [dist.P2POp(dist.irecv, piece, rank) for rank, piece, _ in pieces]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        if mine is None:
            return None
        for _, piece, target in pieces:
            if piece is not target:
                target.copy_(piece)
        return out

    def _begin(
        self, name: str, dtype: torch.dtype
    ) -> tuple[Tensor, list[tuple[int, Tensor, Tensor]]]:
        """Memory for all of a published tensor with what this rank owns in it; and for each other
        part the rank that sends it, where it is received, and where it belongs."""
        out = torch.empty(self._slots[name].shape, dtype=dtype, device=self.mesh.device)
        pieces = []
        for owner, bounds in self._owners(name):
            target = _cut(out, bounds)
            if owner == self.mesh.rank:
                target.copy_(self.view(name))
            else:
                is_plain = target.is_contiguous()
                received = target if is_plain else target.contiguous()
                pieces.append((owner, received, target))
        return out, pieces

    def owners(self, name: str) -> list[int]:
        """Ranks that own a part of a published tensor, ascending."""
        return [rank for rank, _ in self._owners(name)]

    def num_bytes(self, name: str, dtype: torch.dtype) -> int:
        """Of all of a published tensor in `dtype`."""
        return math.prod(self._slots[name].shape) * dtype.itemsize

    def _owns_all(self, rank: int, name: str) -> bool:
        region = self.region(self._param(name), rank)
        part = None if region is None else part_of(region, self._places[name].index)
        return part is not None and part.bounds == whole(self._slots[name].shape)

    def hash(self) -> int:
        """`tensor_hash` of all published tensors, each mixed in units that fit its whole last
        dimension. All ranks call it."""
        total = combine(self._hashes())
        signed = total - (1 << 64) if total >> 63 else total
        return int(self.mesh.sum(torch.tensor(signed))) & ((1 << 64) - 1)

    def _hashes(self) -> Iterator[int]:
        for name, slot in self._slots.items():
            if len(slot.shape) == 1:  # rows are columns here, and cut: together on rank 0
                tensor = self.gathered(name, self.memory[self._param(name)].dtype)
                if tensor is not None:
                    yield tensor_hash(tensor, name=name, unit=unit_of(tensor.dtype, slot.shape))
            elif name in self._parts:
                view = self.view(name)
                yield tensor_hash(
                    view,
                    name=name,
                    offsets=starts(self.bounds(name)),
                    shape=slot.shape,
                    unit=unit_of(view.dtype, slot.shape[-1:]),
                )

    def _owners(self, name: str) -> Iterator[tuple[int, Bounds]]:
        """Ranks that own a part of a published tensor, ascending, and which."""
        place = self._places[name]
        for rank in range(self.mesh.size):
            region = self.region(place.param, rank)
            part: Part | None = None if region is None else part_of(region, place.index)
            if part is not None:
                yield rank, part.bounds

    def _param(self, name: str) -> str:
        return self._places[name].param

    def region(self, param: str, rank: int) -> Bounds | None:
        """The rectangle of a parameter or buffer, transformers' name, that a rank owns."""
        shape, is_experts = self._parameters[param]
        return held_region(shape, is_experts, self.mesh.split, rank)


def _cut(tensor: Tensor, bounds: Bounds | None) -> Tensor:
    """A rectangle of a tensor, in its memory; None: an empty one."""
    if bounds is None:
        return tensor[:0]
    return tensor[tuple(slice(start, stop) for start, stop in bounds)]


def _tied(root: nn.Module) -> list[tuple[_Slot, list[_Slot]]]:
    """Places of each parameter that has several: the first, and the others."""
    found: dict[int, list[_Slot]] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, name))
    return [(first, others) for first, *others in found.values() if others]


def _fully_shard(
    root: Any, units: Iterable[Unit], expert_stacks: set[int], mesh: RankMesh, dtype: torch.dtype
) -> None:
    """
    Args:
        expert_stacks: ids of the parameters that stack experts.
    """
    is_narrow = dtype == torch.bfloat16
    on_wire = MixedPrecisionPolicy(
        param_dtype=dtype if is_narrow else None,
        reduce_dtype=torch.float32 if is_narrow else None,
        cast_forward_inputs=False,
    )
    as_masters = MixedPrecisionPolicy(cast_forward_inputs=False)
    parts = mesh.expert_ranks.size()

    def placement(parameter: nn.Parameter) -> Shard:
        if id(parameter) not in expert_stacks:
            return Shard(0)
        return Shard(cut_dim(parameter.shape[0], parameter.shape[1], parts))

    for unit in units:
        fully_shard(
            unit.module,
            mesh=mesh.expert_ranks if unit.stacks_experts else mesh.ranks,
            mp_policy=as_masters if unit.is_fp32 else on_wire,
            shard_placement_fn=placement,
        )
        unit.module.set_unshard_in_backward(unit.in_backward)
    # After a forward pass without gradients too: what stays gathered would outlive an update.
    fully_shard(root, reshard_after_forward=True, mesh=mesh.ranks, mp_policy=on_wire)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

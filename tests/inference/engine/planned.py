"""Loads with a plan, as a receiver makes them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from inference.engine import Engine
from inference.engine.coverage import Bounds, Part
from inference.engine.loading import LoadPlan
from inference.kernels.mxfp8 import MXFP8Tensor, quantize_into


def cut(tensor: Tensor, bounds: Bounds) -> Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in bounds)]


def parts_of(engine: Engine, cuts: int = 1) -> list[Part]:
    """What the engine holds, every dimension cut into about `cuts` parts, no block of MXFP8 is."""
    parts = []
    for slot in engine.weight_layout():
        edges = []
        for dim, (start, stop) in enumerate(slot.bounds):
            is_blocked = slot.storage == "mxfp8" and dim == len(slot.bounds) - 1
            grain = 32 if is_blocked else 1
            units = (stop - start) // grain
            edges.append(sorted({start + grain * (units * i // cuts) for i in range(cuts + 1)}))
        parts += [
            (slot.name, bounds)
            for bounds in itertools.product(*(list(itertools.pairwise(each)) for each in edges))
        ]
    return parts


def fill(plan: LoadPlan, tensors: dict[str, Tensor], first: int, last: int) -> None:
    """Put the values of whole tensors into places `first` to `last` - 1."""
    for (name, bounds), place in list(zip(plan.parts, plan.places, strict=True))[first:last]:
        source = cut(tensors[name], bounds)
        if isinstance(place, MXFP8Tensor):
            quantize_into(source.to(place.values.device), place)
        else:
            assert source.dtype == place.dtype, name
            place.copy_(source)


def load(
    engine: Engine, plan: LoadPlan, tensors: dict[str, Tensor], version: int, step: int = 7
) -> None:
    """A whole load, `step` parts at a time, the last ones first."""
    engine.begin_load(version, plan)
    for last in range(len(plan.parts), 0, -step):
        first = max(0, last - step)
        fill(plan, tensors, first, last)
        engine.written(first, last)
    engine.commit()


def pointers(plan: LoadPlan) -> list[int]:
    return [
        part.data_ptr()
        for place in plan.places
        for part in (place if isinstance(place, MXFP8Tensor) else (place,))
    ]


def parameters(engine: Engine) -> dict[str, Tensor]:
    """Copies of what the model reads, as bytes."""
    state = engine._worker.model.state_dict()
    return {name: tensor.clone().view(torch.uint8) for name, tensor in state.items()}


def assert_holds(engine: Engine, expected: dict[str, Tensor]) -> None:
    found = parameters(engine)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name

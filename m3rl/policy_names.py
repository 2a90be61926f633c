"""Where checkpoint tensors of any architecture lie in transformers' parameters.

transformers keeps some of them together (the experts of a layer, gates and ups) and knows how to
take its parameters apart when it saves them. Small parameters whose every element is another number
are taken apart that way: the numbers that come out of them tell which rectangle each name is.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from inference.models.weights import Placement
from m3rl.architecture import ArchitectureError
from m3rl.weight_sync.trainer_layout import Index

CUTS = 12
"""Parts in which a small parameter's dimension can be told to be cut: halves, thirds, quarters."""


def places_in(model: Any) -> tuple[dict[str, Placement], dict[str, tuple[int, ...]]]:
    """(place, shape) of every checkpoint tensor of `model`, by name.

    Args:
        model: transformers'; its tensors may be on the meta device.

    Raises:
        ArchitectureError: a tensor is no rectangle of a parameter (one is transposed, say), or the
            tensors are not all of the parameters.
    """
    held = tensors_of(model)
    whole = _apart(model, {n: torch.empty(t.shape, device="meta") for n, t in held.items()})
    small_shapes = {name: _small(tensor) for name, tensor in held.items()}
    sizes = [int(np.prod(shape)) for shape in small_shapes.values()]
    starts = [0, *accumulate(sizes)]
    small = {
        name: torch.arange(start, start + size).view(shape)
        for (name, shape), start, size in zip(small_shapes.items(), starts[:-1], sizes, strict=True)
    }
    numbers = _apart(model, small)
    names, places = list(held), {}
    if numbers.keys() != whole.keys():
        raise ArchitectureError(
            f"{type(model).__name__}: how transformers takes its parameters apart depends on their "
            "sizes, which is not followed here; this architecture cannot be trained"
        )
    for name, values in numbers.items():
        number = int(np.searchsorted(starts, int(values.min()), side="right")) - 1
        param = names[number]
        box = _rectangle(values.numpy() - starts[number], small_shapes[param])
        index = None if box is None else _index(box, small_shapes[param], held[param].shape)
        if index is None or _shape(index, held[param].shape) != tuple(whole[name].shape):
            raise ArchitectureError(
                f"{type(model).__name__}: transformers makes {param} of the checkpoint's {name} in "
                "a way that is not followed here; only stacked and concatenated tensors are"
            )
        places[name] = Placement(param, index)
    _require_all(numbers, names, starts, type(model).__name__)
    return places, {name: tuple(whole[name].shape) for name in places}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, those that are tied once, and buffers that checkpoints hold."""
    named = dict(model.named_parameters())
    buffers = {name for name, _ in model.named_buffers()}
    return named | {n: t for n, t in model.state_dict().items() if n in buffers}


def _apart(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As a checkpoint stores them."""
    result: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return result


def _small(tensor: Tensor) -> tuple[int, ...]:
    """Stacks keep their number of experts."""
    first = tensor.shape[:1] if tensor.ndim > 2 else [CUTS] * min(tensor.ndim, 1)
    return (*first, *[CUTS] * (tensor.ndim - 1))


def _rectangle(places: np.ndarray, shape: tuple[int, ...]) -> list[tuple[int, int]] | None:
    """(first, behind the last) along each dimension of elements of a tensor of `shape`, or None if
    they are no rectangle of it in order."""
    if places.min() < 0 or places.max() >= np.prod(shape):
        return None
    first, last = (np.unravel_index(int(x), shape) for x in (places.flat[0], places.flat[-1]))
    box = [(int(a), int(z) + 1) for a, z in zip(first, last, strict=True)]
    expected = np.arange(np.prod(shape)).reshape(shape)[tuple(slice(*edge) for edge in box)]
    if expected.size != places.size or (expected.ravel() != places.ravel()).any():
        return None
    dropped = len(shape) - places.ndim
    if any(z - a != 1 for a, z in box[:dropped]):
        return None
    return [(a, -1) for a, _ in box[:dropped]] + box[dropped:]


def _index(box: list[tuple[int, int]], small: tuple[int, ...], shape: torch.Size) -> Index | None:
    """The rectangle in a tensor of `shape`; whole dimensions at the end are left out."""
    index: list[slice | int] = []
    for (first, last), size, full in zip(box, small, shape, strict=True):
        if last == -1:
            index.append(first)
            continue
        edges = Fraction(first * full, size), Fraction(last * full, size)
        if any(edge.denominator != 1 for edge in edges):
            return None
        index.append(slice(int(edges[0]), int(edges[1])))
    while index and index[-1] == slice(0, shape[len(index) - 1]):
        index.pop()
    return tuple(index)


def _shape(index: Index, shape: torch.Size) -> tuple[int, ...]:
    sizes = [at.stop - at.start for at in index if isinstance(at, slice)]
    return (*sizes, *shape[len(index) :])


def _require_all(
    numbers: Mapping[str, Tensor], names: list[str], starts: list[int], architecture: str
) -> None:
    """Every element of every parameter is in one tensor of the checkpoint."""
    times = np.zeros(starts[-1], np.int64)
    for values in numbers.values():
        np.add.at(times, values.numpy().ravel(), 1)
    wrong = np.flatnonzero(times != 1)
    if len(wrong):
        param = names[int(np.searchsorted(starts, wrong[0], side="right")) - 1]
        raise ArchitectureError(
            f"{architecture}: a checkpoint holds parts of {param} {times[wrong[0]]} times instead "
            "of once; this architecture cannot be trained"
        )

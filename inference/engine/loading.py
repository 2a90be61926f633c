"""Which policy version the weights of a worker are, and how they become the next one.

                 begin               commit
    EMPTY --------------> LOADING -----------> READY(version)
                          ^ |  |                  |
                          | |  | fail or abort    | begin
                          | |  v after a write    |
                          | |  POISONED           |
                          | |  | begin            |
                          +-|--+------------------+
                            | fail or abort before the first write
                            v
                   the state it began in

Only READY serves. A load is the whole model: `commit` proves that every element was written once.
Either each `write` is checked as it comes, or the parts are agreed on once, in a plan, and whoever
has it fills the memory itself; then the load counts as one that has written from its beginning.

With a shadow the state changes at `commit` alone: EMPTY or READY(old) serves on, or not, while a
load is open and when it fails.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

import torch
from torch import Tensor

from inference.engine.coverage import (
    Bounds,
    Coverage,
    Part,
    PlannedParts,
    WeightLoadError,
    WeightSlot,
)
from inference.engine.weights import WeightMemory, quantized_rectangle, slices
from inference.kernels.mxfp8 import BLOCK_SIZE, MAX_SCALE, MXFP8Tensor, dequantize

logger = logging.getLogger(__name__)


class EngineStateError(RuntimeError):
    """The call does not fit the state of the engine."""


class WeightState(Enum):
    """What the memory of the weights holds."""

    EMPTY = "EMPTY"
    """Nothing yet."""
    LOADING = "LOADING"
    """A version that is still arriving."""
    READY = "READY"
    """All of one version."""
    POISONED = "POISONED"
    """Not all of one version: a load broke off after its first write, or its copy to where the
    model reads did."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """Parts that are the whole model, each element once, and where each of them goes."""

    parts: tuple[Part, ...]
    places: tuple[Tensor | MXFP8Tensor, ...]
    """The memory of each part, the same as long as the engine lives. It may be written by anybody,
    on any stream, while a load with this plan is open, and at no other time."""
    memory: WeightMemory
    """What the places belong to."""


@dataclass(slots=True)
class _Load:
    """The one that is open."""

    version: int
    progress: Coverage | PlannedParts
    state_before: WeightState
    """That of the engine."""


class WeightLoader:
    """The weights of one worker: begin, write every tensor, commit."""

    def __init__(self, memory: WeightMemory) -> None:
        self.state = WeightState.EMPTY
        self.version: int | None = None
        """Version of the newest committed weights; None when the memory holds no whole version."""
        self._memory = memory
        self._slots = {slot.name: slot for slot in memory.layout}
        self._load: _Load | None = None

    @property
    def is_open(self) -> bool:
        """Whether a load is."""
        return self._load is not None

    @property
    def serves_after_load(self) -> bool:
        """READY, or loading from there: requests may wait for it."""
        state = self.state if self._load is None else self._load.state_before
        return state is WeightState.READY

    def plan(self, parts: Iterable[Part]) -> LoadPlan:
        """Agree on the parts in which loads will come; changes nothing.

        Raises:
            WeightLoadError: a part that does not fit, or parts that miss or repeat an element.
        """
        coverage, places = Coverage(self._memory.layout), []
        agreed = tuple((name, _as_bounds(bounds)) for name, bounds in parts)
        for name, bounds in agreed:
            coverage.check(name, bounds)
            check_blocks(self._slots[name], bounds)
            coverage.add(name, bounds)
            places.append(self._memory.place(self._slots[name], bounds))
        if missing := coverage.missing():
            raise WeightLoadError(
                f"the parts of the plan leave {len(missing)} tensors incomplete: {_listed(missing)}"
            )
        return LoadPlan(agreed, tuple(places), self._memory)

    def begin(self, version: int, plan: LoadPlan | None = None) -> None:
        """Open a load of the whole model. EngineStateError while another one is open."""
        version = operator.index(version)
        if version < 0:
            raise WeightLoadError(f"version={version} must be at least 0")
        if self._load is not None:
            raise EngineStateError(
                f"the load of version {self._load.version} is still open; commit or abort it "
                f"before beginning version {version}"
            )
        if plan is not None and plan.memory is not self._memory:
            raise WeightLoadError(f"the plan for version {version} is that of another engine")
        moved = self._memory.moved()
        assert not moved, f"{moved[0]} was replaced; weights stay where they are"
        progress = Coverage(self._memory.layout) if plan is None else PlannedParts(plan.parts)
        self._load = _Load(version, progress, self.state)
        if not self._memory.has_shadow:
            self.state = WeightState.LOADING

    def part_of(
        self, name: str, tensor: Tensor | MXFP8Tensor
    ) -> tuple[Bounds, Tensor | MXFP8Tensor] | None:
        """Of a whole tensor of a checkpoint what is held here, as `write` takes it: its bounds, and
        the values rounded, or widened out of MXFP8. None: nothing is."""
        slot = self._slots.get(name)
        whole = tuple((0, size) for size in tensor.shape)
        if slot is None:
            return None if name in self._memory.elsewhere else (whole, tensor)
        bounds = slot.bounds if tuple(tensor.shape) == slot.shape else whole
        dtype = getattr(torch, slot.dtype)
        if isinstance(tensor, MXFP8Tensor):
            if slot.storage == "mxfp8":
                return bounds, quantized_rectangle(tensor, bounds)
            # Widened before it is cut: a rank's part may end inside a block.
            device = self._memory.device
            tensor = dequantize(tensor.values.to(device), tensor.scale.to(device), dtype)
        return bounds, tensor[slices(bounds)].to(dtype)

    def write(self, name: str, bounds: Bounds, tensor: Tensor | MXFP8Tensor) -> None:
        """Copy one rectangle. WeightLoadError, and the load is over, when it does not fit."""
        coverage = self._open_load("write").progress
        if not isinstance(coverage, Coverage):
            raise EngineStateError("the open load has a plan; fill its places and call written()")
        try:
            bounds = _as_bounds(bounds)
            coverage.check(name, bounds)
            check_rectangle(self._slots[name], bounds, tensor)
            coverage.add(name, bounds)
            self._memory.write(self._slots[name], bounds, tensor)
        except BaseException:
            self._fail()
            raise

    def written(self, first: int, last: int) -> None:
        """Note that parts `first` to `last` - 1 of the plan are in place.

        WeightLoadError, and the load is over, when there are no such parts, or for a second time.
        """
        parts = self._open_load("written").progress
        if not isinstance(parts, PlannedParts):
            raise EngineStateError(
                "the open load has no plan; give one to begin_load(), or write()"
            )
        try:
            parts.add(first, last)
        except WeightLoadError:
            self._fail()
            raise

    def commit(self) -> int:
        """Close the load and return its version.

        Raises:
            WeightLoadError: an element was not written, or what was quantised is NaN, infinite or
                too large for the kernels; names the tensors, and the load is over.
        """
        load = self._open_load("commit")
        if missing := load.progress.missing():
            self._refuse(missing, "are not whole")
        if unusable := self._memory.unusable():
            largest = 448 * 2 ** (MAX_SCALE - 127)
            self._refuse(unusable, f"hold NaN, Inf or magnitudes above {largest}")
        self._load = None
        try:
            self._memory.publish()
        except BaseException:
            self.state, self.version = WeightState.POISONED, None
            raise
        self.state, self.version = WeightState.READY, load.version
        return load.version

    def abort(self) -> None:
        """Give up the open load, if there is one, as if it had failed."""
        if self._load is not None:
            logger.warning("the load of version %d is given up", self._load.version)
            self._fail()

    def _refuse(self, names: list[str], fault: str) -> NoReturn:
        version = self._open_load("commit").version
        self._fail()
        raise WeightLoadError(
            f"{len(names)} tensors of version {version} {fault}: {_listed(names)}; the engine is "
            f"{self.state.value}, load the whole model again"
        )

    def _fail(self) -> None:
        """The open load is over. Untouched weights still serve; others need a whole load."""
        load, self._load = self._load, None
        if self._memory.has_shadow or load is None:
            return
        if load.progress.has_begun:
            self.state, self.version = WeightState.POISONED, None
        else:
            self.state = load.state_before

    def _open_load(self, action: str) -> _Load:
        if self._load is None:
            raise EngineStateError(
                f"{action} without an open load (the engine is {self.state.value}); "
                "call begin_load(version) first"
            )
        return self._load


def check_blocks(slot: WeightSlot, bounds: Bounds) -> None:
    """Raise WeightLoadError where `bounds` cut a block of a weight held in MXFP8."""
    if slot.storage == "mxfp8" and any(edge % BLOCK_SIZE for edge in bounds[-1]):
        raise WeightLoadError(
            f"{slot.name}: bounds {bounds} cut a block of {BLOCK_SIZE} that shares a scale; the "
            f"last dimension of a weight held in MXFP8 is cut at multiples of {BLOCK_SIZE}"
        )


def check_rectangle(slot: WeightSlot, bounds: Bounds, tensor: Tensor | MXFP8Tensor) -> None:
    """Raise WeightLoadError unless `tensor` has the dtype of `slot` and the shape of `bounds`."""
    check_blocks(slot, bounds)
    shape = tuple(stop - start for start, stop in bounds)
    if isinstance(tensor, MXFP8Tensor):
        if slot.storage != "mxfp8":
            raise WeightLoadError(
                f"{slot.name}: the tensor is MXFP8, the engine holds {slot.dtype}; a write never "
                "widens, load_weights does"
            )
        _check_part(slot.name, "values", tensor.values, "float8_e4m3fn", shape)
        _check_part(
            slot.name, "scale", tensor.scale, "uint8", (*shape[:-1], shape[-1] // BLOCK_SIZE)
        )
        return
    dtype = _dtype_of(tensor)
    if dtype != slot.dtype:
        verb = "holds" if slot.storage == "plain" else "quantises from"
        raise WeightLoadError(
            f"{slot.name}: the tensor is {dtype}, the engine {verb} {slot.dtype}; convert it at "
            "the sender, a write never rounds"
        )
    if tuple(tensor.shape) != shape:
        raise WeightLoadError(
            f"{slot.name}: the tensor has shape {tuple(tensor.shape)}, bounds {bounds} ask for "
            f"{shape}"
        )


def _check_part(name: str, part: str, tensor: Tensor, dtype: str, shape: tuple[int, ...]) -> None:
    if (_dtype_of(tensor), tuple(tensor.shape)) != (dtype, shape):
        raise WeightLoadError(
            f"{name}: {part} of the MXFP8 tensor are {_dtype_of(tensor)} {tuple(tensor.shape)}, "
            f"need {dtype} {shape}"
        )


def _dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_bounds(bounds: Bounds) -> Bounds:
    return tuple((operator.index(start), operator.index(stop)) for start, stop in bounds)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")

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
"""

from __future__ import annotations

import logging
import operator
from enum import Enum
from typing import NoReturn

import torch
from torch import Tensor

from inference.engine.coverage import Bounds, Coverage, WeightLoadError, WeightSlot
from inference.engine.worker import Worker, quantized_rectangle, slices
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
    """Not all of one version: a load broke off after its first write."""


class WeightLoader:
    """The weights of one worker: begin, write every tensor, commit."""

    def __init__(self, worker: Worker) -> None:
        self.state = WeightState.EMPTY
        self.version: int | None = None
        """Version of the newest committed weights; None when the memory holds no whole version."""
        self._worker = worker
        self._slots = {slot.name: slot for slot in worker.weight_layout}
        self._state_before = WeightState.EMPTY
        self._next_version = -1
        self._coverage = Coverage(())

    @property
    def serves_after_load(self) -> bool:
        """READY, or loading from there: requests may wait for it."""
        state = self._state_before if self.state is WeightState.LOADING else self.state
        return state is WeightState.READY

    def begin(self, version: int) -> None:
        """Open a load of the whole model. EngineStateError while another one is open."""
        version = operator.index(version)
        if version < 0:
            raise WeightLoadError(f"version={version} must be at least 0")
        if self.state is WeightState.LOADING:
            raise EngineStateError(
                f"the load of version {self._next_version} is still open; commit or abort it "
                f"before beginning version {version}"
            )
        self._state_before, self.state = self.state, WeightState.LOADING
        self._next_version = version
        self._coverage = Coverage(self._worker.weight_layout)

    def part_of(
        self, name: str, tensor: Tensor | MXFP8Tensor
    ) -> tuple[Bounds, Tensor | MXFP8Tensor] | None:
        """Of a whole tensor of a checkpoint what is held here, as `write` takes it: its bounds, and
        the values rounded, or widened out of MXFP8. None: nothing is."""
        slot = self._slots.get(name)
        whole = tuple((0, size) for size in tensor.shape)
        if slot is None:
            return None if name in self._worker.elsewhere else (whole, tensor)
        bounds = slot.bounds if tuple(tensor.shape) == slot.shape else whole
        dtype = getattr(torch, slot.dtype)
        if isinstance(tensor, MXFP8Tensor):
            if slot.storage == "mxfp8":
                return bounds, quantized_rectangle(tensor, bounds)
            # Widened before it is cut: a rank's part may end inside a block.
            device = self._worker.device
            tensor = dequantize(tensor.values.to(device), tensor.scale.to(device), dtype)
        return bounds, tensor[slices(bounds)].to(dtype)

    def write(self, name: str, bounds: Bounds, tensor: Tensor | MXFP8Tensor) -> None:
        """Copy one rectangle. WeightLoadError, and the load is over, when it does not fit."""
        self._require_open("write")
        try:
            bounds = tuple((operator.index(start), operator.index(stop)) for start, stop in bounds)
            self._coverage.check(name, bounds)
            check_rectangle(self._slots[name], bounds, tensor)
            self._coverage.add(name, bounds)
            self._worker.write_weight(self._slots[name], bounds, tensor)
        except BaseException:
            self._fail()
            raise

    def commit(self) -> int:
        """Close the load and return its version.

        Raises:
            WeightLoadError: an element was not written, or what was quantised is NaN, infinite or
                too large for the kernels; names the tensors, and the load is over.
        """
        self._require_open("commit")
        if missing := self._coverage.missing():
            self._refuse(missing, "are not whole")
        if unusable := self._worker.unusable_weights():
            largest = 448 * 2 ** (MAX_SCALE - 127)
            self._refuse(unusable, f"hold NaN, Inf or magnitudes above {largest}")
        self.state, self.version = WeightState.READY, self._next_version
        return self.version

    def abort(self) -> None:
        """Give up the open load, if there is one, as if it had failed."""
        if self.state is WeightState.LOADING:
            logger.warning("the load of version %d is given up", self._next_version)
            self._fail()

    def _refuse(self, names: list[str], fault: str) -> NoReturn:
        version = self._next_version
        self._fail()
        raise WeightLoadError(
            f"{len(names)} tensors of version {version} {fault}: "
            f"{', '.join(names[:8])}{', …' if len(names) > 8 else ''}; the engine is "
            f"{self.state.value}, load the whole model again"
        )

    def _fail(self) -> None:
        """The open load is over. Untouched weights still serve; others need a whole load."""
        if self._coverage.num_writes == 0:
            self.state = self._state_before
        else:
            self.state, self.version = WeightState.POISONED, None

    def _require_open(self, action: str) -> None:
        if self.state is not WeightState.LOADING:
            raise EngineStateError(
                f"{action} without an open load (the engine is {self.state.value}); "
                "call begin_load(version) first"
            )


def check_rectangle(slot: WeightSlot, bounds: Bounds, tensor: Tensor | MXFP8Tensor) -> None:
    """Raise WeightLoadError unless `tensor` has the dtype of `slot` and the shape of `bounds`."""
    if slot.storage == "mxfp8" and any(edge % BLOCK_SIZE for edge in bounds[-1]):
        raise WeightLoadError(
            f"{slot.name}: bounds {bounds} cut a block of {BLOCK_SIZE} that shares a scale; the "
            f"last dimension of a weight held in MXFP8 is cut at multiples of {BLOCK_SIZE}"
        )
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

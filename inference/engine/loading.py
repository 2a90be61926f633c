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

from torch import Tensor

from inference.engine.coverage import Bounds, Coverage, WeightLoadError, WeightSlot
from inference.engine.worker import Worker

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

    def write(self, name: str, bounds: Bounds, tensor: Tensor) -> None:
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
            WeightLoadError: an element was not written; names the tensors, and the load is over.
        """
        self._require_open("commit")
        if missing := self._coverage.missing():
            version = self._next_version
            self._fail()
            raise WeightLoadError(
                f"{len(missing)} tensors of version {version} are not whole: "
                f"{', '.join(missing[:8])}{', …' if len(missing) > 8 else ''}; the engine is "
                f"{self.state.value}, load the whole model again"
            )
        self.state, self.version = WeightState.READY, self._next_version
        return self.version

    def abort(self) -> None:
        """Give up the open load, if there is one, as if it had failed."""
        if self.state is WeightState.LOADING:
            logger.warning("the load of version %d is given up", self._next_version)
            self._fail()

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


def check_rectangle(slot: WeightSlot, bounds: Bounds, tensor: Tensor) -> None:
    """Raise WeightLoadError unless `tensor` has the dtype of `slot` and the shape of `bounds`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != slot.dtype:
        raise WeightLoadError(
            f"{slot.name}: the tensor is {dtype}, the engine holds {slot.dtype}; convert it at the "
            "sender, a write never rounds"
        )
    shape = tuple(stop - start for start, stop in bounds)
    if tuple(tensor.shape) != shape:
        raise WeightLoadError(
            f"{slot.name}: the tensor has shape {tuple(tensor.shape)}, bounds {bounds} ask for "
            f"{shape}"
        )

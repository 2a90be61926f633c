"""The weights of one vLLM worker, as a weight sync sees them.

Parts arrive in staging memory: the whole tensors of the checkpoint, by their own names, on the
model's device and beside it, as it serves meanwhile: on every worker of tensor parallelism as much
as the undivided model. `commit` has vLLM load them from there, layer by layer, into the
memory that serves; nothing may compute then. That is no flip of a pointer: from its begin to its
end no whole version serves (`version` is None), and a commit that fails leaves none.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from inference.engine.coverage import Bounds, Coverage, Part, PlannedParts, WeightLoadError
from m3rl.rollout.vllm_coverage import CoverageCheck
from m3rl.types import TensorSlot
from m3rl.weight_files import weight_files

logger = logging.getLogger(__name__)

TEXT_PREFIX = "language_model."
GIB = 1 << 30


class OpenLoad(Protocol):
    """A load that was begun, and neither committed nor given up."""

    @property
    def version(self) -> int: ...
    @property
    def progress(self) -> Coverage | PlannedParts: ...


L = TypeVar("L", bound=OpenLoad)


class WorkerWeights(ABC, Generic[L]):
    """What every `WeightTarget` over the model of a vLLM worker has, however it is filled."""

    def __init__(
        self,
        slots: Sequence[TensorSlot],
        device: torch.device,
        reload: Callable[[Iterable[tuple[str, Tensor]]], None],
        check: CoverageCheck,
    ) -> None:
        """
        Args:
            slots: the whole tensors that this worker needs, bucket by bucket.
            device: of the weights.
            reload: has vLLM load tensors by name into the model.
            check: of what becomes of them.
        """
        self.version: int | None = None
        self._slots = {slot.name: slot for slot in slots}
        self._device, self._reload, self.check = device, reload, check
        self._load: L | None = None

    @property
    @abstractmethod
    def staging(self) -> Mapping[str, Tensor]:
        """The memory in which each tensor arrives, by name; allocated when a sync first needs it.

        Raises:
            WeightLoadError: it does not fit beside what vLLM holds.
        """

    def weight_layout(self) -> list[TensorSlot]:
        return list(self._slots.values())

    def _require_closed(self, version: int) -> None:
        if self._load is not None:
            raise RuntimeError(
                f"the load of version {self._load.version} is still open; commit or abort it "
                f"before beginning version {version}"
            )

    def _open_load(self, action: str) -> L:
        if self._load is None:
            raise RuntimeError(f"{action} without an open load; call begin_load(version) first")
        return self._load

    def _place(self, name: str, bounds: Bounds) -> Tensor:
        return self.staging[name][tuple(slice(start, stop) for start, stop in bounds)]

    def _nbytes(self, name: str) -> int:
        slot = self._slots[name]
        return math.prod(slot.shape) * int(getattr(torch, slot.dtype).itemsize)

    def _require_memory(self, needed: int, what: str, cure: str) -> None:
        """
        Args:
            needed: bytes that are about to be allocated on the device.

        Raises:
            WeightLoadError: a GPU has less.
        """
        if self._device.type != "cuda":
            return
        free, _ = torch.cuda.mem_get_info(self._device)
        if needed > free:
            raise WeightLoadError(
                f"weight syncs into vLLM need {needed / GIB:.1f} GiB on each GPU of a replica, for "
                f"{what} beside the model, and {free / GIB:.1f} GiB are free; lower "
                f"rollout.backend.engine.gpu_memory_utilization{cure}"
            )


def require_whole(load: OpenLoad) -> None:
    """
    Raises:
        WeightLoadError: something has not come.
    """
    if missing := load.progress.missing():
        raise WeightLoadError(
            f"{len(missing)} tensors of version {load.version} are not whole: "
            f"{', '.join(missing[:8])}"
        )


def check_parts(slots: Iterable[TensorSlot], parts: Iterable[Part]) -> tuple[Part, ...]:
    """The parts, if each element of the slots is in one of them.

    Raises:
        WeightLoadError: a part that does not fit, or parts that miss or repeat an element.
    """
    coverage, agreed = Coverage(slots), tuple(parts)  # type: ignore[arg-type]
    for name, bounds in agreed:
        coverage.check(name, bounds)
        coverage.add(name, bounds)
    if missing := coverage.missing():
        raise WeightLoadError(
            f"the parts of the plan leave {len(missing)} tensors incomplete: "
            f"{', '.join(missing[:8])}"
        )
    return agreed


@dataclass(frozen=True, slots=True, eq=False)
class StagedPlan:
    """Parts of a load and the staging memory of each."""

    parts: tuple[Part, ...]
    places: tuple[Tensor, ...]


@dataclass(slots=True)
class _Load:
    version: int
    progress: Coverage | PlannedParts


class StagedWeights(WorkerWeights[_Load]):
    """All that a worker is sent has memory of its own, in which it stays until the next load."""

    has_shadow = True

    def __init__(
        self,
        slots: Sequence[TensorSlot],
        device: torch.device,
        reload: Callable[[Iterable[tuple[str, Tensor]]], None],
        check: CoverageCheck,
    ) -> None:
        super().__init__(slots, device, reload, check)
        self._tensors: dict[str, Tensor] = {}
        self._staged: int | None = None
        """Version that is whole in the staging memory."""

    @property
    def staging(self) -> dict[str, Tensor]:
        if not self._tensors:
            needed = sum(map(self._nbytes, self._slots))
            cure = ", or set rollout.backend.engine.staging: layers"
            self._require_memory(needed, "the whole tensors of the checkpoint", cure)
            self._tensors = {
                slot.name: torch.empty(
                    slot.shape, dtype=getattr(torch, slot.dtype), device=self._device
                )
                for slot in self._slots.values()
            }
        return self._tensors

    def serving_places(self) -> list[Tensor]:
        """What was staged last; between a commit and the next load that is what serves.

        Raises:
            RuntimeError: it is not, since a load that began is open or was given up.
        """
        if self._staged is None or self._staged != self.version:
            raise RuntimeError(
                f"version {self.version} serves, and is not whole in the staging memory of this "
                "vLLM worker: a later sync has begun, or broke off; sync from the trainer"
            )
        return [self.staging[name] for name in self._slots]

    def plan_load(self, parts: Iterable[Part]) -> StagedPlan:
        """Agree on the parts in which loads will come.

        Raises:
            WeightLoadError: a part that does not fit, or parts that miss or repeat an element.
        """
        agreed = check_parts(self._slots.values(), parts)
        return StagedPlan(agreed, tuple(self._place(name, bounds) for name, bounds in agreed))

    def begin_load(self, version: int, plan: StagedPlan | None = None) -> None:
        """Open a load into the staging memory; what serves goes on.

        Raises:
            RuntimeError: another load is open.
        """
        self._require_closed(version)
        progress: Coverage | PlannedParts = (
            Coverage(self._slots.values())  # type: ignore[arg-type]
            if plan is None
            else PlannedParts(plan.parts)
        )
        self._load, self._staged = _Load(version, progress), None

    def write(self, name: str, bounds: Bounds, tensor: Tensor) -> None:
        """Copy a rectangle to its place, for a load without a plan.

        Raises:
            WeightLoadError: it does not fit, or came before; the load is over.
        """
        coverage = self._open_load("write").progress
        if not isinstance(coverage, Coverage):
            raise RuntimeError("the open load has a plan; fill its places and call written()")
        try:
            coverage.check(name, bounds)
            place = self._place(name, bounds)
            if tensor.shape != place.shape:
                raise WeightLoadError(
                    f"{name}: the tensor has shape {tuple(tensor.shape)}, bounds {bounds} ask for "
                    f"{tuple(place.shape)}"
                )
            coverage.add(name, bounds)
            place.copy_(tensor)
        except BaseException:
            self.abort_load()
            raise

    def written(self, first: int, last: int) -> None:
        """Parts `first` to `last` - 1 of the plan are in place.

        Raises:
            WeightLoadError: no such parts, or for a second time; the load is over.
        """
        parts = self._open_load("written").progress
        if not isinstance(parts, PlannedParts):
            raise RuntimeError("the open load has no plan; give one to begin_load(), or write()")
        try:
            parts.add(first, last)
        except WeightLoadError:
            self.abort_load()
            raise

    def commit(self) -> None:
        """Load what was staged into the model. Nothing may be computing with it.

        Raises:
            WeightLoadError: a tensor is not whole (the old version serves on), or did not arrive
                in the model as it was staged; then no version serves.
        """
        load = self._open_load("commit")
        self._load = None
        require_whole(load)
        self.version = None
        tensors = self.staging
        with torch.no_grad(), self.check.watched(tensors):
            self._reload(tensors.items())
        self._synchronize()
        self.version = self._staged = load.version

    def abort_load(self) -> None:
        if self._load is not None:
            logger.warning("the load of version %d is given up", self._load.version)
            self._load = None

    def load_checkpoint(self, path: str, version: int) -> None:
        """Read the safetensors files at `path`, rounding to the dtypes of the wire, and commit.

        Raises:
            WeightLoadError: a tensor is missing, or has another shape.
        """
        self.begin_load(version)
        for file in weight_files(Path(path)):
            with safe_open(file, framework="pt") as tensors:
                for stored in list(tensors.keys()):  # it is no dict
                    name = stored.removeprefix(TEXT_PREFIX)
                    if slot := self._slots.get(name):
                        self.write(name, slot.bounds, tensors.get_tensor(stored))
        self.commit()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

"""The weights of a vLLM worker that has no room for those of a sync: for a few buckets of them.

    bucket  pre      layer.0  layer.1  layer.2  ...      each is loaded into the model
    memory  0        1        0        1                 when its last part has come

What serves is written over from the first bucket on: the replica is paused from the begin of a load
to its commit, no version serves in between, and a load that breaks off leaves none.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from inference.engine.coverage import Part, PlannedParts, WeightLoadError
from m3rl.rollout.vllm_coverage import CoverageCheck
from m3rl.rollout.vllm_feed import LayerFeed
from m3rl.rollout.vllm_weights import (
    TEXT_PREFIX,
    WorkerWeights,
    check_parts,
    require_whole,
)
from m3rl.types import TensorSlot
from m3rl.weight_files import weight_files

logger = logging.getLogger(__name__)

ALIGNMENT = 256
"""Tensors begin at multiples of this, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class LayeredPlan:
    """Parts of a load, the memory of each, and the number of its bucket."""

    parts: tuple[Part, ...]
    places: tuple[Tensor, ...]
    buckets: tuple[int, ...]
    num_staged: int
    """Buckets that have memory of their own; the one after them has that of the first again."""

    def check_rounds(self, rounds: Sequence[Sequence[int]]) -> None:
        """Prove that no part is received over a bucket that is not loaded.

        When a round is put into place, and a bucket that it completes is loaded, the next round is
        under way already: what shares memory with a bucket must come two rounds after its last.

        Args:
            rounds: numbers of the parts that each brings.

        Raises:
            WeightLoadError: one would be.
        """
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for number, parts in enumerate(rounds):
            for bucket in {self.buckets[part] for part in parts}:
                first.setdefault(bucket, number)
                last[bucket] = number
        for bucket, end in last.items():
            begin = first.get(bucket + self.num_staged)
            if begin is not None and begin < end + 2:
                raise WeightLoadError(
                    f"round {begin} would be received over weights of round {end} that are not "
                    "loaded then; set rollout.backend.engine.staging: whole"
                )


@dataclass(slots=True)
class _Load:
    version: int
    plan: LayeredPlan
    progress: PlannedParts
    num_left: Counter[int]
    """Parts to come, by bucket."""
    feed: LayerFeed


class LayeredWeights(WorkerWeights[_Load]):
    """A `WeightTarget` over the model of a vLLM worker. It cannot give away what serves."""

    has_shadow = False

    def __init__(
        self,
        slots: Sequence[TensorSlot],
        device: torch.device,
        reload: Callable[[Iterable[tuple[str, Tensor]]], None],
        check: CoverageCheck,
        num_staged: int,
    ) -> None:
        """
        Args:
            num_staged: buckets that have memory at a time.
        """
        super().__init__(slots, device, reload, check)
        self._num_staged = num_staged
        order = list(dict.fromkeys(slot.bucket for slot in slots))
        self._bucket_of = {slot.name: order.index(slot.bucket) for slot in slots}
        self._names: list[list[str]] = [[] for _ in order]
        for name, bucket in self._bucket_of.items():
            self._names[bucket].append(name)
        self._tensors: dict[str, Tensor] = {}

    @property
    def staging(self) -> Mapping[str, Tensor]:
        """The memory that each tensor passes through, shared with those of other buckets."""
        if not self._tensors:
            self._tensors = self._allocated()
        return self._tensors

    def plan_load(self, parts: Iterable[Part]) -> LayeredPlan:
        """Agree on the parts in which loads will come.

        Raises:
            WeightLoadError: a part that does not fit, or parts that miss or repeat an element.
        """
        agreed = check_parts(self._slots.values(), parts)
        places = tuple(self._place(name, bounds) for name, bounds in agreed)
        buckets = tuple(self._bucket_of[name] for name, _ in agreed)
        return LayeredPlan(agreed, places, buckets, self._num_staged)

    def begin_load(self, version: int, plan: LayeredPlan | None = None) -> None:
        """Open a load, over what serves: from here to its commit no version does.

        Raises:
            RuntimeError: another load is open, or there is no plan.
        """
        self._require_closed(version)
        if plan is None:
            raise RuntimeError("weights that are staged by layers come by a plan; give plan_load's")
        self.version = None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what the engine's last step still reads
        feed = LayerFeed(list(self._slots), self._device, self._reload, self.check)
        num_left = Counter(plan.buckets)
        self._load = _Load(version, plan, PlannedParts(plan.parts), num_left, feed)

    def written(self, first: int, last: int) -> None:
        """Parts `first` to `last` - 1 of the plan are in place, on the device too; loads the
        buckets that are complete.

        Raises:
            WeightLoadError: no such parts, or for a second time, or vLLM does not take them as they
                are; the load is over.
        """
        load = self._open_load("written")
        try:
            load.progress.add(first, last)
            for bucket in load.plan.buckets[first:last]:
                load.num_left[bucket] -= 1
                if load.num_left[bucket] == 0:
                    load.feed.put({name: self.staging[name] for name in self._names[bucket]})
        except BaseException:
            self.abort_load()
            raise

    def commit(self) -> None:
        """End the load; its version serves.

        Raises:
            WeightLoadError: a tensor is not whole, or did not arrive in the model as it was sent;
                no version serves.
        """
        load = self._open_load("commit")
        try:
            require_whole(load)
        except WeightLoadError:
            self.abort_load()
            raise
        self._load = None
        load.feed.finish()
        self.version = load.version

    def abort_load(self) -> None:
        if self._load is not None:
            logger.warning("the load of version %d is given up", self._load.version)
            load, self._load = self._load, None
            load.feed.abort()

    def load_checkpoint(self, path: str, version: int) -> None:
        """Read the safetensors files at `path`, rounding to the dtypes of the wire, and commit.

        Raises:
            WeightLoadError: a tensor is missing, or has another shape.
        """
        files: dict[str, tuple[Path, str]] = {}
        for file in weight_files(Path(path)):
            with safe_open(file, framework="pt") as tensors:
                files |= {key.removeprefix(TEXT_PREFIX): (file, key) for key in tensors.keys()}  # noqa: SIM118 (it is no dict)
        if missing := sorted(self._slots.keys() - files.keys()):
            raise WeightLoadError(f"{path}: {len(missing)} tensors are missing: {missing[:8]}")
        order = [name for names in self._names for name in names]
        plan = self.plan_load([(name, self._slots[name].bounds) for name in order])
        self.begin_load(version, plan)
        try:
            for i, name in enumerate(order):
                file, key = files[name]
                with safe_open(file, framework="pt") as tensors:
                    stored = tensors.get_tensor(key)
                if stored.shape != plan.places[i].shape:
                    raise WeightLoadError(
                        f"{file}: {key} has shape {tuple(stored.shape)}, the model has "
                        f"{tuple(plan.places[i].shape)}"
                    )
                plan.places[i].copy_(stored)
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
                self.written(i, i + 1)
            self.commit()
        except BaseException:
            self.abort_load()
            raise

    def _allocated(self) -> dict[str, Tensor]:
        offsets: dict[str, int] = {}
        sizes = [0] * min(self._num_staged, len(self._names))
        for bucket, names in enumerate(self._names):
            end = 0
            for name in names:
                offsets[name] = end
                end += -(-self._nbytes(name) // ALIGNMENT) * ALIGNMENT
            place = bucket % self._num_staged
            sizes[place] = max(sizes[place], end)
        self._require_memory(sum(sizes), f"{self._num_staged} layers", "")
        memory = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        return {
            name: memory[self._bucket_of[name] % self._num_staged][
                offset : offset + self._nbytes(name)
            ]
            .view(getattr(torch, self._slots[name].dtype))
            .view(self._slots[name].shape)
            for name, offset in offsets.items()
        }

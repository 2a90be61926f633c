"""Both sides of a sync in processes of their own: any trainer layout, any layout of the runtime."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from inference.config import EngineConfig
from inference.engine.loading import WeightLoader
from inference.engine.weights import WeightMemory
from inference.models.minimax_m3 import MiniMaxM3
from inference.models.weights import transformers_placement
from inference.parallel.config import ParallelConfig
from m3rl.types import Receiver
from m3rl.weight_sync.layout import Bounds
from m3rl.weight_sync.send import Sender
from m3rl.weight_sync.trainer_layout import TrainerShards, trainer_layout
from tests.m3rl.weight_sync.model_layouts import published
from tests.m3rl.weight_sync.sync_fakes import cut
from tests.tiny_models import model_config, random_tensors, tiny_config

RAW = tiny_config(
    vocab_size=96,
    num_attention_heads=8,
    num_key_value_heads=4,
    shared_intermediate_size=32,
    intermediate_size=32,
    dense_intermediate_size=64,
    num_hidden_layers=2,
)
MODEL = model_config(RAW)


def policy(num_steps: int) -> dict[str, Tensor]:
    """The masters after some optimizer steps, FP32: each step moves every weight a little."""
    masters = random_tensors(RAW, 0)
    for step in range(num_steps):
        for name, gradient in random_tensors(RAW, 100 + step).items():
            masters[name] -= 0.03 * gradient
    return masters


class LayoutTrainer:
    """A trainer rank that takes whichever part of the policy it is given."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._slots = {slot.name: slot for slot in published(MODEL)}
        self._masters = policy(0)
        self.sender: Sender | None = None

    def shard(self, split: TrainerShards) -> None:
        places = transformers_placement(MODEL)
        held = trainer_layout(tuple(self._slots.values()), places, split, self._rank)
        self.sender = Sender(self._rank, held, self.read)

    def step(self, num_steps: int) -> None:
        self._masters = policy(num_steps)

    def read(self, name: str, bounds: Bounds) -> Tensor:
        return cut(self._masters[name], bounds).to(getattr(torch, self._slots[name].dtype))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sender, name)


class LayoutWorker:
    """A worker of a replica: the parameters of its rank, and no engine around them."""

    has_shadow = False

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def split(self, parallel: ParallelConfig, quantization: str) -> None:
        self._parallel, self._quantization = parallel, quantization
        self._loader, self._memory = self._fresh()
        self.commit, self.abort_load = self._loader.commit, self._loader.abort
        self.begin_load, self.written = self._loader.begin, self._loader.written
        self.plan_load = self._loader.plan

    def weight_layout(self) -> list[Any]:
        return self._memory.layout

    def attach(self, receiver: Receiver) -> None:
        receiver.bind(self)
        self._receiver: Any = receiver

    def receive(self, method: str, *args: Any) -> Any:
        return getattr(self._receiver, method)(*args)

    def differs_from_disk(self, num_steps: int) -> list[str]:
        """Tensors of which a load from a checkpoint with the same weights holds other bits."""
        loader, memory = self._fresh()
        loader.begin(0)
        masters = policy(num_steps)
        for slot in published(MODEL):
            whole = masters[slot.name].to(getattr(torch, slot.dtype))
            part = loader.part_of(slot.name, whole)
            if part is not None:
                loader.write(slot.name, *part)
        loader.commit()
        synced, loaded = self._memory.hashes(), memory.hashes()
        assert synced.keys() == loaded.keys()
        return [name for name in synced if synced[name] != loaded[name]]

    def _fresh(self) -> tuple[WeightLoader, WeightMemory]:
        config = EngineConfig(dtype="bfloat16", quantization=self._quantization).resolve(MODEL)
        groups = types.SimpleNamespace(config=self._parallel, rank=self._rank)
        model = MiniMaxM3(
            MODEL,
            torch.bfloat16,
            "cpu",
            64,
            self._quantization,
            groups,  # type: ignore[arg-type]
        )
        memory = WeightMemory(model, MODEL, config, self._parallel, self._rank)
        return WeightLoader(memory), memory

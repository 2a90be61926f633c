"""One replica of vLLM: its engine, on the thread of `engine_replica`. Knows nothing of Ray.

    a receiver's caller ──▶ the worker that holds it: staging memory; its commit is a command

Where weights are staged by layers, so is that no version serves any more: before the first comes.

The workers of tensor parallelism are processes of vLLM, each with a receiver of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inference.config import ModelConfig
from m3rl.model_layout import is_m3
from m3rl.rollout.engine_replica import EngineReplica
from m3rl.rollout.vllm_engine import VllmEngine
from m3rl.rollout.vllm_settings import VllmSettings
from m3rl.types import Receiver, TensorSlot


class VllmReplica(EngineReplica[VllmEngine]):
    """One vLLM engine and the thread that makes and steps it."""

    def __init__(self, settings: VllmSettings) -> None:
        """
        Raises:
            BackendError: vLLM is missing, not of a version that was tried, or cannot run the model
                with these settings.
        """
        super().__init__(lambda: VllmEngine(settings))

    def weight_layout(self) -> list[list[TensorSlot]]:
        """Of each worker, in rank order."""
        return [worker.call("weight_layout") for worker in self.engine.workers]

    def gpu(self) -> list[str | None]:
        """`gpu_of` the weights of each worker, in rank order."""
        return [worker.call("gpu") for worker in self.engine.workers]

    def load(self, path: str, version: int) -> None:
        self._run(lambda: self.engine.load(path, version))

    def prompt_lengths(self) -> tuple[int, int]:
        """Of a prompt: tokens of which block selection keeps all (where a model has it), and the
        most there can be."""
        longest, path = self.engine.max_model_len - 1, self.engine.settings.model_path
        if not is_m3(Path(path)):
            return longest, longest
        config = ModelConfig.from_pretrained(path)
        return config.index_topk_blocks * config.index_block_size, longest

    def prompt_logprobs(self, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Of each prompt, [n - 1] float32, see `VllmEngine.prompt_logprobs`."""
        return self._run(lambda: self.engine.prompt_logprobs(prompts))

    def attach(self, rank: int, receiver: Receiver) -> None:
        self.engine.workers[rank].call("attach", receiver)

    def receiver_call(self, rank: int, method: str, *args: Any) -> Any:
        """Call a method of a worker's receiver, beside the engine's steps; what publishes weights,
        between two of them."""

        def call() -> Any:
            return self.engine.workers[rank].call("receiver_call", method, *args)

        if method == "commit":
            return self._run(lambda: self.engine.commit(call))
        if method == "stream" and self.engine.settings.staging == "layers":
            return self._load(call)
        if method == "close":
            self.engine.give_up_load()
        return call()

    def _load(self, stream: Callable[[], Any]) -> Any:
        """Layers are loaded as they come: what served is gone before the first one."""
        self._run(self.engine.give_up_version)
        is_done = False
        try:
            result = stream()
            is_done = True
        finally:
            if not is_done:
                self.engine.give_up_load()
        return result

    def close(self) -> None:
        """End the engine and its workers; nothing may be asked afterwards."""
        if self._failure is None:
            self._run(self.engine.close)
        else:  # its thread has ended
            self.engine.close()

    def health(self) -> dict[str, Any]:
        report = super().health()
        return report | {"failure": report["failure"] or self.engine.fault}

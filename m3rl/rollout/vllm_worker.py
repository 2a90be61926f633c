"""What m3rl adds to each worker process of vLLM: its weights as a sync's target, and a door to it.

    VllmReplica ── Unix socket ──▶ thread of the worker: its receiver, its staged weights
    VllmEngine  ── vLLM's executor ──▶ the worker's own loop: steps

The bytes of a sync come through the receiver's own transport, into staging memory, while the
worker steps. Calls come beside the executor's queue, so that a long one does not hold up steps; the
replica makes the one that touches what serves, `commit`, between two steps.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from multiprocessing import ProcessError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn

from m3rl.model_layout import whole_layout
from m3rl.rollout.receiver_seat import ReceiverSeat
from m3rl.rollout.vllm_coverage import CoverageCheck
from m3rl.rollout.vllm_files import EngineFiles, files_of_process
from m3rl.rollout.vllm_layers import LayeredWeights
from m3rl.rollout.vllm_m3 import index_names
from m3rl.rollout.vllm_staging import LAYER, own_slots
from m3rl.rollout.vllm_weights import StagedWeights
from m3rl.rollout.vllm_worker_handle import WeightOptions
from m3rl.sync_transport import gpu_of
from m3rl.types import Receiver, TensorSlot

logger = logging.getLogger(__name__)

VllmWeights = StagedWeights | LayeredWeights


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker's weights are."""

    version: int | None


class WorkerExtension:
    """Becomes a base class of vLLM's worker: its `worker_extension_cls`."""

    def m3rl_serve(self, options: WeightOptions, authkey: bytes) -> str:
        """Open the worker's door; returns its address."""
        worker: Any = self
        model = worker.model_runner.get_model()
        slots = own_slots(whole_layout(Path(options.model_path), options.dtype), experts_of(model))

        def reload(tensors: Any) -> None:
            worker.reload_weights(weights_iterator=iter(tensors), is_checkpoint_format=True)

        exempt = index_names(options.model_path) if options.drops_index else frozenset()
        target = slots, worker.device, reload, CoverageCheck(model, exempt)
        self._m3rl_weights: VllmWeights
        if options.num_staged is None:
            self._m3rl_weights = StagedWeights(*target)
        else:
            self._m3rl_weights = LayeredWeights(*target, options.num_staged)
        self._m3rl_door = WorkerDoor(self._m3rl_weights, worker.device, authkey)
        return self._m3rl_door.address

    def m3rl_files(self) -> EngineFiles:
        worker: Any = self
        return files_of_process(worker.distributed_init_method)

    def m3rl_state(self) -> WorkerState:
        return WorkerState(self._m3rl_weights.version)


def experts_of(model: nn.Module) -> dict[int, frozenset[int]]:
    """Layer -> its experts that this worker of expert parallelism holds."""
    found: dict[int, frozenset[int]] = {}
    for name, module in model.named_modules():
        experts, layer = getattr(module, "expert_map_manager", None), LAYER.search(f"{name}.")
        if experts is not None and layer is not None:
            found[int(layer[1])] = frozenset(experts.get_local_expert_ids())
    return found


class WorkerDoor:
    """Serves calls on a worker's weights and receiver, each from a thread of its own."""

    def __init__(self, weights: VllmWeights, device: torch.device, authkey: bytes) -> None:
        self._weights, self._device = weights, device
        self._seat = ReceiverSeat()
        # In Linux's abstract namespace: no file is left behind by a process that is killed.
        self.address = f"\0m3rl-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = Listener(self.address, family="AF_UNIX", backlog=16, authkey=authkey)
        threading.Thread(target=self._accept, name="m3rl-door", daemon=True).start()

    def attach(self, receiver: Receiver) -> None:
        self._seat.attach(receiver, self._weights)

    def receiver_call(self, method: str, *args: Any) -> Any:
        return self._seat.call(method, *args)

    def weight_layout(self) -> list[TensorSlot]:
        return self._weights.weight_layout()

    def load_checkpoint(self, path: str, version: int) -> None:
        self._weights.load_checkpoint(path, version)

    def gpu(self) -> str | None:
        """`gpu_of` its weights."""
        return gpu_of(self._device)

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (OSError, ProcessError) as error:  # it has not the key, or is gone again
                logger.warning("a call to this worker was refused: %s", error)
                time.sleep(0.01)
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # it is a thread's own
                method, args = cloudpickle.loads(connection.recv_bytes())
                result, error = getattr(self, method)(*args), None
            except BaseException as fault:  # outermost loop of this call: hand the fault on
                logger.info("a call to this worker failed", exc_info=True)
                result, error = None, fault
            try:
                connection.send_bytes(_dumps(result, error))
            except OSError:
                logger.warning("a caller of this worker did not wait for the answer")


def _dumps(result: Any, error: BaseException | None) -> bytes:
    try:
        return cloudpickle.dumps((result, error))
    except Exception as fault:  # an exception may hold anything; its words travel always
        return cloudpickle.dumps((None, RuntimeError(f"{error!r} (and it cannot travel: {fault})")))

"""vLLM's in-process engine behind the surface that a replica steps: requests in, results out,
weights replaced in between.

One thread owns an engine and makes it. Its policy version is None, and nothing generates, until all
workers committed one and the same version and what the old one computed is dropped:

    commit of each worker ─▶ do all have one version? ─▶ caches reset ─▶ version
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import numpy as np

from inference.config import ModelConfig
from m3rl.model_layout import is_m3, stop_ids, whole_layout
from m3rl.rollout.backend import BackendError, Generated, PauseMode
from m3rl.rollout.vllm_files import EngineFiles, files_of_process, own_folder, together
from m3rl.rollout.vllm_requests import (
    check_request,
    generated,
    prompt_scores,
    sampling_params,
    scoring_params,
)
from m3rl.rollout.vllm_scheduling import Counters, is_running, make_room, only
from m3rl.rollout.vllm_settings import VllmSettings, make_config, set_environment
from m3rl.rollout.vllm_version import require_interface
from m3rl.rollout.vllm_worker_handle import WeightOptions, WorkerCallError, open_doors
from m3rl.types import GenerationRequest

if TYPE_CHECKING:
    from m3rl.rollout.vllm_worker import WorkerState

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineStateError(RuntimeError):
    """The call does not fit the state of the engine."""


@dataclass(slots=True)
class _Live:
    """A request inside vLLM."""

    request: GenerationRequest
    internal_id: str
    """vLLM's own, unique among all there ever were."""


class VllmEngine:
    """Continuous batching by vLLM, one policy version at a time. Its weights are empty at first."""

    def __init__(self, settings: VllmSettings) -> None:
        """
        Raises:
            BackendError: vLLM is missing, not of a version that was tried, or cannot run the model
                with these settings.
        """
        set_environment(settings)
        require_interface()
        from vllm.v1.engine.llm_engine import LLMEngine

        self.settings = settings
        self.counters = Counters()
        config = make_config(settings)
        folder, others = own_folder(), files_of_process()
        try:
            self._engine = LLMEngine.from_vllm_config(
                config, stat_loggers=[lambda vllm_config, engine_index=0: self.counters]
            )
        except BaseException:
            shutil.rmtree(folder)
            raise
        of_workers = self._engine.collective_rpc("m3rl_files")
        self.files: EngineFiles = together([files_of_process(), *of_workers], folder, others)
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._eos_token_ids = stop_ids(Path(settings.model_path))
        self._moe_layers = moe_layers(settings) if settings.capture_routing else None
        self._live: dict[str, _Live] = {}
        self._held: list[Generated] = []
        """Outputs made between steps; the next step returns them."""
        self._paused: PauseMode | None = None
        self.version: int | None = None
        self._is_loading = False
        """Whether the weights that served are being written over: requests are taken meanwhile."""
        options = WeightOptions(
            settings.model_path,
            settings.dtype,
            drops_index=settings.uses_dense_m3,
            num_staged=settings.num_staged,
        )
        self.workers = open_doors(self._engine.collective_rpc, options, settings.timeout_s)
        self._require_whole()

    @property
    def max_model_len(self) -> int:
        return int(self._engine.model_config.max_model_len)

    @property
    def fault(self) -> str:
        """Why the engine is lost, as far as nobody has stepped into it; '' if it is not."""
        # Its executor watches processes, and says so before it has ended the others.
        is_dead = getattr(self._core.model_executor, "is_failed", False)
        return "a worker process of vLLM died" if is_dead else ""

    @property
    def has_work(self) -> bool:
        is_serving = self.version is not None and self._paused is None
        return bool(self._held) or (is_serving and bool(self._live))

    def add(self, request: GenerationRequest) -> None:
        """Put a request at the end of the line.

        Raises:
            EngineStateError: no committed weights, or drained.
            ValueError: a request that cannot be served, with its numbers.
        """
        if self.version is None and not self._is_loading:
            raise EngineStateError(
                "no request is taken before the weights of a version are committed"
            )
        if self._paused == "drain":
            raise EngineStateError("the engine was drained; resume() before adding requests")
        if request.request_id in self._live:
            raise ValueError(f"request_id {request.request_id!r} is in the engine already")
        check_request(
            request,
            max_model_len=self.max_model_len,
            vocab_size=self._engine.model_config.get_vocab_size(),
            has_tokenizer=not self._engine.model_config.skip_tokenizer_init,
            records_routing=self.settings.capture_routing,
        )
        params = sampling_params(request, self._eos_token_ids)
        internal = self._add(request.request_id, request.prompt_ids, params)
        self._live[request.request_id] = _Live(request, internal)

    def step(self) -> list[Generated]:
        """Compute one batch; returns the requests that finished, also those aborted since.

        Raises:
            BackendError: a worker process is gone.
        """
        if self.fault:
            raise BackendError(self.fault)
        if self._paused is None and self._live:
            self._step()
        outputs, self._held = self._held, []
        return outputs

    def abort(self, ids: Iterable[str]) -> int:
        """End requests by id; each comes out of the next `step` with the tokens it has."""
        known = [name for name in dict.fromkeys(ids) if name in self._live]
        for name in known:
            live = self._live.pop(name)
            state = self._engine.output_processor.request_states[live.internal_id]
            self._held.append(self._generated(live, self._unfinished(state), state))
            self._engine.abort_request([live.internal_id], internal=True)
        return len(known)

    def pause(self, mode: PauseMode) -> None:
        """Compute nothing until `resume`.

        'drain' first finishes every request that has begun and takes no new ones; 'keep' keeps the
        keys of the old version for running requests; 'recompute' drops them.

        Raises:
            EngineStateError: paused otherwise already.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"pause mode {mode!r}; use one of {list(get_args(PauseMode))}")
        if self._paused not in (None, mode):
            raise EngineStateError(f"paused already, to {self._paused!r}; resume() first")
        if mode == "drain":
            with only(self._scheduler, is_running(self._scheduler)):
                while self._scheduler.has_unfinished_requests():
                    self._step()
        self._settle()
        if mode == "recompute":
            self._core.reset_prefix_cache(reset_running_requests=True)
        self._paused = mode

    def resume(self) -> None:
        """Compute again. EngineStateError without whole weights."""
        if self.version is None:
            raise EngineStateError(
                "cannot resume without whole weights; commit those of a version first"
            )
        self._paused = None

    def stats(self) -> dict[str, float]:
        return self.counters.stats()

    def prompt_logprobs(self, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Of each prompt, [n - 1] float32: log-probability of every token but the first, at
        temperature 1; computed at once, also while paused, and before all else that runs.

        Raises:
            EngineStateError: there are no whole weights.
            ValueError: a prompt that the engine could not serve.
        """
        if self.version is None:
            raise EngineStateError("prompts are scored by whole weights; commit those of a version")
        lengths = [len(ids) for ids in prompts]
        if not all(2 <= length < self.max_model_len for length in lengths):
            raise ValueError(
                f"prompts of {lengths} tokens to score; each must have 2 to "
                f"{self.max_model_len - 1}, which is max_model_len less one"
            )
        self._settle()
        make_room(self._scheduler, max(lengths, default=0))
        found: dict[str, np.ndarray] = {}
        with only(self._scheduler, lambda request: False):
            names = [
                self._add(f"scored {i}", ids, scoring_params()) for i, ids in enumerate(prompts)
            ]
            while len(found) < len(names):
                for output in self._engine.step():
                    count = len(output.prompt_token_ids)
                    found[output.request_id] = prompt_scores(output.prompt_logprobs, count)
            self._settle()
        return [found[f"scored {i}"] for i in range(len(prompts))]

    def give_up_version(self) -> None:
        """Before weights that serve are written over: no version does until all workers committed.

        Raises:
            EngineStateError: requests are under way and not paused.
        """
        if self._paused is None and self._live:
            raise EngineStateError(
                f"weights are written over while {len(self._live)} requests are under way; pause "
                "the replica first"
            )
        self._settle()
        self.version, self._is_loading = None, True

    def give_up_load(self) -> None:
        """What was to come after `give_up_version` does not: no request is taken any more. Any
        thread may call it."""
        self._is_loading = False

    def commit(self, of_a_worker: Callable[[], T]) -> T:
        """Have a worker commit; the version serves when all workers have it, and the caches of the
        old one are empty.

        Raises:
            EngineStateError: requests are under way and not paused.
            BackendError: a cache still holds what the old version computed.
            Exception: what the commit raises; the old version serves on if it touched no weight.
        """
        if self._paused is None and self._live:
            raise EngineStateError(
                f"weights are committed while {len(self._live)} requests are under way; pause "
                "the replica first"
            )
        self._settle()
        before, self.version = self.version, None
        try:
            result = of_a_worker()
        except WorkerCallError:
            raise
        except BaseException:
            if {state.version for state in self._states()} == {before}:
                self.version = before
            raise
        self._publish()
        return result

    def load(self, path: str, version: int) -> None:
        """Have every worker read a checkpoint from disk, through the same commit as a sync."""
        for worker in self.workers:
            self.commit(partial(worker.call, "load_checkpoint", path, version))

    def close(self) -> None:
        """End the worker processes, and remove what the engine has on the host."""
        self.version = None  # nothing is stepped any more
        self._engine.engine_core.shutdown()
        workers = self.files.pids - {os.getpid()}
        replace(self.files, pids=workers).remove()

    def _add(self, name: str, ids: np.ndarray, params: Any) -> str:
        prompt = {"prompt_token_ids": ids.tolist()}
        return self._engine.add_request(name, prompt, params)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            if self.fault:  # what vLLM raises then says that something was cancelled
                raise BackendError(self.fault) from error
            raise
        for output in outputs:
            live = self._live.pop(output.request_id, None)
            if live is not None:
                self._held.append(self._generated(live, output.outputs[0], output))

    def _settle(self) -> None:
        """Look at the tokens of steps that vLLM has launched ahead; afterwards none is."""
        from vllm.v1.core.sched.interface import PauseState

        if not self._core.batch_queue:
            return
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while self._core.batch_queue:
                self._step()
        finally:
            self._scheduler.set_pause_state(PauseState.UNPAUSED)

    def _require_whole(self) -> None:
        """Raises BackendError where a tensor of the model is wanted by no worker."""
        wanted = {slot.name for worker in self.workers for slot in worker.call("weight_layout")}
        whole = whole_layout(Path(self.settings.model_path), self.settings.dtype)
        if lost := [slot.name for slot in whole if slot.name not in wanted]:
            raise BackendError(
                f"{len(lost)} tensors of {self.settings.model_path} are held by no worker of vLLM: "
                f"{', '.join(lost[:4])}; set rollout.backend.engine.enable_expert_parallel: false"
            )

    def _states(self) -> list[WorkerState]:
        timeout_s = self.settings.timeout_s
        return self._engine.collective_rpc("m3rl_state", timeout=timeout_s)

    def _publish(self) -> None:
        states = self._states()
        version = states[0].version
        if version is None or any(state.version != version for state in states):
            return  # a worker is still to commit
        self._reset_caches(version)
        self._core.set_weight_version(str(version))
        self.version, self._is_loading = version, False

    def _reset_caches(self, version: int) -> None:
        """Raises BackendError where keys of an older version would be found by a later request."""
        core = self._core
        # Also without a prefix cache: what is kept outside the engine has keys of its own.
        if not self._scheduler.reset_connector_cache():
            raise BackendError(
                f"version {version}: vLLM kept keys outside the engine that the old version "
                "computed; set no kv_transfer_config"
            )
        is_caching = self._engine.vllm_config.cache_config.enable_prefix_caching
        if is_caching and not core.reset_prefix_cache():
            raise BackendError(
                f"version {version}: vLLM could not reset its prefix cache, as "
                f"{len(self._scheduler.running)} running requests hold pages of it: they would be "
                "found by requests of the new version; pause with mode drain or recompute, or set "
                "rollout.backend.engine.enable_prefix_caching: false"
            )
        self._engine.reset_mm_cache()
        core.reset_encoder_cache()
        if kept := getattr(self._scheduler.encoder_cache_manager, "cached", None):
            raise BackendError(
                f"version {version}: vLLM kept {len(kept)} outputs of encoders that the old "
                "version computed; pause with mode drain"
            )

    def _generated(self, live: _Live, completion: Any, source: Any) -> Generated:
        result = generated(
            live.request,
            completion,
            num_cached_tokens=max(0, int(source.num_cached_tokens or 0)),
            version=self.version,
            moe_layers=self._moe_layers,
        )
        self.counters.nonfinite_logits += result.error is not None
        return result

    def _unfinished(self, state: Any) -> Any:
        """The completion of a request as far as it got."""
        from vllm.v1.engine import FinishReason

        return state._new_completion_output([], FinishReason.ABORT, None)


def moe_layers(settings: VllmSettings) -> list[int] | None:
    """Layers of which the trainer replays the router's choices; None: all."""
    path = Path(settings.model_path)
    return list(ModelConfig.from_pretrained(path).moe_layers) if is_m3(path) else None

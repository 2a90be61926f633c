"""The engine: requests in, finished requests out, weights replaced in between.

One thread owns an engine. Its policy versions are those of `loading.py`; the life of a request is
drawn in `scheduler.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor

from inference.config import EngineConfig, ModelConfig
from inference.engine.coverage import Bounds, Part, WeightSlot
from inference.engine.in_flight import StepInFlight
from inference.engine.loading import EngineStateError, LoadPlan, WeightLoader, WeightState
from inference.engine.request import Request, RequestOutput, check_request, make_live
from inference.engine.scheduler import Schedule, Scheduler
from inference.engine.settle import Settler
from inference.engine.stats import Counters
from inference.engine.stop import StopMatcher
from inference.engine.worker import Worker
from inference.kernels.mxfp8 import MXFP8Tensor
from inference.models.weights import read_checkpoint
from inference.parallel.groups import ParallelGroups

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

PauseMode = Literal["drain", "keep", "recompute"]


class Engine:
    """Continuous batching over paged memory, one policy version at a time.

    The weights are empty at first: nothing is accepted until a version is committed. The same
    requests added in the same order to an engine in the same state give the same bits.

    With `groups` it is one rank's part of a replica, and every rank has one (see
    `inference.parallel`): all calls are made alike on all ranks, but that each dp group adds and
    aborts requests of its own. With several dp groups `step` and `pause` wait for the other ranks,
    so all call them equally often: after adding, whether here or elsewhere, once `step`, and then
    while `has_work`, which is the same on all from that step on.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine_config: EngineConfig | None = None,
        tokenizer: Any = None,
        groups: ParallelGroups | None = None,
    ) -> None:
        """
        Args:
            tokenizer: of `tokenizers`, or a fast one of transformers; only needed for text.
            groups: this rank and the others of the replica; the limits of `engine_config` are those
                of each dp group.

        Raises:
            ConfigError: the model cannot be run, or split, this way; names the values that do.
        """
        self.config = config
        self.engine_config = (engine_config or EngineConfig()).resolve(config)
        self.tokenizer: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", tokenizer)
        assert self.engine_config.page_size is not None, "resolve fills in the page size"
        self._tp = 1 if groups is None else groups.config.tp
        self._worker = Worker(config, self.engine_config, groups)
        self._scheduler = Scheduler(
            num_pages=self.engine_config.num_pages,
            page_size=self.engine_config.page_size,
            max_running_requests=self.engine_config.max_running_requests,
            max_tokens_per_step=self.engine_config.max_tokens_per_step,
            enable_prefix_cache=self.engine_config.enable_prefix_cache,
        )
        self._weights = WeightLoader(self._worker.weights)
        self._held: list[RequestOutput] = []
        """Outputs made between steps (aborts, a drain); the next step returns them."""
        self._in_flight: StepInFlight | None = None
        self._paused: PauseMode | None = None
        self._others_work = self._worker.is_dp
        """Whether any dp group had requests when the last step began."""
        self._counters = Counters()
        self._settler = Settler(self._scheduler, self._worker, self._counters, self.tokenizer)
        self._live = self._settler.live

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        engine_config: EngineConfig | None = None,
        *,
        version: int = 0,
        groups: ParallelGroups | None = None,
    ) -> Engine:
        """An engine with the weights of a published checkpoint, and its tokenizer if there is one.

        How weights are held `engine_config` says (`quantization`), however they are stored.

        Raises:
            ConfigError, CheckpointError: what is wrong in which file.
        """
        config = ModelConfig.from_pretrained(path)
        engine = cls(config, engine_config, load_tokenizer(path), groups)
        held = {slot.name for slot in engine.weight_layout()}
        engine.load_weights(read_checkpoint(path, config, allow_mxfp8=True, only=held), version)
        return engine

    @property
    def version(self) -> int | None:
        """Policy version of the weights; None when they are not all of one version."""
        return self._weights.version if self._weights.state is WeightState.READY else None

    @property
    def has_work(self) -> bool:
        """Whether `step` would return or compute something."""
        is_serving = self._weights.state is WeightState.READY and self._paused is None
        return bool(self._held) or (is_serving and (self._has_requests or self._others_work))

    @property
    def _has_requests(self) -> bool:
        return bool(self._live) or self._in_flight is not None

    def add(self, request: Request) -> None:
        """Put a request at the end of the line.

        Raises:
            EngineStateError: no committed weights, or drained.
            ValueError: a request that cannot be served, with its numbers; one that samples without
                a seed on several tp ranks.
        """
        if not self._weights.serves_after_load:
            raise EngineStateError(
                f"no request is taken while the engine is {self._weights.state.value}; "
                "commit the weights of a version first"
            )
        if self._paused == "drain":
            raise EngineStateError("the engine was drained; resume() before adding requests")
        if request.request_id in self._live:
            raise ValueError(f"request_id {request.request_id!r} is in the engine already")
        check_request(request, self.config, self.engine_config, has_text=self.tokenizer is not None)
        if self._tp > 1 and request.params.seed is None and request.params.temperature > 0:
            raise ValueError(
                f"request {request.request_id!r} has no seed; each of the {self._tp} tp ranks "
                "would draw one of its own, and with it other tokens"
            )
        live = make_live(request, self.config.eos_token_ids)
        if request.params.stop:
            assert self.tokenizer is not None, "checked with the request"
            live.stop_matcher = StopMatcher(self.tokenizer, request.params.stop)
        self._scheduler.add(live)
        self._live[request.request_id] = live

    def step(self) -> list[RequestOutput]:
        """Compute one batch; returns the requests that finished, also those aborted since.

        With several dp groups one without requests computes padding while others have some.

        With `async_scheduling` a step is launched before the tokens of the one before are looked
        at, so a request comes out one call later.

        Raises:
            EngineStateError: there are no whole weights to compute with.
            ParallelError: another rank failed, died or did not come; this engine is lost too.
        """
        if self._paused is None and (self._worker.is_dp or not self._held):
            self._step(admit_new=True)
        outputs, self._held = self._held, []
        return outputs

    def _step(self, *, admit_new: bool) -> None:
        """Compute one batch; who finishes is held, so that nobody is lost when a launch raises."""
        if self._weights.state is not WeightState.READY:
            raise EngineStateError(
                f"nothing can be computed while the engine is {self._weights.state.value}; "
                "commit the weights of a version first"
            )
        if self._scheduler.is_short_of_pages:
            self._held += self._settle()
        schedule = self._scheduler.schedule(admit_new=admit_new)
        if self._worker.is_dp:
            self._others_work = self._worker.agree(
                self._scheduler.rows, schedule, has_requests=self._has_requests
            )
        launched = None if schedule is None else self._launch(schedule)
        if launched is None and self._worker.is_dp:
            self._worker.launch_empty(self._scheduler.rows)
        before, self._in_flight = self._in_flight, launched
        if before is not None:
            self._held += self._settler.settle(before)
        if not self.engine_config.async_scheduling:
            self._held += self._settle()

    def _launch(self, schedule: Schedule) -> StepInFlight:
        """Start a step; when that raises, no request is lost, only its pages."""
        rows = self._scheduler.rows
        try:
            sample = self._worker.launch(rows, schedule)
        except BaseException:
            self._held += self._settle()
            self._scheduler.forget_pages()
            raise
        rows_S = schedule.rows_R[schedule.is_last_R]
        self._scheduler.advance(schedule)
        version = self._weights.version
        assert version is not None, "only READY computes"
        places_S, tickets_R = rows.append_pending(rows_S), rows.ticket[schedule.rows_R]
        return StepInFlight(schedule, rows_S, places_S, tickets_R, version, sample)

    def _settle(self) -> list[RequestOutput]:
        """Wait for the step under way, if there is one; returns the requests that it finished."""
        flight, self._in_flight = self._in_flight, None
        return [] if flight is None else self._settler.settle(flight)

    def abort(self, ids: Iterable[str] | None = None) -> int:
        """End requests by id, all without ids; returns how many there were.

        Each comes out of the next `step` with the tokens it has and reason 'abort'.
        """
        names = list(self._live) if ids is None else list(dict.fromkeys(ids))
        unknown = [name for name in names if name not in self._live]
        self._held += self._settle()
        known = [name for name in names if name in self._live]
        if unknown:
            logger.warning("abort: no such request: %s", ", ".join(map(repr, unknown)))
        self._held += [self._settler.finish(self._live[name], "abort") for name in known]
        return len(known)

    def pause(self, mode: PauseMode) -> None:
        """Compute nothing until `resume`; what runs survives a new policy version.

        'drain' first finishes every request that has begun (its outputs come with the next step)
        and takes no new ones; 'keep' keeps keys of the old version for running requests, which
        then go on with the new one; 'recompute' drops them, to be computed by the new one.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"pause mode {mode!r}; use one of {list(get_args(PauseMode))}")
        if self._paused not in (None, mode):
            raise EngineStateError(f"paused already, to {self._paused!r}; resume() first")
        self._held += self._settle()
        if mode == "drain":
            while self._worker.has_anybody(self._has_begun_request()):
                self._step(admit_new=False)
            self._held += self._settle()
        elif mode == "recompute":
            self._scheduler.preempt_all()
        self._paused = mode

    def _has_begun_request(self) -> bool:
        waiting = self._scheduler.waiting
        return bool(self._scheduler.running) or (bool(waiting) and waiting[0].has_sampled)

    def resume(self) -> None:
        """Compute again. EngineStateError without whole weights."""
        if self._weights.state is not WeightState.READY:
            raise EngineStateError(
                f"cannot resume while the engine is {self._weights.state.value}; "
                "commit the weights of a version first"
            )
        self._paused = None

    def stats(self) -> dict[str, float]:
        """running, waiting, kv_usage, prefix_hit_rate and the totals of `Counters`."""
        return self._counters.stats(self._scheduler)

    def weight_layout(self) -> list[WeightSlot]:
        """What this engine holds of each published tensor, and in which dtype it takes it."""
        return list(self._worker.weights.layout)

    @property
    def has_shadow(self) -> bool:
        """Whether loads go to a second copy of the weights while the engine serves."""
        return self._worker.weights.has_shadow

    def plan_load(self, parts: Iterable[Part]) -> LoadPlan:
        """Agree, once, on the parts in which loads will come: (published name, bounds) each.

        `places[i]` of the plan is the memory of part i, for the caller to fill.

        Raises:
            WeightLoadError: a part that does not fit, or parts that miss or repeat an element.
        """
        return self._weights.plan(parts)

    def begin_load(self, version: int, plan: LoadPlan | None = None) -> None:
        """Open a load of the whole model.

        Without a shadow nothing computes until it is committed. With a `plan` its places are the
        caller's from here to `commit` or `abort_load`; `write` is for loads without.

        Raises:
            EngineStateError: another load is open; or, without a shadow, requests are under way and
                not paused.
        """
        if not self.has_shadow:
            self._require_quiet(f"loading version {version}")
            self._held += self._settle()
        self._weights.begin(version, plan)

    def write(self, name: str, bounds: Bounds, tensor: Tensor | MXFP8Tensor) -> None:
        """Copy a rectangle of a published tensor into the weights; `WeightSlot.storage` says where
        it is quantised on the way.

        Raises:
            WeightLoadError: unknown name, bounds outside or written before, other shape or dtype.
                The load is over: the old version serves on if nothing was written yet or there is a
                shadow, else the engine is POISONED until a whole load commits.
        """
        self._weights.write(name, bounds, tensor)

    def written(self, first: int, last: int) -> None:
        """Note that parts `first` to `last` - 1 of the plan are in place, on the device too.

        `commit` looks at what was quantised here; that all else is finite the caller sees to.

        Raises:
            WeightLoadError: no such parts, or for a second time. The load is over: with a shadow
                the old version serves on, else the engine is POISONED.
        """
        self._weights.written(first, last)

    def commit(self) -> None:
        """The new version serves, once every element is known to be written exactly once.

        Cached pages of the old version are gone; see `pause` for the running requests.

        Raises:
            EngineStateError: with a shadow, requests are under way and not paused; the load stays
                open.
            WeightLoadError: tensors that are not whole, or in MXFP8 and not finite, by name; the
                load is over as for `write` and `written`.
        """
        if self.has_shadow:
            self._require_quiet("committing a version")
            self._held += self._settle()
        self._scheduler.start_version(self._weights.commit())

    def abort_load(self) -> None:
        """Give up the open load, if there is one.

        The old version serves on if nothing was written yet or there is a shadow, else the engine
        is POISONED; a load with a plan counts as written to from its beginning.
        """
        self._weights.abort()

    def weights_hash(self, *, shadow: bool = False) -> dict[str, int]:
        """`tensor_hash` of every published tensor as the engine holds it, also while loading.

        Of one held in MXFP8: `mxfp8.hash_tensor`, over values and scales.

        Args:
            shadow: of what the open load has put into the second copy.

        Raises:
            EngineStateError: there is nothing of the kind.
        """
        if shadow and not (self.has_shadow and self._weights.is_open):
            raise EngineStateError("no load into a shadow is open: there is nothing to hash")
        if not shadow and self._weights.state is WeightState.EMPTY:
            raise EngineStateError("the weights are EMPTY: there is nothing to hash")
        return self._worker.weights.hashes(shadow=shadow)

    def load_weights(
        self, tensors: Iterable[tuple[str, Tensor | MXFP8Tensor]], version: int
    ) -> None:
        """Load whole published tensors, or of each what is held here, rounded to the engine's dtype
        where theirs is wider, and widened where they are MXFP8 and the engine's are not.

        Raises:
            EngineStateError: another load is open, or requests are under way and not paused.
            WeightLoadError, or whatever `tensors` raises: as for `write` and `commit`.
        """
        self._require_quiet(f"loading version {version}")
        self.begin_load(version)
        try:
            for name, tensor in tensors:
                if (part := self._weights.part_of(name, tensor)) is not None:
                    self.write(name, *part)
        except BaseException:
            self.abort_load()
            raise
        self.commit()

    def _require_quiet(self, action: str) -> None:
        if self._live and self._paused is None:
            raise EngineStateError(
                f"{len(self._live)} requests are under way; pause() before {action}"
            )


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The `tokenizer.json` of a checkpoint; None when there is none."""
    from tokenizers import Tokenizer

    file = Path(path) / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.exists() else None

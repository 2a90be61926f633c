"""A replica's engine and the thread that steps it, whatever the engine is. Knows nothing of Ray.

    callers ──▶ command queue ──▶ engine thread: commands, step, deliver

The engine thread owns the engine: whatever touches it (submissions, aborts, pauses, the version
that serves) is a command that runs between two steps, so nothing can see half an update.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from m3rl.rollout.backend import Generated, PauseMode
from m3rl.types import GenerationRequest

logger = logging.getLogger(__name__)


class SteppedEngine(Protocol):
    """What a replica asks of its engine; on the engine thread, all but `version`."""

    @property
    def version(self) -> int | None:
        """Policy version that serves; None: no whole one does. Read on any thread."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would return or compute something; while it is False, none is called."""

    def add(self, request: Any) -> None:
        """Put a request at the end of the line; what it raises is raised to the caller.

        Raises:
            ValueError: no engine of this kind would take the request.
        """

    def step(self) -> Sequence[Any]:
        """Compute one batch; outputs of the requests that ended, each with its `request_id`.

        What it raises ends the replica.
        """

    def abort(self, request_ids: Iterable[str]) -> int:
        """End requests; each may still come out of a step. Returns how many were known."""

    def pause(self, mode: PauseMode) -> None: ...
    def resume(self) -> None: ...
    def stats(self) -> dict[str, float]: ...


E = TypeVar("E", bound=SteppedEngine)


class EngineReplica(Generic[E]):
    """One engine and the thread that steps it; lives in its own process.

    A kind whose engine takes other requests than GenerationRequest, or gives other outputs than
    Generated, overrides `_add` and `_generated`.
    """

    engine: E

    def __init__(self, make_engine: Callable[[], E]) -> None:
        """Return when there is an engine, however long that takes.

        Args:
            make_engine: called on the engine thread, for engines that must be made where they are
                stepped; what it raises is raised here.
        """
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = (
            queue.SimpleQueue()
        )
        self._waiting: dict[str, Future[Any]] = {}
        """Request id -> its output to come; of the engine thread."""
        self._progress = 0
        self._failure: BaseException | None = None
        made: Future[E] = Future()
        self._thread = threading.Thread(
            target=self._live, args=(make_engine, made), name="engine", daemon=True
        )
        self._thread.start()
        made.result()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generated]:
        """Submit all requests before the next step and wait for all of them, in order.

        Raises:
            ValueError: the engine refuses one; then it has taken none.
            RuntimeError: the engine has failed, or is in no state to take requests.
        """
        futures = self._run_alike(lambda: self._submit_all(requests))
        return [self._generated(future.result()) for future in futures]

    def abort(self, request_ids: Sequence[str]) -> int:
        return self._run_alike(lambda: self.engine.abort(request_ids))

    def pause(self, mode: PauseMode) -> None:
        self._run_alike(lambda: self.engine.pause(mode))

    def resume(self) -> None:
        self._run_alike(self.engine.resume)

    def stats(self) -> dict[str, float]:
        return self._run(self.engine.stats)

    def health(self) -> dict[str, Any]:
        """Answers from another thread, so a long step or sync does not make it silent."""
        return {
            "pid": os.getpid(),
            "version": self.engine.version,
            "progress": self._progress,
            "failure": repr(self._failure) if self._failure is not None else "",
        }

    def alike(self, number: int, method: str, *args: Any) -> Any:
        """Call a method that all ranks of a replica are given under one number."""
        return getattr(self, method)(*args)

    def _add(self, request: GenerationRequest) -> None:
        """Hand a request to the engine."""
        self.engine.add(request)

    def _generated(self, output: Any) -> Generated:
        """What is made of an output of the engine, on the thread of whoever asked for it."""
        return output

    def _submit_all(self, requests: Sequence[GenerationRequest]) -> list[Future[Any]]:
        """All or none: when one is refused, those before it are taken back."""
        taken: list[str] = []
        try:
            for request in requests:
                self._add(request)
                self._waiting[request.request_id] = Future()
                taken.append(request.request_id)
        except Exception:
            self.engine.abort(taken)
            for request_id in taken:
                del self._waiting[request_id]
            raise
        return [self._waiting[request_id] for request_id in taken]

    def _run_alike(self, command: Callable[[], Any]) -> Any:
        """Run a command that all ranks of a replica run between the same two steps."""
        return self._run(command)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine of this replica has failed: {self._failure!r}")

    def _run(self, command: Callable[[], Any]) -> Any:
        """Run a command on the engine thread between two steps and return its result."""
        self._raise_failure()
        future: Future[Any] = Future()
        self._commands.put((command, future))
        if self._failure is not None:  # it failed since: nobody else empties the queue
            self._fail_all(self._failure)
        return future.result()

    def _live(self, make_engine: Callable[[], E], made: Future[E]) -> None:
        try:
            self.engine = make_engine()
        except BaseException as error:  # told to whoever constructs the replica
            made.set_exception(error)
            return
        made.set_result(self.engine)
        self._serve()

    def _serve(self) -> None:
        try:
            while True:
                self._run_commands(wait=not self.engine.has_work)
                if self.engine.has_work:
                    self._deliver(self.engine.step())
                    self._progress += 1
        except BaseException as error:  # outermost loop of the engine thread: hand the fault on
            self._failure = error
            logger.exception("the engine thread ended")
            self._fail_all(error)

    def _run_commands(self, wait: bool) -> None:
        """Run what is queued, waiting for a first command if `wait`."""
        while True:
            try:
                command, future = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            try:
                future.set_result(command())
            except Exception as error:  # a caller's fault belongs to the caller, not to the loop
                future.set_exception(error)

    def _deliver(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            future = self._waiting.pop(output.request_id, None)
            if future is not None:  # None: taken back by _submit_all
                future.set_result(output)

    def _fail_all(self, error: BaseException) -> None:
        for future in self._waiting.values():
            future.set_exception(RuntimeError(f"the engine of this replica has failed: {error!r}"))
        self._waiting.clear()
        while True:
            try:
                _, future = self._commands.get_nowait()
            except queue.Empty:
                return
            future.set_exception(RuntimeError(f"the engine has failed: {error!r}"))

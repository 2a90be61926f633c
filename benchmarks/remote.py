"""An object in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

NUM_THREADS = 4


class RemoteProcess:
    """Calls on it run in the process, four at a time; a call it dies in ends with RuntimeError."""

    start_method = "spawn"

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        """`make(*args)` builds the object there; its `begin_thread`, if it has one, is called on
        every thread that calls will run on."""
        context = multiprocessing.get_context(self.start_method)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self._process.start()
        theirs.close()
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._next = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def call(self, method: str, *args: Any) -> Future[Any]:
        """The future ends with the method's result or its error."""
        future: Future[Any] = Future()
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._pending[number] = future
            try:
                self._pipe.send((number, method, args))
            except OSError:
                self._pending.pop(number)
                future.set_exception(RuntimeError("the process died"))
        return future

    def attach(self, receiver: Any) -> None:
        """As `m3rl.types.RemoteReceiver`."""
        self.call("attach", receiver).result(120)  # it may still be importing torch

    def kill(self) -> None:
        """With SIGKILL: it has no time for anything."""
        os.kill(self._process.pid or 0, signal.SIGKILL)

    def end(self) -> None:
        self._process.kill()
        self._process.join()

    def _listen(self) -> None:
        while True:
            try:
                number, result, error = self._pipe.recv()
            except (EOFError, OSError):
                break
            future = self._pending.pop(number)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        with self._lock:
            for future in self._pending.values():
                future.set_exception(RuntimeError("the process died"))
            self._pending.clear()
            self._pipe.close()


def _serve(pipe: Any, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    body = make(*args)
    lock = threading.Lock()

    def run(number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            answer = (number, getattr(body, method)(*args), None)
        except Exception as error:  # outermost frame of the call: the error belongs to the caller
            answer = (number, None, error)
        with lock:
            pipe.send(answer)

    begin_thread = getattr(body, "begin_thread", None)
    with ThreadPoolExecutor(NUM_THREADS, initializer=begin_thread) as threads:
        while True:
            try:
                number, method, args = pipe.recv()
            except EOFError:
                return
            threads.submit(run, number, method, args)

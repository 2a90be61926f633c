"""A scoring process: receives items, sends one outcome each. `rewards.RewardPool` starts it.

Standard library only, so that it starts in a blink; the scorer brings what it needs. A scorer is
untrusted: it may raise, return nonsense or never return (then the pool kills the process).

    pool ──▶ (kind, argument)          ──▶ ready | failed: why
    pool ──▶ [(key, payload, text), …] ──▶ (key, status, reward, parts, message) for each, in order
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

Scorer = Callable[[dict[str, Any], str], Any]
Outcome = tuple[str, float, dict[str, float], str]
"""Status ('ok', 'error', 'nonfinite'), reward (NaN unless ok), its parts, what went wrong."""

NAN = float("nan")


def exact_scorer(_: Any) -> Scorer:
    """1.0 when the stripped text equals the stripped answer, else 0.0."""
    return lambda payload, text: float(text.strip() == str(payload["answer"]).strip())


def function_scorer(target: str) -> Scorer:
    """The user's function 'package.module:function'."""
    module, _, name = target.partition(":")
    scorer: Scorer = getattr(importlib.import_module(module), name)
    return scorer


def reasoning_gym_scorer(datasets: list[dict[str, Any]]) -> Scorer:
    """The generators' own `score_answer`, found by `payload["dataset"]`; 1.0 is solved."""
    import reasoning_gym

    made = {
        dataset_key(d["name"], d["params"]): reasoning_gym.create_dataset(
            d["name"], size=1, seed=d["seed"], **d["params"]
        )
        for d in datasets
    }
    return lambda payload, text: made[payload["dataset"]].score_answer(text, entry=payload)


def dataset_key(name: str, params: dict[str, Any]) -> str:
    """One string for a generator and its arguments: what its scorer may depend on."""
    return f"{name} {json.dumps(params, sort_keys=True)}"


SCORERS: dict[str, Callable[[Any], Scorer]] = {
    "exact": exact_scorer,
    "function": function_scorer,
    "reasoning_gym": reasoning_gym_scorer,
}


def outcome(scorer: Scorer, payload: dict[str, Any], text: str) -> Outcome:
    """Score one completion; every fault of the scorer becomes a status.

    A mapping of numbers is taken as the named parts of the reward, which is their sum.
    """
    try:
        return _judged(scorer(payload, text))
    except BaseException as error:  # the scorer is foreign code; some libraries raise BaseException
        return "error", NAN, {}, describe(error)


def _judged(result: Any) -> Outcome:
    is_mapping = isinstance(result, dict)
    values = list(result.values()) if is_mapping else [result]
    if not values or not all(isinstance(value, Real) for value in values):
        return (
            "error",
            NAN,
            {},
            f"the scorer returned {result!r:.200}, not a number or named numbers",
        )
    parts = {str(k): float(v) for k, v in result.items()} if is_mapping else {}
    reward = math.fsum(parts.values()) if is_mapping else float(result)
    if not all(math.isfinite(value) for value in (reward, *parts.values())):
        return "nonfinite", NAN, {}, f"the scorer returned {result!r:.200}"
    return "ok", reward, parts, ""


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:  # foreign code again: an error that cannot say what it is
        return type(error).__name__


def serve(connection: Connection) -> None:
    """Answer the pool until it closes the connection.

    Raises:
        EOFError, ConnectionResetError, BrokenPipeError: it did.
    """
    kind, argument = connection.recv()
    try:
        scorer = SCORERS[kind](argument)
    except BaseException as error:  # the outermost loop of this process
        connection.send(("failed", describe(error)))
        return
    connection.send(("ready", ""))
    own_pid = os.getpid()
    while True:
        for key, payload, text in connection.recv():
            answer = outcome(scorer, payload, text)
            if os.getpid() != own_pid:  # the scorer forked and returned twice
                os._exit(1)
            connection.send((key, *answer))


def _die_with(parent: int) -> None:
    """A scorer that hangs does not see its connection close; this thread sees the parent go."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)  # with all that the scorer started: this process leads its group


def main() -> None:
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    # these are the pipe's (a scorer's own become outcomes): the pool is gone, nobody waits
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        serve(connection)


if __name__ == "__main__":
    main()

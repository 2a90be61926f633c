"""Answers of members, which may be late, failed or refused: what they say, in one line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from m3rl.types import RemoteReceiver
from m3rl.weight_sync.errors import (
    NotMappableError,
    RefusedError,
    SyncError,
    TransportError,
)
from m3rl.weight_sync.probe import ProbeError


def gather(phase: str, asked: Mapping[str, Future[Any]], limit_s: float) -> list[Any]:
    """Results of all calls, in order; the first fault or the deadline ends the wait.

    Args:
        asked: by the name of who was asked.

    Raises:
        RefusedError: all that failed refuse to prepare.
        NotMappableError: those that connect cannot map memory, and nothing else is wrong.
        ProbeError: one found another function than the trainer's.
        SyncError: one failed or is late; names all such.
    """
    _, late = wait(asked.values(), limit_s, return_when=FIRST_EXCEPTION)
    errors = {
        name: error
        for name, future in asked.items()
        if future.done() and (error := future.exception()) is not None
    }
    if errors:
        kind = _kind(phase, errors.values())
        if kind is RefusedError:
            wait(asked.values(), limit_s)  # whoever tries again finds nobody at it
        told = "; ".join(f"{who}: {cause(error)}" for who, error in errors.items())
        raise kind(f"{phase}: {told}") from next(iter(errors.values()))
    if late:
        names = ", ".join(name for name, future in asked.items() if future in late)
        raise SyncError(f"{phase}: no answer from {names} within {limit_s:g} s")
    return [future.result() for future in asked.values()]


def _kind(phase: str, errors: Collection[BaseException]) -> type[SyncError]:
    """Of the error that tells of these."""

    def are(kind: type[SyncError]) -> Iterator[bool]:
        return (isinstance(error, kind) for error in errors)

    if any(are(ProbeError)):
        return ProbeError
    if phase == "prepare" and all(are(RefusedError)):
        return RefusedError
    if phase == "connect" and all(are(TransportError)) and any(are(NotMappableError)):
        return NotMappableError
    return SyncError


def all_answer(asked: Collection[Future[Any]], answer: Any, limit_s: float) -> bool:
    """Whether that is what every call ends with, in time."""
    wait(asked, limit_s)
    return all(
        future.done() and future.exception() is None and future.result() == answer
        for future in asked
    )


def settled(result: object) -> object:
    """What a call gave, at once or by a Future."""
    return result.result() if isinstance(result, Future) else result


def closing(worker: RemoteReceiver, timeout_s: float) -> Callable[[], None]:
    """To have a worker leave its group, on a thread that may wait for it."""
    return lambda: worker.call("close").result(timeout_s)


def complaint(name: str, left: Future[Any]) -> str | None:
    """What a member that was told to close has to say; None: nothing."""
    if not left.done():
        return f"{name} has not let go of the connection"
    error = left.exception()
    text = cause(error) if error is not None else left.result()
    return f"{name}: {text}" if text else None


def cause(error: BaseException) -> str:
    """An error as one line; what Ray wraps around a remote error is left out."""
    inner = getattr(error, "cause", None) or error
    return f"{type(inner).__name__}: {str(inner).strip().splitlines()[-1] if str(inner) else ''}"

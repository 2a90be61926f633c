"""A replica of an engine that is no model: what any engine may count on."""

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from m3rl.rollout.backend import Generated, PauseMode
from m3rl.rollout.engine_replica import EngineReplica
from m3rl.types import GenerationRequest, SamplingSettings


class CountingEngine:
    """Ends a request after `max_tokens` steps; notes the threads that called it."""

    version = 7

    def __init__(self) -> None:
        self.threads = {threading.current_thread().name}
        self._left: dict[str, list[int]] = {}
        self._is_paused = False

    @property
    def has_work(self) -> bool:
        return bool(self._left) and not self._is_paused

    def add(self, request: GenerationRequest) -> None:
        self._note()
        if request.sampling.max_tokens > 100:
            raise ValueError(f"{request.request_id}: max_tokens is over 100")
        self._left[request.request_id] = [request.sampling.max_tokens, 0]

    def step(self) -> Sequence[Generated]:
        self._note()
        for count in self._left.values():
            count[1] += 1
        ended = [name for name, (most, done) in self._left.items() if done == most]
        return [self._output(name) for name in ended]

    def abort(self, request_ids: Sequence[str]) -> int:
        self._note()
        known = [name for name in request_ids if name in self._left]
        for name in known:
            del self._left[name]
        return len(known)

    def pause(self, mode: PauseMode) -> None:
        self._note()
        self._is_paused = True

    def resume(self) -> None:
        self._note()
        self._is_paused = False

    def stats(self) -> dict[str, float]:
        self._note()
        return {"running": float(len(self._left))}

    def _note(self) -> None:
        self.threads.add(threading.current_thread().name)

    def _output(self, name: str) -> Generated:
        _, done = self._left.pop(name)
        spans = np.array([[0, self.version]])
        return Generated(
            name, np.arange(done, dtype=np.int32), np.zeros(done), "length", spans, seed=0
        )


def request(name: str, max_tokens: int = 5) -> GenerationRequest:
    sampling = SamplingSettings(1.0, 1.0, 0, 0.0, max_tokens)
    return GenerationRequest(name, name, 0, 0, np.arange(3, dtype=np.int32), 0, sampling)


def test_an_engine_is_made_and_called_on_one_thread_alone():
    def slow() -> CountingEngine:
        time.sleep(0.2)
        return CountingEngine()

    replica = EngineReplica(slow)
    assert replica.health()["version"] == 7  # there is one once the constructor returns
    replica.pause("keep")
    replica.resume()
    assert replica.stats() == {"running": 0.0}
    assert replica.abort(["nobody"]) == 0
    results = replica.generate([request("a", 3), request("b", 2)])
    assert [(g.request_id, len(g.token_ids)) for g in results] == [("a", 3), ("b", 2)]
    assert replica.health()["progress"] == 3
    assert replica.engine.threads == {"engine"}


def test_an_engine_that_cannot_be_made_is_told_to_who_constructs_its_replica():
    def broken() -> CountingEngine:
        raise ValueError("max_model_len=512 is over 256 of the model")

    with pytest.raises(ValueError, match="max_model_len=512 is over 256"):
        EngineReplica(broken)


def test_a_request_that_an_engine_refuses_takes_its_whole_call_back():
    replica = EngineReplica(CountingEngine)
    with pytest.raises(ValueError, match="b: max_tokens is over 100"):
        replica.generate([request("a"), request("b", 101)])
    assert replica.stats() == {"running": 0.0}
    assert [g.request_id for g in replica.generate([request("a")])] == ["a"]
    assert replica.health()["failure"] == ""

"""The replica process without Ray: one engine, one thread, commands between two steps."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from m3rl.rollout.m3_replica import M3Replica, ReplicaSettings
from m3rl.types import GenerationRequest, SamplingSettings
from tests.tiny_models import random_checkpoint, random_tensors, tiny_config

RAW = tiny_config()
ENGINE = {"num_pages": 256, "max_tokens_per_step": 64}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_checkpoint(path, RAW, seed=0)
    return path


@pytest.fixture
def replica(model_path: Path) -> M3Replica:
    made = M3Replica(ReplicaSettings(str(model_path), ENGINE))
    made.load(str(model_path), 3)
    return made


def sampling(max_tokens: int = 8, stop: tuple[str, ...] = ()) -> SamplingSettings:
    return SamplingSettings(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=max_tokens, stop=stop
    )


def request(ordinal: int, index: int = 0, **changes) -> GenerationRequest:
    fields = {
        "request_id": f"{ordinal}.{index}",
        "group_id": str(ordinal),
        "prompt_ordinal": ordinal,
        "sample_index": index,
        "prompt_ids": np.arange(1, 12 + ordinal, dtype=np.int32),
        "seed": 100 * ordinal + index,
        "sampling": sampling(),
    }
    return GenerationRequest(**{**fields, **changes})


def test_results_come_in_the_order_of_the_requests_with_the_loaded_version(
    replica: M3Replica,
) -> None:
    requests = [request(p, i) for p in (2, 0, 1) for i in range(3)]
    results = replica.generate(requests)
    assert [r.request_id for r in results] == [r.request_id for r in requests]
    for result in results:
        assert result.version_spans.tolist() == [[0, 3]]
        assert len(result.token_ids) == len(result.logprobs)
        assert (result.logprobs < 0).all()


def test_the_same_requests_give_the_same_bits_in_another_process_state(
    replica: M3Replica, model_path: Path
) -> None:
    requests = [request(p, i) for p in range(3) for i in range(4)]
    first = replica.generate(requests)
    fresh = M3Replica(ReplicaSettings(str(model_path), ENGINE))
    fresh.load(str(model_path), 3)
    for a, b in zip(first, fresh.generate(requests), strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert np.array_equal(a.logprobs, b.logprobs)


def test_a_refused_request_takes_back_those_before_it_and_harms_nobody(
    replica: M3Replica,
) -> None:
    with pytest.raises(ValueError, match=r"9\.9"):
        replica.generate([request(0), request(9, 9, sampling=sampling(10**6))])
    assert [r.request_id for r in replica.generate([request(0)])] == ["0.0"]
    assert replica.health()["failure"] == ""


# BR-017
def test_an_abort_ends_a_running_call_with_what_it_has(replica: M3Replica) -> None:
    replica.pause("keep")
    results: list = []
    caller = threading.Thread(target=lambda: results.extend(replica.generate([request(0)])))
    caller.start()
    while replica.stats()["waiting"] + replica.stats()["running"] == 0:
        pass
    assert replica.abort(["0.0", "unknown"]) == 1
    caller.join(timeout=10)
    assert not caller.is_alive()
    assert results[0].finish_reason == "abort"
    replica.resume()


def test_a_paused_replica_generates_nothing_until_it_is_resumed(replica: M3Replica) -> None:
    replica.pause("drain")
    with pytest.raises(RuntimeError, match="drained"):
        replica.generate([request(0)])
    replica.resume()
    assert len(replica.generate([request(0)])) == 1


# BR-075
def test_a_failed_engine_fails_its_callers_and_its_health_and_does_not_hang(
    replica: M3Replica,
) -> None:
    def explode():
        raise FloatingPointError("the forward pass broke")

    replica.engine.step = explode
    with pytest.raises(RuntimeError, match="the forward pass broke"):
        replica.generate([request(0), request(1)])
    assert "the forward pass broke" in replica.health()["failure"]
    with pytest.raises(RuntimeError, match="has failed"):
        replica.generate([request(2)])


def test_an_engine_without_weights_serves_nothing(model_path: Path) -> None:
    empty = M3Replica(ReplicaSettings(str(model_path), ENGINE))
    with pytest.raises(RuntimeError, match="EMPTY"):
        empty.generate([request(0)])


def test_a_paused_replica_scores_prompts_as_it_samples_them(replica: M3Replica) -> None:
    asked = request(0, sampling=sampling(30))
    (result,) = replica.generate([asked])
    replica.pause("keep")
    ids = np.concatenate([asked.prompt_ids, result.token_ids])
    (scores,) = replica.prompt_logprobs([ids])
    sampled = scores[len(asked.prompt_ids) - 1 :]
    np.testing.assert_allclose(sampled, result.logprobs, rtol=0, atol=1e-5)  # sums in other orders
    assert [len(each) for each in replica.prompt_logprobs([ids[:2], ids])] == [1, len(ids) - 1]


def test_a_replica_says_how_long_prompts_can_be_and_where_its_weights_are(
    replica: M3Replica,
) -> None:
    assert replica.prompt_lengths() == (8, 511)  # top-k 2 of blocks of 4; 512 positions
    replica.prompt_logprobs([np.arange(3, 3 + 90, dtype=np.int32).repeat(6)[:511]])
    assert replica.gpu() is None


class Recorder:
    """A receiver that notes on which thread the engine is called, and loads all of it by a plan."""

    def __init__(self) -> None:
        self.filled, self.go_on = threading.Event(), threading.Event()
        self.running = 0

    def bind(self, target) -> None:
        self.target = target
        parts = [(slot.name, slot.bounds) for slot in target.weight_layout()]
        self.plan = target.plan_load(parts)

    def thread_name(self) -> str:
        return threading.current_thread().name

    def fail(self) -> None:
        raise ValueError("this sync is broken")

    def stream(self, version: int, tensors: dict) -> None:
        """Stops when all is in place until `go_on` is set."""
        self.target.begin_load(version, self.plan)
        for (name, _), place in zip(self.plan.parts, self.plan.places, strict=True):
            place.copy_(tensors[name])
        self.target.written(0, len(self.plan.parts))
        self.filled.set()
        assert self.go_on.wait(10)

    def commit(self) -> None:
        self.target.commit()

    def abort(self) -> None:
        self.target.abort_load()

    def overlap(self) -> int:
        """How many of these calls ever ran at once."""
        self.running += 1
        time.sleep(0.02)
        seen = self.running
        self.running -= 1
        return seen


def test_receiver_calls_run_beside_the_engine_one_at_a_time_and_raise_to_the_caller(
    replica: M3Replica,
) -> None:
    with pytest.raises(RuntimeError, match="no receiver"):
        replica.receiver_call("thread_name")
    replica.attach(Recorder())
    assert replica.receiver_call("thread_name") == threading.current_thread().name
    with pytest.raises(ValueError, match="this sync is broken"):
        replica.receiver_call("fail")
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(replica.receiver_call, "overlap") for _ in range(4)]
        assert [call.result(10) for call in calls] == [1] * 4
    assert replica.health()["failure"] == ""


def test_only_the_engine_thread_changes_what_serves(
    replica: M3Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: dict[str, str] = {}

    def noting(name: str):
        original = getattr(replica.engine, name)

        def call(*args):
            called[name] = threading.current_thread().name
            return original(*args)

        return call

    for name in ("begin_load", "written", "commit", "abort_load"):
        monkeypatch.setattr(replica.engine, name, noting(name))
    recorder = Recorder()
    replica.attach(recorder)
    recorder.go_on.set()
    for method, args in (
        ("stream", (4, random_tensors(RAW, 1))),
        ("commit", ()),
        ("stream", (5, random_tensors(RAW, 0))),
        ("abort", ()),
    ):
        replica.receiver_call(method, *args)
    here = threading.current_thread().name
    assert called == {
        "begin_load": "engine",
        "written": here,
        "commit": "engine",
        "abort_load": "engine",
    }
    assert replica.health()["version"] is None  # poisoned: a load in place was given up


def spans(results) -> list:
    return [result.version_spans.tolist() for result in results]


@pytest.mark.parametrize("shadow", [True, False])
def test_a_load_into_a_shadow_lets_the_replica_generate_and_another_holds_it_up(
    model_path: Path, shadow: bool
) -> None:
    replica = M3Replica(ReplicaSettings(str(model_path), ENGINE | {"shadow_weights": shadow}))
    replica.load(str(model_path), 3)
    (before,) = replica.generate([request(0)])
    recorder = Recorder()
    replica.attach(recorder)
    with ThreadPoolExecutor(2) as threads:
        if not shadow:
            replica.pause("keep")
        streaming = threads.submit(replica.receiver_call, "stream", 4, random_tensors(RAW, 1))
        assert recorder.filled.wait(10)
        generating = threads.submit(replica.generate, [request(0)])
        if shadow:
            (beside,) = generating.result(10)
            assert beside.token_ids.tolist() == before.token_ids.tolist()
            assert spans([beside]) == [[[0, 3]]]
            replica.pause("keep")
        assert replica.health()["version"] == (3 if shadow else None)  # none is whole, in place
        recorder.go_on.set()
        streaming.result(10)
        replica.receiver_call("commit")
        assert shadow or not generating.done()
        replica.resume()
        after = generating.result(10) if not shadow else replica.generate([request(0)])
    assert spans(after) == [[[0, 4]]]
    assert after[0].token_ids.tolist() != before.token_ids.tolist()


def test_a_receiver_is_told_of_an_engine_that_failed(replica: M3Replica) -> None:
    replica.attach(Recorder())
    replica.engine.step = lambda: 1 / 0
    with pytest.raises(RuntimeError, match="has failed"):
        replica.generate([request(0)])
    with pytest.raises(RuntimeError, match="has failed"):
        replica.receiver_call("stream", 4, {})

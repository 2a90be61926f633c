"""Replicas of several ranks under Ray: what one rank gives, in lockstep whatever is asked."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from m3rl.rollout.backend import BackendError, Generated
from m3rl.rollout.m3_backend import M3Backend
from m3rl.rollout.m3_replica import M3Replica, ReplicaSettings
from m3rl.rollout.placement import ray_cluster
from m3rl.types import GenerationRequest, SamplingSettings
from m3rl.weight_sync.sync import WeightSync
from tests.m3rl.weight_sync.sync_fakes import LocalSenders
from tests.m3rl.weight_sync.test_sync_engine import Rank
from tests.tiny_models import random_checkpoint, random_tensors, tiny_config

pytestmark = pytest.mark.timeout(240)

RAW = tiny_config(num_hidden_layers=2, vocab_size=96)
TP, DP = {"tp": 2}, {"tp": 1, "dp": 2}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_checkpoint(path, RAW, seed=0)
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster(5):
        yield


def settings(path: Path, parallel: dict[str, int] | None = None) -> ReplicaSettings:
    engine = {"num_pages": 256, "device": "cpu"}
    return ReplicaSettings(str(path), engine, parallel=parallel or {}, timeout_s=20.0)


def started(path: Path, parallel: dict[str, int]) -> M3Backend:
    backend = M3Backend(settings(path, parallel), 1)
    backend.wait_started()
    return backend


@pytest.fixture(scope="module")
def shared(cluster: None, model_path: Path) -> Iterator[M3Backend]:
    backend = started(model_path, TP)
    yield backend
    backend.close()


@pytest.fixture
def backend(shared: M3Backend, model_path: Path) -> M3Backend:
    """A replica of two tp ranks with the weights at `model_path`, whatever the test before did."""
    if not shared.alive:
        shared.restart(0)
    shared.load(str(model_path), 0)
    return shared


def request(ordinal: int, index: int, max_tokens: int = 8) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{ordinal}.{index}",
        group_id=str(ordinal),
        prompt_ordinal=ordinal,
        sample_index=index,
        prompt_ids=np.arange(3, 12 + ordinal, dtype=np.int32),
        seed=10 * ordinal + index,
        sampling=SamplingSettings(1.0, 1.0, 0, 0.0, max_tokens),
    )


REQUESTS = [request(p, i) for p in range(4) for i in range(3)]


def of_one_rank(path: Path, seed: int, requests: list[GenerationRequest]) -> dict[str, Generated]:
    replica = M3Replica(settings(path))
    replica.engine.load_weights(random_tensors(RAW, seed).items(), 0)
    return {result.request_id: result for result in replica.generate(requests)}


def assert_same(found: dict[str, Generated], expected: dict[str, Generated]) -> None:
    """The same tokens; logprobs within 1e-5, FP32 sums split over the ranks."""
    assert found.keys() == expected.keys()
    for name, result in found.items():
        assert result.token_ids.tolist() == expected[name].token_ids.tolist()
        np.testing.assert_allclose(result.logprobs, expected[name].logprobs, rtol=0, atol=1e-5)


def assert_generates_as_one_rank(backend: M3Backend, model_path: Path) -> None:
    """Also for calls that overlap, and pauses amid them."""
    expected = of_one_rank(model_path, 0, REQUESTS)
    assert_same(backend.generate(REQUESTS, timeout_s=60).generated, expected)
    shares = [[r for r in REQUESTS if r.prompt_ordinal == p] for p in range(4)]
    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(backend.generate, share, timeout_s=60) for share in shares]
        for _ in range(3):
            backend.pause("keep")
            assert backend.abort(["nobody"]) == 0
            backend.resume()
        found: dict[str, Generated] = {}
        for call in calls:
            found |= call.result(60).generated
    assert_same(found, expected)
    assert backend.health()[0].is_alive


def test_tensor_parallel_ranks_give_what_one_gives(backend, model_path):
    assert_generates_as_one_rank(backend, model_path)


def test_ranks_of_two_groups_give_what_one_gives(cluster, model_path):
    backend = started(model_path, DP)
    backend.load(str(model_path), 0)
    assert_generates_as_one_rank(backend, model_path)
    backend.close()


def test_a_refused_request_and_an_abort_leave_the_ranks_in_step(backend, model_path):
    with pytest.raises(BackendError, match=r"refused a request: .*7\.0"):
        backend.generate([*REQUESTS, request(7, 0, max_tokens=10**6)], timeout_s=60)
    backend.pause("keep")
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(backend.generate, REQUESTS[:2], timeout_s=60)
        while backend.stats()["engine/waiting"] == 0:
            pass
        assert backend.abort([REQUESTS[0].request_id]) == 1
        backend.resume()
        generated = call.result(60).generated
    assert [generated[r.request_id].finish_reason == "abort" for r in REQUESTS[:2]] == [True, False]
    assert_same(
        backend.generate(REQUESTS, timeout_s=60).generated, of_one_rank(model_path, 0, REQUESTS)
    )


def pids(backend: M3Backend) -> list[int]:
    return [ray.get(worker.health.remote())["pid"] for worker in backend.workers(0)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_takes_its_replica_along_and_a_fresh_one_comes(backend, model_path, rank):
    others = pids(backend)
    os.kill(others.pop(rank), signal.SIGKILL)
    outcome = backend.generate(REQUESTS, timeout_s=60)
    assert outcome.failures.keys() == {0}
    assert len(outcome.lost) == len(REQUESTS)
    assert backend.alive == []
    backend.restart(0)
    assert not set(others) & set(pids(backend))
    backend.load(str(model_path), 0)
    assert not backend.generate(REQUESTS, timeout_s=60).lost


def assert_syncs_reach_every_rank(backend: M3Backend, model_path: Path) -> None:
    """Requests go on with the new weights."""
    rank = Rank(torch.float32, 0, 1)
    sync = WeightSync(
        LocalSenders([rank]),
        {0: backend.receivers(0)},
        pause=lambda replica: backend.pause("recompute", replica),
        resume=backend.resume,
        host="127.0.0.1",
        timeout_s=20.0,
        min_replicas=1,
        verify=True,
    )
    sync.connect(0)
    for version, seed in enumerate([0, 5], start=1):
        rank.weights = random_tensors(RAW, seed)
        assert sync.sync(version).checksum_ok
        expected = of_one_rank(model_path, seed, REQUESTS)
        found = backend.generate(REQUESTS, timeout_s=60).generated
        assert_same(found, expected)
        assert {int(result.version_spans[0, 1]) for result in found.values()} == {version}
    scores = backend.prompt_logprobs(0, [REQUESTS[0].prompt_ids])
    alone = M3Replica(settings(model_path))
    alone.engine.load_weights(random_tensors(RAW, 5).items(), 0)
    (expected_scores,) = alone.prompt_logprobs([REQUESTS[0].prompt_ids])
    np.testing.assert_allclose(scores[0], expected_scores, rtol=0, atol=1e-5)
    sync.close()


def test_a_sync_reaches_every_rank(backend, model_path):
    assert_syncs_reach_every_rank(backend, model_path)


def test_a_sync_reaches_the_shadow_of_every_rank(cluster, model_path):
    made = settings(model_path, TP)
    made.engine["shadow_weights"] = True
    backend = M3Backend(made, 1)
    backend.wait_started()
    assert_syncs_reach_every_rank(backend, model_path)
    backend.close()


@pytest.fixture(autouse=True)
def _same_model(monkeypatch):
    monkeypatch.setattr("tests.m3rl.weight_sync.test_sync_engine.RAW", RAW)


def test_the_port_where_ranks_will_meet_is_taken_before_they_start(cluster, model_path):
    backend = M3Backend(settings(model_path, TP), 1)
    meeting = backend._rendezvous.new_meeting()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((meeting.host, meeting.port))
    backend.close()


def test_ranks_that_cannot_split_the_model_say_why(cluster, model_path):
    backend = M3Backend(settings(model_path, {"tp": 3}), 1)
    with pytest.raises(BackendError, match=r"tp=3 does not divide num_attention_heads=4"):
        backend.wait_started()
    backend.close()

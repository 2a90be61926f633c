"""A pool of real replica processes under Ray: shared work, silence, death, refusal."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from m3rl.rollout.backend import BackendError
from m3rl.rollout.m3_backend import M3Backend
from m3rl.rollout.m3_replica import M3Replica, ReplicaSettings
from m3rl.rollout.placement import ray_cluster
from m3rl.types import GenerationRequest, SamplingSettings
from tests.tiny_models import random_checkpoint, tiny_config

pytestmark = pytest.mark.timeout(180)


class SlowReplica(M3Replica):
    """Every engine step takes a while."""

    def __init__(self, settings: ReplicaSettings) -> None:
        super().__init__(settings)
        step = self.engine.step

        def slow_step():
            time.sleep(0.3)
            return step()

        self.engine.step = slow_step


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_checkpoint(path, tiny_config(), seed=0)
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster(4):
        yield


@pytest.fixture(scope="module")
def shared(cluster: None, model_path: Path) -> Iterator[M3Backend]:
    backend = M3Backend(settings(model_path), 2)
    backend.wait_started()
    backend.load(str(model_path), 0)
    yield backend
    backend.close()


@pytest.fixture
def backend(shared: M3Backend, model_path: Path) -> M3Backend:
    """The shared pool, whole again after what the test before did to it."""
    for replica in range(2):
        if replica not in shared.alive:
            shared.restart(replica)
            shared.load(str(model_path), 0, [replica])
    return shared


def settings(model_path: Path) -> ReplicaSettings:
    return ReplicaSettings(str(model_path), {"num_pages": 256})


def request(ordinal: int, index: int, max_tokens: int = 8) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{ordinal}.{index}",
        group_id=str(ordinal),
        prompt_ordinal=ordinal,
        sample_index=index,
        prompt_ids=np.arange(1, 10 + ordinal, dtype=np.int32),
        seed=10 * ordinal + index,
        sampling=SamplingSettings(1.0, 1.0, 0, 0.0, max_tokens),
    )


REQUESTS = [request(p, i) for p in range(4) for i in range(3)]


def pid(backend: M3Backend, replica: int) -> int:
    import ray

    return int(ray.get(backend.actor(replica).health.remote())["pid"])


def test_a_pool_gives_what_single_replicas_give_for_their_shares(
    backend: M3Backend, model_path: Path
) -> None:
    outcome = backend.generate(REQUESTS, timeout_s=60)
    assert not outcome.lost
    assert outcome.generated.keys() == {r.request_id for r in REQUESTS}
    for replica in range(2):
        alone = M3Replica(settings(model_path))
        alone.load(str(model_path), 0)
        share = [r for r in REQUESTS if r.prompt_ordinal % 2 == replica]
        for result in alone.generate(share):
            pooled = outcome.generated[result.request_id]
            assert np.array_equal(result.token_ids, pooled.token_ids)
            assert np.array_equal(result.logprobs, pooled.logprobs)


# BR-075
def test_a_silent_replica_is_given_up_in_time_and_the_others_finish(backend: M3Backend) -> None:
    os.kill(pid(backend, 1), signal.SIGSTOP)
    begin = time.monotonic()
    outcome = backend.generate(REQUESTS, timeout_s=2.0)
    assert time.monotonic() - begin < 15
    assert outcome.failures.keys() == {1}
    assert "no progress within rollout.timeout_s=2 s" in outcome.failures[1]
    assert {r.prompt_ordinal for r in outcome.lost} == {1, 3}
    assert outcome.generated.keys() == {r.request_id for r in REQUESTS if r.prompt_ordinal % 2 == 0}
    assert backend.alive == [0]
    again = backend.generate(outcome.lost, timeout_s=60)  # the one that is left takes them
    assert again.generated.keys() == {r.request_id for r in outcome.lost}


def test_a_killed_replica_is_noticed_at_once_and_has_no_weights_until_it_is_given_some(
    backend: M3Backend, model_path: Path
) -> None:
    os.kill(pid(backend, 0), signal.SIGKILL)
    outcome = backend.generate(REQUESTS, timeout_s=600)
    assert outcome.failures.keys() == {0}
    assert {r.prompt_ordinal for r in outcome.lost} == {0, 2}
    assert [h.is_alive for h in backend.health()] == [False, True]
    backend.restart(0)
    outcome = backend.generate(REQUESTS, timeout_s=60)
    assert "EMPTY" in outcome.failures[0]
    backend.restart(0)
    backend.load(str(model_path), 5, [0])
    outcome = backend.generate(REQUESTS, timeout_s=60)
    assert not outcome.lost
    versions = {int(g.version_spans[0, 1]) for g in outcome.generated.values()}
    assert versions == {0, 5}


def test_a_refused_request_ends_the_call_and_costs_no_replica(backend: M3Backend) -> None:
    with pytest.raises(BackendError, match=r"refused a request: .*7\.0"):
        backend.generate([*REQUESTS, request(7, 0, max_tokens=10**6)], timeout_s=60)
    assert backend.alive == [0, 1]
    assert not backend.generate(REQUESTS, timeout_s=60).lost


def test_only_the_replicas_that_are_named_generate(backend: M3Backend, model_path: Path) -> None:
    """Others are alive, and may hold what nobody should read."""
    held = {0: 8, 1: 9}
    for replica, version in held.items():
        backend.load(str(model_path), version, [replica])
    for replica, version in held.items():
        outcome = backend.generate(REQUESTS, timeout_s=60, replicas=[replica])
        assert not outcome.lost
        assert outcome.generated.keys() == {r.request_id for r in REQUESTS}
        spans = [generated.version_spans for generated in outcome.generated.values()]
        assert {int(version) for span in spans for version in span[:, 1]} == {version}
    with pytest.raises(BackendError, match="no replica is left to generate on"):
        backend.generate(REQUESTS, timeout_s=60, replicas=[])
    assert backend.alive == [0, 1]
    backend.load(str(model_path), 0, [1])


def test_a_slow_replica_that_makes_progress_is_waited_for(cluster: None, model_path: Path) -> None:
    slow = M3Backend(settings(model_path), 1, replica_class=SlowReplica)
    slow.wait_started()
    slow.load(str(model_path), 0)
    begin = time.monotonic()
    outcome = slow.generate(REQUESTS, timeout_s=1.5)
    assert not outcome.lost
    assert time.monotonic() - begin > 1.5
    process = psutil.Process(pid(slow, 0))
    slow.close()
    slow.close()
    process.wait(timeout=10)
    with pytest.raises(BackendError, match="no replica is left"):
        slow.generate(REQUESTS, timeout_s=1.5)


def test_more_gpus_than_the_cluster_has_are_refused_at_once(cluster, model_path):
    with pytest.raises(
        BackendError, match=r"need 512 GPUs and the cluster has \d+; set rollout.* parallel"
    ):
        M3Backend(settings(model_path), 512, num_gpus=1)

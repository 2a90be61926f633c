"""The pool over Ray actors: one replica, from its start to its death."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from m3rl.rollout.backend import BackendError
from m3rl.rollout.placement import ray_cluster
from m3rl.rollout.vllm_backend import VllmBackend
from m3rl.rollout.vllm_files import is_running
from m3rl.types import GenerationRequest, SamplingSettings
from tests.vllm.conftest import settings
from tests.vllm.tiny_hf import greedy, load_model


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(2):
        yield


def request(name: str, max_tokens: int) -> GenerationRequest:
    ids = np.array([5, 6, 7], np.int32)
    return GenerationRequest(
        name, name, 0, 0, ids, 1, SamplingSettings(0.0, 1.0, 0, 0.0, max_tokens)
    )


def test_a_replica_loads_generates_and_its_death_is_told(cluster, qwen3):
    backend = VllmBackend(settings(qwen3 / "1"), 1, start_timeout_s=120)
    try:
        backend.wait_started()
        assert [health.version for health in backend.health()] == [None]
        with pytest.raises(BackendError, match="commit those of a version"):
            backend.resume()
        backend.load(str(qwen3 / "1"), 4)
        outcome = backend.generate([request("r", 8)], timeout_s=20)
        tokens, _ = greedy(load_model(qwen3 / "1"), [5, 6, 7], 8)
        assert outcome.generated["r"].token_ids.tolist() == tokens
        (layout,) = backend.weight_layout(0)
        assert layout[0].name == "model.embed_tokens.weight"
        assert backend.gpus() == {"replica 0 rank 0": None}
        assert backend.prompt_lengths() == (127, 127)
        assert backend.stats()["engine/steps"] > 0
        assert len(backend.receivers(0)) == 1
        begin = time.monotonic()
        os.kill(_pid(backend), signal.SIGKILL)
        outcome = backend.generate([request("lost", 100)], timeout_s=20)
        assert [lost.request_id for lost in outcome.lost] == ["lost"]
        assert "died" in outcome.failures[0]
        assert time.monotonic() - begin < 20
    finally:
        backend.close()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("end", ["close", "kill"])
def test_the_end_of_a_replica_leaves_nothing(cluster, qwen3, workers, end):
    import ray

    chosen = settings(qwen3 / "1", tensor_parallel_size=workers)
    backend = VllmBackend(chosen, 1, start_timeout_s=120)
    try:
        backend.wait_started()
        files = ray.get(backend.actor(0).__ray_call__.remote(lambda replica: replica.engine.files))
        assert len(files.pids) == (1 if workers == 1 else 1 + workers)
        made = set(map(Path, files.paths))
        assert all(path.exists() for path in made)
        assert {path.name.split("_")[0] for path in made} >= {"vllm"}, "where the workers met"
        num_segments = sum(path.parent == Path("/dev/shm") for path in made)
        assert num_segments > 2 if workers > 1 else num_segments == 0
        if end == "kill":
            os.kill(_pid(backend), signal.SIGKILL)
    finally:
        backend.close()
    assert not [path for path in made if path.exists()]
    assert not [pid for pid in files.pids if is_running(pid)]


def _pid(backend: VllmBackend) -> int:
    import ray

    return ray.get(backend.actor(0).health.remote())["pid"]


def test_more_gpus_than_there_are_is_told_before_anything_starts(cluster, qwen3):
    wanted = settings(qwen3 / "1")
    wanted = type(wanted)(wanted.model_path, "float32", "cuda", tensor_parallel_size=4)
    with pytest.raises(
        BackendError,
        match=r"need 8 GPUs and the cluster has 0; .* ranks of each .*engine.tensor_parallel_size",
    ):
        VllmBackend(wanted, 2)


def test_a_replica_that_cannot_start_says_why(cluster, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of", "architectures": ["No"]}')
    backend = VllmBackend(settings(tmp_path), 1, start_timeout_s=120)
    try:
        with pytest.raises(BackendError, match=r"could not start: .*unheard_of"):
            backend.wait_started()
    finally:
        backend.close()

"""What the requests of a real replica see of a real sync, in each pause mode."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inference.engine.scoring import prompt_logprobs
from m3rl.rollout.backend import Generated, PauseMode
from m3rl.rollout.m3_replica import M3Replica, ReplicaSettings
from m3rl.types import GenerationRequest, Receiver, SamplingSettings
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.layout import Bounds
from m3rl.weight_sync.sync import WeightSync
from tests.m3rl.weight_sync.sync_fakes import LocalSenders, store_without_sockets
from tests.m3rl.weight_sync.test_sync_engine import Rank
from tests.tiny_models import random_checkpoint, random_tensors, tiny_config

RAW = tiny_config(num_hidden_layers=2)
ENDLESS = {key: value for key, value in RAW.items() if key != "eos_token_id"}
LENGTH = 40
"""Tokens that a request samples."""


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_checkpoint(path, ENDLESS, seed=0)
    return path


class Worker:
    """A replica as the driver reaches it."""

    def __init__(self, replica: M3Replica) -> None:
        self._replica = replica
        self._threads = ThreadPoolExecutor(4)

    def attach(self, receiver: Receiver) -> None:
        self._replica.attach(receiver)

    def call(self, method: str, *args: Any) -> Future[Any]:
        return self._threads.submit(self._replica.receiver_call, method, *args)


class Steps:
    """Lets the engine do so many steps; without leave it does none and goes on taking commands."""

    def __init__(self, replica: M3Replica) -> None:
        self._step, self._left = replica.engine.step, 0
        replica.engine.step = self._stepped  # type: ignore[method-assign]

    def allow(self, count: int) -> None:
        self._left = count

    def wait_done(self) -> None:
        end = time.monotonic() + 20
        while self._left:
            assert time.monotonic() < end, f"{self._left} steps are still to come"
            time.sleep(1e-3)

    def _stepped(self) -> Any:
        if not self._left:
            time.sleep(1e-3)
            return []
        outputs = self._step()
        self._left -= 1
        return outputs


class WatchedRank(Rank):
    """Stops at the first read of a sync until it may go on."""

    def __init__(self) -> None:
        self.reads, self.go_on = threading.Event(), threading.Event()
        super().__init__(torch.float32, 0, 1)
        read = self.sender._read

        def waiting(name: str, bounds: Bounds) -> torch.Tensor:
            if threading.current_thread().name.startswith("sync-replica"):
                self.reads.set()
                assert self.go_on.wait(20)
            return read(name, bounds)

        self.sender._read = waiting


def request(ordinal: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{ordinal}.0",
        group_id=str(ordinal),
        prompt_ordinal=ordinal,
        sample_index=0,
        prompt_ids=np.arange(3, 14 + ordinal, dtype=np.int32),
        seed=ordinal,
        sampling=SamplingSettings(1.0, 1.0, 0, 0.0, LENGTH),
    )


def new_replica(path: Path, *, shadow: bool = True) -> M3Replica:
    return M3Replica(ReplicaSettings(str(path), {"num_pages": 256, "shadow_weights": shadow}))


def driver(replica: M3Replica, rank: WatchedRank, mode: PauseMode) -> WeightSync:
    sync = WeightSync(
        LocalSenders([rank]),
        {0: Worker(replica)},
        pause=lambda number: replica.pause(mode),
        resume=lambda number: replica.resume(),
        host="127.0.0.1",
        timeout_s=20.0,
        min_replicas=1,
        verify=True,
    )
    sync.connect(0)
    return sync


def run_over_a_sync(
    path: Path, mode: PauseMode, *, shadow: bool, beside: int
) -> tuple[list[Generated], M3Replica]:
    """Two requests with 5 tokens when a sync begins; `beside` steps may follow while it streams."""
    replica, rank = new_replica(path, shadow=shadow), WatchedRank()
    sync = driver(replica, rank, mode)
    rank.go_on.set()
    sync.sync(1)
    rank.go_on.clear()
    rank.reads.clear()
    rank.load(7)
    steps = Steps(replica)
    with ThreadPoolExecutor(2) as threads:
        generating = threads.submit(replica.generate, [request(0), request(1)])
        steps.allow(5)
        steps.wait_done()
        syncing = threads.submit(sync.sync, 2)
        assert rank.reads.wait(20)
        if beside:
            steps.allow(beside)
            steps.wait_done()
        rank.go_on.set()
        assert syncing.result(30).ready == (0,)
        steps.allow(1000)
        return generating.result(30), replica


def logprobs(path: Path, seed: int, result: Generated, ordinal: int) -> np.ndarray:
    """Of the sampled tokens, by an engine with the weights of `seed` alone."""
    replica = new_replica(path, shadow=False)
    replica.engine.load_weights(random_tensors(RAW, seed).items(), 0)
    ids = np.concatenate([request(ordinal).prompt_ids, result.token_ids])
    return prompt_logprobs(replica.engine, ids)[len(request(ordinal).prompt_ids) - 1 :]


def differ(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a - b).max() > 1e-3)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """But for FP32 sums in another order."""
    return bool(np.abs(a - b).max() < 1e-5)


@pytest.mark.parametrize(("shadow", "beside"), [(True, 3), (False, 0)])
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_requests_under_way_change_version_at_the_flip_and_not_before(
    model_path, mode, shadow, beside
):
    results, replica = run_over_a_sync(model_path, mode, shadow=shadow, beside=beside)
    flip = 5 + beside
    for ordinal, result in enumerate(results):
        assert result.finish_reason == "length"
        assert result.version_spans.tolist() == [[0, 1], [flip, 2]]
        old, new = (logprobs(model_path, seed, result, ordinal) for seed in (0, 7))
        assert same(result.logprobs[:flip], old[:flip])
        assert differ(result.logprobs[flip:], old[flip:])
        # Kept pages are of the old weights: what follows is of neither model alone.
        assert same(result.logprobs[flip:], new[flip:]) == (mode == "recompute")
    assert replica.generate([request(2)])[0].version_spans.tolist() == [[0, 2]]


@pytest.mark.parametrize(("shadow", "beside"), [(True, 3), (False, 0)])
def test_a_drain_ends_all_requests_with_the_version_they_began_with(model_path, shadow, beside):
    results, replica = run_over_a_sync(model_path, "drain", shadow=shadow, beside=beside)
    for ordinal, result in enumerate(results):
        assert result.version_spans.tolist() == [[0, 1]]
        assert len(result.token_ids) == LENGTH
        assert same(result.logprobs, logprobs(model_path, 0, result, ordinal))
    (after,) = replica.generate([request(2)])
    assert after.version_spans.tolist() == [[0, 2]]
    assert same(after.logprobs, logprobs(model_path, 7, after, 2))

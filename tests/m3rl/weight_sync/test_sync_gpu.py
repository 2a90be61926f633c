"""Whole syncs between processes with their weights on GPUs, and what a death costs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels.harness import Bench
from benchmarks.remote import RemoteProcess
from benchmarks.sync_sides import ReplicaSide
from benchmarks.weight_sync import Pair, Worker
from m3rl.weight_sync import replica
from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.messages import Limits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KIB = 1 << 10

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU a rank")


class DyingReplica(ReplicaSide):
    """Kills itself in a round of its next sync."""

    def die_in(self, rounds: int) -> None:
        left, written = [rounds], self.written

        def dying(first: int, last: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            written(first, last)

        self.written = dying


def started(kind: type[ReplicaSide], raw: dict[str, Any]) -> RemoteProcess:
    process = RemoteProcess(kind, raw, "cuda:1", "none")
    process.call("num_tensors").result(120)
    return process


@pytest.fixture
def pair(request, tmp_path: Path) -> Iterator[Pair]:
    devices, backend, quantization = request.param
    made = Pair(Bench(300, tmp_path), quantization, devices, backend, is_small=True, timeout_s=10)
    yield made
    made.end()


NCCL = (["cuda:0", "cuda:1"], "nccl")
CASES = [
    pytest.param((*NCCL, "none"), marks=needs_two),
    pytest.param((*NCCL, "mxfp8_released"), marks=needs_two),
    pytest.param((["cuda:0", "cuda:0"], "gloo", "mxfp8"), id="one GPU, through pinned memory"),
    pytest.param((["cpu", "cuda:0"], "gloo", "none"), id="a trainer on the CPU"),
]


@pytest.mark.parametrize("pair", CASES, indirect=True)
@pytest.mark.parametrize("chunk_kib", [64, 64 * KIB])
def test_the_gpu_holds_the_trainers_bits_after_each_of_three_syncs(
    pair: Pair, chunk_kib: int, monkeypatch
):
    monkeypatch.setattr(replica, "LIMITS", Limits(chunk_kib * KIB, pack_bytes=chunk_kib * KIB))
    sync = pair.driver(verify=True, chunk_bytes=chunk_kib * KIB)
    for version in (1, 2, 3):
        pair.step()
        assert sync.sync(version).checksum_ok
        assert pair.num_differing() == 0
    sync.close()


@needs_two
@pytest.mark.parametrize("pair", [(*NCCL, "none")], indirect=True)
def test_a_trainer_lives_on_when_its_replica_dies_in_a_round(pair: Pair, monkeypatch):
    monkeypatch.setattr(replica, "LIMITS", Limits(16 * KIB))
    pair.replica.end()
    pair.replica = started(DyingReplica, pair.raw)
    sync = pair.driver(verify=True, chunk_bytes=16 * KIB)
    sync.sync(1)
    pair.replica.call("die_in", 20).result(60)
    with pytest.raises(SyncError, match="the process died"):
        sync.sync(2)
    assert sync.states() == {0: "POISONED"}
    pair.step()
    pair.replica = started(ReplicaSide, pair.raw)
    sync.connect(0, Worker(pair.replica))
    assert sync.sync(3).checksum_ok
    assert pair.num_differing() == 0
    pair.ranks[0].kill()
    with pytest.raises(SyncError, match="the process died"):
        sync.sync(4)
    sync.close()

"""Whole syncs between processes with their weights on GPUs, and what a death costs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.kernels.harness import Bench
from benchmarks.remote import RemoteProcess
from benchmarks.sync_sides import ReplicaSide
from benchmarks.weight_sync import Pair, Worker
from m3rl.rendezvous import Rendezvous
from m3rl.weight_sync import replica
from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.messages import Limits
from m3rl.weight_sync.transport import Deadline, GroupSpec, Transfer, Transport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KIB = 1 << 10

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU a rank")


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


def started(kind: type[ReplicaSide], pair: Pair) -> RemoteProcess:
    process = RemoteProcess(kind, pair.raw, pair.devices[-1], "none")
    process.call("num_tensors").result(120)
    return process


@pytest.fixture
def pair(request, tmp_path: Path) -> Iterator[Pair]:
    devices, backend, quantization = request.param
    made = Pair(Bench(300, tmp_path), quantization, devices, backend, is_small=True, timeout_s=10)
    yield made
    made.end()


TWO, ONE = ["cuda:0", "cuda:1"], ["cuda:0", "cuda:0"]
CASES = [
    pytest.param((TWO, "nccl", "none"), marks=needs_two),
    pytest.param((TWO, "nccl", "mxfp8_released"), marks=needs_two),
    pytest.param((TWO, "ipc", "none"), marks=needs_two),
    pytest.param((TWO, "ipc", "mxfp8_released"), marks=needs_two),
    pytest.param((ONE, "ipc", "mxfp8"), id="one GPU, mapped"),
    pytest.param((ONE, "gloo", "mxfp8"), id="one GPU, through pinned memory"),
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


DEATHS = [
    pytest.param((TWO, "nccl", "none"), marks=needs_two),
    pytest.param((TWO, "ipc", "none"), marks=needs_two),
    pytest.param((ONE, "ipc", "none"), id="one GPU, mapped"),
]


@pytest.mark.parametrize("pair", DEATHS, indirect=True)
def test_a_trainer_lives_on_when_its_replica_dies_in_a_round(pair: Pair, monkeypatch):
    monkeypatch.setattr(replica, "LIMITS", Limits(16 * KIB))
    pair.replica.end()
    pair.replica = started(DyingReplica, pair)
    sync = pair.driver(verify=True, chunk_bytes=16 * KIB)
    sync.sync(1)
    pair.replica.call("die_in", 20).result(60)
    with pytest.raises(SyncError, match="the process died"):
        sync.sync(2)
    assert sync.states() == {0: "POISONED"}
    pair.step()
    pair.replica = started(ReplicaSide, pair)
    sync.connect(0, Worker(pair.replica))
    assert sync.sync(3).checksum_ok
    assert pair.num_differing() == 0
    pair.ranks[0].kill()
    with pytest.raises(SyncError, match="the process died"):
        sync.sync(4)
    sync.close()


class Member:
    """One end of a group whose members share a GPU; each message has memory of its own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.device = torch.device("cuda:0")

    def join(self, group: GroupSpec) -> None:
        self.transport = Transport.join(group, self.rank, self.device)

    def send(self, fill: int) -> None:
        wire = torch.full((MESSAGE_BYTES,), fill, dtype=torch.uint8, device=self.device)
        posted = self.transport.post(sends=[Transfer(wire, 1, 0, "a part")])
        self.transport.wait(posted, Deadline(10))
        self.transport.note("done")
        del wire, posted
        torch.cuda.empty_cache()

    def receive(self) -> list[int]:
        wire = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=self.device)
        posted = self.transport.post(receives=[Transfer(wire, 0, 0, "a part")])
        self.transport.wait(posted, Deadline(10))
        event = torch.cuda.current_stream(self.device).record_event()
        self.transport.wait_for_device(event, Deadline(10))
        return wire.unique().tolist()

    def num_mapped(self) -> int:
        return len(self.transport._memory._opened)


MESSAGE_BYTES = 24 << 20  # torch's allocator gives it a segment of its own


def test_memory_that_the_sender_frees_is_unmapped_and_its_address_may_be_used_again():
    rendezvous = Rendezvous("127.0.0.1", 60.0)
    group = GroupSpec(0, 1, 1, "127.0.0.1", rendezvous.port, "key", 60.0, "ipc")
    members = [RemoteProcess(Member, rank) for rank in range(2)]
    try:
        for joining in [member.call("join", group) for member in members]:
            joining.result(120)
        for fill in range(1, 6):
            sending, receiving = members[0].call("send", fill), members[1].call("receive")
            sending.result(60)
            assert receiving.result(60) == [fill]
        assert members[1].call("num_mapped").result(60) <= 3
    finally:
        for member in members:
            member.end()

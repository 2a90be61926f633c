from __future__ import annotations

import os
import signal
import socket

import pytest
import ray
import torch

from benchmarks.remote import RemoteProcess
from m3rl.rendezvous import Meeting, Rendezvous
from m3rl.rollout.m3_backend import RankActor
from m3rl.rollout.m3_replica import ReplicaSettings
from m3rl.rollout.placement import ClusterError, Place, gpus_to_see, ray_cluster, see_gpus


@pytest.fixture
def failing(monkeypatch):
    """Ray as it is where it cannot start."""
    asked = []

    def init(**options):
        asked.append(options)
        raise Exception("The current node timed out during startup")  # as Ray raises it

    monkeypatch.setattr(ray, "init", init)
    return asked


def test_a_ray_that_cannot_start_is_told_with_where_to_look(failing, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(ClusterError, match=r"cannot start here: The current node .* `m3rl doctor`"),
        ray_cluster(3),
    ):
        pass
    assert failing[0]["num_cpus"] >= 3


def test_a_cluster_that_cannot_be_joined_is_named_with_its_address(failing, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(ClusterError, match=r"RAY_ADDRESS=10.0.0.9:6379: cannot join: .*ray status"),
        ray_cluster(3),
    ):
        pass
    assert "num_cpus" not in failing[0]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_sees_its_own_gpu_first_and_those_of_its_group_on_its_node():
    # Two nodes; on the second, GPUs 1 and 2 belong to another group.
    places = [Place("a", ("4",)), Place("b", ("3",)), Place("a", ("0",)), Place("b", ("0",))]
    assert gpus_to_see(places) == [["4", "0"], ["3", "0"], ["0", "4"], ["0", "3"]]


def test_a_rank_of_several_gpus_shows_all_of_them():
    places = [Place("a", ("0", "1")), Place("a", ("2", "3"))]
    assert gpus_to_see(places) == [["0", "1", "2", "3"], ["2", "3", "0", "1"]]


def test_ranks_without_gpus_see_none():
    assert gpus_to_see([Place("a", ()), Place("a", ())]) == [[], []]


class StartedRank(RankActor):
    """Notes what its process shows CUDA when the engine would start."""

    def start(self, rank, meeting, host):
        names = ("CUDA_VISIBLE_DEVICES", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
        self.seen = [os.environ.get(name) for name in names]


@pytest.mark.parametrize(
    ("gpus", "seen"), [(["1", "0", "6"], ["1,0,6", "1"]), ([], ["5", None])], ids=["some", "none"]
)
def test_a_rank_shows_cuda_its_gpus_before_it_starts(monkeypatch, gpus, seen):
    """Without any, what Ray has set stays."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "")
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    monkeypatch.setattr("m3rl.rollout.m3_backend.node_address", lambda: "127.0.0.1")
    rank = StartedRank(ReplicaSettings("none", {}))
    rank.join(0, Meeting("127.0.0.1", 1, "", 1.0), gpus)
    assert rank.seen == seen


def test_the_port_of_a_rendezvous_is_taken_before_anybody_is_told_of_it():
    rendezvous = Rendezvous("127.0.0.1", 5.0)
    meeting = rendezvous.new_meeting()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((meeting.host, meeting.port))
    store = meeting.store()
    store.set("here", "1")
    assert meeting.store().get("here") == b"1"


def test_meetings_of_one_rendezvous_are_apart():
    rendezvous = Rendezvous("127.0.0.1", 5.0)
    first, second = (rendezvous.new_meeting().store() for _ in range(2))
    first.set("here", "1")
    assert first.check(["here"])
    assert not second.check(["here"])


class SummingRank:
    """One of two ranks, each with a GPU of its own, as `RankActor` makes them see these."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        see_gpus(gpus_to_see([Place("here", ("0",)), Place("here", ("1",))])[rank])
        from inference.parallel.config import ParallelConfig
        from inference.parallel.groups import ParallelGroups

        torch.distributed.init_process_group("gloo", store=meeting.store(), rank=rank, world_size=2)
        self.rank = rank
        self.groups = ParallelGroups.create(ParallelConfig(tp=2), timeout_s=20, backend="nccl")

    def sum(self) -> tuple[bool, list[float], str]:
        """(whether it went through common memory, the sum, on which GPU); on any thread."""
        x = torch.full((37, 384), self.rank + 1.0, dtype=torch.bfloat16, device="cuda")
        self.groups.all_reduce(x).wait()
        values = x.unique().tolist()  # waits for the device
        uuid = str(torch.cuda.get_device_properties(x.device).uuid)
        return self.groups.tp_memory is not None, values, uuid


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_that_see_each_others_gpus_sum_in_common_memory():
    rendezvous = Rendezvous("127.0.0.1", 60.0)
    meeting = rendezvous.new_meeting()
    ranks = [RemoteProcess(SummingRank, rank, meeting) for rank in range(2)]
    try:
        calls = [rank.call("sum") for rank in ranks]  # which wait for one another
        sums = [call.result(120) for call in calls]
    finally:
        for rank in ranks:
            rank.end()
    assert [in_memory for in_memory, _, _ in sums] == [True, True]
    assert [values for _, values, _ in sums] == [[3.0], [3.0]]
    assert sums[0][2] != sums[1][2]

"""Trainer ranks as real Ray actors: where they meet, and what is said of those that fail."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import psutil
import pytest
import ray
import torch

from m3rl import cli, launch
from m3rl.rollout.placement import ray_cluster
from tests.m3rl.rank_cases import SETTINGS


class LateRank(launch.RankProcess):
    """Before it begins, another program on its machine asks for the port that was chosen."""

    def build(self, settings, rank, world_size, meet_at):
        url = urlsplit(meet_at)
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind((url.hostname, url.port))
        super().build(settings, rank, world_size, meet_at)

    def call(self, method, *args):
        assert method == "sum"
        return self._rank._group.sum(torch.tensor(self._rank.rank + 1.0)).item()


@pytest.mark.timeout(180)
def test_the_port_where_ranks_meet_is_taken_from_the_moment_it_is_chosen(monkeypatch):
    monkeypatch.setattr(launch, "RankProcess", LateRank)
    with ray_cluster(2):
        ranks = launch.TrainerRanks(SETTINGS, 2, num_threads=1)
        assert ranks.all("sum") == [3.0, 3.0]
        ranks.close()


class SummingRank(launch.RankProcess):
    """A whole rank, of which a collective alone is wanted."""

    def call(self, method, *args):
        return getattr(self, method)()

    def pid(self):
        return os.getpid()

    def sum(self):
        return self._rank._group.sum(torch.tensor(self._rank.rank + 1.0)).item()


@pytest.mark.timeout(180)
def test_ranks_that_do_not_answer_end_the_wait_and_those_that_are_stopped_are_named(monkeypatch):
    monkeypatch.setattr(launch, "RankProcess", SummingRank)
    monkeypatch.setattr(launch, "ANSWER_S", 2.0)
    with ray_cluster(2):
        ranks = launch.TrainerRanks(replace(SETTINGS, timeout_s=3.0), 2, num_threads=1)
        assert ranks.all("sum") == [3.0, 3.0]
        pids = ranks.all("pid")
        with pytest.raises(
            launch.RankError,
            match=r"sum: no answer from trainer rank 0 within train\.timeout_s=3 s; all their "
            r"processes are there: .* raise train\.timeout_s",
        ):
            ranks.one(0, "sum")  # which the other one never enters
        assert ranks.one(1, "sum") == 3.0  # and it was no deadline of the collective's own
        os.kill(pids[1], signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(
            launch.RankError,
            match=r"no answer from trainer rank 0, 1 within .*; the process of rank 1 is stopped",
        ):
            ranks.all("sum")
        assert time.monotonic() - begin < 15
        ranks.close()
        psutil.Process(pids[1]).wait(timeout=20)  # nothing is left that holds a GPU


class BareRank(launch.RankProcess):
    """A process without a model."""

    def build(self, settings, rank, world_size, meet_at):
        self.number = rank

    def call(self, method, *args):
        return getattr(self, method)(*args)

    def pid(self):
        return os.getpid()

    def stall(self):
        time.sleep(self.number * 1.5)

    @ray.method(concurrency_group="sync")
    def sync_call(self, method, *args):
        time.sleep(30)


class FailingRank(BareRank):
    def build(self, settings, rank, world_size, meet_at):
        raise ValueError(f"rank {rank} finds\nno such device")


@pytest.fixture
def cluster(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "RankProcess", BareRank)
    with ray_cluster(2):
        yield


@pytest.mark.timeout(180)
def test_the_faults_of_ranks_are_told_in_a_line(cluster, monkeypatch, caplog):
    ranks = launch.TrainerRanks(SETTINGS, 2, num_threads=1, num_replicas=1)
    pids = ranks.all("pid")

    monkeypatch.setattr(launch, "WARN_EVERY_S", 0.4)
    assert ranks.all("pid") == pids
    assert "no answer" not in caplog.text
    for call in (lambda: ranks.all("stall"), lambda: ranks.one(1, "stall")):
        caplog.clear()
        call()
        told = re.findall(r"stall: no answer from trainer rank 1 for (\d+) s", caplog.text)
        assert len(told) == caplog.text.count("no answer") > 1, "again while it lasts"
        assert told == sorted(told)

    for _ in range(2):  # of one replica, until the hashes are there and all is sent
        for rank in range(2):
            ranks.call(rank, "sync_hashes", 0)
    ranks.require_answers(10.0)

    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(launch.RankError, match=r"trainer rank 1 is silent for 0\.5 s"):
        ranks.require_answers(0.5)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(launch.RankError, match=rf"trainer rank 1 died: .*pid: {pids[1]}"):
        ranks.require_answers(20.0)
    ranks.close()

    monkeypatch.setattr(launch, "RankProcess", FailingRank)
    with pytest.raises(launch.RankError, match=r"could not start: ValueError: no such device"):
        launch.TrainerRanks(SETTINGS, 1, num_threads=1)


@pytest.mark.timeout(60)
def test_a_termination_comes_out_of_a_wait_for_ray(cluster, monkeypatch):
    """As SystemExit it would come as one of code 1."""
    before = signal.signal(signal.SIGTERM, cli._terminate)
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        never = ray.remote(lambda: time.sleep(30)).remote()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ray.wait([never])
        assert cli._is_terminated.is_set()
    finally:
        timer.join()
        cli._is_terminated.clear()
        signal.signal(signal.SIGTERM, before)

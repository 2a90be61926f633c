"""Trainer ranks as real Ray actors meet at a port that nobody else can take."""

import socket
from urllib.parse import urlsplit

import pytest
import torch

from m3rl import launch
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

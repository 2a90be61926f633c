"""A rank that dies, fails or does not come: a clear error on every other rank, in bounded time."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from inference.parallel.config import ParallelConfig
from inference.parallel.exchange import ExpertExchange
from inference.parallel.groups import ParallelGroups
from tests.inference.parallel.ranks import Ranks

WAY = {"all-reduce": ParallelConfig(tp=4), "fixed": ParallelConfig(dp=4)}
WAY["counted"] = WAY["fixed"]


def collective(groups: ParallelGroups, way: str) -> None:
    if way == "all-reduce":
        groups.all_reduce(torch.ones(1000)).wait()
        return
    ids = torch.arange(4, dtype=torch.int32)[:, None]
    rows = 4 if way == "fixed" else None
    exchange = ExpertExchange(groups, num_experts=4)
    exchange.dispatch(torch.ones(4, 8), ids, torch.ones(4, 1), num_rows=rows).received()


def misbehave(rank: int, way: str, victim: int, how: str, timeout_s: float) -> tuple[str, float]:
    """What the rank says of a collective without `victim`, and after how many seconds."""
    groups = ParallelGroups.create(WAY[way], timeout_s=timeout_s)
    begin = time.monotonic()
    try:
        # Complete on the victim before it is on the others, who may miss it here already.
        collective(groups, way)
        if rank == victim:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "fails":
                raise ValueError("no memory for 3 pages")
            time.sleep(2 * timeout_s)
        collective(groups, way)
    except Exception as error:
        groups.close(error)
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    groups.close()
    return "completed", time.monotonic() - begin


@pytest.mark.parametrize("way", ["all-reduce", "fixed", "counted"])
def test_a_killed_rank_is_named_on_every_other_rank(tmp_path: Path, way: str):
    ranks = Ranks(4, tmp_path)
    try:
        answers = ranks.run(misbehave, way, 2, "dies", 60)
    finally:
        ranks.close()
    assert answers.pop(2) == ("died", -signal.SIGKILL)
    operation = "all-reduce" if way == "all-reduce" else r"(counts before )?dispatch( of tokens)?"
    for rank, (kind, result) in zip((0, 1, 3), answers, strict=True):
        assert kind == "ok", result
        message, seconds = result
        expected = rf"ParallelError: rank {rank}: {operation} was not completed: rank 2 is gone"
        assert re.match(expected, message), message
        assert seconds < 10, "the groups' timeout is 60 s"


def test_a_rank_that_fails_by_itself_tells_the_others_why(four_ranks: Ranks):
    answers = four_ranks.results(misbehave, "all-reduce", 1, "fails", 60)
    for rank, (message, seconds) in enumerate(answers):
        if rank == 1:
            assert message == "ValueError: no memory for 3 pages"
        else:
            assert "rank 1 failed: ValueError: no memory for 3 pages" in message
        assert seconds < 10


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over(four_ranks: Ranks):
    answers = four_ranks.results(misbehave, "all-reduce", 3, "sleeps", 2.0)
    for rank, (message, seconds) in enumerate(answers[:3]):
        expected = f"ParallelError: rank {rank}: all-reduce was not completed: rank 3 is late"
        assert message.startswith(expected), message
        assert seconds < 6
    message, _ = answers[3]
    expected = "ParallelError: rank 3: all-reduce was not completed: all others gave up: rank 0 in"
    assert message.startswith(expected), message


def wrong_size(rank: int) -> None:
    ParallelGroups.create(ParallelConfig(tp=2), timeout_s=5)


def another_split(rank: int) -> None:
    config = ParallelConfig(tp=2, dp=2) if rank == 3 else ParallelConfig(tp=4)
    ParallelGroups.create(config, timeout_s=20)


def test_ranks_that_ask_for_different_splits_are_refused(four_ranks: Ranks):
    for kind, message in four_ranks.run(another_split):
        assert kind == "error"
        assert "ParallelError" in message
        assert "the split must be the same on all ranks" in message
        assert message.endswith("of rank 3 another one")


def without_the_others(rank: int) -> None:
    if rank:
        return
    ParallelGroups.create(ParallelConfig(tp=4), timeout_s=2)


def test_a_rank_that_waits_alone_says_so(tmp_path: Path):
    ranks = Ranks(4, tmp_path)
    try:
        kind, message = ranks.run(without_the_others)[0]
    finally:
        ranks.close()
    assert kind == "error"
    assert message.startswith("ParallelError: rank 0: not all ranks came")


def test_a_world_of_another_size_is_refused(four_ranks: Ranks):
    for kind, message in four_ranks.run(wrong_size):
        assert kind == "error"
        assert message == "ParallelError: tp=2, dp=1 need 2 ranks, 4 are there"

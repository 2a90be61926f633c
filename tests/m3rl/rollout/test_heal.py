"""Lost replicas come back, all are told of before the first, and nobody restarts without end."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from m3rl.errors import M3rlError
from m3rl.rollout.backend import BackendError, ReplicaHealth
from m3rl.rollout.heal import GivenUpError, Healer


class Pool:
    """Backend and weight sync in one; notes what it is asked, in order."""

    def __init__(self, dead: set[int]) -> None:
        self.dead = dead
        self.events: list[tuple] = []
        self.faults: dict[int, list[M3rlError]] = {}
        self.unfit: dict[int, list[int]] = {}
        """Replica -> those that are found unfit while it is brought back."""
        self.poisoned: list[int] = []

    def health(self) -> list[ReplicaHealth]:
        return [ReplicaHealth(r, r not in self.dead, 1, "") for r in range(4)]

    def restart(self, replica: int) -> None:
        self.events.append(("restart", replica))
        self.dead.discard(replica)

    def drop(self, replica: int) -> None:
        self.events.append(("drop", replica))
        self.dead.add(replica)

    def bring(self, replica: int) -> None:
        self.events.append(("bring", replica))
        self.poisoned += self.unfit.pop(replica, [])
        if self.faults.get(replica):
            raise self.faults[replica].pop(0)
        if replica in self.poisoned:
            self.poisoned.remove(replica)

    def forget(self, replica: int) -> None:
        self.events.append(("forget", replica))

    def lose(self, replicas: Collection[int]) -> None:
        self.events.append(("lose", *sorted(replicas)))


def healer(pool: Pool, max_restarts: int = 5) -> Healer:
    return Healer(
        pool,  # type: ignore[arg-type]
        bring=pool.bring,
        forget=pool.forget,
        max_restarts=max_restarts,
        lose=pool.lose,
        poisoned=lambda: pool.poisoned,
    )


def test_all_that_are_lost_are_told_of_before_the_first_is_brought_back() -> None:
    pool = Pool(dead={0, 2})
    heal = healer(pool)
    assert heal(2)
    assert pool.events == [("lose", 0, 2), ("restart", 2), ("bring", 2)]
    assert heal(0)
    assert pool.events[3:] == [("lose", 0), ("restart", 0), ("bring", 0)]
    assert heal.num_restarts == 2


def test_one_that_answers_is_lost_too_when_it_is_to_be_healed() -> None:
    pool = Pool(dead=set())
    assert healer(pool)(3)
    assert pool.events[0] == ("lose", 3)


def test_it_tries_again_until_the_restarts_of_the_run_are_used_up(caplog) -> None:
    pool = Pool(dead={1})
    pool.faults[1] = [BackendError("no room"), BackendError("no room")]
    heal = healer(pool, max_restarts=3)
    assert heal(1)
    assert heal.num_restarts == 3
    del pool.events[:]
    pool.dead.add(0)
    assert not heal(0)
    assert pool.events == [("drop", 0), ("forget", 0)]
    assert "replica 0 is dropped: rollout.backend.max_restarts=3 is used up" in caplog.text


def test_a_replica_that_is_given_up_costs_no_more_restarts(caplog) -> None:
    pool = Pool(dead={1})
    pool.faults[1] = [GivenUpError("it failed the probe 2 times in a row: 0.5")]
    heal = healer(pool, max_restarts=1000)
    assert not heal(1)
    assert heal.num_restarts == 1
    assert pool.events[-2:] == [("drop", 1), ("forget", 1)]
    assert "replica 1 is dropped: it failed the probe 2 times in a row: 0.5" in caplog.text


def test_what_was_found_unfit_meanwhile_is_healed_too() -> None:
    pool = Pool(dead={1})
    pool.unfit = {1: [2], 2: [3]}
    assert healer(pool)(1)
    assert [event for event in pool.events if event[0] == "restart"] == [
        ("restart", 1),
        ("restart", 2),
        ("restart", 3),
    ]


def test_of_several_each_is_restarted_once_also_where_another_found_it_unfit() -> None:
    pool = Pool(dead={1, 2})
    pool.unfit = {1: [2, 3]}
    assert healer(pool)(1, 2)
    assert [event for event in pool.events if event[0] == "restart"] == [
        ("restart", 1),
        ("restart", 2),
        ("restart", 3),
    ]


def test_what_was_found_unfit_is_healed_though_its_finder_is_dropped() -> None:
    pool = Pool(dead={1})
    pool.faults[1] = [GivenUpError("its probe fails")]
    pool.unfit = {1: [2]}
    assert not healer(pool)(1)
    assert pool.events[-2:] == [("restart", 2), ("bring", 2)]


def test_where_no_restart_can_help_none_is_spent() -> None:
    class RankGone(M3rlError):
        pass

    pool = Pool(dead={1})

    def lose(replicas: Collection[int]) -> None:
        raise RankGone("trainer rank 0 is silent")

    pool.lose = lose  # type: ignore[method-assign]
    heal = healer(pool)
    with pytest.raises(RankGone):
        heal(1)
    assert heal.num_restarts == 0
    assert pool.events == []


def test_the_answer_is_about_the_replica_that_was_asked_for() -> None:
    pool = Pool(dead={1})
    pool.unfit = {1: [2]}
    assert healer(pool, max_restarts=1)(1)
    assert pool.events[-2:] == [("drop", 2), ("forget", 2)]


def test_a_fault_of_the_run_is_not_swallowed() -> None:
    class Stop(M3rlError):
        pass

    pool = Pool(dead={1})

    def stop(replica: int) -> None:
        raise Stop("every replica fails the probe")

    pool.forget = stop
    with pytest.raises(Stop):
        healer(pool, max_restarts=0)(1)

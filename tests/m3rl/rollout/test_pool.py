"""A pool whose replicas are one actor with several ranks behind it, each with a receiver."""

import time

import pytest
import ray

from m3rl.rollout import pool as pool_module
from m3rl.rollout.backend import BackendError
from m3rl.rollout.placement import WorkerDied, ray_cluster, worker_options
from m3rl.rollout.pool import ReplicaPool
from m3rl.rollout.receiver_seat import ReceiverSeat
from m3rl.types import TensorSlot

NUM_RANKS = 2


class ManyRanks:
    """An actor that answers for all ranks of its replica."""

    def __init__(self, is_broken):
        if is_broken:
            raise RuntimeError("no engine of this model")
        self.seats = [ReceiverSeat() for _ in range(NUM_RANKS)]

    def health(self):
        return {"pid": 1, "version": None, "progress": 0, "failure": ""}

    def alike(self, number, method, *args):
        return getattr(self, method)(*args)

    def weight_layout(self):
        bounds = [((0, 1),), ((1, 2),)]
        return [[TensorSlot("w", "float32", (2,), each, "pre")] for each in bounds]

    def gpu(self):
        return [f"GPU-{rank}@here" for rank in range(NUM_RANKS)]

    def attach(self, rank, receiver):
        self.seats[rank].attach(receiver, rank)

    def receiver_call(self, rank, method, *args):
        return self.seats[rank].call(method, *args)


class ManyRanksPool(ReplicaPool):
    def __init__(self, is_broken=False, start_timeout_s=60.0):
        self._is_broken = is_broken
        self.freed = []
        super().__init__(2, num_ranks=NUM_RANKS, num_gpus=0, start_timeout_s=start_timeout_s)

    def _new_workers(self, replica):
        return [ray.remote(ManyRanks).options(**worker_options(1)).remote(self._is_broken)]

    def _free(self, replica):
        self.freed.append(replica)

    def _by_rank(self, answers):
        return answers[0]

    def _attach(self, replica, rank, receiver):
        return self.actor(replica).attach.remote(rank, receiver)

    def _receiver_call(self, replica, rank, method, *args):
        return self.actor(replica).receiver_call.remote(rank, method, *args)


class Closing(ManyRanks):
    """Puts something in order before it ends, or does not get so far."""

    def __init__(self, note, is_silent):
        super().__init__(is_broken=False)
        self.note, self.is_silent = note, is_silent

    def close(self):
        if self.is_silent:
            time.sleep(600)
        self.note.write_text("closed")


class ClosingPool(ManyRanksPool):
    def __init__(self, folder, silent):
        self._folder, self._silent = folder, silent
        super().__init__()

    def _new_workers(self, replica):
        actor = ray.remote(Closing).options(**worker_options(1, max_concurrency=4))
        return [actor.remote(self._folder / str(replica), replica in self._silent)]

    def _begin_close(self, replica):
        return [self.actor(replica).close.remote()]


class Named:
    """A receiver that says where it was bound."""

    def bind(self, target):
        self.target = target

    def where(self, greeting):
        return f"{greeting} {self.target}"


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    with ray_cluster(2):
        yield


def test_ranks_behind_one_actor_have_a_receiver_a_layout_and_a_gpu_each():
    pool = ManyRanksPool()
    pool.wait_started()
    receivers = pool.receivers(1)
    with pytest.raises(RuntimeError, match=r"receiver.where: no receiver is attached"):
        receivers[0].call("where", "at").result(10)
    for receiver in receivers:
        receiver.attach(Named())
    assert [each.call("where", "at").result(10) for each in receivers] == ["at 0", "at 1"]
    assert [[slot.bounds for slot in rank] for rank in pool.weight_layout(1)] == [
        [((0, 1),)],
        [((1, 2),)],
    ]
    assert pool.gpus() == {
        f"replica {replica} rank {rank}": f"GPU-{rank}@here"
        for replica in range(2)
        for rank in range(NUM_RANKS)
    }
    ray.kill(pool.actor(1))

    def answer_until_dead():
        while True:
            receivers[1].call("where", "at").result(10)

    with pytest.raises(WorkerDied):
        answer_until_dead()
    pool.restart(1)  # the receivers reach the actor that took its place
    receivers[1].attach(Named())
    assert receivers[1].call("where", "now at").result(10) == "now at 1"
    pool.close()
    assert pool.freed == [1, 0, 1]


def test_an_engine_that_cannot_be_made_ends_the_start_with_its_reason():
    pool = ManyRanksPool(is_broken=True)
    with pytest.raises(BackendError, match=r"could not start: .*no engine of this model"):
        pool.wait_started()
    pool.close()


def _is_dead(actor):
    """Soon: it may answer until it is dead."""
    for _ in range(100):
        try:
            ray.get(actor.health.remote(), timeout=10)
        except ray.exceptions.RayActorError:
            return True
        time.sleep(0.05)
    return False


def test_a_replica_ends_in_order_and_a_silent_one_is_killed_at_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "CLOSE_TIMEOUT_S", 1.0)
    pool = ClosingPool(tmp_path, silent={1})
    pool.wait_started()
    actors = [pool.actor(replica) for replica in range(2)]
    began = time.monotonic()
    pool.close()
    assert 1.0 <= time.monotonic() - began < 10
    assert [file.name for file in tmp_path.iterdir()] == ["0"]
    assert all(map(_is_dead, actors))
    assert pool.freed == [0, 1]


def test_a_replica_that_died_is_dropped_without_a_wait(tmp_path):
    pool = ClosingPool(tmp_path, silent={0, 1})
    pool.wait_started()
    ray.kill(pool.actor(1))
    began = time.monotonic()
    pool.drop(1)
    assert time.monotonic() - began < pool_module.CLOSE_TIMEOUT_S / 2
    assert pool.alive == [0]
    ray.kill(pool.actor(0))
    pool.close()

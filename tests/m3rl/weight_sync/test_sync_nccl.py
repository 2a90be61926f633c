"""What of the groups between GPUs can be shown without one: order, deadlines, who is named."""

from __future__ import annotations

import collections
import itertools
import os
import threading

import pytest
import torch
from torch.distributed import HashStore

from m3rl.rendezvous import Rendezvous
from m3rl.weight_sync import nccl
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.errors import SyncError, TransportError
from m3rl.weight_sync.nccl import NcclTransport
from m3rl.weight_sync.transport import Deadline, GroupSpec, Transfer, Transport
from tests.m3rl.weight_sync.sync_fakes import (
    FakeEngine,
    TrainerRank,
    assert_holds,
    layout,
    local_sync,
    store_without_sockets,
)

CPU = torch.device("cpu")


class Done:
    def wait(self) -> None: ...


class FakeGroup:
    """A round's messages arrive when both ends have ended it; in order, without tags, as NCCL's."""

    mail: dict[tuple[str, int, int], collections.deque[torch.Tensor]]
    changed = threading.Condition()

    def __init__(self, key: str, rank: int) -> None:
        self.key, self.rank = key, rank
        self.round: list[tuple[str, torch.Tensor, int]] | None = None
        self.is_aborted = False

    def _start_coalescing(self) -> None:
        assert self.round is None, "a round is open"
        self.round = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self.round is not None, "outside of a round"
        self.round.append(("send", tensors[0], peer))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self.round is not None, "outside of a round"
        self.round.append(("recv", tensors[0], peer))

    def _end_coalescing(self) -> Done:
        assert self.round is not None, "no round is open"
        ops, self.round = self.round, None
        with self.changed:
            for kind, tensor, peer in ops:
                if kind == "send":
                    self.mail[self.key, self.rank, peer].append(tensor.clone())
            self.changed.notify_all()
            for kind, tensor, peer in ops:
                if kind == "recv":
                    box = self.mail[self.key, peer, self.rank]
                    if not self.changed.wait_for(lambda box=box: box or self.is_aborted, 10):
                        raise RuntimeError("nothing came")
                    if self.is_aborted:
                        raise RuntimeError("aborted")
                    message = box.popleft()
                    assert message.numel() == tensor.numel(), "another message"
                    tensor.copy_(message)
        return Done()

    def abort(self) -> None:
        with self.changed:
            self.is_aborted = True
            self.changed.notify_all()


@pytest.fixture(autouse=True)
def _fakes(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)
    FakeGroup.mail = collections.defaultdict(collections.deque)

    def meet(spec, rank, store, device):
        return NcclTransport(FakeGroup(spec.key, rank), spec, rank, store, CPU)

    monkeypatch.setattr(NcclTransport, "meet", meet)


@pytest.mark.parametrize("chunk_bytes", [64, 200, 1 << 20])
@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 1), (2, 3), (3, 2)])
def test_rounds_of_both_ends_match_without_tags(num_ranks, num_workers, chunk_bytes):
    engines = [FakeEngine(layout(w, num_workers)) for w in range(num_workers)]
    ranks = [TrainerRank(r, num_ranks) for r in range(num_ranks)]
    sync, senders, _ = local_sync({0: engines}, ranks, chunk_bytes=chunk_bytes, backend="nccl")
    for version, seed in enumerate([1, 2, 1], start=1):
        senders.load(seed)
        assert sync.sync(version).checksum_ok
        for w, engine in enumerate(engines):
            assert_holds(engine.tensors, layout(w, num_workers), seed)
    assert not any(FakeGroup.mail.values())
    sync.close()


def spec(num_senders: int = 1, num_workers: int = 1, timeout_s: float = 5.0) -> GroupSpec:
    return GroupSpec(3, num_senders, num_workers, "127.0.0.1", 1, "key", timeout_s, "nccl")


def members(count: int) -> list[NcclTransport]:
    store = HashStore()
    group = spec(1, count - 1)
    return [NcclTransport(FakeGroup("key", r), group, r, store, CPU) for r in range(count)]


class Event:
    """A point that the device does not reach, or reaches once somebody has left the group."""

    def __init__(self, is_past=lambda: False) -> None:
        self.query = is_past


def test_who_has_not_begun_is_late_and_who_waits_or_is_done_is_not(monkeypatch):
    monkeypatch.setattr(nccl, "LONG_WAIT_S", 0.0)
    trainer, first, second, third = members(4)
    trainer.note("begins")
    first.note("begins")
    second.note("begins")
    second.note("done")
    with pytest.raises(
        TransportError, match=r"replica 3 worker 0: .*trainer rank 0, replica 3 wor"
    ):
        first.wait_for_device(Event(), Deadline(0.05))
    third.note("begins")
    with pytest.raises(TransportError, match=r"worker 2: trainer rank 0 late or gone: after 0\.0"):
        third.wait_for_device(Event(), Deadline(0.05))


def test_a_member_that_goes_on_after_a_long_wait_is_late_again_if_it_stops(monkeypatch):
    monkeypatch.setattr(nccl, "LONG_WAIT_S", 0.0)
    trainer, worker = members(2)
    trainer.note("begins")
    worker.note("begins")
    answers = itertools.chain([False, False], itertools.repeat(True))
    trainer.wait_for_device(Event(lambda: next(answers)), Deadline(5))
    with pytest.raises(TransportError, match="trainer rank 0 late or gone"):
        worker.wait_for_device(Event(), Deadline(0.05))


def test_when_all_wait_nobody_is_blamed(monkeypatch):
    monkeypatch.setattr(nccl, "LONG_WAIT_S", 0.0)
    trainer, worker = members(2)
    trainer.note("begins")
    worker.note("begins")
    with pytest.raises(TransportError):
        trainer.wait_for_device(Event(), Deadline(0.05))
    with pytest.raises(TransportError, match="all others wait, or are done"):
        worker.wait_for_device(Event(), Deadline(0.05))


def test_a_device_that_goes_on_because_of_an_abort_has_not_received_anything():
    _, worker = members(2)
    worker.note("begins")

    def left() -> bool:
        worker.close()
        return True

    with pytest.raises(TransportError, match="replica 3 worker 0 has left the group"):
        worker.wait_for_device(Event(left), Deadline(5))


def test_leaving_aborts_and_does_not_wait_for_an_abort_that_hangs(monkeypatch):
    monkeypatch.setattr(nccl, "ABORT_S", 0.05)
    never = threading.Event()
    trainer, worker = members(2)
    group = worker._group
    worker.close()
    assert group.is_aborted
    monkeypatch.setattr(trainer._group, "abort", never.wait)
    trainer.close()
    trainer.close()
    never.set()
    with pytest.raises(TransportError, match="has left"):
        trainer.post(sends=[Transfer(torch.zeros(4, dtype=torch.uint8), 1, 0, "a part")])


def test_a_round_that_cannot_begin_names_its_first_part():
    _, worker = members(2)
    worker._group.is_aborted = True
    part = Transfer(torch.zeros(4, dtype=torch.uint8), 0, 0, "lm_head[0:2]")
    with pytest.raises(
        TransportError, match=r"1 transfers from lm_head\[0:2\] on was not begun \(a"
    ):
        worker.post(receives=[part])


def test_a_trainer_rank_that_is_stuck_learns_at_once_when_the_driver_gives_up():
    """Its replica died in a round; the other thread's wait ends with the group."""
    engine = FakeEngine(layout())
    sync, senders, workers = local_sync({0: [engine]}, backend="nccl", timeout_s=20.0)

    def die() -> None:
        raise RuntimeError("the process died")

    workers[0][0].before["stream"] = die
    link = senders.ranks[0].sender._links[0]
    link.transport.wait_for_device = lambda mark, deadline: NcclTransport.wait_for_device(
        link.transport, Event(), deadline
    )
    begin = Deadline(20.0)
    with pytest.raises(
        SyncError, match=r"the process died.*trainer rank 0: TransportError: .*left"
    ):
        sync.sync(1)
    assert begin.elapsed_s < 10


def test_weights_on_the_cpu_cannot_travel_over_nccl(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)
    Rendezvous("127.0.0.1", 5.0)
    port = next(reversed(sync_stores()))
    with pytest.raises(TransportError, match="trainer rank 0 keeps its weights on cpu, NCCL moves"):
        Transport.join(GroupSpec(0, 1, 1, "127.0.0.1", port, "k", 1.0, "nccl"), 0, CPU)


def sync_stores():
    from tests.m3rl.weight_sync import sync_fakes

    return sync_fakes._stores


def test_torchs_watchdog_is_told_to_leave_the_group_alone_and_others_not(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    with nccl._unwatched():
        assert {name: os.environ[name] for name in nccl.UNWATCHED} == nccl.UNWATCHED
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ

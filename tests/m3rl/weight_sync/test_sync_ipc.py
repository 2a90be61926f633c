"""Groups that map one another's memory: order, reuse, deaths and deadlines, without a GPU."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from benchmarks.remote import RemoteProcess
from m3rl.rendezvous import Rendezvous
from m3rl.weight_sync import ipc, ipc_links
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.errors import SyncError, TransportError
from m3rl.weight_sync.ipc import IpcTransport
from m3rl.weight_sync.ipc_memory import CudaMemory
from m3rl.weight_sync.transport import Deadline, GroupSpec, Transfer, Transport, here_key
from tests.m3rl.weight_sync import sync_fakes
from tests.m3rl.weight_sync.ipc_fakes import HostMemory, IpcRank, IpcReplica
from tests.m3rl.weight_sync.joining import TAKEN, GivingEngine, phases
from tests.m3rl.weight_sync.sync_fakes import (
    EXPERT,
    FakeEngine,
    TrainerRank,
    assert_holds,
    layout,
    local_sync,
    store_without_sockets,
)
from tests.m3rl.weight_sync.test_sync_processes import driver, holds, load
from tests.m3rl.weight_sync.test_sync_relayed import (
    NODES,
    StridedEngine,
    connected,
    expert_parallel,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _host_memory(monkeypatch):
    monkeypatch.setattr(ipc, "CudaMemory", HostMemory)


def spec(num_senders: int = 1, num_workers: int = 1, timeout_s: float = 5.0) -> GroupSpec:
    return GroupSpec(3, num_senders, num_workers, "127.0.0.1", 1, "key", timeout_s, "ipc")


def meeting(group: GroupSpec, *, hosts=None, monkeypatch=None) -> list:
    """How joining ended for each member: its transport, or an error."""
    store = HashStore()
    for rank in range(group.world_size):
        store.set(here_key(rank), "1")
    if hosts is not None:
        names = dict(enumerate(hosts))
        monkeypatch.setattr(
            ipc_links, "this_host", lambda: names[int(threading.current_thread().name[-1])]
        )

    def meet(rank: int) -> IpcTransport | TransportError:
        threading.current_thread().name = f"member-{rank}"
        try:
            return IpcTransport.meet(group, rank, store, CPU)
        except TransportError as error:
            return error

    with ThreadPoolExecutor(group.world_size) as threads:
        return list(threads.map(meet, range(group.world_size)))


@pytest.fixture
def pair():
    members = meeting(spec())
    yield members
    for member in members:
        member.close()


def part(fill: int, peer: int, size: int = 8) -> Transfer:
    wire = torch.full((size,), fill, dtype=torch.uint8)
    return Transfer(wire, peer, 0, "lm_head[0:2]")


def step(*members: IpcTransport) -> None:
    """Let hosts and devices come along."""
    for member in members:
        with member._lock:
            member._go_on()


def test_a_trainer_rank_is_not_told_that_memory_is_freed_which_it_never_mapped(pair):
    trainer, worker = pair
    worker._memory.gone = list(worker._memory.shared)
    worker.note("done")
    sending = trainer.post(sends=[part(7, 1)])
    receiving = worker.post(receives=[part(0, 0)])
    for _ in range(9):
        step(trainer, worker)
    worker.wait(receiving, Deadline(3))
    worker.wait_for_device(None, Deadline(3))
    trainer.wait(sending, Deadline(3))
    assert receiving.works == []


@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize("chunk_bytes", [64, 200, 1 << 20])
@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 1), (2, 3), (3, 2)])
def test_every_worker_holds_the_trainers_bits_after_each_sync(
    num_ranks, num_workers, chunk_bytes, lag, monkeypatch
):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)
    monkeypatch.setattr(HostMemory, "lag", lag)
    engines = [FakeEngine(layout(w, num_workers)) for w in range(num_workers)]
    ranks = [TrainerRank(r, num_ranks) for r in range(num_ranks)]
    sync, senders, _ = local_sync({0: engines}, ranks, chunk_bytes=chunk_bytes, backend="ipc")
    for version, seed in enumerate([1, 2, 1], start=1):
        senders.load(seed)
        assert sync.sync(version).checksum_ok
        for w, engine in enumerate(engines):
            assert_holds(engine.tensors, layout(w, num_workers), seed)
    sync.close()


@pytest.mark.parametrize("engine", [FakeEngine, StridedEngine])
@pytest.mark.parametrize("chunk_bytes", [2000, 1 << 20])
def test_workers_of_a_node_pass_on_what_they_hold_in_common(engine, chunk_bytes, monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)
    for name, (dtype, shape, bucket) in sync_fakes.TENSORS.items():
        larger = (8 * shape[0], *(8 * size for size in shape[1:]))
        monkeypatch.setitem(sync_fakes.TENSORS, name, (dtype, larger, bucket))
    engines = [engine(expert_parallel(w)) for w in range(4)]
    ranks = [TrainerRank(r, 2) for r in range(2)]
    sync, senders = connected(engines, ranks, NODES, chunk_bytes=chunk_bytes, backend="ipc")
    assert any(op.via >= 0 for op in sync.plan(0).ops)
    for version, seed in enumerate([1, 2, 1], start=1):
        senders.load(seed)
        assert sync.sync(version).checksum_ok
        for w, each in enumerate(engines):
            assert_holds(each.tensors, expert_parallel(w), seed)
    sync.close()


def test_a_late_replica_takes_the_weights_from_its_peer(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)
    engines = {r: [GivingEngine(layout(w, 2)) for w in range(2)] for r in range(2)}
    sync, senders, _ = local_sync(engines, connect=False, chunk_bytes=64, backend="ipc")
    sync.connect(0)
    senders.load(1)
    sync.sync(1, [0])
    sync.bring(1, 1)
    assert phases(sync, 1) == TAKEN
    for w in range(2):
        assert_holds(engines[1][w].tensors, layout(w, 2), 1)
    sync.close()


def test_a_message_is_done_for_its_sender_when_the_receivers_device_has_it(pair):
    trainer, worker = pair
    message, place = part(7, 1), part(0, 0)
    sending = trainer.post(sends=[message])
    receiving = worker.post(receives=[place])
    step(trainer, trainer, trainer, worker)
    worker._memory.lag = 1 << 30
    assert not sending.works[0].is_done
    (arrival,) = receiving.works
    assert arrival.is_done  # the copy was begun
    assert not place.wire.any()  # and the device has not come there
    worker.wait(receiving, Deadline(5))
    assert torch.equal(place.wire, message.wire)
    with pytest.raises(TransportError, match=r"replica 3 worker 0 is late: .*nobody took it"):
        trainer.wait(sending, Deadline(0.05))
    worker.wait_for_device(None, Deadline(5))
    trainer.wait(sending, Deadline(5))


def test_nothing_is_copied_before_the_senders_device_has_written_it(pair):
    trainer, worker = pair
    trainer._memory.lag = 1 << 30
    trainer.post(sends=[part(7, 1)])
    receiving = worker.post(receives=[part(0, 0)])
    with pytest.raises(
        TransportError,
        match=r"3 worker 0: trainer rank 0 is late: after 0\.\d s of 0\.1 s, lm_head\[0:2\] was "
        r"not transferred \(nothing came\)",
    ):
        worker.wait(receiving, Deadline(0.1))


def test_messages_that_nobody_awaits_yet_wait_for_their_places(pair):
    trainer, worker = pair
    sending = trainer.post(sends=[part(fill, 1) for fill in range(200)])
    for _ in range(9):
        step(trainer, worker)
    places = [part(255, 0) for _ in range(200)]
    for first in range(0, 200, 50):
        worker.wait(worker.post(receives=places[first : first + 50]), Deadline(5))
    worker.wait_for_device(None, Deadline(5))
    trainer.wait(sending, Deadline(5))
    assert [int(place.wire[0]) for place in places] == list(range(200))


def test_a_handle_travels_once_and_freed_memory_is_unmapped(pair):
    trainer, worker = pair
    message = part(1, 1)
    memory = message.wire.untyped_storage().data_ptr()
    for _ in range(3):
        sending = trainer.post(sends=[message])
        step(trainer, trainer, trainer)
        worker.wait(worker.post(receives=[part(0, 0)]), Deadline(5))
        worker.wait_for_device(None, Deadline(5))
        trainer.wait(sending, Deadline(5))
    (peer,) = worker._group.values()
    assert memory in peer.opened
    assert len(worker._memory.opened) == 2  # of the trial, and this
    trainer._memory.gone = [memory]
    trainer.note("done")
    step(worker)
    assert memory not in peer.opened
    assert len(worker._memory.opened) == 1
    worker.close()
    assert worker._memory.is_closed
    assert not worker._memory.opened


def test_ends_with_different_plans_are_told_apart(pair):
    trainer, worker = pair
    trainer.post(sends=[part(7, 1, size=8)])
    receiving = worker.post(receives=[part(0, 0, size=9)])
    step(trainer, trainer, trainer)
    with pytest.raises(TransportError, match="sends 8 bytes for the 9 of lm_head"):
        worker.wait(receiving, Deadline(5))


def test_a_peer_that_leaves_is_named_at_once(pair):
    trainer, worker = pair
    receiving = worker.post(receives=[part(0, 0)])
    trainer.close()
    with pytest.raises(TransportError, match=r"trainer rank 0 is gone .*its socket is closed"):
        worker.wait(receiving, Deadline(20))
    with pytest.raises(TransportError, match="trainer rank 0 has left the group of replica 3"):
        trainer.post(sends=[part(0, 1)])


def test_a_wait_ends_when_another_thread_leaves_the_group(pair):
    trainer, _ = pair
    sending = trainer.post(sends=[part(0, 1)])
    begin = Deadline(20)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(trainer.wait, sending, Deadline(20))
        time.sleep(0.05)
        trainer.interrupt()
        with pytest.raises(TransportError, match="trainer rank 0 has left the group"):
            waiting.result(10)
    assert begin.elapsed_s < 5


def test_a_trainer_rank_that_stalls_is_named_at_the_deadline(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)
    ranks = [TrainerRank(r, 2) for r in range(2)]
    engine = FakeEngine(layout())
    sync, _, _ = local_sync({0: [engine]}, ranks, timeout_s=0.5, backend="ipc")
    never, read = threading.Event(), ranks[1].read

    def stall(name, bounds):
        never.wait(1.0 if threading.current_thread().name.startswith("sync-") else 0)
        return read(name, bounds)

    ranks[1].sender._read = stall
    with pytest.raises(SyncError, match=r"worker 0: trainer rank 1 is late: after 0\.[5-9] s"):
        sync.sync(1)
    never.set()
    assert not engine.serves


def test_members_on_different_hosts_are_refused(monkeypatch):
    found = meeting(spec(2, 1), hosts=["a 1", "a 1", "b 2"], monkeypatch=monkeypatch)
    for error in found:
        assert "replica 3 worker 0 is on host b 2 and trainer rank 0 on a 1" in str(error)
        assert "set weight_sync.transport: nccl" in str(error)


def test_a_gpu_that_cannot_be_mapped_is_named_by_all_who_connect_with_it(monkeypatch):
    monkeypatch.setattr(HostMemory, "owners_that_map_nothing", ["replica 3 worker 0"])
    for error in meeting(spec()):
        assert (
            "replica 3 worker 0 (GPU of replica 3 worker 0) cannot map memory of trainer rank 0 "
            "(GPU of trainer rank 0): CUDA_ERROR_PEER_ACCESS_UNSUPPORTED; set "
            "weight_sync.transport: nccl"
        ) in str(error)


def test_weights_on_the_cpu_cannot_be_mapped(monkeypatch):
    monkeypatch.setattr(ipc, "CudaMemory", CudaMemory)
    (error, *_) = meeting(spec(timeout_s=1.0))
    assert "trainer rank 0 keeps its weights on cpu, CUDA IPC maps memory of GPUs" in str(error)


def test_a_member_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)
    rendezvous = Rendezvous("127.0.0.1", 5.0)
    group = dataclasses.replace(spec(timeout_s=0.3), port=rendezvous.port)
    with pytest.raises(TransportError, match=r"within 0\.3 s; not there: replica 3 worker 0"):
        Transport.join(group, 0, CPU)


def test_members_leave_no_file_and_no_socket(pair):
    numbers = [member._group[1 - rank].link.fileno() for rank, member in enumerate(pair)]
    files = [Path(f"/proc/self/fd/{number}") for number in numbers]
    assert all(file.exists() for file in files)
    inodes = [file.readlink().name.strip("socket:[]") for file in files]
    for member in pair:
        member.close()
    left = Path("/proc/net/unix").read_text().split()
    assert not any(inode in left for inode in inodes)


def test_a_worker_killed_amid_a_stream_costs_one_replica_and_a_trainer_rank_all():
    """Between processes, each of which reads the memory of others."""
    rank = RemoteProcess(IpcRank, 0, 1)
    workers = [RemoteProcess(IpcReplica, 0, 1) for _ in range(2)]
    replicas = {0: workers[:1], 1: workers[1:]}
    try:
        sync = driver([rank], replicas, backend="ipc")
        for version, seed in enumerate([3, 4], start=1):
            load([rank], seed)
            assert sync.sync(version).ready == (0, 1)
            for worker in workers:
                holds(worker, 0, 1, version, seed)
        workers[1].call("die_in_write", EXPERT.format(2)).result(60)
        load([rank], 5)
        report = sync.sync(3)
        assert report.ready == (0,)
        assert "replica 1 worker 0: RuntimeError: the process died" in report.failed[1]
        # Its socket says so, or the driver, whichever comes first.
        assert re.search(r"trainer rank 0(: replica 1 worker 0 is gone| has)", report.failed[1])
        assert report.seconds < 20  # nobody waited for the deadline
        rank.kill()
        begin = Deadline(60)
        with pytest.raises(SyncError, match="the process died"):
            sync.sync(4)
        assert begin.elapsed_s < 20
    finally:
        for process in [rank, *workers]:
            process.end()

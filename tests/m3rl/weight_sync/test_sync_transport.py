from __future__ import annotations

import dataclasses
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from m3rl.rendezvous import Meeting, Rendezvous, RendezvousError
from m3rl.weight_sync import errors
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.errors import TransportError
from m3rl.weight_sync.transport import (
    Deadline,
    GroupSpec,
    Transfer,
    Transport,
    in_background,
    wire_bytes,
    worker_ranks,
)
from tests.m3rl.weight_sync.sync_fakes import store_without_sockets

CPU = torch.device("cpu")


def part_of(num_bytes: int, peer: int, tag: int) -> Transfer:
    return Transfer(torch.zeros(num_bytes, dtype=torch.uint8), peer, tag, "lm_head[0:2]")


def spec(rendezvous: Rendezvous, timeout_s: float = 20.0) -> GroupSpec:
    return GroupSpec(
        replica=3,
        num_senders=1,
        num_workers=1,
        host=rendezvous.host,
        port=rendezvous.port,
        key="replica3/1",
        timeout_s=timeout_s,
    )


def pair(timeout_s: float = 20.0) -> tuple[Rendezvous, Transport, Transport]:
    rendezvous = Rendezvous("127.0.0.1", 20.0)
    with ThreadPoolExecutor(2) as threads:
        joining = [
            threads.submit(Transport.join, spec(rendezvous, timeout_s), r, CPU) for r in (0, 1)
        ]
        sender, worker = (future.result(30) for future in joining)
    return rendezvous, sender, worker


# BR-007
def test_ranks_of_three_engines_with_data_and_tensor_parallel_follow_the_trainer():
    ranks = worker_ranks(1, (3, 2, 2))
    assert sorted(ranks.values()) == list(range(1, 13))
    assert ranks[(0, 0, 1)] == 2
    assert ranks[(1, 0, 0)] == 5
    assert ranks[(2, 1, 1)] == 12
    assert sorted(worker_ranks(1, (3, 1, 2)).values()) == list(range(1, 7))


def test_a_group_has_the_trainer_ranks_first_and_names_every_member():
    group = dataclasses.replace(spec_of(2, 3), replica=4)
    assert group.world_size == 5
    assert [group.worker_rank(w) for w in range(3)] == [2, 3, 4]
    assert [group.member(r) for r in (0, 1, 2, 4)] == [
        "trainer rank 0",
        "trainer rank 1",
        "replica 4 worker 0",
        "replica 4 worker 2",
    ]


def spec_of(num_senders: int, num_workers: int) -> GroupSpec:
    return GroupSpec(0, num_senders, num_workers, "127.0.0.1", 1, "key", 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_wire_bytes_are_the_bits_of_the_tensor_row_by_row(dtype: torch.dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    for view in (tensor, tensor.T, tensor[1:, 1:3], tensor[0, 0]):
        wire = wire_bytes(view)
        assert wire.dtype == torch.uint8
        assert torch.equal(wire.view(dtype).view(view.shape), view)
    assert wire_bytes(tensor).data_ptr() == tensor.data_ptr()


def test_bits_cross_a_group_unchanged_nan_included():
    _, sender, worker = pair()
    bits = torch.tensor([0x7FC0, 0x7FC1, -0x8000, 0x0001, 0x3F80], dtype=torch.int16)
    sent = [bits.view(torch.bfloat16), torch.randn(7), torch.tensor(2.5)]
    buffers = [torch.zeros(wire_bytes(t).numel(), dtype=torch.uint8) for t in sent]
    receiving = worker.post(receives=[Transfer(b, 0, i, "a part") for i, b in enumerate(buffers)])
    sending = sender.post(
        sends=[Transfer(wire_bytes(t), 1, i, "a part") for i, t in enumerate(sent)]
    )
    sender.wait(sending, Deadline(20))
    worker.wait(receiving, Deadline(20))
    for tensor, buffer in zip(sent, buffers, strict=True):
        assert torch.equal(buffer, wire_bytes(tensor))


def test_a_peer_that_does_not_send_is_named_as_late():
    _, _sender, worker = pair()
    receiving = worker.post(receives=[part_of(4, 0, 0)])
    with pytest.raises(
        TransportError,
        match=r"3 worker 0: trainer rank 0 is late: after \d\.\d s of 0\.2 s, lm_head\[0:2\] was",
    ):
        worker.wait(receiving, Deadline(0.2))


def test_a_peer_that_leaves_is_named_at_once():
    _, sender, worker = pair()
    receiving = worker.post(receives=[part_of(4, 0, 0)])
    sender.close()
    with pytest.raises(TransportError, match="trainer rank 0 is gone or has left the group"):
        worker.wait(receiving, Deadline(20))
    with pytest.raises(TransportError, match="trainer rank 0 has left the group of replica 3"):
        sender.post(sends=[part_of(4, 1, 0)])


def test_leaving_with_transfers_under_way_closes_the_connection():
    _, sender, worker = pair()
    under_way = worker.post(receives=[part_of(4, 0, i) for i in range(3)])
    worker.close()
    with pytest.raises(TransportError, match="replica 3 worker 0 is gone or has left"):
        sender.wait(sender.post(sends=[part_of(1 << 20, 1, 9)]), Deadline(20))
    assert under_way.works == []


def test_a_member_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)
    rendezvous = Rendezvous("127.0.0.1", 20.0)
    with pytest.raises(
        TransportError,
        match=r"trainer rank 0 could not join .* within 0\.5 s; not there: replica 3 worker 0",
    ):
        Transport.join(dataclasses.replace(spec(rendezvous), timeout_s=0.5), 0, CPU)


def test_an_unknown_transport_is_refused_with_the_known_ones():
    with pytest.raises(
        TransportError, match=r"cannot travel over 'pigeon'; use one of \['gloo', 'nccl', 'ipc'\]"
    ):
        Transport.join(dataclasses.replace(spec_of(1, 1), backend="pigeon"), 0, CPU)


def test_an_error_on_a_background_thread_reaches_the_waiter():
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0, "division").result(5)
    assert in_background(lambda: 7, "seven").result(5) == 7


def test_every_error_survives_pickling():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(kinds) >= 9
    for kind in kinds:
        error = pickle.loads(pickle.dumps(kind("what, where, how")))
        assert type(error) is kind
        assert str(error) == "what, where, how"


def test_threads_of_ended_calls_run_later_ones_under_their_names():
    def whoami() -> tuple[int, str]:
        return threading.get_ident(), threading.current_thread().name

    first, name = in_background(whoami, "first").result(5)
    assert name == "first"
    assert in_background(whoami, "second").result(5) == (first, "second")
    never = threading.Event()
    stuck = in_background(never.wait, "stuck")
    assert in_background(whoami, "third").result(5)[0] != first
    never.set()
    assert stuck.result(5)


def test_a_store_that_cannot_be_or_is_not_there_is_told_with_its_address():
    with pytest.raises(RendezvousError, match=r"cannot listen on 192\.0\.2\.1, by which members"):
        Rendezvous("192.0.2.1", 1.0)  # of nobody (RFC 5737)
    with pytest.raises(RendezvousError, match=r"no store on 127\.0\.0\.1:\d+ within 0\.0001 s"):
        Rendezvous("127.0.0.1", 1e-4)
    with pytest.raises(RendezvousError, match=r"nobody listens on 127\.0\.0\.1:9 within 0\.2 s"):
        Meeting("127.0.0.1", 9, "key", 0.2).store()

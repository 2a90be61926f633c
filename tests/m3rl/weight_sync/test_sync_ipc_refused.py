"""Members that cannot map one another's memory, and what carries the weights then."""

import re
import time
from concurrent.futures import Future

import pytest

from m3rl.weight_sync import ipc, ipc_links
from m3rl.weight_sync.calls import gather
from m3rl.weight_sync.errors import NotMappableError, SyncError, TransportError
from tests.m3rl.weight_sync.ipc_fakes import HostMemory
from tests.m3rl.weight_sync.sync_fakes import FakeEngine, assert_holds, layout, local_sync
from tests.m3rl.weight_sync.test_sync_ipc import meeting, spec


@pytest.fixture(autouse=True)
def _host_memory(monkeypatch):
    monkeypatch.setattr(ipc, "CudaMemory", HostMemory)


def test_members_that_do_not_see_one_anothers_sockets_all_hear_of_it_at_once(monkeypatch):
    exchange = ipc_links._exchange

    def exchange_elsewhere(group, rank, *args):
        """What listens where the others are is not seen by workers."""
        cards = exchange(group, rank, *args)
        if rank < group.num_senders:
            return cards
        return {m: card._replace(address=f"{card.address}-unseen") for m, card in cards.items()}

    monkeypatch.setattr(ipc_links, "_exchange", exchange_elsewhere)
    begin = time.monotonic()
    for error in meeting(spec(2, 2, timeout_s=30.0)):
        assert isinstance(error, NotMappableError)
        assert re.search(
            r"replica 3 worker \d cannot reach trainer rank 0 on its own host \(.*refused\); it is "
            r"gone, or in a network namespace of its own; set weight_sync.transport: nccl",
            str(error),
        )
    assert time.monotonic() - begin < 10


def test_where_memory_is_not_mapped_the_next_transport_carries_and_the_log_says_why(
    monkeypatch, caplog
):
    monkeypatch.setattr(HostMemory, "owners_that_map_nothing", ["replica 1 worker 0"])
    engines = {r: [FakeEngine(layout())] for r in range(3)}
    options = {"connect": False, "backend": "ipc", "fallbacks": ("gloo",)}
    sync, senders, _ = local_sync(engines, **options)
    sync.connect(0)
    assert caplog.messages == []
    sync.connect(1)
    first, second = caplog.messages
    assert "replica 1 cannot be joined over ipc, trying gloo: connect: " in first
    assert "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" in first
    assert second == "weights travel over gloo from here on, not ipc"
    sync.connect(2)
    assert len(caplog.messages) == 2
    kinds = [type(link.transport).__name__ for link in senders.ranks[0].sender._links.values()]
    assert kinds == ["IpcTransport", "Transport", "Transport"]
    senders.load(1)
    assert sync.sync(1).checksum_ok
    for (engine,) in engines.values():
        assert_holds(engine.tensors, layout(), 1)
    sync.close()


def test_a_transport_asked_for_by_name_is_not_replaced(monkeypatch):
    monkeypatch.setattr(HostMemory, "owners_that_map_nothing", ["replica 0 worker 0"])
    with pytest.raises(NotMappableError, match=r"PEER_ACCESS_UNSUPPORTED; set weight_sync"):
        local_sync({0: [FakeEngine(layout())]}, backend="ipc")


def test_a_fallback_that_fails_too_leaves_the_first_choice_to_those_who_come_next(monkeypatch):
    monkeypatch.setattr(HostMemory, "owners_that_map_nothing", ["replica 1 worker 0"])
    engines = {r: [FakeEngine(layout())] for r in range(3)}
    sync, senders, _ = local_sync(engines, connect=False, backend="ipc", fallbacks=("smoke",))
    with pytest.raises(SyncError, match="cannot travel over 'smoke'"):
        sync.connect(1)
    sync.connect(2)
    links = senders.ranks[0].sender._links
    assert [type(link.transport).__name__ for link in links.values()] == ["IpcTransport"]
    sync.close()


@pytest.mark.parametrize(
    ("phase", "errors", "kind"),
    [
        ("connect", [NotMappableError("no"), TransportError("left")], NotMappableError),
        ("connect", [NotMappableError("no"), RuntimeError("died")], SyncError),
        ("connect", [TransportError("left")], SyncError),
        ("stream", [NotMappableError("no")], SyncError),
    ],
)
def test_only_members_that_cannot_map_while_they_connect_are_worth_another_transport(
    phase, errors, kind
):
    asked = {}
    for number, error in enumerate(errors):
        asked[str(number)] = Future()
        asked[str(number)].set_exception(error)
    with pytest.raises(SyncError, match=f"{phase}: 0: ") as caught:
        gather(phase, asked, 1.0)
    assert type(caught.value) is kind

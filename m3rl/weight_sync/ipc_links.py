"""Sockets between the members of a group on one host: what each tells the others.

A Unix socket says at once that its other end died, keeps messages whole and in order, and under an
abstract name leaves no file.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import socket
import struct
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from m3rl.host import this_host
from m3rl.weight_sync.errors import NotMappableError, TransportError
from m3rl.weight_sync.transport import Deadline, GroupSpec, here_key

MAX_FRAME = 1 << 16
"""Bytes of a frame, at most."""
LOOK_S = 0.2
"""Between two looks of a member that waits to be connected with at whether one refuses."""


class Card(NamedTuple):
    """What a member tells the others in the store."""

    host: str
    gpu: str
    address: str
    """Abstract name of its socket."""


class Link:
    """A connection with another member: frames, which are tuples that begin with their kind."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._unsent: deque[bytes] = deque()
        self.is_gone = False
        """The other end has left or died, and all it said was read."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, *frame: Any) -> None:
        """Without waiting: what the socket has no room for goes with a later `flush`."""
        self._unsent.append(pickle.dumps(frame))
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            try:
                self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:  # what it said before can still be read
                self._unsent.clear()
                return
            self._unsent.popleft()

    def read(self) -> Iterator[tuple[Any, ...]]:
        """Frames that have come."""
        while not self.is_gone:
            try:
                data = self._socket.recv(MAX_FRAME)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self.is_gone = not data
            if data:
                yield pickle.loads(data)

    def expect(self, kind: str, deadline: Deadline) -> tuple[Any, ...]:
        """Wait for the next frame, which is of this kind.

        Raises:
            OSError: it does not come in time, or the other end has left or died.
        """
        self._socket.settimeout(deadline.left_s)
        try:
            data = self._socket.recv(MAX_FRAME)
        finally:
            self._socket.setblocking(False)
        if not data:
            raise ConnectionResetError("it has left the group")
        frame: tuple[Any, ...] = pickle.loads(data)
        assert frame[0] == kind, f"{kind} is due, and not {frame[0]}"
        return frame[1:]

    def close(self) -> None:
        self._socket.close()


def connect_all(
    spec: GroupSpec, rank: int, store: Store, gpu: str, deadline: Deadline
) -> tuple[dict[int, Link], dict[int, Card]]:
    """Connect with every member that this one moves bytes from or to, once all are here.

    Args:
        gpu: name of this member's GPU.

    Raises:
        NotMappableError: the members are on different hosts, or one is not to be reached here.
        TransportError: one did not connect in time.
        RuntimeError: a member did not come in time.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    links: dict[int, Link] = {}
    is_done = False
    try:
        address = f"\0m3rl-sync-{secrets.token_hex(16)}"
        listener.bind(address)
        listener.listen(spec.world_size)
        cards = _exchange(spec, rank, store, Card(this_host(), gpu, address))
        peers = [m for m in range(spec.world_size) if max(m, rank) >= spec.num_senders]
        for peer in (m for m in peers if m < rank):
            links[peer] = _connect(spec, rank, peer, cards[peer].address, store, deadline)
        while any(m > rank and m not in links for m in peers):
            peer, link = _accept(spec, rank, listener, store, deadline)
            links[peer] = link
        is_done = True
    finally:
        listener.close()
        for link in links.values() if not is_done else ():
            link.close()
    return dict(sorted(links.items())), cards


def _exchange(spec: GroupSpec, rank: int, store: Store, card: Card) -> dict[int, Card]:
    store.set(_card_key(rank), json.dumps(card))
    members = range(spec.world_size)
    timeout = timedelta(seconds=spec.timeout_s)
    store.wait([here_key(m) for m in members], timeout)
    store.wait([_card_key(m) for m in members], timeout)
    cards = {m: Card(*json.loads(store.get(_card_key(m)))) for m in members}
    for member, other in cards.items():
        if other.host != cards[0].host:
            raise NotMappableError(
                f"{spec.member(member)} is on host {other.host} and {spec.member(0)} on "
                f"{cards[0].host}: CUDA IPC maps memory of one host only; set "
                "weight_sync.transport: nccl"
            )
    return cards


def refuse(store: Store, error: NotMappableError) -> None:
    """Tell the other members, before they are left alone, why there will be no group."""
    store.set(_REFUSAL, str(error))


def raise_refusal(store: Store) -> None:
    """
    Raises:
        NotMappableError: a member has said why there will be no group.
    """
    if store.check([_REFUSAL]):
        raise NotMappableError(store.get(_REFUSAL).decode())


def _connect(
    spec: GroupSpec, rank: int, peer: int, address: str, store: Store, deadline: Deadline
) -> Link:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(deadline.left_s)
    try:
        connection.connect(address)
    except OSError as error:
        connection.close()
        raise_refusal(store)
        raise NotMappableError(
            f"{spec.member(rank)} cannot reach {spec.member(peer)} on its own host ({error}); it "
            "is gone, or in a network namespace of its own; set weight_sync.transport: nccl"
        ) from error
    link = Link(connection)
    link.send("hello", rank)
    return link


def _accept(
    spec: GroupSpec, rank: int, listener: socket.socket, store: Store, deadline: Deadline
) -> tuple[int, Link]:
    while True:
        listener.settimeout(min(LOOK_S, deadline.left_s))
        try:
            connection, _ = listener.accept()
            link = Link(connection)
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, _PEER, 12))
            if user == os.getuid():  # else a stranger's: such names have no owner
                return int(link.expect("hello", deadline)[0]), link
            link.close()
        except OSError as error:
            raise_refusal(store)
            if isinstance(error, TimeoutError) and not deadline.is_over:
                continue
            raise TransportError(
                f"{spec.member(rank)}: not all members have connected after "
                f"{deadline.elapsed_s:.1f} s of {deadline.seconds:g} s ({error})"
            ) from error


def _card_key(rank: int) -> str:
    return f"ipc/{rank}"


_PEER = socket.SO_PEERCRED
_REFUSAL = "ipc/refusal"
"""Key in the store."""

"""Rounds between GPUs of one host: the receiver copies out of the sender's memory, mapped there.

    sender    post ─▶ its stream comes there ─▶ says where the bytes lie ············ may be reused
                                                  │                                      ▲
    receiver  post ─▶ (the wire may be written) ─▶ copies on a stream of its own ─▶ says it has them

Copy engines move the bytes: no SM is taken from generation, and two members may share a GPU. What
one member tells another goes through a socket from host to host, once its device has come there: no
device ever waits for another process, so none hangs when one dies. For a copy that means some 0.1
ms, in which the one before is still under way.
"""

from __future__ import annotations

import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from m3rl.weight_sync.errors import NotMappableError, TransportError
from m3rl.weight_sync.ipc_links import Card, Link, connect_all, raise_refusal, refuse
from m3rl.weight_sync.ipc_memory import CudaMemory, MappingError, Spot
from m3rl.weight_sync.lane import POLL_S
from m3rl.weight_sync.transport import Deadline, GroupSpec, Posted, Transfer, Transport

FRAME_PARTS = 64
"""Messages that are told of at a time: the first are copied while others are looked up."""
IDLE_MS = 5
"""Longest sleep of a member that waits for what others say; they wake it."""


@dataclass(eq=False, slots=True)
class _Sent:
    """A message that a peer copies; done when the peer has said so."""

    peer: _Peer
    number: int

    @property
    def is_done(self) -> bool:
        return self.number <= self.peer.num_taken


@dataclass(eq=False, slots=True)
class _Arrival:
    """A message that is copied from a peer; done when the device was told to."""

    peer: _Peer
    transfer: Transfer
    free: torch.cuda.Event
    """From here on its wire may be written."""
    copied: torch.cuda.Event | None = None

    @property
    def is_done(self) -> bool:
        return self.copied is not None


@dataclass(eq=False, slots=True)
class _Peer:
    """What this member knows of another."""

    name: str
    link: Link
    num_sent: int = 0
    num_taken: int = 0
    """Of them: complete there."""
    told: set[int] = field(default_factory=set)
    """Allocations of this member whose handles it has."""
    opened: dict[int, int] = field(default_factory=dict)
    """Its allocations that are mapped here: their addresses."""
    offered: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Messages that can be copied: allocation, offset, bytes."""
    awaited: deque[_Arrival] = field(default_factory=deque)
    """Messages whose wires are posted, in the same order."""
    copies: deque[tuple[torch.cuda.Event, int]] = field(default_factory=deque)
    """Copies under way, and how many messages each stands for."""

    def offer(self, parts: Sequence[tuple[Spot, int]]) -> None:
        """Tell it where messages lie, (spot, bytes) each."""
        new = {s.allocation: s.handle for s, _ in parts if s.allocation not in self.told}
        self.told |= new.keys()
        self.link.send("sent", new, [(spot.allocation, spot.offset, size) for spot, size in parts])


class IpcTransport(Transport):
    """This rank's membership in a group whose members map one another's GPU memory."""

    def __init__(
        self,
        peers: Mapping[int, _Peer],
        spec: GroupSpec,
        rank: int,
        store: Store,
        memory: CudaMemory,
    ) -> None:
        super().__init__(peers, spec, rank, store)
        self._memory = memory
        self._lock = threading.RLock()
        """Of all that follows; a member is left from another thread."""
        self._unready: deque[tuple[torch.cuda.Event, _Peer, tuple[Spot, int]]] = deque()
        """Posted to be sent; not told before the mark is reached."""
        self._sockets = select.poll()
        for peer in peers.values():
            self._sockets.register(peer.link, select.POLLIN)

    @classmethod
    def meet(cls, spec: GroupSpec, rank: int, store: Store, device: torch.device) -> IpcTransport:
        """Connect to the members and map a little memory of each, once all are here.

        Raises:
            NotMappableError: the members are on different hosts, or one cannot map what another
                has.
            TransportError: the device is no GPU, or a member has left.
            RuntimeError: a member did not come in time.
        """
        deadline = Deadline(spec.timeout_s)
        memory = CudaMemory(device, spec.member(rank))
        transport, is_done = None, False
        try:
            links, cards = connect_all(spec, rank, store, memory.gpu, deadline)
            peers = {m: _Peer(spec.member(m), link) for m, link in links.items()}
            transport = cls(peers, spec, rank, store, memory)
            transport._try_out(cards, deadline)
            is_done = True
        except NotMappableError as error:
            refuse(store, error)
            raise
        finally:
            if not is_done:
                (transport or memory).close()
        return transport

    @property
    def device(self) -> torch.device:
        return self._memory.device

    def post(self, *, sends: Sequence[Transfer] = (), receives: Sequence[Transfer] = ()) -> Posted:
        posted = Posted([*sends, *receives])
        with self._lock:
            peers, here = self._member(), self._memory.mark()
            spots = self._memory.share([each.wire for each in sends])
            for transfer, spot in zip(sends, spots, strict=True):
                peer = peers[transfer.peer]
                peer.num_sent += 1
                posted.works.append(_Sent(peer, peer.num_sent))
                self._unready.append((here, peer, (spot, transfer.wire.numel())))
            for transfer in receives:
                peer = peers[transfer.peer]
                posted.works.append(_Arrival(peer, transfer, here))
                peer.awaited.append(posted.works[-1])
            self._go_on()
        return posted

    def wait(self, posted: Posted, deadline: Deadline) -> None:
        self._member()
        for transfer, work in zip(posted.transfers, posted.works, strict=True):
            while not work.is_done:
                with self._lock:
                    self._go_on()
                    is_idle = self._is_idle
                if work.is_done:
                    break
                if work.peer.link.is_gone:
                    raise self._broken(transfer, deadline, RuntimeError("its socket is closed"))
                if deadline.is_over:
                    raise self._broken(transfer, deadline, RuntimeError(_missing(work)))
                self._sleep(is_idle=is_idle)
        copied = dict.fromkeys(w.copied for w in posted.works if isinstance(w, _Arrival))
        for mark in copied:
            assert mark is not None, "all are done"
            self._memory.follow(mark)
        posted.works.clear()

    def wait_for_device(self, event: torch.cuda.Event | None, deadline: Deadline) -> None:
        while True:
            is_past = event is None or event.query()
            with self._lock:
                self._go_on()  # also when it is: then the peers hear what is complete
            if is_past:
                return
            if deadline.is_over:
                raise self._late(deadline)
            self._sleep(is_idle=False)

    def note(self, what: str) -> None:
        if what == "done":
            with self._lock:
                self._forget_freed()

    def close(self) -> None:
        """Leave the group: peers learn at once; what was mapped is unmapped when the copies that
        were begun are done. The driver keeps memory that a peer frees until it is unmapped."""
        peers, self._group = self._group, None
        if peers is None:
            return
        with self._lock:
            for peer in peers.values():
                peer.link.close()
            self._unready.clear()
            self._memory.close()

    def interrupt(self) -> None:
        self.close()

    def _go_on(self) -> None:
        """Do whatever can be done now."""
        peers: Iterable[_Peer] = self._member().values()
        for peer in peers:
            self._say_taken(peer)
        while self._unready and self._unready[0][0].query():
            self._say_sent(self._unready[0][0])
        for peer in peers:
            for frame in peer.link.read():
                self._hear(peer, *frame)
            if peer.awaited and peer.offered:
                self._copy_from(peer)
            peer.link.flush()

    def _say_sent(self, here: torch.cuda.Event) -> None:
        """Tell of what was posted at this mark."""
        parts: dict[_Peer, list[tuple[Spot, int]]] = {}
        while self._unready and self._unready[0][0] is here:
            _, peer, part = self._unready.popleft()
            parts.setdefault(peer, []).append(part)
        for peer, found in parts.items():
            for first in range(0, len(found), FRAME_PARTS):
                peer.offer(found[first : first + FRAME_PARTS])

    def _say_taken(self, peer: _Peer) -> None:
        count = 0
        while peer.copies and peer.copies[0][0].query():
            count += peer.copies.popleft()[1]
        if count:
            peer.link.send("taken", count)

    def _hear(self, peer: _Peer, kind: str, *said: Any) -> None:
        if kind == "sent":
            for allocation, handle in said[0].items():
                self._open(peer, allocation, handle)
            peer.offered.extend(said[1])
        elif kind == "taken":
            peer.num_taken += said[0]
        elif kind == "freed":
            self._memory.release(peer.opened.pop(said[0]))
        else:
            raise TransportError(f"{self._name}: {peer.name} says {kind!r}, which is unknown here")

    def _open(self, peer: _Peer, allocation: int, handle: bytes) -> None:
        try:
            peer.opened[allocation] = self._memory.open(handle)
        except MappingError as error:
            raise TransportError(f"{self._name} cannot map memory of {peer.name}: {error}") from (
                error
            )

    def _copy_from(self, peer: _Peer) -> None:
        """Begin to copy what is there and awaited, posted at one mark as one."""
        count = min(len(peer.awaited), len(peer.offered))
        here = [(peer.awaited.popleft(), peer.offered.popleft()) for _ in range(count)]
        for free, group in groupby(here, key=lambda each: each[0].free):
            parts, arrivals = [], []
            for arrival, (allocation, offset, size) in group:
                wire, what = arrival.transfer.wire, arrival.transfer.what
                if size != wire.numel():
                    raise TransportError(
                        f"{self._name}: {peer.name} sends {size} bytes for the {wire.numel()} of "
                        f"{what}; both ends have different plans"
                    )
                parts.append((wire, peer.opened[allocation] + offset))
                arrivals.append(arrival)
            try:
                copied = self._memory.copy(parts, free)
            except MappingError as error:
                raise TransportError(
                    f"{self._name} cannot copy {arrivals[0].transfer.what} from {peer.name}: "
                    f"{error}"
                ) from error
            peer.copies.append((copied, len(arrivals)))
            for arrival in arrivals:
                arrival.copied = copied

    def _forget_freed(self) -> None:
        """Have peers unmap what was freed here; all that was sent of it is taken."""
        if self._group is None:
            return
        freed = self._memory.freed()
        for peer in self._member().values():
            for allocation in peer.told.intersection(freed):
                peer.told.remove(allocation)
                peer.link.send("freed", allocation)

    def _try_out(self, cards: Mapping[int, Card], deadline: Deadline) -> None:
        """Have every worker read a few bytes of each of its peers.

        Raises:
            NotMappableError: one cannot; all who connect with it raise the same.
        """
        peers, is_worker = self._member(), self.rank >= self.spec.num_senders
        secret = secrets.token_bytes(64)
        probe = torch.frombuffer(bytearray(secret), dtype=torch.uint8).to(self.device)
        self._reach(self._memory.mark(), deadline)
        (spot,) = self._memory.share([probe])
        for member, peer in peers.items():
            if member >= self.spec.num_senders:  # trainer ranks map nothing
                peer.told.add(spot.allocation)
            peer.link.send("probe", spot, secret)
        faults = []
        for member, peer in peers.items():
            theirs, expected = self._expect(peer, "probe", deadline)
            if is_worker:
                try:
                    self._read_probe(peer, Spot(*theirs), expected, deadline)
                except MappingError as error:
                    faults.append(
                        f"{self._name} ({cards[self.rank].gpu}) cannot map memory of {peer.name} "
                        f"({cards[member].gpu}): {error}; set weight_sync.transport: nccl"
                    )
        for peer in peers.values():
            peer.link.send("mapped", faults)
        for peer in peers.values():
            faults += self._expect(peer, "mapped", deadline)[0]
        if faults:
            raise NotMappableError(faults[0])

    def _read_probe(self, peer: _Peer, spot: Spot, expected: bytes, deadline: Deadline) -> None:
        address = peer.opened[spot.allocation] = self._memory.open(spot.handle)
        out = torch.zeros(len(expected), dtype=torch.uint8, device=self.device)
        copied = self._memory.copy([(out, address + spot.offset)], self._memory.mark())
        self._reach(copied, deadline)
        if bytes(out.tolist()) != expected:
            raise MappingError("other bytes are read than lie there")

    def _expect(self, peer: _Peer, kind: str, deadline: Deadline) -> tuple[Any, ...]:
        try:
            return peer.link.expect(kind, deadline)
        except OSError as error:
            raise_refusal(self._store)
            raise TransportError(
                f"{self._name} could not join the group of replica {self.spec.replica}: "
                f"{peer.name} does not answer after {deadline.elapsed_s:.1f} s of "
                f"{deadline.seconds:g} s ({error})"
            ) from error

    def _reach(self, mark: torch.cuda.Event, deadline: Deadline) -> None:
        while not mark.query():
            if deadline.is_over:
                raise self._late(deadline)
            time.sleep(POLL_S)

    @property
    def _is_idle(self) -> bool:
        """Whether there is nothing to be said once the device comes there."""
        return not self._unready and not any(peer.copies for peer in self._member().values())

    def _sleep(self, *, is_idle: bool) -> None:
        # The socket of one that is gone would wake it at once.
        if is_idle and not any(peer.link.is_gone for peer in self._member().values()):
            self._sockets.poll(IDLE_MS)
        else:
            time.sleep(POLL_S)


def _missing(work: _Sent | _Arrival) -> str:
    return "nobody took it" if isinstance(work, _Sent) else "nothing came"

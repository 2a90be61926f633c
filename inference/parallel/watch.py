"""Who of the ranks is still there: a socket from each rank to each other one.

When a process dies its sockets close, so every other rank learns it at once and knows who it was,
whatever the collective that it waits in would say (gloo names an address, NCCL hangs). Messages
are lines: `fault TEXT` (this rank failed by itself), `broken TEXT` (a collective did not complete
here), `bye` (this rank leaves in good order).
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Sequence

GRACE_S = 1.0
"""How long a rank whose collective broke waits to learn from the others whose fault it was."""
HELLO_BYTES = 4

Address = tuple[str, int]


class ParallelError(RuntimeError):
    """A rank failed, died or did not come; says which, and in which operation it was missed."""


class Watch:
    """This rank's sockets to all others, and what came over them. Its own thread listens."""

    def __init__(
        self,
        rank: int,
        world: int,
        address: str,
        exchange: Callable[[Address], Sequence[Address]],
        timeout_s: float,
    ) -> None:
        """Connect to all other ranks, which do the same.

        Args:
            address: of this machine, as the other ranks reach it.
            exchange: gives every rank's listening address, in the order of ranks, for one's own.

        Raises:
            ParallelError: a rank did not connect in time.
        """
        self.rank, self.world = rank, world
        self.gone: list[int] = []
        """Ranks whose process ended without a word."""
        self.left: list[int] = []
        """Ranks that said goodbye."""
        self.faults: dict[int, str] = {}
        """What ranks that failed by themselves say."""
        self.broken: dict[int, str] = {}
        """What ranks say in which a collective did not complete."""
        self.changed = threading.Condition()
        """Notified with every change of the above."""
        self.on_trouble: Callable[[], None] = lambda: None
        """Called once, by the listening thread, when the first trouble of another rank is seen."""
        self._sockets = _connect_all(rank, world, address, exchange, timeout_s)
        self._selector = selectors.DefaultSelector()
        self._wake, wake_end = socket.socketpair()
        self._selector.register(wake_end, selectors.EVENT_READ, None)
        for peer, sock in self._sockets.items():
            self._selector.register(sock, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._listen, name=f"watch {rank}", daemon=True)
        self._thread.start()

    @property
    def is_trouble(self) -> bool:
        """Whether another rank is dead, failed, or could not complete a collective."""
        return bool(self.gone or self.faults or self.broken)

    def check(self, what: str) -> None:
        """Raise ParallelError if there is trouble; `what` is about to begin or was waited for."""
        if self.is_trouble:
            raise self.explain(what, None)

    def fail(self, text: str) -> None:
        """Tell all others that this rank failed by itself."""
        self._tell(f"fault {text}")

    def explain(self, what: str, error: BaseException | None) -> ParallelError:
        """Say whose fault it is that `what` was not completed here; waits GRACE_S at most.

        The others are told that it was not.
        """
        self._tell(f"broken {what}")
        with self.changed:
            self.changed.wait_for(self._is_explained, GRACE_S)
            return ParallelError(f"rank {self.rank}: {what} was not completed: {self._why(error)}")

    def close(self) -> None:
        """Leave in good order."""
        self._tell("bye")
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()
        self._wake.close()

    def _is_explained(self) -> bool:
        return bool(self.gone or self.faults) or len({*self.left, *self.broken}) == self.world - 1

    def _why(self, error: BaseException | None) -> str:
        said = "" if error is None else f" ({first_line(error)})"
        if self.gone:
            return f"{_ranks(self.gone)} gone, the process ended{said}"
        if self.faults:
            return "; ".join(f"rank {r} failed: {text}" for r, text in sorted(self.faults.items()))
        silent = [r for r in range(self.world) if r != self.rank and r not in self.broken]
        if left := [r for r in silent if r in self.left]:
            return f"{_ranks(left)} gone, having said goodbye{said}"
        if silent:
            return f"{_ranks(silent)} late, alive but not in it{said}"
        given_up = "; ".join(f"rank {r} in {what}" for r, what in sorted(self.broken.items()))
        return f"all others gave up: {given_up}{said}"

    def _tell(self, line: str) -> None:
        message = (line.replace("\n", " ")[:1000] + "\n").encode()
        for sock in self._sockets.values():
            with contextlib.suppress(OSError):  # who is gone need not be told
                sock.sendall(message)

    def _listen(self) -> None:
        """Until `close`: the invariant is that every socket of a rank not gone is registered."""
        buffers = dict.fromkeys(self._sockets, b"")
        while True:
            was_trouble = self.is_trouble
            for key, _ in self._selector.select():
                if key.data is None:
                    return self._close_all()
                self._read(key.data, buffers)
            with self.changed:
                self.changed.notify_all()
            if self.is_trouble and not was_trouble:
                self.on_trouble()

    def _read(self, peer: int, buffers: dict[int, bytes]) -> None:
        try:
            data = self._sockets[peer].recv(4096)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(self._sockets[peer])
            if peer not in {*self.left, *self.faults, *self.broken}:
                self.gone.append(peer)
            return
        *lines, buffers[peer] = (buffers[peer] + data).split(b"\n")
        for line in lines:
            kind, _, text = line.decode().partition(" ")
            if kind == "bye":
                self.left.append(peer)
            else:
                {"fault": self.faults, "broken": self.broken}[kind].setdefault(peer, text)

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        for sock in self._sockets.values():
            sock.close()
        self._selector.close()


def first_line(error: BaseException) -> str:
    """The beginning of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, sorted(ranks)))} are"


def _connect_all(
    rank: int,
    world: int,
    address: str,
    exchange: Callable[[Address], Sequence[Address]],
    timeout_s: float,
) -> dict[int, socket.socket]:
    """A socket to each other rank: to lower ones we connect, higher ones connect to us."""
    sockets: dict[int, socket.socket] = {}
    with socket.create_server((address, 0), backlog=world) as listener:
        addresses = exchange((address, int(listener.getsockname()[1])))
        listener.settimeout(timeout_s)
        try:
            for peer in range(rank):
                sockets[peer] = socket.create_connection(addresses[peer], timeout_s)
                sockets[peer].sendall(rank.to_bytes(HELLO_BYTES, "little"))
            while len(sockets) < world - 1:
                sock, _ = listener.accept()
                sock.settimeout(timeout_s)
                hello = sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
                sockets[int.from_bytes(hello, "little")] = sock
        except OSError as error:
            missing = [r for r in range(world) if r != rank and r not in sockets]
            raise ParallelError(
                f"rank {rank}: {_ranks(missing)} not connected after {timeout_s:g} s ({error})"
            ) from error
    for sock in sockets.values():
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):  # a host that vanished is noticed within 20 s
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sockets

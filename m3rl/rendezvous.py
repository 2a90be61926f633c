"""Where processes meet: a store that listens before anybody is told of it.

A port that is only found free can be lost again before whoever was told of it listens there.
"""

from __future__ import annotations

import itertools
import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from m3rl.errors import M3rlError


class RendezvousError(M3rlError):
    """There is no store where members could meet."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a member needs to know; travels to each of them."""

    host: str
    port: int
    key: str
    """Prefix in the store, of this meeting alone."""
    timeout_s: float
    """Longest wait for the other members."""

    def store(self) -> Store:
        """The meeting's own part of the store, of which every member is a client.

        Raises:
            RendezvousError: nobody listens.
        """
        timeout = timedelta(seconds=self.timeout_s)
        try:
            store = TCPStore(self.host, self.port, None, False, timeout)
        except RuntimeError as error:
            raise RendezvousError(
                f"nobody listens on {self.host}:{self.port} within {self.timeout_s:g} s: {error}"
            ) from error
        return PrefixStore(self.key, store)


class Rendezvous:
    """The driver's store where groups meet; it outlives all their members."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """Listen on a free port of `host`, an address of this machine that members can reach.

        Raises:
            RendezvousError: that cannot be.
        """
        self.host = host
        try:
            listener = _listener(host)
        except OSError as error:
            raise RendezvousError(
                f"cannot listen on {host}, by which members are to reach this machine: {error}"
            ) from error
        self.port = int(listener.getsockname()[1])
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        try:
            self._store = TCPStore(
                host,
                self.port,
                None,
                True,
                timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        except RuntimeError as error:
            raise RendezvousError(
                f"no store on {host}:{self.port} within {timeout_s:g} s: {error}"
            ) from error

    def new_meeting(self) -> Meeting:
        """Apart from all others, so that nobody finds what members of an earlier one have left."""
        return Meeting(self.host, self.port, f"meeting {next(self._numbers)}", self._timeout_s)


def _listener(host: str) -> socket.socket:
    """A socket of the address's own family: behind the dual-stack one that TCPStore opens, IPv4
    peers look like ::ffff:1.2.3.4, and it asks the name server about each of them."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family, backlog=128)

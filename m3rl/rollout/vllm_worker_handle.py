"""How a replica calls into the workers of its vLLM engine: the near side of their doors."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import Any


class WorkerCallError(RuntimeError):
    """A vLLM worker is gone or silent; says which call and how long."""


@dataclass(frozen=True, slots=True)
class WeightOptions:
    """How a worker takes weights."""

    model_path: str
    dtype: str
    """Of the wire."""
    drops_index: bool
    """Whether the model is M3 without its index branch."""
    num_staged: int | None
    """Buckets that have memory at a time, see `vllm_layers`; None: all."""


class WorkerHandle:
    """The other side of a WorkerDoor, in the replica's process."""

    def __init__(self, rank: int, address: str, authkey: bytes, timeout_s: float) -> None:
        self._rank, self._address = rank, address
        self._authkey, self._timeout_s = authkey, timeout_s

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the door.

        Raises:
            WorkerCallError: no answer within the deadline, or the worker's process is gone.
            Exception: what the method raised.
        """
        import cloudpickle  # comes with vLLM

        name = args[0] if method == "receiver_call" else method
        try:
            with Client(self._address, family="AF_UNIX", authkey=self._authkey) as connection:
                connection.send_bytes(cloudpickle.dumps((method, args)))
                if not connection.poll(self._timeout_s):
                    raise WorkerCallError(
                        f"{name}: vLLM worker {self._rank} did not answer within "
                        f"{self._timeout_s:g} s"
                    )
                result, error = cloudpickle.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise WorkerCallError(
                f"{name}: the process of vLLM worker {self._rank} is gone ({error!r})"
            ) from error
        if error is not None:
            raise error
        return result


def open_doors(
    serve: Callable[..., Sequence[str]], options: WeightOptions, timeout_s: float
) -> list[WorkerHandle]:
    """Open the door of every worker of an engine.

    Args:
        serve: calls `WorkerExtension.m3rl_serve` on all workers, and gives their addresses in rank
            order.
    """
    authkey = secrets.token_bytes(32)
    addresses = serve("m3rl_serve", args=(options, authkey))
    return [
        WorkerHandle(rank, address, authkey, timeout_s) for rank, address in enumerate(addresses)
    ]

"""Where the receiver of one worker sits: bound to that worker's weights, called by name."""

from __future__ import annotations

import threading
from typing import Any

from m3rl.types import Receiver, WeightTarget


class ReceiverSeat:
    """Holds a worker's receiver; any thread may call it, and one call runs at a time."""

    def __init__(self) -> None:
        self._receiver: Receiver | None = None
        self._receiving = threading.Lock()

    def attach(self, receiver: Receiver, target: WeightTarget) -> None:
        """Bind `receiver` to `target`; it takes the place of the one before."""
        with self._receiving:
            receiver.bind(target)
            self._receiver = receiver

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the receiver, on this thread.

        Raises:
            RuntimeError: there is no receiver.
        """
        with self._receiving:
            if self._receiver is None:
                raise RuntimeError(f"receiver.{method}: no receiver is attached to this replica")
            return getattr(self._receiver, method)(*args)

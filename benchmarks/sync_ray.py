"""The baseline of one call a tensor as others make it, through Ray: `--ray`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ray

from benchmarks.kernels.harness import Bench, Timing
from benchmarks.weight_sync import Pair
from m3rl.rollout.placement import future_of, ray_cluster, worker_options


class RayProcess:
    """As `RemoteProcess`, a Ray actor: calls on it run one after the other.

    It asks Ray for no GPU, and sees all that there are.
    """

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        """`make(*args)` builds the object there."""
        self._actor = ray.remote(_Body).options(**worker_options(1)).remote(make, args)

    def call(self, method: str, *args: Any) -> Future[Any]:
        """The future ends with the method's result or its error."""
        return future_of(self._actor.call.remote(method, args))

    def end(self) -> None:
        ray.kill(self._actor)


class _Body:
    def __init__(self, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._body = make(*args)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self._body, method)(*args)


def measure(
    bench: Bench,
    quantization: str,
    devices: Sequence[str],
    backend: str,
    ours: Timing,
    floor: float,
    *,
    is_small: bool,
) -> None:
    """Record it beside a verified sync.

    Raises:
        AssertionError: the replica did not get the trainer's bits.
    """
    with ray_cluster(len(devices)):
        pair = Pair(bench, quantization, devices, backend, is_small=is_small, process=RayProcess)
        try:
            pair.one_call_a_tensor("through Ray", ours, floor)
        finally:
            pair.end()

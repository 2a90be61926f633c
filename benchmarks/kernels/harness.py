"""Timing and recording of kernels: medians on the device, correctness before any time."""

from __future__ import annotations

import contextlib
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import RESULTS, write_record

BYTES_PER_S = 4.3e12
"""HBM of one H200, as measured (a copy counts what is read and what is written)."""
FLOP_PER_S = 790e12
"""BF16 matrix product of one H200 on random data, as measured."""
K = 1024


@dataclass(slots=True)
class Timing:
    """Microseconds of one call."""

    us: float
    p10: float
    p90: float


def floor_us(num_bytes: float, flop: float = 0.0) -> float:
    """No version runs faster: bytes at the memory's rate or FLOP at the tensor cores'."""
    return 1e6 * max(num_bytes / BYTES_PER_S, flop / FLOP_PER_S)


def time_graph(calls: Sequence[Callable[[], Any]], inner: int = 1, reps: int = 15) -> Timing:
    """One call's time inside a CUDA graph, as decode steps run them.

    `calls` are captured in turn, each on inputs of its own: with enough of them the data is cold
    in L2 whenever it is read again.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(inner):
            kept += [call() for call in calls]
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    times = [_event_us(graph.replay) for _ in range(reps)]
    count = len(calls) * inner
    return _timing([us / count for us in times])


QUEUE_CYCLES = 4_000_000
"""About 2 ms: longer than any op here takes to launch."""


def time_eager(call: Callable[[], Any], reps: int = 9, warmup: int = 2) -> Timing:
    """One call's time on the device as prefill runs it: without a graph, L2 flushed before each.

    The device is kept busy while the call is launched, as by an engine that launches ahead; time
    that the host alone takes is not in it, for no kernel and no peer.
    """
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for _ in range(warmup):
        call()
    times = []
    for _ in range(reps):
        flush.zero_()
        torch.cuda._sleep(QUEUE_CYCLES)
        times.append(_event_us(call))
    return _timing(times)


def _event_us(run: Callable[[], Any]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def _timing(times: list[float]) -> Timing:
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), cuts[0], cuts[-1])


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖ in FP64; NaN when anything is NaN."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


class Bench:
    """Where a family of kernels reports: checks first, then times, then one record a case."""

    def __init__(self, seconds: float, results: Path = RESULTS, peers: Sequence[str] = ()) -> None:
        self.peers = tuple(peers)
        self.failures: list[str] = []
        self._results = results
        self._stop = time.monotonic() + seconds
        self._lines: list[str] = []

    def has_time(self, seconds: float = 2.0) -> bool:
        return time.monotonic() + seconds < self._stop

    def case(self, name: str, run: Callable[[], None]) -> None:
        """Run one case; a failure is told and counted, and the other cases go on."""
        if not self.has_time():
            self.failures.append(f"{name}: no time left")
            return
        try:
            run()
        except Exception as error:
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            traceback.print_exc()
            if "illegal" in str(error) or "unspecified launch" in str(error):
                raise
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def peer_part(self, name: str) -> Iterator[None]:
        """A peer that cannot run is a failure of the bench, but costs no record of ours."""
        try:
            yield
        except Exception as error:
            if "illegal" in str(error):
                raise
            self.failures.append(f"{name}, peer: {type(error).__name__}: {str(error)[:300]}")

    def record(
        self,
        bench: str,
        case: str,
        timing: Timing,
        *,
        correct: Mapping[str, float],
        tolerance: Mapping[str, float],
        floor: float | None = None,
        peer: tuple[str, float] | None = None,
        value: Mapping[str, float] | None = None,
    ) -> None:
        """Write a record if every error in `correct` is within its `tolerance`, else refuse.

        Raises:
            AssertionError: an error above its tolerance (or NaN): such a time means nothing.
        """
        for what, error in correct.items():
            assert error <= tolerance[what], f"{case}: {what} is {error}, above {tolerance[what]}"
        fields: dict[str, Any] = {"us": timing.us, "p10": timing.p10, "p90": timing.p90}
        if floor is not None:
            fields["floor_us"] = floor
        if peer is not None:
            fields |= {"peer": peer[0], "peer_us": peer[1]}
        if value is not None:
            fields["value"] = dict(value)
        written = write_record(bench, case, results=self._results, correct=dict(correct), **fields)
        self._lines.append(_line(written))

    def summary(self) -> str:
        return "\n".join([*self._lines, *(f"FAILED {failure}" for failure in self.failures)])


def _line(record: Mapping[str, Any]) -> str:
    parts = [f"{record['bench']} {record['case']}: {record['us']:.1f} us"]
    if "x_floor" in record:
        parts.append(f"{record['x_floor']:.2f}x floor")
    if "peer" in record:
        parts.append(f"{record['peer']} {record['peer_us']:.1f} us, ratio {record['ratio']:.2f}")
    if "value" in record:
        parts.append(" ".join(f"{name}={value:.4g}" for name, value in record["value"].items()))
    return " | ".join(parts)


@dataclass(slots=True)
class Pool:
    """Enough pages of random keys that a rotation over requests stays cold in L2."""

    num_pages: int
    generator: torch.Generator = field(
        default_factory=lambda: torch.Generator(device="cuda").manual_seed(0)
    )

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Random normal values, made in slices so that FP8 needs no copy of the whole."""
        out = torch.empty(shape, dtype=dtype, device="cuda")
        flat = out.view(-1)
        for first in range(0, flat.numel(), 1 << 28):
            part = flat[first : first + (1 << 28)]
            part.copy_(
                torch.randn(
                    part.shape, dtype=torch.bfloat16, device="cuda", generator=self.generator
                )
            )
        return out

    def tables(self, num_rows: int, num_pages: int) -> Tensor:
        """[num_rows, num_pages] int32 pages, all distinct if the pool allows."""
        count = num_rows * num_pages
        if count <= self.num_pages:
            order = torch.randperm(self.num_pages, device="cuda", generator=self.generator)
            return order[:count].view(num_rows, num_pages).int()
        drawn = torch.randint(
            self.num_pages, (count,), device="cuda", generator=self.generator, dtype=torch.int32
        )
        return drawn.view(num_rows, num_pages)

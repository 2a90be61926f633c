"""What the GPU did during some steps: how long it was idle, and which kernels took the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

NUM_STEPS = 12
SHOWN = 28


def trace_steps(
    step: Callable[[], Any], title: str | None, num_steps: int = NUM_STEPS
) -> dict[str, float]:
    """Profile some steps; with a `title` also print their kernels.

    Returns:
        idle_share: part of the time in which no kernel or copy ran; idle_us: of one step.
    """
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    kernels = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    kernels.sort()
    busy, end = 0.0, kernels[0][0]
    for start, stop, _ in kernels:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    span = end - kernels[0][0]
    if title is not None:
        print(f"-- {title}: {span / num_steps:.0f} us a step under the profiler")
        _print_kernels(kernels, num_steps)
        _print_gaps(kernels, num_steps)
    return {"idle_share": 1 - busy / span, "idle_us": (span - busy) / num_steps}


def _print_kernels(kernels: list[tuple[float, float, str]], num_steps: int) -> None:
    """Times of a kernel that waits for the one before it inside the launch count the wait too."""
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for start, stop, name in kernels:
        total[name] += stop - start
        count[name] += 1
    for name in sorted(total, key=total.__getitem__, reverse=True)[:SHOWN]:
        per_step = total[name] / num_steps
        print(f"   {per_step:9.1f} us {count[name] / num_steps:6.1f} x  {name[:90]}")


def _print_gaps(kernels: list[tuple[float, float, str]], num_steps: int) -> None:
    """Between which kernels the GPU was idle, the longest gaps first."""
    total: dict[tuple[str, str], float] = defaultdict(float)
    count: dict[tuple[str, str], int] = defaultdict(int)
    _, end, last = kernels[0]
    for start, stop, name in kernels[1:]:
        if start > end:
            total[last, name] += start - end
            count[last, name] += 1
        if stop > end:
            end, last = stop, name
    for pair in sorted(total, key=total.__getitem__, reverse=True)[:SHOWN]:
        names = " -> ".join(_short(name) for name in pair)
        per_step = total[pair] / num_steps
        print(f"   {per_step:9.1f} us idle {count[pair] / num_steps:6.1f} x  {names}")


def _short(name: str) -> str:
    """A kernel's name without namespaces and most of its template."""
    return name.removeprefix("void ").replace("at::native::", "")[:56]

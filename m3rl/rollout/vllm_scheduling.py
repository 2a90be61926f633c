"""Which of vLLM's requests a step may compute, beyond what its pause states say.

Reaches into vLLM's scheduler (0.32): the requests that run and those that wait are two of its
fields, and a request that is in neither is not computed, but keeps its pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def only(scheduler: Any, is_wanted: Callable[[Any], bool]) -> Iterator[None]:
    """Inside the block, requests for which `is_wanted` is False are neither run nor begun.

    Args:
        is_wanted: of a vLLM Request; those that are added inside the block are wanted.
    """
    running = [r for r in scheduler.running if not is_wanted(r)]
    waiting = [r for r in scheduler.waiting if not is_wanted(r)]
    scheduler.running = [r for r in scheduler.running if is_wanted(r)]
    scheduler.waiting.remove_requests(waiting)
    try:
        yield
    finally:
        scheduler.running = running + scheduler.running
        scheduler.waiting.prepend_requests(reversed(waiting))


def has_begun(request: Any) -> bool:
    """Whether a request that waits was preempted, and has sampled tokens already."""
    return request.num_output_tokens > 0


def is_running(scheduler: Any) -> Callable[[Any], bool]:
    """Tells requests that run now, or were preempted, from those that have not begun."""
    running = {request.request_id for request in scheduler.running}
    return lambda request: request.request_id in running or has_begun(request)


def make_room(scheduler: Any, num_tokens: int) -> None:
    """Take the pages of running requests, the latest admitted first, until a prompt of `num_tokens`
    finds place; they are computed anew later.

    Raises:
        ValueError: the whole memory for keys is too small.
    """
    pool, page_size = scheduler.kv_cache_manager.block_pool, scheduler.block_size
    needed = -(-(num_tokens + 1) // page_size)
    while pool.get_num_free_blocks() < needed and scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
    if pool.get_num_free_blocks() < needed:
        raise ValueError(
            f"a prompt of {num_tokens} tokens needs {needed} pages of {page_size}, and "
            f"{pool.get_num_free_blocks()} are free; raise rollout.backend.engine.kv_cache_gib or "
            "gpu_memory_utilization"
        )


class Counters:
    """What vLLM counts of its steps; one of its `stat_loggers`."""

    def __init__(self) -> None:
        self.steps = self.generated_tokens = self.prefill_tokens = self.preemptions = 0
        self.nonfinite_logits = 0
        self._running = self._waiting = 0
        self._kv_usage = 0.0
        self._queries = self._hits = 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM after each step."""
        self.steps += 1
        if scheduler_stats is not None:
            self._running = scheduler_stats.num_running_reqs
            self._waiting = (
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            )
            self._kv_usage = scheduler_stats.kv_cache_usage
            self._queries += scheduler_stats.prefix_cache_stats.queries
            self._hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self.generated_tokens += iteration_stats.num_generation_tokens
            self.prefill_tokens += iteration_stats.prompt_token_stats.computed
            self.preemptions += iteration_stats.num_preempted_reqs

    def stats(self) -> dict[str, float]:
        """By the names of the bundled runtime, `inference.engine.stats`."""
        return {
            "running": self._running,
            "waiting": self._waiting,
            "kv_usage": self._kv_usage,
            "prefix_hit_rate": self._hits / max(1, self._queries),
            "preemptions": self.preemptions,
            "nonfinite_logits": self.nonfinite_logits,
            "steps": self.steps,
            "generated_tokens": self.generated_tokens,
            "prefill_tokens": self.prefill_tokens,
        }

    # What vLLM asks of a logger besides.

    def log_engine_initialized(self) -> None:
        return

    def log(self) -> None:
        return

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        return

"""Log-probabilities of given tokens, by the weights and the kernels that serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from inference.engine.batch import build_batch
from inference.engine.engine import Engine
from inference.engine.loading import EngineStateError
from inference.engine.request import Request, SamplingParams, check_request, make_live
from inference.engine.rows import RunningRows
from inference.engine.scheduler import Schedule
from inference.engine.staging import Staging

ROWS = 128
"""Hidden states whose logits are computed at a time."""


@torch.inference_mode()
def prompt_logprobs(
    engine: Engine, token_ids: Sequence[int] | np.ndarray, *, num_decodes: int = 0
) -> np.ndarray:
    """[n - 1] float32: log-probability of each token but the first after those before it.

    At temperature 1. The keys go into pages of their own, whatever the prefix cache knows. Where
    too few are left, running requests give theirs, the latest admitted first, and are computed anew
    later. With several ranks all of them are to call it alike.

    Args:
        token_ids: at least 2.
        num_decodes: so many of the last tokens are computed one by one, as decode steps do; the
            others in chunks, as prefills.

    Raises:
        EngineStateError: a step is under way (an engine without requests, or a paused one, has
            none), or there are no whole weights.
        ValueError: tokens that the engine could not serve as a prompt.
    """
    if engine.version is None or engine._in_flight is not None:
        raise EngineStateError("prompts are scored between two steps, by whole weights")
    assert engine.engine_config.page_size is not None, "resolve fills in the page size"
    request = Request("scored", token_ids, SamplingParams(max_tokens=1))
    if not 0 <= num_decodes < len(request.prompt_ids) - 1:
        raise ValueError(
            f"{len(request.prompt_ids)} tokens to score, num_decodes={num_decodes}; the first "
            "token has no log-probability, and one at least is computed as a prefill"
        )
    check_request(request, engine.config, engine.engine_config, has_text=False)
    rows = RunningRows(1, engine.engine_config.page_size)
    num_pages = -(-len(request.prompt_ids) // rows.page_size)
    pages = _take_pages(engine, num_pages)
    try:
        rows.place(make_live(request, ()), pages, 0)
        hidden_TC = torch.cat(list(_hidden_states(engine, rows, num_decodes)))
        ids_T = torch.from_numpy(request.prompt_ids).to(hidden_TC.device, torch.int64)
        return _logprobs(engine, hidden_TC[:-1], ids_T[1:]).cpu().numpy()
    finally:
        engine._scheduler.pool.release(pages)


def _take_pages(engine: Engine, count: int) -> list[int]:
    scheduler = engine._scheduler
    while scheduler.pool.num_available < count and scheduler.running:
        scheduler.preempt(scheduler.running[-1])
    return scheduler.pool.allocate(count)


def _hidden_states(engine: Engine, rows: RunningRows, num_decodes: int) -> Iterator[Tensor]:
    """Those of the one row's tokens, [T, C] of each chunk."""
    worker, staging = engine._worker, Staging(engine._worker.device)
    num_prefill = int(rows.num_tokens[0]) - num_decodes
    chunk = engine.engine_config.max_tokens_per_step
    sizes = [min(chunk, num_prefill - first) for first in range(0, num_prefill, chunk)]
    for count in [*sizes, *[1] * num_decodes]:
        one = np.ones(1, bool)
        schedule = Schedule(np.zeros(1, np.int64), np.full(1, count), one, one, int(count == 1))
        batch = build_batch(rows, schedule, staging, worker.planner)
        yield worker.model(
            batch.input_ids_T, batch.paged, worker.pages, max_tokens=batch.max_tokens
        )
        rows.num_computed += count


def _logprobs(engine: Engine, hidden_TC: Tensor, next_ids_T: Tensor) -> Tensor:
    found = []
    for first in range(0, len(hidden_TC), ROWS):
        rows = slice(first, first + ROWS)
        logits_RV = engine._worker.model.logits(hidden_TC[rows])
        chosen_R = logits_RV.gather(-1, next_ids_T[rows, None])[:, 0]
        found.append(chosen_R - logits_RV.logsumexp(-1))
    return torch.cat(found)

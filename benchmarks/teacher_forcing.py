"""Logprobs of given tokens by the runtime, whole prompts at once or token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from inference.engine import Engine, Request, SamplingParams
from inference.engine.batch import build_batch
from inference.engine.request import make_live
from inference.engine.rows import RunningRows
from inference.engine.scheduler import Schedule
from inference.engine.staging import Staging

CHUNK = 8192
ROWS = 512
"""Hidden states whose logits are computed at a time."""


class TeacherForcing:
    """One sequence in the first pages of an idle engine's memory."""

    def __init__(self, engine: Engine, token_ids: Sequence[int]) -> None:
        assert not engine.has_work, "the sequence overwrites the pages of others"
        self._worker = engine._worker
        assert engine.engine_config.page_size is not None
        self._rows = RunningRows(1, engine.engine_config.page_size)
        request = Request("forced", list(token_ids), SamplingParams(max_tokens=1))
        num_pages = -(-len(token_ids) // engine.engine_config.page_size)
        self._rows.place(make_live(request, ()), range(num_pages), 0)
        self._staging = Staging(self._worker.device)

    @torch.inference_mode()
    def advance(self, count: int) -> Tensor:
        """Hidden states of the next `count` tokens, computed in one step."""
        one = np.ones(1, bool)
        schedule = Schedule(np.zeros(1, np.int64), np.full(1, count), one, one, int(count == 1))
        worker = self._worker
        batch = build_batch(self._rows, schedule, self._staging, worker.planner)
        hidden_TC = worker.model(batch.input_ids_T, batch.paged, worker.pages)
        self._rows.num_computed += count
        return hidden_TC


@torch.inference_mode()
def prompt_logprobs(
    engine: Engine, token_ids: Sequence[int], *, num_decodes: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(logprob of each token but the first [n - 1], likeliest next token after each of them).

    The last `num_decodes` tokens are computed one by one, as decode steps do.
    """
    forced = TeacherForcing(engine, token_ids)
    num_prefill = len(token_ids) - num_decodes
    sizes = [min(CHUNK, num_prefill - first) for first in range(0, num_prefill, CHUNK)]
    hidden_TC = torch.cat([forced.advance(size) for size in [*sizes, *[1] * num_decodes]])
    ids = torch.tensor(list(token_ids), device=hidden_TC.device)
    logprobs, best = [], []
    for first in range(0, len(ids) - 1, ROWS):
        rows = slice(first, min(first + ROWS, len(ids) - 1))
        logits_RV = engine._worker.model.logits(hidden_TC[rows])
        next_ids = ids[1:][rows]
        chosen = logits_RV.gather(-1, next_ids[:, None])[:, 0]
        logprobs.append(chosen - logits_RV.logsumexp(-1))
        best.append(logits_RV.argmax(-1))
    return torch.cat(logprobs).cpu().numpy(), torch.cat(best).cpu().numpy()


def decode_against_prefill(
    engine: Engine, prompts: Sequence[Sequence[int]], num_decodes: int
) -> float:
    """Mean |Δ logprob| of the last tokens of each prompt, computed both ways."""
    errors = []
    for prompt in prompts:
        whole, _ = prompt_logprobs(engine, prompt)
        decoded, _ = prompt_logprobs(engine, prompt, num_decodes=num_decodes)
        errors.append(np.abs(whole - decoded)[-num_decodes:].mean())
    return float(np.mean(errors))

"""What becomes of the tokens that a step sampled, and of the requests that they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from inference.engine.in_flight import StepInFlight
from inference.engine.outputs import make_output
from inference.engine.request import FinishReason, LiveRequest, RequestOutput
from inference.engine.sampler import Sampled
from inference.engine.scheduler import Scheduler
from inference.engine.stats import Counters
from inference.engine.worker import Worker

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Settler:
    """Fills tokens into the rows, and takes out who is done."""

    def __init__(
        self, scheduler: Scheduler, worker: Worker, counters: Counters, tokenizer: Tokenizer | None
    ) -> None:
        self.live: dict[str, LiveRequest] = {}
        """Every request of the engine."""
        self._scheduler, self._worker = scheduler, worker
        self._counters, self._tokenizer = counters, tokenizer

    def settle(self, flight: StepInFlight) -> list[RequestOutput]:
        """Wait for a step, which another one may have followed; returns whom it finished."""
        sampled = flight.sample.wait()
        rows, schedule = self._scheduler.rows, flight.schedule
        is_there_R = flight.is_there(rows)
        is_there_S = is_there_R[schedule.is_last_R]
        is_finite_S = sampled.is_finite_S & is_there_S
        self._counters.count_step(schedule, is_finite_S, sampled.is_finite_S | ~is_there_S)
        self._fill(flight, sampled, is_finite_S)
        is_sound_R = is_there_R
        is_sound_R[schedule.is_last_R] = is_finite_S
        self._scheduler.remember_prompts(schedule, is_sound_R)
        return self._collect(flight, sampled, is_there_S)

    def _fill(self, flight: StepInFlight, sampled: Sampled, is_finite_S: np.ndarray) -> None:
        """Tokens are appended and stamped with the version that sampled them."""
        rows, rows_F = self._scheduler.rows, flight.rows_S[is_finite_S]
        places_F = flight.places_S[is_finite_S]
        is_first_F = rows.version[rows_F] != flight.version
        for row, place in zip(rows_F[is_first_F], places_F[is_first_F], strict=True):
            first = int(place - rows.num_prompt[row])
            self._live_at(int(row)).version_spans.append((first, flight.version))
        rows.version[rows_F] = flight.version
        rows.fill_tokens(
            rows_F,
            places_F,
            sampled.ids_S[is_finite_S],
            sampled.logprobs_S[is_finite_S],
            sampled.raw_logprobs_S[is_finite_S],
        )

    def _collect(
        self, flight: StepInFlight, sampled: Sampled, is_there_S: np.ndarray
    ) -> list[RequestOutput]:
        """Take out who is done: broken numbers, then stop token, stop string, length."""
        rows, rows_S, outputs = self._scheduler.rows, flight.rows_S, []
        is_stop_S = (sampled.ids_S[:, None] == rows.stop_ids[rows_S]).any(1)
        has_strings_S = rows.has_stop_strings[rows_S] & sampled.is_finite_S & is_there_S
        for i in np.flatnonzero(has_strings_S).tolist():
            matcher = self._live_at(rows_S[i]).stop_matcher
            assert matcher is not None, "has_stop_strings says so"
            is_stop_S[i] |= matcher.push(int(sampled.ids_S[i]))
        is_full_S = flight.places_S + 1 == rows.max_total[rows_S]
        is_done_S = (is_stop_S | is_full_S | ~sampled.is_finite_S) & is_there_S
        for i in np.flatnonzero(is_done_S).tolist():
            live = self._live_at(rows_S[i])
            # The step after this one may have made room for another token already.
            rows.num_tokens[live.row] = flight.places_S[i] + bool(sampled.is_finite_S[i])
            if not sampled.is_finite_S[i]:
                outputs.append(self._fail(live, flight.version))
            else:
                outputs.append(self.finish(live, "stop" if is_stop_S[i] else "length"))
        return outputs

    def _live_at(self, row: int) -> LiveRequest:
        live = self._scheduler.rows.live[row]
        assert live is not None, f"row {row} is scheduled and empty"
        return live

    def _fail(self, live: LiveRequest, version: int) -> RequestOutput:
        count = int(self._scheduler.rows.num_tokens[live.row]) - live.num_prompt
        error = (
            f"non-finite logits for completion token {count} with policy version "
            f"{version}; the weights, or the keys of this prompt, hold NaN or Inf"
        )
        return self.finish(live, "error", error)

    def finish(
        self, live: LiveRequest, reason: FinishReason, error: str | None = None
    ) -> RequestOutput:
        """Take a request out of the engine, from whichever state."""
        captured: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
        if live.row >= 0 and (live.request.params.routing or live.request.params.blocks):
            rows = self._scheduler.rows
            # The key of the last token may have been computed ahead; it had no use.
            known = int(rows.num_tokens[live.row]) - 1
            count = min(int(rows.num_computed[live.row]), known)
            captured = self._worker.captured(self._scheduler.rows.pages(live.row), count)
        self._scheduler.finish(live, keep_in_cache=reason != "error")
        del self.live[live.request_id]
        return make_output(live, reason, error=error, captured=captured, tokenizer=self._tokenizer)

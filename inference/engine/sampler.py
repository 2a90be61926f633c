"""One sampled token for each row of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.engine.rows import RunningRows
from inference.engine.staging import Fetch
from inference.kernels.sample_logprob import SampledTokens, sample_logprob


@dataclass(slots=True)
class SamplingArrays:
    """What `sample` must know of each row, in the order of the logits."""

    rows_S: Tensor
    """int64: row of `RunningRows`."""
    temperature_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    seeds_S: Tensor
    positions_S: Tensor
    """int64: place of the token being drawn in its request."""
    has_cuts: bool
    """Whether any row truncates its distribution."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor], *, has_cuts: bool) -> SamplingArrays:
        """From what `sampling_arrays` gives, as it lies on the device."""
        rows, temperature, top_k, top_p, min_p, seeds, positions = tensors
        return cls(rows, temperature, top_k, top_p, min_p, seeds, positions, has_cuts)


@dataclass(slots=True)
class Sampled:
    """Tokens of one step, on the host."""

    ids_S: np.ndarray
    """int64; means nothing where `is_finite_S` is False."""
    logprobs_S: np.ndarray
    """float32, of the distribution sampled from."""
    raw_logprobs_S: np.ndarray
    """float32, at temperature 1 and untruncated."""
    is_finite_S: np.ndarray
    """bool: False where a logit was NaN or infinite."""


class PendingSample:
    """Tokens of a step that the device may still be computing."""

    def __init__(
        self,
        packed: Tensor,
        count: int,
        wait_for: Callable[[torch.cuda.Event], None] | None = None,
    ) -> None:
        """`packed`: of `pack`; the first `count` rows are wanted. `wait_for`: see `Fetch`."""
        self._fetch, self._count = Fetch(packed, wait_for), count

    def wait(self) -> Sampled:
        packed = self._fetch.wait()
        num_rows = len(packed) // ROW_BYTES
        ids, logprobs, raw, is_finite = np.split(packed, np.cumsum([8, 4, 4]) * num_rows)
        return Sampled(
            ids.view(np.int64)[: self._count],
            logprobs.view(np.float32)[: self._count],
            raw.view(np.float32)[: self._count],
            is_finite.view(bool)[: self._count],
        )


ROW_BYTES = 8 + 4 + 4 + 1
"""A token: its id, two logprobs, and whether the logits were finite."""


def pack(tokens: SampledTokens) -> Tensor:
    """All fields one after the other in one tensor of bytes."""
    return torch.cat([field.view(torch.uint8) for field in tokens])


def sampling_arrays(rows: RunningRows, rows_S: np.ndarray) -> list[np.ndarray]:
    """The fields of `SamplingArrays` but the last, on the host."""
    return [
        rows_S,
        rows.temperature[rows_S],
        rows.top_k[rows_S],
        rows.top_p[rows_S],
        rows.min_p[rows_S],
        rows.seed[rows_S],
        rows.num_tokens[rows_S],
    ]


def has_cuts(rows: RunningRows, rows_S: np.ndarray) -> bool:
    """Whether any of the rows truncates its distribution."""
    is_cut = (rows.top_k[rows_S] > 0) | (rows.top_p[rows_S] < 1) | (rows.min_p[rows_S] > 0)
    return bool(is_cut.any())


@torch.inference_mode()
def sample(logits_SV: Tensor, arrays: SamplingArrays) -> SampledTokens:
    """Sample by each row's own parameters.

    The noise depends on the request's seed and the token's position alone, so a request draws the
    same tokens in any batch, and again after a preemption.
    """
    return sample_logprob(
        logits_SV,
        temperature_R=arrays.temperature_S,
        top_k_R=arrays.top_k_S,
        top_p_R=arrays.top_p_S,
        min_p_R=arrays.min_p_S,
        seeds_R=arrays.seeds_S,
        positions_R=arrays.positions_S,
        has_cuts=arrays.has_cuts,
    )

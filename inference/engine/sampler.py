"""One sampled token for each row of logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.engine.rows import RunningRows
from inference.kernels.sample_logprob import sample_logprob


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


@torch.inference_mode()
def sample(logits_SV: Tensor, rows: RunningRows, rows_S: np.ndarray) -> Sampled:
    """Sample by each row's own parameters.

    The noise depends on the request's seed and the token's position alone, so a request draws the
    same tokens in any batch, and again after a preemption.
    """
    device = logits_SV.device
    # A sum is finite when all its terms are, and one pass over the logits is enough to see it.
    is_finite_S = torch.isfinite(logits_SV.sum(-1))
    tokens = sample_logprob(
        logits_SV,
        temperature_R=_tensor(rows.temperature[rows_S], device),
        top_k_R=_tensor(rows.top_k[rows_S], device),
        top_p_R=_tensor(rows.top_p[rows_S], device),
        min_p_R=_tensor(rows.min_p[rows_S], device),
        seeds_R=_tensor(rows.seed[rows_S], device),
        positions_R=_tensor(rows.num_tokens[rows_S], device),
    )
    return Sampled(
        tokens.ids_R.cpu().numpy(),
        tokens.logprobs_R.cpu().numpy(),
        tokens.raw_logprobs_R.cpu().numpy(),
        is_finite_S.cpu().numpy(),
    )


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)

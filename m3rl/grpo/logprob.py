"""Log-probabilities and entropies of given tokens, never holding the logits of all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

DEFAULT_CHUNK = 1024


def token_logprobs(
    hidden_TC: Tensor,
    head_VC: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    chunk_size: int = DEFAULT_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(head · hidden / temperature), and the entropy.

    Logits exist for `chunk_size` tokens at a time, in the forward and again in the backward, where
    they are recomputed: peak memory is a few chunks, [chunk_size, V] each. Computed in FP32, or in
    FP64 if `hidden_TC` is.

    Args:
        hidden_TC: [T, C], the hidden state from which each target is predicted; any float dtype.
        head_VC: [V, C]; gradients are accumulated in its own dtype.
        targets_T: [T] int64.
        temperature: of the sampling, above 0. It divides logits, not log-probabilities.

    Returns:
        (logprobs_T, entropy_T): FP32 (FP64); the entropy carries no gradient.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1")
    return _TokenLogprobs.apply(hidden_TC, head_VC, targets_T, temperature, chunk_size)


@torch.no_grad()
def greedy_hits(
    hidden_TC: Tensor, head_VC: Tensor, targets_T: Tensor, *, chunk_size: int = DEFAULT_CHUNK
) -> Tensor:
    """[T] bool: whether greedy decoding would choose each target (lowest id of equal logits)."""
    dtype = _compute_dtype(hidden_TC)
    head = head_VC.to(dtype)
    hits_T = torch.empty(len(targets_T), dtype=torch.bool, device=targets_T.device)
    for part in _chunks(len(targets_T), chunk_size):
        hits_T[part] = (hidden_TC[part].to(dtype) @ head.T).argmax(-1) == targets_T[part]
    return hits_T


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TC: Tensor,
        head_VC: Tensor,
        targets_T: Tensor,
        temperature: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = _compute_dtype(hidden_TC)
        head = head_VC.to(dtype)
        logprobs_T = hidden_TC.new_empty(len(targets_T), dtype=dtype)
        entropy_T = torch.empty_like(logprobs_T)
        normaliser_T = torch.empty_like(logprobs_T)
        for part in _chunks(len(targets_T), chunk_size):
            logits_tV = hidden_TC[part].to(dtype) @ head.T
            logits_tV.div_(temperature)
            normaliser_t = logits_tV.logsumexp(-1)
            chosen_t = logits_tV.gather(-1, targets_T[part, None]).squeeze(-1)
            logprobs_T[part] = chosen_t - normaliser_t
            normaliser_T[part] = normaliser_t
            # H = -Σ p log p with log p = logits - normaliser, in place of the logits.
            log_p_tV = logits_tV.sub_(normaliser_t[:, None])
            entropy_T[part] = -(log_p_tV.exp() * log_p_tV).sum(-1)
        ctx.save_for_backward(hidden_TC, head_VC, targets_T, normaliser_T)
        ctx.temperature = temperature
        ctx.chunk_size = chunk_size
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_T: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_TC, head_VC, targets_T, normaliser_T = ctx.saved_tensors
        dtype = _compute_dtype(hidden_TC)
        head = head_VC.to(dtype)
        grad_hidden = torch.zeros_like(hidden_TC) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(targets_T), ctx.chunk_size):
            hidden_tC = hidden_TC[part].to(dtype)
            # d logp / d logits = onehot(target) - p, and logits = head · hidden / temperature
            grad_tV = hidden_tC @ head.T
            grad_tV.div_(ctx.temperature).sub_(normaliser_T[part, None]).exp_()
            scale_t = grad_T[part, None] / ctx.temperature
            grad_tV.mul_(-scale_t).scatter_add_(-1, targets_T[part, None], scale_t)
            if grad_hidden is not None:
                grad_hidden[part] = (grad_tV @ head).to(grad_hidden.dtype)
            if grad_head is not None:
                grad_head.addmm_(grad_tV.T, hidden_tC)
        if grad_head is not None:
            grad_head = grad_head.to(head_VC.dtype)
        return grad_hidden, grad_head, None, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]

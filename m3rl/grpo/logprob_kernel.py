"""Passes over the logits of some ids, each logit read once: a token a program, FP32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 4
"""Ids at a time."""


@triton.jit
def _fold_kernel(
    sums_ptr,
    logits_ptr,
    targets_ptr,
    first_id,
    num_tokens,
    num_ids,
    inverse,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    logits_ptr += i_token * num_ids
    p_largest = sums_ptr + i_token
    p_total = p_largest + num_tokens
    p_weighted = p_total + num_tokens
    largest, total, weighted = tl.load(p_largest), tl.load(p_total), tl.load(p_weighted)
    place = tl.load(targets_ptr + i_token) - first_id
    if (place >= 0) & (place < num_ids):
        tl.store(p_weighted + num_tokens, tl.load(logits_ptr + place))
    for first in range(0, num_ids, BLOCK):
        # [BLOCK]
        o_id = first + tl.arange(0, BLOCK)
        b_logit = tl.load(logits_ptr + o_id, mask=o_id < num_ids, other=float("-inf"))
        larger = tl.maximum(largest, tl.max(b_logit, 0))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        b_below = (b_logit - shift) * inverse
        b_exp = tl.exp(b_below)
        # Sums so far, seen from the new largest logit.
        below = (largest - shift) * inverse
        share = tl.exp(below)
        # The limit of exp(y) y is 0, also at -inf.
        weighted = tl.where(share == 0.0, 0.0, share * (weighted + total * below))
        weighted += tl.sum(tl.where(b_exp == 0.0, 0.0, b_exp * b_below), 0)
        total = share * total + tl.sum(b_exp, 0)
        largest = larger
    tl.store(p_largest, largest)
    tl.store(p_total, total)
    tl.store(p_weighted, weighted)


@triton.jit
def _gradient_kernel(
    out_ptr,
    logits_ptr,
    targets_ptr,
    largest_ptr,
    log_total_ptr,
    entropy_ptr,
    grad_ptr,
    grad_entropy_ptr,
    first_id,
    num_ids,
    inverse,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    logits_ptr += i_token * num_ids
    out_ptr += i_token * num_ids
    place = tl.load(targets_ptr + i_token) - first_id
    largest = tl.load(largest_ptr + i_token)
    log_total = tl.load(log_total_ptr + i_token)
    grad = tl.load(grad_ptr + i_token) * inverse
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptr + i_token)
        grad_entropy = tl.load(grad_entropy_ptr + i_token) * inverse
    for first in range(0, num_ids, BLOCK):
        # [BLOCK]
        o_id = first + tl.arange(0, BLOCK)
        m_id = o_id < num_ids
        b_logit = tl.load(logits_ptr + o_id, mask=m_id, other=float("-inf"))
        b_log_p = (b_logit - largest) * inverse - log_total
        b_p = tl.exp(b_log_p)
        b_grad = b_p * grad
        if HAS_ENTROPY:
            b_grad += b_p * (grad_entropy * (b_log_p + entropy))
        b_grad = tl.where(o_id == place, grad, 0.0) - tl.where(b_p == 0.0, 0.0, b_grad)
        tl.store(out_ptr + o_id, b_grad.to(out_ptr.dtype.element_ty), mask=m_id)


def fold(
    sums_4T: Tensor, logits_TN: Tensor, targets_T: Tensor, first_id: int, inverse: float
) -> None:
    num_tokens, num_ids = logits_TN.shape
    _fold_kernel[(num_tokens,)](
        sums_4T,
        logits_TN,
        targets_T,
        first_id,
        num_tokens,
        num_ids,
        inverse,
        BLOCK=_block(num_ids),
        num_warps=WARPS,
    )


def logits_gradient(
    logits_TN: Tensor,
    targets_T: Tensor,
    first_id: int,
    inverse: float,
    largest_T: Tensor,
    log_total_T: Tensor,
    entropy_T: Tensor,
    grad_T: Tensor,
    grad_entropy_T: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """FP32 gradients take the place of the logits."""
    num_tokens, num_ids = logits_TN.shape
    out_TN = logits_TN if dtype == logits_TN.dtype else torch.empty_like(logits_TN, dtype=dtype)
    _gradient_kernel[(num_tokens,)](
        out_TN,
        logits_TN,
        targets_T,
        largest_T,
        log_total_T,
        entropy_T,
        grad_T,
        grad_entropy_T,
        first_id,
        num_ids,
        inverse,
        HAS_ENTROPY=grad_entropy_T is not None,
        BLOCK=_block(num_ids),
        num_warps=WARPS,
    )
    return out_TN


def _block(num_ids: int) -> int:
    return min(BLOCK, triton.next_power_of_2(num_ids))

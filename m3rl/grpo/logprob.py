"""Log-probabilities and entropies of given tokens, never holding the logits of all ids.

The vocabulary is cut into tiles. A tile's logits are computed once in the forward pass, folded into
sums of every token, and again in the backward pass, where its part of the head's gradient is one
product over all tokens; only the gradient of the hidden states adds up over tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from inference.kernels.dispatch import use_kernel
from m3rl.grpo import logprob_reference
from m3rl.grpo.logprob_reference import CHOSEN, LARGEST, TOTAL, WEIGHTED, new_sums

OP = "token_logprobs"
TILE_LOGITS = 1 << 27
"""Logits that exist at a time: 0.5 GiB in FP32, and half of it again for BF16 gradients."""
MIN_TILE_IDS = 2048
"""Narrower tiles would have products wait for memory; so more logits exist above 64K tokens."""
ALIGNMENT = 128


def token_logprobs(
    hidden_TC: Tensor,
    head_VC: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    entropy_grad: bool = False,
    tile_ids: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(head · hidden / temperature), and the entropy.

    Logits are FP32 (FP64 if `hidden_TC` is), and so are all sums. On CUDA the operands of products
    with BF16 hidden states are BF16: in the forward pass these are the given values; in the
    backward pass the logits' gradients are rounded to it. Beyond inputs and the head's gradient,
    32K tokens of 6,144 channels take 1.5 GiB.

    Args:
        hidden_TC: [T, C], the hidden state from which each target is predicted; any float dtype,
            but FP64 on the CPU only.
        head_VC: [V, C]; its values are rounded to the dtype of `hidden_TC`, a tile at a time, and
            the gradient is that of the rounded ones, in the dtype of `head_VC`: give FP32 masters
            where its sums shall stay unrounded.
        targets_T: [T] int64; an id outside the vocabulary has logprob NaN.
        temperature: of the sampling, above 0. It divides logits, not log-probabilities.
        entropy_grad: whether the entropy carries a gradient.
        tile_ids: ids whose logits exist at a time; by default as many as `TILE_LOGITS` allows.

    Returns:
        (logprobs_T, entropy_T): FP32 (FP64).

    Raises:
        ValueError: an option is out of its range; the tensors lie on different devices.
        TypeError: FP64 on CUDA.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0")
    tiles = _tiles(len(targets_T), len(head_VC), tile_ids)
    on_cuda = use_kernel(OP, hidden_TC, head_VC, targets_T)
    if on_cuda and hidden_TC.dtype == torch.float64:
        raise TypeError(f"{OP}: float64 runs on the CPU only")
    return _TokenLogprobs.apply(
        hidden_TC, head_VC, targets_T.contiguous(), 1.0 / temperature, entropy_grad, tiles
    )


@torch.no_grad()
def greedy_hits(
    hidden_TC: Tensor, head_VC: Tensor, targets_T: Tensor, *, tile_ids: int | None = None
) -> Tensor:
    """[T] bool: whether greedy decoding would choose each target (lowest id of equal logits).

    Logits and arguments as in `token_logprobs`.
    """
    x_TC = _operand(hidden_TC)
    best_T = torch.full_like(targets_T, -torch.inf, dtype=_sum_dtype(hidden_TC))
    ids_T = torch.zeros_like(targets_T)
    for tile in _tiles(len(targets_T), len(head_VC), tile_ids):
        value_T, place_T = _product(x_TC, _rounded(head_VC[tile], hidden_TC).T).max(1)
        is_better_T = value_T > best_T
        best_T = torch.where(is_better_T, value_T, best_T)
        ids_T = torch.where(is_better_T, place_T + tile.start, ids_T)
    return ids_T == targets_T


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TC: Tensor,
        head_VC: Tensor,
        targets_T: Tensor,
        inverse: float,
        entropy_grad: bool,
        tiles: list[slice],
    ) -> tuple[Tensor, Tensor]:
        passes = _passes(hidden_TC)
        x_TC = _operand(hidden_TC)
        sums_4T = new_sums(targets_T, _sum_dtype(hidden_TC))
        for tile in tiles:
            head_NC = _rounded(head_VC[tile], hidden_TC)
            passes.fold(sums_4T, _product(x_TC, head_NC.T), targets_T, tile.start, inverse)
        largest_T = sums_4T[LARGEST].clone()
        log_total_T = sums_4T[TOTAL].log()
        logprobs_T = (sums_4T[CHOSEN] - largest_T) * inverse - log_total_T
        # H = -Σ p log p with log p = y - log Σ exp(y).
        entropy_T = log_total_T - sums_4T[WEIGHTED] / sums_4T[TOTAL]
        ctx.save_for_backward(hidden_TC, head_VC, targets_T, largest_T, log_total_T, entropy_T)
        ctx.inverse, ctx.entropy_grad, ctx.tiles = inverse, entropy_grad, tiles
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_T: Tensor, grad_entropy_T: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden_TC, head_VC, targets_T, *of_token = ctx.saved_tensors
        of_token += [grad_T.contiguous(), grad_entropy_T.contiguous() if ctx.entropy_grad else None]
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        passes = _passes(hidden_TC)
        x_TC = _operand(hidden_TC)
        grad_TC = torch.zeros_like(x_TC, dtype=_sum_dtype(hidden_TC)) if needs_hidden else None
        grad_VC = torch.zeros_like(head_VC) if needs_head else None
        for tile in ctx.tiles:
            head_NC = _rounded(head_VC[tile], hidden_TC)
            grad_TN = passes.logits_gradient(
                _product(x_TC, head_NC.T), targets_T, tile.start, ctx.inverse, *of_token, x_TC.dtype
            )
            if grad_TC is not None:
                _add_product(grad_TC, grad_TN, head_NC)
            if grad_VC is not None:
                grad_VC[tile] = _product(grad_TN.T, x_TC)
            # Before the next logits are made.
            del grad_TN
        if grad_TC is not None:
            grad_TC = grad_TC.to(hidden_TC.dtype)
        return grad_TC, grad_VC, None, None, None, None


def _tiles(num_tokens: int, vocab_size: int, tile_ids: int | None) -> list[slice]:
    """The ids of each tile; none where there are no tokens."""
    if tile_ids is None:
        aligned = TILE_LOGITS // max(num_tokens, 1) // ALIGNMENT * ALIGNMENT
        tile_ids = max(MIN_TILE_IDS, aligned)
    elif tile_ids < 1:
        raise ValueError(f"tile_ids={tile_ids} must be at least 1")
    if num_tokens == 0:
        return []
    return [
        slice(first, min(first + tile_ids, vocab_size)) for first in range(0, vocab_size, tile_ids)
    ]


def _passes(hidden: Tensor) -> Any:
    """The module whose passes run on the device of `hidden`."""
    if hidden.is_cuda:
        from m3rl.grpo import logprob_kernel

        return logprob_kernel
    return logprob_reference


def _sum_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _operand(x: Tensor) -> Tensor:
    """`x` as it enters products: as it is where BF16 has products with FP32 sums."""
    return x if x.is_cuda and x.dtype == torch.bfloat16 else x.to(_sum_dtype(x))


def _rounded(head_NC: Tensor, hidden: Tensor) -> Tensor:
    """A tile of the head with the values that the dtype of `hidden` can hold, as an operand."""
    return _operand(head_NC.to(hidden.dtype))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a · b with the sums' dtype."""
    if a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a · b to `total`, which has the sums' dtype."""
    if a.dtype == torch.bfloat16:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a, b)

"""Causal attention of packed samples by the libraries in torch: cuDNN for long samples, where it is
the faster, else FlashAttention 2, which takes many samples in one call.

cuDNN adds the gradient of q in a free order. Where torch is told to be deterministic,
FlashAttention computes the gradients of long samples too, from cuDNN's output and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from inference.kernels.packing import Packing, Seen

LONG = 4096
"""Tokens from which on a sample is a call of its own."""
NUM_KEPT = 3
"""Tensors that the forward pass of a part keeps for the backward beside inputs and output."""


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring samples that one call attends over."""

    samples: slice
    """Of those that have a query."""
    queries: slice
    keys: slice
    is_long: bool
    """One long sample, all of whose tokens are queries."""


def parts_of(seen: Seen) -> list[Part]:
    """Cut the samples into long ones and runs of others, in order."""
    parts: list[Part] = []
    query = key = 0
    for sample, (num_queries, num_keys) in enumerate(
        zip(seen.query_lens, seen.key_lens, strict=True)
    ):
        is_long = num_queries == num_keys >= LONG
        starts = sample, query, key
        if parts and not is_long and not parts[-1].is_long:
            last = parts.pop()
            starts = last.samples.start, last.queries.start, last.keys.start
        query, key = query + num_queries, key + num_keys
        stops = sample + 1, query, key
        parts.append(Part(*map(slice, starts, stops), is_long))
    return parts


def padded_length(length: int) -> int:
    """Tokens that a long sample is filled up to: 8 sizes from each power of two to the next.

    cuDNN makes a plan for every size that it sees.
    """
    step = 1 << (length.bit_length() - 4)
    return -(-length // step) * step


def dense_varlen(
    q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, packing: Packing, scale: float
) -> Tensor:
    keys = packing.seen.keys
    out_QHD: Tensor = _DenseVarlen.apply(q_QHD, k_TKD[keys], v_TKD[keys], packing.seen, scale)
    return out_QHD


class _DenseVarlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_QHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, seen: Seen, scale: float
    ) -> Tensor:
        outs, kept = [], []
        for part in parts_of(seen):
            forward = _long_forward if part.is_long else _short_forward
            qkv = q_QHD[part.queries], k_SKD[part.keys], v_SKD[part.keys]
            out, *of_part = forward(qkv, seen, part, scale)
            outs.append(out)
            kept += of_part
        out_QHD = _joined(outs)
        ctx.save_for_backward(q_QHD, k_SKD, v_SKD, out_QHD, *kept)
        ctx.seen, ctx.scale = seen, scale
        return out_QHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_QHD: Tensor) -> tuple[Tensor | None, ...]:
        q_QHD, k_SKD, v_SKD, out_QHD, *kept = ctx.saved_tensors
        of_parts = iter(kept)
        found = []
        for part in parts_of(ctx.seen):
            backward = _short_backward
            if part.is_long:
                fixed_order = torch.are_deterministic_algorithms_enabled()
                backward = _long_backward_in_order if fixed_order else _long_backward
            grad, q, out = (x[part.queries] for x in (grad_QHD, q_QHD, out_QHD))
            qkvo = q, k_SKD[part.keys], v_SKD[part.keys], out
            of_part = [next(of_parts) for _ in range(NUM_KEPT)]
            found.append(backward(grad, qkvo, of_part, ctx.seen, part, ctx.scale))
        return *(_joined(grads) for grads in zip(*found, strict=True)), None, None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _starts(seen: Seen, part: Part) -> tuple[Tensor, Tensor, int, int]:
    """(where queries of each sample begin, where keys do, the longest of each)."""
    samples = part.samples
    bounds = slice(samples.start, samples.stop + 1)
    query_start, key_start = seen.query_start_R1[bounds], seen.key_start_R1[bounds]
    if samples.start:
        query_start, key_start = query_start - part.queries.start, key_start - part.keys.start
    return query_start, key_start, max(seen.query_lens[samples]), max(seen.key_lens[samples])


def _short_forward(
    qkv: Sequence[Tensor], seen: Seen, part: Part, scale: float
) -> tuple[Tensor, ...]:
    """(out, log-sum-exp [H, Q], and two that only dropout needs)."""
    # The last key belongs to the last query, also where a sample has more keys than queries.
    starts = _starts(seen, part)
    *found, _ = torch.ops.aten._flash_attention_forward(
        *qkv, *starts, 0.0, True, False, scale=scale
    )
    return tuple(found)


def _short_backward(
    grad: Tensor,
    qkvo: Sequence[Tensor],
    kept: Sequence[Tensor],
    seen: Seen,
    part: Part,
    scale: float,
) -> tuple[Tensor, ...]:
    lse_HQ, *of_dropout = kept
    return torch.ops.aten._flash_attention_backward(
        grad, *qkvo, lse_HQ, *_starts(seen, part), 0.0, True, *of_dropout, scale=scale
    )


def _long_forward(
    qkv: Sequence[Tensor], seen: Seen, part: Part, scale: float
) -> tuple[Tensor, ...]:
    """(out, log-sum-exp [1, H, padded length, ...], and two that only dropout needs)."""
    out, lse, _, _, _, _, *of_dropout, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *map(_filled_up, qkv), None, True, 0.0, True, False, scale=scale
    )
    return _packed(out, len(qkv[0])), lse, *of_dropout


def _long_backward(
    grad: Tensor,
    qkvo: Sequence[Tensor],
    kept: Sequence[Tensor],
    seen: Seen,
    part: Part,
    scale: float,
) -> tuple[Tensor, ...]:
    # Tokens that fill a sample up have no gradient, and no real one sees them.
    filled_up = [_filled_up(x) for x in (grad, *qkvo)]
    size = filled_up[0].shape[2]
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *filled_up, *kept, None, None, None, size, size, 0.0, True, scale=scale
    )
    return tuple(_packed(x, len(grad)) for x in found)


def _long_backward_in_order(
    grad: Tensor,
    qkvo: Sequence[Tensor],
    kept: Sequence[Tensor],
    seen: Seen,
    part: Part,
    scale: float,
) -> tuple[Tensor, ...]:
    length, num_heads, _ = grad.shape
    lse_HS = kept[0].view(num_heads, -1)[:, :length].contiguous()
    # The state of random numbers, which are never drawn.
    state = torch.empty(2, dtype=torch.uint64, device=grad.device)
    return _short_backward(grad, qkvo, (lse_HS, state, state[:0]), seen, part, scale)


def _filled_up(x_SHD: Tensor) -> Tensor:
    """[1, H, padded length, D], zeros behind the sample."""
    missing = padded_length(len(x_SHD)) - len(x_SHD)
    if missing:
        x_SHD = pad(x_SHD, (0, 0, 0, 0, 0, missing))
    return x_SHD.transpose(0, 1)[None]


def _packed(x: Tensor, length: int) -> Tensor:
    """[S, H, D] of what `_filled_up` makes."""
    return x[0].transpose(0, 1)[:length]

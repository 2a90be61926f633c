"""Norm and rotation of heads, and their gradients, each in one pass.

A row is a head of a token. It is cut into the two halves that turn and pieces of their width for
the rest: partners meet in one thread's registers, and all pieces lie alike over the threads.
"""

# ruff: noqa: RUF005 - Triton knows no starred tuples

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.hardware import num_multiprocessors
from inference.kernels.rms_norm.pieces_kernel import (
    load_gains,
    load_pieces,
    norm_gradient,
    store_part,
    store_pieces,
    zeros_like,
)


@triton.jit
def _cut(D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """(offsets [1, BLOCK] of the pieces of a row, where each ends)."""
    o_i = tl.arange(0, BLOCK)[None, :]
    offsets, ends = (o_i, HALF + o_i), (HALF, 2 * HALF)
    for first in tl.static_range(2 * HALF, D, BLOCK):
        offsets, ends = offsets + (first + o_i,), ends + (D,)
    return offsets, ends


@triton.jit
def _load_turn(p_cos, m_row, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """(cosines, sines) [ROWS, BLOCK] of each row's token."""
    o_i = tl.arange(0, BLOCK)[None, :]
    mask = m_row & (o_i < HALF)
    b_cos = tl.load(p_cos + o_i, mask=mask, other=1.0)
    return b_cos, tl.load(p_cos + HALF + o_i, mask=mask, other=0.0)


@triton.jit
def _turned(pieces, b_cos, b_sin):
    """The first two pieces turned, by the angle or (with -sin) back; the others as they are."""
    b_x, b_y = pieces[0], pieces[1]
    turned = (b_x * b_cos - b_y * b_sin, b_y * b_cos + b_x * b_sin)
    for i in tl.static_range(2, len(pieces)):
        turned = turned + (pieces[i],)
    return turned


@triton.jit
def _qk_norm_rope_kernel(
    x_ptr,
    weight_ptr,
    cos_sin_ptr,
    out_ptr,
    stride_token,
    stride_head,
    num_rows,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    # [ROWS, 1]
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    m_r = o_r < num_rows
    o_t, o_h = (o_r // H).to(tl.int64), o_r % H
    offsets, ends = _cut(D, HALF, BLOCK)
    pieces = load_pieces(x_ptr + o_t * stride_token + o_h * stride_head, offsets, ends, m_r)
    b_cos, b_sin = _load_turn(cos_sin_ptr + o_t * (2 * HALF), m_r, HALF, BLOCK)
    gains = load_gains(weight_ptr, offsets, ends)
    b_square = pieces[0] * pieces[0]
    for i in tl.static_range(1, len(pieces)):
        b_square += pieces[i] * pieces[i]
    b_rstd = tl.rsqrt(tl.sum(b_square, 1)[:, None] / D + eps)
    normed = ()
    for i in tl.static_range(len(pieces)):
        normed = normed + (pieces[i] * b_rstd * gains[i],)
    turned = _turned(normed, b_cos, b_sin)
    store_pieces(out_ptr + o_r.to(tl.int64) * D, turned, offsets, ends, m_r)


@triton.jit
def _qk_norm_rope_backward_kernel(
    x_ptr,
    weight_ptr,
    cos_sin_ptr,
    grad_ptr,
    grad_x_ptr,
    parts_ptr,
    stride_x_token,
    stride_x_head,
    stride_grad_token,
    stride_grad_head,
    num_rows,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program takes tiles of rows in steps and sums their part of the weight's gradient."""
    offsets, ends = _cut(D, HALF, BLOCK)
    gains, parts = load_gains(weight_ptr, offsets, ends), zeros_like(offsets, ROWS)
    step = tl.num_programs(0) * ROWS
    for row in tl.range(tl.program_id(0) * ROWS, num_rows, step, num_stages=STAGES):
        # [ROWS, 1]
        o_r = row + tl.arange(0, ROWS)[:, None]
        m_r = o_r < num_rows
        o_t, o_h = (o_r // H).to(tl.int64), o_r % H
        x = load_pieces(x_ptr + o_t * stride_x_token + o_h * stride_x_head, offsets, ends, m_r)
        p_grad = grad_ptr + o_t * stride_grad_token + o_h * stride_grad_head
        grads = load_pieces(p_grad, offsets, ends, m_r)
        b_cos, b_sin = _load_turn(cos_sin_ptr + o_t * (2 * HALF), m_r, HALF, BLOCK)
        grads = _turned(grads, b_cos, -b_sin)
        # A row past the end is all zero; so must be its share of the sum, for any eps.
        b_eps = tl.where(m_r, eps, 1.0)
        grads_x, parts = norm_gradient(x, grads, gains, parts, D, b_eps, NEEDS_WEIGHT)
        store_pieces(grad_x_ptr + o_r.to(tl.int64) * D, grads_x, offsets, ends, m_r)
    if NEEDS_WEIGHT:
        store_part(parts_ptr + tl.program_id(0) * D, parts, offsets, ends)


class Launch(NamedTuple):
    """How the rows are cut; of the backward pass the weight's gradient is summed in that order."""

    rows: int
    num_warps: int
    programs: int = 0
    """Of a multiprocessor."""
    num_stages: int = 1


FORWARD = Launch(rows=32, num_warps=4)
BACKWARD = Launch(rows=16, num_warps=4, programs=5)


def _sizes(x_THD: Tensor, cos_sin_TX: Tensor) -> dict[str, int]:
    half = cos_sin_TX.shape[1] // 2
    num_heads, head_dim = x_THD.shape[1:]
    return {"H": num_heads, "D": head_dim, "HALF": half, "BLOCK": triton.next_power_of_2(half)}


def qk_norm_rope(x_THD: Tensor, weight_D: Tensor, cos_sin_TX: Tensor, eps: float) -> Tensor:
    if x_THD.stride(2) != 1:
        raise ValueError(f"qk_norm_rope: the head dim has stride {x_THD.stride(2)}, needs 1")
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    num_rows = x_THD.shape[0] * x_THD.shape[1]
    if out_THD.numel():
        _qk_norm_rope_kernel[(triton.cdiv(num_rows, FORWARD.rows),)](
            x_THD,
            weight_D.contiguous(),
            cos_sin_TX.contiguous(),
            out_THD,
            x_THD.stride(0),
            x_THD.stride(1),
            num_rows,
            eps,
            **_sizes(x_THD, cos_sin_TX),
            ROWS=FORWARD.rows,
            num_warps=FORWARD.num_warps,
        )
    return out_THD


def qk_norm_rope_backward(
    x_THD: Tensor,
    weight_D: Tensor,
    cos_sin_TX: Tensor,
    eps: float,
    grad_THD: Tensor,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """(gradient of `x_THD`, of the weight if needed) from that of the result."""
    grad_x_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    num_rows = x_THD.shape[0] * x_THD.shape[1]
    if grad_THD.stride(2) != 1:
        grad_THD = grad_THD.contiguous()
    most = BACKWARD.programs * num_multiprocessors(x_THD.device) if x_THD.is_cuda else 3
    programs = min(triton.cdiv(num_rows, BACKWARD.rows), most)
    parts = None
    if needs_weight:
        parts = torch.empty((programs, len(weight_D)), dtype=torch.float32, device=x_THD.device)
    if grad_x_THD.numel():
        _qk_norm_rope_backward_kernel[(programs,)](
            x_THD,
            weight_D.contiguous(),
            cos_sin_TX.contiguous(),
            grad_THD,
            grad_x_THD,
            parts,
            x_THD.stride(0),
            x_THD.stride(1),
            grad_THD.stride(0),
            grad_THD.stride(1),
            num_rows,
            eps,
            **_sizes(x_THD, cos_sin_TX),
            ROWS=BACKWARD.rows,
            NEEDS_WEIGHT=needs_weight,
            STAGES=BACKWARD.num_stages,
            num_warps=BACKWARD.num_warps,
        )
    return grad_x_THD, None if parts is None else parts.sum(0).to(weight_D.dtype)

"""Rows of any width, held as pieces of a power of two each; and the gradient of their norm.

A piece is [ROWS, BLOCK] FP32; `offsets` are [1, BLOCK] each, `ends` say where the pieces end.
"""

# ruff: noqa: RUF005 - Triton knows no starred tuples

import triton
import triton.language as tl


@triton.jit
def load_pieces(p_row, offsets, ends, m_row):
    """0 where none is; `p_row` and `m_row` are [ROWS, 1] or scalars."""
    pieces = ()
    for i in tl.static_range(len(offsets)):
        mask = m_row & (offsets[i] < ends[i])
        pieces = pieces + (tl.load(p_row + offsets[i], mask=mask, other=0.0).to(tl.float32),)
    return pieces


@triton.jit
def store_pieces(p_row, pieces, offsets, ends, m_row):
    for i in tl.static_range(len(offsets)):
        mask = m_row & (offsets[i] < ends[i])
        tl.store(p_row + offsets[i], pieces[i].to(p_row.dtype.element_ty), mask=mask)


@triton.jit
def load_gains(weight_ptr, offsets, ends):
    gains = ()
    for i in tl.static_range(len(offsets)):
        b_weight = tl.load(weight_ptr + offsets[i], mask=offsets[i] < ends[i], other=0.0)
        gains = gains + (1.0 + b_weight.to(tl.float32),)
    return gains


@triton.jit
def zeros_like(offsets, ROWS: tl.constexpr):
    pieces = ()
    for i in tl.static_range(len(offsets)):
        pieces = pieces + (tl.zeros([ROWS, offsets[i].shape[1]], tl.float32),)
    return pieces


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def norm_gradient(x, grads, gains, parts, dim, eps, NEEDS_WEIGHT: tl.constexpr):
    """(gradients of `x`, `parts` with these rows' share of the weight's gradient added).

    `grads` are those of x · rsqrt(mean(x²) + eps) · gain; `eps` may be [ROWS, 1].
    """
    scaled = ()
    for i in tl.static_range(len(x)):
        scaled = scaled + (grads[i] * gains[i],)
    b_square, b_dot = x[0] * x[0], x[0] * scaled[0]
    for i in tl.static_range(1, len(x)):
        b_square += x[i] * x[i]
        b_dot += x[i] * scaled[i]
    # [ROWS]
    b_square, b_dot = tl.reduce((b_square, b_dot), 1, _add_pairs)
    # [ROWS, 1]
    b_rstd = tl.rsqrt(b_square[:, None] / dim + eps)
    b_slope = b_rstd * b_rstd * b_rstd * (b_dot[:, None] / dim)
    grads_x, sums = (), ()
    for i in tl.static_range(len(x)):
        grads_x = grads_x + (scaled[i] * b_rstd - x[i] * b_slope,)
        sums = sums + (parts[i] + grads[i] * (x[i] * b_rstd) if NEEDS_WEIGHT else parts[i],)
    return grads_x, sums


@triton.jit
def store_part(p_part, parts, offsets, ends):
    """The sum of a program's rows."""
    for i in tl.static_range(len(offsets)):
        b_part = tl.sum(parts[i], 0)[None, :]
        tl.store(p_part + offsets[i], b_part, mask=offsets[i] < ends[i])

"""Sum of the parts of a row's output, each weighted by its log-sum-exp.

Log-sum-exps of parts are in base 2, of logits that carry log2(e).
"""

import triton
import triton.language as tl

from inference.kernels.merge_kernel import MIN_MAX


@triton.jit
def natural_lse(b_max, b_sum):
    """Log to base e of `b_sum` weights of 2^b_max each; -inf for none."""
    LN_2: tl.constexpr = 0.6931471805599453
    b_lse = (b_max + tl.log2(tl.where(b_sum > 0, b_sum, 1.0))) * LN_2
    return tl.where(b_sum > 0, b_lse, float("-inf"))


@triton.jit(do_not_specialize=("first_token", "first_head"))
def combine_kernel(
    part_ptr,
    lse_ptr,
    row_ptr,
    out_ptr,
    out_lse_ptr,
    stride_ot,
    stride_rt,
    stride_rk,
    first_token,
    first_head,
    K: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    LISTED: tl.constexpr,
    LSE: tl.constexpr,
):
    """Add the parts of ROWS query heads: rows named at `row_ptr` if LISTED, else in order.

    If LSE, the log-sum-exp of each query head (base e, of scaled logits) goes to [T, H].
    """
    i_t, i_k = (tl.program_id(0) + first_token).to(tl.int64), tl.program_id(1) + first_head
    o_p, o_d = tl.arange(0, PARTS_PAD), tl.arange(0, D_PAD)
    o_g = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if LISTED:
        p_row = row_ptr + i_t * stride_rt + i_k * stride_rk
        b_row = tl.load(p_row + o_p, mask=o_p < PARTS, other=-1).to(tl.int64)
    else:
        b_row = tl.where(o_p < PARTS, (i_t * K + i_k) * PARTS + o_p, -1)
    # [G, P]
    o_gp = b_row[None, :] * G + o_g[:, None]
    m_gp = (b_row >= 0)[None, :] & (o_g < G)[:, None]
    # [G, P, D]: all loads are on their way before the first is needed.
    b_part = tl.load(
        part_ptr + o_gp[:, :, None] * D + o_d[None, None, :],
        mask=m_gp[:, :, None] & (o_d < D)[None, None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    b_lse = tl.load(lse_ptr + o_gp, mask=m_gp, other=MIN_MAX)
    b_max = tl.max(b_lse, 1)
    b_w = tl.exp2(b_lse - b_max[:, None])
    b_w = tl.where(b_lse > MIN_MAX, b_w, 0.0)
    b_sum = tl.sum(b_w, 1)
    if LSE:
        p_lse = out_lse_ptr + (i_t * K + i_k) * G + o_g
        tl.store(p_lse, natural_lse(b_max, b_sum), mask=o_g < G)
    b_w = b_w / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    # [G, D]
    b_o = tl.sum(b_part.to(tl.float32) * b_w[:, :, None], 1)
    p_o = out_ptr + i_t * stride_ot + (i_k * G + o_g)[:, None] * D + o_d[None, :]
    tl.store(p_o, b_o.to(out_ptr.dtype.element_ty), mask=(o_g < G)[:, None] & (o_d < D)[None, :])

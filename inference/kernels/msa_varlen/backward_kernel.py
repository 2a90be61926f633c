"""Backward of sparse GQA, key-major: a block of keys against the queries that chose it.

A program keeps the keys and values of one block and takes tiles of `TILE` queries x `G` heads from
a unit of the block's list (`backward_lists_kernel`). It sums the unit's dK and dV in registers, in
the list's order, and writes each query's dQ from this block to a row of its own. Two more kernels
add the units of a block and the rows of a query, in order: no result depends on who came first.

Weights are computed as [keys, rows]: so they and their gradients go from one product into the next
without leaving the registers. Logits are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inference.kernels.msa_varlen.backward_lists_kernel import UNIT

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_stats_kernel(
    out_ptr,
    grad_ptr,
    lse_ptr,
    stats_ptr,
    stride_ot,
    stride_gt,
    num_rows,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """[2, Q, H] of one token: log-sum-exp in base 2 (inf if nothing is seen), out · grad."""
    i_t = tl.program_id(0).to(tl.int64)
    o_h, o_d = tl.arange(0, H_PAD), tl.arange(0, D_PAD)
    m_h = o_h < H
    # [H, D]
    o_hd = o_h[:, None] * D + o_d[None, :]
    m_hd = m_h[:, None] & (o_d < D)[None, :]
    b_out = tl.load(out_ptr + i_t * stride_ot + o_hd, mask=m_hd, other=0.0).to(tl.float32)
    b_grad = tl.load(grad_ptr + i_t * stride_gt + o_hd, mask=m_hd, other=0.0).to(tl.float32)
    p_row = i_t * H + o_h
    b_lse = tl.load(lse_ptr + p_row, mask=m_h, other=0.0)
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2_E)
    tl.store(stats_ptr + p_row, b_lse, mask=m_h)
    tl.store(stats_ptr + num_rows + p_row, tl.sum(b_out * b_grad, 1), mask=m_h)


@triton.jit(do_not_specialize=("first_list", "num_pages", "first_head"))
def list_stats_kernel(
    stats_ptr,
    tokens_ptr,
    row_start_ptr,
    list_stats_ptr,
    num_stats,
    num_list_stats,
    first_list,
    num_pages,
    first_head,
    H: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[2, rows, G_PAD]: `row_stats_kernel`'s numbers in the order of a pass's rows.

    Rows that are no query have a log-sum-exp of inf: their weights are 0.
    """
    i_h = tl.program_id(1)
    p_start = row_start_ptr + first_list + i_h * num_pages
    o_l = tl.load(p_start) + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_l = o_l < tl.load(p_start + num_pages)
    b_t = tl.load(tokens_ptr + o_l, mask=m_l, other=-1)
    o_g = tl.arange(0, G_PAD)
    # [BLOCK, G]
    m_lg = (b_t >= 0)[:, None] & (o_g < G)[None, :]
    p_stats = stats_ptr + b_t.to(tl.int64)[:, None] * H + (first_head + i_h) * G + o_g[None, :]
    b_lse = tl.load(p_stats, mask=m_lg, other=float("inf"))
    b_delta = tl.load(p_stats + num_stats, mask=m_lg, other=0.0)
    o_row = (o_l - tl.load(row_start_ptr + first_list)).to(tl.int64)
    p_row = list_stats_ptr + o_row[:, None] * G_PAD + o_g[None, :]
    tl.store(p_row, b_lse, mask=m_l[:, None])
    tl.store(p_row + num_list_stats, b_delta, mask=m_l[:, None])


@triton.jit
def _gather(
    ptr,
    b_t,
    stride,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """[M, D_PAD]: row m is head m % G_PAD of token b_t[m] [M]; zeros where there is none."""
    o_g, o_d = tl.arange(0, b_t.shape[0]) % G_PAD, tl.arange(0, D_PAD)
    p_rows = ptr + tl.maximum(b_t, 0).to(tl.int64)[:, None] * stride
    p_rows += o_g[:, None] * D + o_d[None, :]
    if (G == G_PAD) & (D == D_PAD):
        return tl.load(p_rows)
    return tl.load(p_rows, mask=(o_g < G)[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=("first_list", "num_lists", "first_query"))
def unit_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    list_stats_ptr,
    tokens_ptr,
    units_ptr,
    row_start_ptr,
    unit_start_ptr,
    dq_ptr,
    dkv_ptr,
    scale,
    stride_qt,
    stride_gt,
    stride_kt,
    stride_vt,
    num_list_stats,
    first_list,
    num_lists,
    first_query,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_PAD: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One unit of a pass: its dK and dV [2, PAGE, D] in FP32, and its rows [G_PAD, D_PAD] of dQ."""
    i_unit = tl.load(unit_start_ptr + first_list) + tl.program_id(0)
    if i_unit >= tl.load(unit_start_ptr + first_list + num_lists):
        return
    p_unit = units_ptr + i_unit.to(tl.int64) * UNIT
    i_row = tl.load(p_unit)
    num_rows = tl.load(p_unit + 1)
    first_token = tl.load(p_unit + 2)
    num_keys = tl.load(p_unit + 3)
    i_head = tl.load(p_unit + 4)
    tokens_ptr += i_row
    i_row -= tl.load(row_start_ptr + first_list)
    list_stats_ptr += i_row.to(tl.int64) * G_PAD
    dq_ptr += i_row.to(tl.int64) * (G_PAD * D_PAD)

    o_s, o_d, o_m = tl.arange(0, PAGE_PAD), tl.arange(0, D_PAD), tl.arange(0, TILE * G_PAD)
    # [PAGE, D]
    m_sd = (o_s < num_keys)[:, None] & (o_d < D)[None, :]
    o_token = first_token.to(tl.int64) + o_s
    p_k = k_ptr + o_token[:, None] * stride_kt + i_head * D + o_d[None, :]
    p_v = v_ptr + o_token[:, None] * stride_vt + i_head * D + o_d[None, :]
    b_k = tl.load(p_k, mask=m_sd, other=0.0)
    b_v = tl.load(p_v, mask=m_sd, other=0.0)
    b_dk = tl.zeros([PAGE_PAD, D_PAD], tl.float32)
    b_dv = tl.zeros([PAGE_PAD, D_PAD], tl.float32)
    # Key s is in the future of token t if s > t - first_token. Tokens ascend: those that do not see
    # the whole block are among the first PAGE.
    first_token -= first_query
    b_t = tl.load(tokens_ptr + o_s, mask=o_s < num_rows, other=(1 << 31) - 1)
    num_masked = tl.sum((b_t < first_token + PAGE - 1).to(tl.int32), 0)

    q_ptr += i_head * G * D
    grad_ptr += i_head * G * D
    log_scale = scale * LOG2_E
    # Tokens are read a tile ahead, so that nothing waits for what they point to.
    b_t = tl.load(tokens_ptr + o_m // G_PAD)
    for i in tl.range(0, num_rows, TILE, num_stages=STAGES):
        # [M, D]
        b_q = _gather(q_ptr, b_t, stride_qt, G, G_PAD, D, D_PAD)
        b_grad = _gather(grad_ptr, b_t, stride_gt, G, G_PAD, D, D_PAD)
        b_t = tl.load(tokens_ptr + i + TILE + o_m // G_PAD)
        # [M]
        p_stats = list_stats_ptr + i * G_PAD + o_m
        b_lse = tl.load(p_stats)
        b_delta = tl.load(p_stats + num_list_stats)
        # [PAGE, M]
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")
        b_dp = tl.dot(b_v, tl.trans(b_grad), input_precision="ieee")
        b_p = tl.exp2(b_s * log_scale - b_lse[None, :])
        if (i < num_masked) | (PAGE != PAGE_PAD):
            b_last = tl.load(tokens_ptr + i + o_m // G_PAD) - first_token
            b_last = tl.minimum(b_last, PAGE - 1)
            b_p = tl.where(o_s[:, None] <= b_last[None, :], b_p, 0.0)
        b_dv = tl.dot(b_p.to(b_q.dtype), b_grad, acc=b_dv, input_precision="ieee")
        b_ds = (b_p * (b_dp - b_delta[None, :])).to(b_q.dtype)
        b_dk = tl.dot(b_ds, b_q, acc=b_dk, input_precision="ieee")
        # [M, D]
        b_dq = tl.dot(tl.trans(b_ds), b_k, input_precision="ieee") * scale
        p_dq = dq_ptr + (i * G_PAD + o_m)[:, None] * D_PAD + o_d[None, :]
        tl.store(p_dq, b_dq.to(dq_ptr.dtype.element_ty))
    # [PAGE, D]
    p_dkv = dkv_ptr + tl.program_id(0).to(tl.int64) * (2 * PAGE * D)
    p_dkv += o_s[:, None] * D + o_d[None, :]
    m_sd = (o_s < PAGE)[:, None] & (o_d < D)[None, :]
    tl.store(p_dkv, b_dk * scale, mask=m_sd)
    tl.store(p_dkv + PAGE * D, b_dv, mask=m_sd)


@triton.jit(do_not_specialize=("first_list",))
def add_units_kernel(
    dkv_ptr,
    units_ptr,
    unit_start_ptr,
    sum_ptr,
    first_list,
    num_gradients,
    K: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add the units of a list to the gradients [2, T, K, D] in FP32: ROWS keys of dK or dV."""
    i_list = first_list + tl.program_id(0)
    i_unit, end_unit = tl.load(unit_start_ptr + i_list), tl.load(unit_start_ptr + i_list + 1)
    if i_unit == end_unit:
        return
    p_unit = units_ptr + i_unit.to(tl.int64) * UNIT
    first_token, num_keys = tl.load(p_unit + 2).to(tl.int64), tl.load(p_unit + 3)
    i_head, i_which = tl.load(p_unit + 4), tl.program_id(2)
    i_unit -= tl.load(unit_start_ptr + first_list)
    end_unit -= tl.load(unit_start_ptr + first_list)
    o_s, o_d = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, D_PAD)
    # [ROWS, D]
    m_sd = (o_s < num_keys)[:, None] & (o_d < D)[None, :]
    p_sum = sum_ptr + i_which * num_gradients + (first_token + o_s)[:, None] * (K * D)
    p_sum += i_head * D + o_d[None, :]
    p_dkv = dkv_ptr + (i_unit.to(tl.int64) * 2 + i_which) * (PAGE * D)
    p_dkv += o_s[:, None] * D + o_d[None, :]
    b_sum = tl.load(p_sum, mask=m_sd, other=0.0)
    for _ in tl.range(i_unit, end_unit, num_stages=4):
        b_sum += tl.load(p_dkv, mask=m_sd, other=0.0)
        p_dkv += 2 * PAGE * D
    tl.store(p_sum, b_sum, mask=m_sd)


@triton.jit(do_not_specialize=("first_list", "first_token", "first_head"))
def add_rows_kernel(
    dq_ptr,
    row_ptr,
    row_start_ptr,
    out_ptr,
    first_list,
    first_token,
    first_head,
    K: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    B: tl.constexpr,
    B_PAD: tl.constexpr,
):
    """dQ [G, D] of one token and KV head: the sum of its rows."""
    i_t, i_k = (tl.program_id(0) + first_token).to(tl.int64), tl.program_id(1) + first_head
    o_b, o_g, o_d = tl.arange(0, B_PAD), tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    b_row = tl.load(row_ptr + (i_t * K + i_k) * B + o_b, mask=o_b < B, other=-1)
    m_row = b_row >= 0
    b_row = (b_row - tl.load(row_start_ptr + first_list)).to(tl.int64)
    # [G, B, D]: all loads are on their way before the first is needed.
    o_gb = b_row[None, :] * G_PAD + o_g[:, None]
    b_dq = tl.load(
        dq_ptr + o_gb[:, :, None] * D_PAD + o_d[None, None, :],
        mask=m_row[None, :, None],
        other=0.0,
        eviction_policy="evict_first",
    )
    b_sum = tl.sum(b_dq.to(tl.float32), 1)
    p_out = out_ptr + (i_t * K + i_k) * (G * D) + o_g[:, None] * D + o_d[None, :]
    m_gd = (o_g < G)[:, None] & (o_d < D)[None, :]
    tl.store(p_out, b_sum.to(out_ptr.dtype.element_ty), mask=m_gd)

"""Divergence of the index branch from the attention over the chosen blocks, and its gradient.

A program of the first kernel takes a query and a KV head, and each of its blocks once: it keeps
both branches' values of all keys in registers, and sums index keys by the weights of either branch
as it goes. An index query is one row of a product among sixteen, so are the weights by which keys
are summed: keys go into products as they are. Weights are split into two values of the keys' dtype,
since two nearly equal sums are subtracted.

Logits are in base 2.
"""

import triton
import triton.language as tl

from inference.kernels.msa_varlen.backward_lists_kernel import UNIT

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOW = tl.constexpr(-1e30)
"""In the place of -inf where two are subtracted."""


@triton.jit(do_not_specialize=("first_query",))
def divergence_kernel(
    iq_ptr,
    ik_ptr,
    q_ptr,
    k_ptr,
    lse_ptr,
    blocks_ptr,
    row_ptr,
    positions_ptr,
    kl_ptr,
    slope_ptr,
    weight_ptr,
    scale,
    index_scale,
    first_query,
    K: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DI: tl.constexpr,
    DI_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_PAD: tl.constexpr,
    B: tl.constexpr,
    B_PAD: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Divergence, its derivative by the index query, and that by each index logit."""
    i_q, i_k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_qk = i_q * K + i_k
    o_g, o_d, o_b = tl.arange(0, G_PAD), tl.arange(0, D_PAD), tl.arange(0, B_PAD)
    o_s, o_i, o_r = tl.arange(0, PAGE_PAD), tl.arange(0, DI_PAD), tl.arange(0, 16)
    i_position = tl.load(positions_ptr + first_query + i_q)
    i_start = first_query + i_q - i_position
    k_ptr += i_k * D
    log_scale, log_index_scale = scale * LOG2_E, index_scale * LOG2_E
    # [G, D]
    m_g = o_g < G
    p_q = q_ptr + (i_qk * G + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_q, mask=m_g[:, None] & (o_d < D)[None, :], other=0.0)
    b_lse = tl.load(lse_ptr + i_qk * G + o_g, mask=m_g, other=0.0) * LOG2_E
    b_lse = tl.where(b_lse == float("-inf"), 0.0, b_lse)
    # [16, DI]
    p_iq = iq_ptr + i_qk * DI + o_i[None, :] + o_r[:, None] * 0
    b_iq = tl.load(p_iq, mask=(o_r == 0)[:, None] & (o_i < DI)[None, :], other=0.0)
    # [B]
    b_row = tl.load(row_ptr + i_qk * B + o_b, mask=o_b < B, other=-1)
    num_blocks = tl.max(tl.where(b_row >= 0, o_b + 1, 0), 0)

    i_max = tl.full([], LOW, tl.float32)
    i_sum = tl.full([], 0.0, tl.float32)
    # [B, PAGE]: weights of the main branch, logits of the index branch
    b_ps = tl.zeros([B_PAD, PAGE_PAD], tl.float32)
    b_ts = tl.full([B_PAD, PAGE_PAD], float("-inf"), tl.float32)
    # [16, DI]: index keys by the main branch's weights in rows 0 and 1, by the index branch's in 2
    # and 3.
    b_sums = tl.zeros([16, DI_PAD], tl.float32)
    for i in tl.range(0, num_blocks, num_stages=STAGES):
        i_place = tl.load(blocks_ptr + i_qk * B + i).to(tl.int64) * PAGE
        num_visible = tl.minimum(i_position + 1 - i_place, PAGE)
        num_visible = tl.where(tl.load(row_ptr + i_qk * B + i) >= 0, num_visible, 0)
        # [PAGE, D], [PAGE, DI]
        m_s = o_s < num_visible
        o_token = i_start + i_place + o_s
        p_k = k_ptr + o_token[:, None] * (K * D) + o_d[None, :]
        b_k = tl.load(p_k, mask=m_s[:, None] & (o_d < D)[None, :], other=0.0)
        p_ik = ik_ptr + o_token[:, None] * DI + o_i[None, :]
        b_ik = tl.load(p_ik, mask=m_s[:, None] & (o_i < DI)[None, :], other=0.0)
        # [G, PAGE], then [PAGE]
        b_p = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * log_scale
        b_p = tl.exp2(b_p - b_lse[:, None])
        b_p = tl.sum(tl.where(m_g[:, None] & m_s[None, :], b_p, 0.0), 0) / G
        b_t = tl.sum(tl.dot(b_iq, tl.trans(b_ik), input_precision="ieee"), 0) * log_index_scale
        b_t = tl.where(m_s, b_t, float("-inf"))
        if BY_BLOCK:  # as if the best key stood for its block
            m_best = o_s == tl.min(tl.where(b_t == tl.max(b_t, 0), o_s, PAGE_PAD), 0)
            b_p = tl.where(m_best, tl.sum(b_p, 0), 0.0)
            b_t = tl.where(m_best, b_t, float("-inf"))
        i_new = tl.maximum(i_max, tl.max(b_t, 0))
        i_less = tl.exp2(i_max - i_new)
        b_u = tl.exp2(b_t - i_new)
        i_sum = i_sum * i_less + tl.sum(b_u, 0)
        i_max = i_new
        m_i = (o_b == i)[:, None]
        b_ps = tl.where(m_i, b_p[None, :], b_ps)
        b_ts = tl.where(m_i, b_t[None, :], b_ts)
        b_w = tl.where((o_r < 2)[:, None], b_p[None, :], b_u[None, :])
        b_high = b_w.to(b_ik.dtype)
        b_low = (b_w - b_high.to(tl.float32)).to(b_ik.dtype)
        b_w = tl.where((o_r % 2 == 0)[:, None], b_high, b_low)
        b_w = tl.where((o_r < 4)[:, None], b_w, 0.0)
        b_sums *= tl.where(o_r < 2, 1.0, i_less)[:, None]
        b_sums = tl.dot(b_w, b_ik, acc=b_sums, input_precision="ieee")

    i_sum = tl.where(num_blocks > 0, i_sum, 1.0)
    b_ts -= i_max + tl.log2(i_sum)
    m_p = b_ps > 0
    b_log = tl.log2(tl.where(m_p, b_ps, 1.0)) - tl.where(m_p, b_ts, 0.0)
    tl.store(kl_ptr + i_qk, tl.sum(b_ps * b_log) * LN_2)
    b_slope = tl.sum(b_sums * tl.where(o_r < 2, -1.0, 1 / i_sum)[:, None], 0)
    tl.store(slope_ptr + i_qk * DI + o_i, b_slope * index_scale, mask=o_i < DI)
    p_weight = weight_ptr + b_row.to(tl.int64)[:, None] * PAGE + o_s[None, :]
    b_w = (tl.exp2(b_ts) - b_ps).to(weight_ptr.dtype.element_ty)
    tl.store(p_weight, b_w, mask=(b_row >= 0)[:, None] & (o_s < PAGE)[None, :])


@triton.jit(do_not_specialize=("num_lists",))
def key_gradient_kernel(
    query_ptr,
    weight_ptr,
    tokens_ptr,
    units_ptr,
    unit_start_ptr,
    parts_ptr,
    num_lists,
    K: tl.constexpr,
    DI: tl.constexpr,
    DI_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """[PAGE, DI] of one unit: the weights of its choices times their scaled index queries."""
    i_u = tl.program_id(0).to(tl.int64)
    if i_u >= tl.load(unit_start_ptr + num_lists):
        return
    i_row = tl.load(units_ptr + i_u * UNIT).to(tl.int64)
    num_rows = tl.load(units_ptr + i_u * UNIT + 1)
    i_head = tl.load(units_ptr + i_u * UNIT + 4)
    o_s, o_i, o_l = tl.arange(0, PAGE_PAD), tl.arange(0, DI_PAD), tl.arange(0, TILE)
    b_sum = tl.zeros([PAGE_PAD, DI_PAD], tl.float32)
    for i in range(0, num_rows, TILE):
        b_token = tl.load(tokens_ptr + i_row + i + o_l)
        m_l = b_token >= 0
        # [TILE, DI], [TILE, PAGE]; a list is padded with rows that nobody wrote.
        o_query = b_token.to(tl.int64) * K + i_head
        p_query = query_ptr + o_query[:, None] * DI + o_i[None, :]
        b_query = tl.load(p_query, mask=m_l[:, None] & (o_i < DI)[None, :], other=0.0)
        p_weight = weight_ptr + (i_row + i + o_l)[:, None] * PAGE + o_s[None, :]
        b_weight = tl.load(p_weight, mask=m_l[:, None] & (o_s < PAGE)[None, :], other=0.0)
        b_sum = tl.dot(tl.trans(b_weight), b_query, acc=b_sum, input_precision="ieee")
    p_part = parts_ptr + i_u * (PAGE * DI) + o_s[:, None] * DI + o_i[None, :]
    tl.store(p_part, b_sum, mask=(o_s < PAGE)[:, None] & (o_i < DI)[None, :])


@triton.jit(do_not_specialize=("num_pages",))
def add_units_kernel(
    parts_ptr,
    unit_start_ptr,
    pages_ptr,
    out_ptr,
    num_pages,
    K: tl.constexpr,
    DI: tl.constexpr,
    DI_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS keys of a block: the sum of its units over KV heads, in order."""
    i_page = tl.program_id(0)
    o_s = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o_i = tl.arange(0, DI_PAD)
    first_token = tl.load(pages_ptr + i_page * 2).to(tl.int64)
    num_keys = tl.load(pages_ptr + i_page * 2 + 1)
    # [ROWS, DI]
    m_si = (o_s < num_keys)[:, None] & (o_i < DI)[None, :]
    o_si = o_s[:, None] * DI + o_i[None, :]
    b_sum = tl.zeros([ROWS, DI_PAD], tl.float32)
    for i_head in range(K):
        p_start = unit_start_ptr + i_head * num_pages + i_page
        i_unit, end_unit = tl.load(p_start).to(tl.int64), tl.load(p_start + 1).to(tl.int64)
        for i_u in range(i_unit, end_unit):
            b_sum += tl.load(parts_ptr + i_u * (PAGE * DI) + o_si, mask=m_si, other=0.0)
    tl.store(out_ptr + first_token * DI + o_si, b_sum.to(out_ptr.dtype.element_ty), mask=m_si)

"""The two grouped products over the tiles of a plan.

Every program walks over (tile of rows, tile of columns) of the plan that `align_kernel` wrote.
With SWAP the weights are the left operand of the tensor cores and the rows the right one: 64 or
more rows of weights meet as few as 16 tokens. An expert's last tile may have TAIL_M rows more
than BLOCK_M: a second, swapped product takes them while the weights are there.
"""

import triton
import triton.language as tl

from inference.kernels.swiglu_oai.kernel import clamped


@triton.jit
def _tile_of(tile, num_m, num_n: tl.constexpr, GROUP: tl.constexpr):
    """(tile of rows, tile of columns): GROUP neighbouring tiles of rows share columns in L2."""
    per_group = GROUP * num_n
    first = tile // per_group * GROUP
    size = tl.minimum(num_m - first, GROUP)
    return first + tile % per_group % size, tile % per_group // size


@triton.jit
def _weights_at(w, p_w, row, i_k, m_k, USE_TMA: tl.constexpr, EVEN_K: tl.constexpr):
    """[N, K] weights: rows from `row` of the descriptor `w`, or at the pointers `p_w`."""
    if USE_TMA:
        b_w = w.load([row, i_k])
    elif EVEN_K:
        b_w = tl.load(p_w + i_k)
    else:
        b_w = tl.load(p_w + i_k, mask=m_k, other=0.0)
    return b_w


@triton.jit
def _product(b_x, b_w, b_acc, SWAP: tl.constexpr):
    """Accumulate x wᵀ [M, N], or with SWAP w xᵀ [N, M]."""
    if SWAP:
        b_acc = tl.dot(b_w, b_x.T, b_acc, input_precision="ieee")
    else:
        b_acc = tl.dot(b_x, b_w.T, b_acc, input_precision="ieee")
    return b_acc


@triton.jit
def _rows_at(ptr, plan_ptr, order_start, o_m, m_m, TOPK: tl.constexpr, SIZE: tl.constexpr):
    """Pointers to the tokens of sorted rows."""
    b_pair = tl.load(plan_ptr + order_start + o_m, mask=m_m, other=0)
    return ptr + (b_pair // TOPK).to(tl.int64) * SIZE


@triton.jit
def _store_h(
    h_ptr, b_gate, b_up, o_m, m_m, o_n, alpha, limit, beta, WIDTH: tl.constexpr, SWAP: tl.constexpr
):
    b_gate, b_up = clamped(b_gate, b_up, limit)
    b_h = b_gate * tl.sigmoid(alpha * b_gate) * (b_up + beta)
    if SWAP:
        p_h = h_ptr + o_m.to(tl.int64)[None, :] * WIDTH + o_n[:, None]
        m_h = m_m[None, :] & (o_n < WIDTH)[:, None]
    else:
        p_h = h_ptr + o_m.to(tl.int64)[:, None] * WIDTH + o_n[None, :]
        m_h = m_m[:, None] & (o_n < WIDTH)[None, :]
    tl.store(p_h, b_h.to(h_ptr.dtype.element_ty), mask=m_h)


@triton.jit
def _gate_up_tile(
    x_ptr,
    w13,
    plan_ptr,
    h_ptr,
    order_start,
    expert,
    first,
    end,
    i_n,
    alpha,
    limit,
    beta,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    EVEN_K: tl.constexpr = HIDDEN % BLOCK_K == 0
    o_k = tl.arange(0, BLOCK_K)
    # [BLOCK_M]
    o_m = first + tl.arange(0, BLOCK_M)
    m_m = o_m < end
    p_x = _rows_at(x_ptr, plan_ptr, order_start, o_m, m_m, TOPK, HIDDEN)[:, None] + o_k[None, :]
    # [BLOCK_N]
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (expert * (2 * WIDTH) + i_n * BLOCK_N).to(tl.int32)
    p_w = w13
    if not USE_TMA:
        o_row = expert * (2 * WIDTH) + tl.minimum(o_n, WIDTH - 1)
        p_w = w13 + o_row[:, None] * HIDDEN + o_k[None, :]
    if SWAP:
        b_gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        b_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        b_gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if TAIL_M > 0:
        # [TAIL_M]
        o_t = first + BLOCK_M + tl.arange(0, TAIL_M)
        m_t = o_t < end
        p_xt = _rows_at(x_ptr, plan_ptr, order_start, o_t, m_t, TOPK, HIDDEN)
        p_xt = p_xt[:, None] + o_k[None, :]
        b_gate_t = tl.zeros([BLOCK_N, TAIL_M], tl.float32)
        b_up_t = tl.zeros([BLOCK_N, TAIL_M], tl.float32)
    for i_k in range(0, HIDDEN, BLOCK_K):
        m_k = i_k + o_k[None, :] < HIDDEN
        m_x = m_m[:, None] if EVEN_K else m_m[:, None] & m_k
        b_x = tl.load(p_x + i_k, mask=m_x, other=0.0)
        b_w1 = _weights_at(w13, p_w, row, i_k, m_k, USE_TMA, EVEN_K)
        b_gate = _product(b_x, b_w1, b_gate, SWAP)
        p_w3 = p_w if USE_TMA else p_w + WIDTH * HIDDEN
        b_w3 = _weights_at(w13, p_w3, row + WIDTH, i_k, m_k, USE_TMA, EVEN_K)
        b_up = _product(b_x, b_w3, b_up, SWAP)
        if TAIL_M > 0:
            m_xt = m_t[:, None] if EVEN_K else m_t[:, None] & m_k
            b_xt = tl.load(p_xt + i_k, mask=m_xt, other=0.0)
            b_gate_t = _product(b_xt, b_w1, b_gate_t, True)
            b_up_t = _product(b_xt, b_w3, b_up_t, True)
    _store_h(h_ptr, b_gate, b_up, o_m, m_m, o_n, alpha, limit, beta, WIDTH, SWAP)
    if TAIL_M > 0:
        _store_h(h_ptr, b_gate_t, b_up_t, o_t, m_t, o_n, alpha, limit, beta, WIDTH, True)


@triton.jit(do_not_specialize=["order_start"])
def gate_up_kernel(
    x_ptr,
    w13,
    plan_ptr,
    h_ptr,
    order_start,
    alpha,
    limit,
    beta,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    USE_TMA: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """h[row] = swiglu_oai(w13[expert] x[token]): BLOCK_N gates and their ups a tile."""
    if USE_PDL:
        # In this order: kernels behind read the ids before they wait.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_n: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    num_m = tl.load(plan_ptr)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        i_m, i_n = _tile_of(tile, num_m, num_n, GROUP)
        expert = tl.load(plan_ptr + 4 + 4 * i_m).to(tl.int64)
        first = tl.load(plan_ptr + 5 + 4 * i_m)
        end = tl.load(plan_ptr + 6 + 4 * i_m)
        # fmt: off
        if TAIL_M > 0 and end - first > BLOCK_M:
            _gate_up_tile(x_ptr, w13, plan_ptr, h_ptr, order_start, expert, first, end, i_n,
                          alpha, limit, beta, HIDDEN, WIDTH, TOPK, BLOCK_M, TAIL_M, BLOCK_N,
                          BLOCK_K, SWAP, USE_TMA)
        else:
            _gate_up_tile(x_ptr, w13, plan_ptr, h_ptr, order_start, expert, first, end, i_n,
                          alpha, limit, beta, HIDDEN, WIDTH, TOPK, BLOCK_M, 0, BLOCK_N,
                          BLOCK_K, SWAP, USE_TMA)
        # fmt: on


@triton.jit
def _store_y(
    y_ptr,
    b_y,
    weights_ptr,
    plan_ptr,
    order_start,
    o_m,
    m_m,
    o_n,
    HIDDEN: tl.constexpr,
    SWAP: tl.constexpr,
):
    b_pair = tl.load(plan_ptr + order_start + o_m, mask=m_m, other=0)
    b_share = tl.load(weights_ptr + b_pair, mask=m_m, other=0.0)
    o_y = b_pair.to(tl.int64) * HIDDEN
    if SWAP:
        b_y *= b_share[None, :]
        p_y = y_ptr + o_y[None, :] + o_n[:, None]
        m_y = m_m[None, :] & (o_n < HIDDEN)[:, None]
    else:
        b_y *= b_share[:, None]
        p_y = y_ptr + o_y[:, None] + o_n[None, :]
        m_y = m_m[:, None] & (o_n < HIDDEN)[None, :]
    tl.store(p_y, b_y, mask=m_y)


@triton.jit
def _down_tile(
    h_ptr,
    w2,
    weights_ptr,
    plan_ptr,
    y_ptr,
    order_start,
    expert,
    first,
    end,
    i_n,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    EVEN_K: tl.constexpr = WIDTH % BLOCK_K == 0
    o_k = tl.arange(0, BLOCK_K)
    # [BLOCK_M]
    o_m = first + tl.arange(0, BLOCK_M)
    m_m = o_m < end
    p_h = h_ptr + o_m.to(tl.int64)[:, None] * WIDTH + o_k[None, :]
    # [BLOCK_N]
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (expert * HIDDEN + i_n * BLOCK_N).to(tl.int32)
    p_w = w2
    if not USE_TMA:
        o_row = expert * HIDDEN + tl.minimum(o_n, HIDDEN - 1)
        p_w = w2 + o_row[:, None] * WIDTH + o_k[None, :]
    if SWAP:
        b_y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        b_y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if TAIL_M > 0:
        # [TAIL_M]
        o_t = first + BLOCK_M + tl.arange(0, TAIL_M)
        m_t = o_t < end
        p_ht = h_ptr + o_t.to(tl.int64)[:, None] * WIDTH + o_k[None, :]
        b_y_t = tl.zeros([BLOCK_N, TAIL_M], tl.float32)
    for i_k in range(0, WIDTH, BLOCK_K):
        m_k = i_k + o_k[None, :] < WIDTH
        m_h = m_m[:, None] if EVEN_K else m_m[:, None] & m_k
        b_h = tl.load(p_h + i_k, mask=m_h, other=0.0)
        b_w = _weights_at(w2, p_w, row, i_k, m_k, USE_TMA, EVEN_K)
        b_y = _product(b_h, b_w, b_y, SWAP)
        if TAIL_M > 0:
            m_ht = m_t[:, None] if EVEN_K else m_t[:, None] & m_k
            b_ht = tl.load(p_ht + i_k, mask=m_ht, other=0.0)
            b_y_t = _product(b_ht, b_w, b_y_t, True)
    _store_y(y_ptr, b_y, weights_ptr, plan_ptr, order_start, o_m, m_m, o_n, HIDDEN, SWAP)
    if TAIL_M > 0:
        _store_y(y_ptr, b_y_t, weights_ptr, plan_ptr, order_start, o_t, m_t, o_n, HIDDEN, True)


@triton.jit(do_not_specialize=["order_start"])
def down_kernel(
    h_ptr,
    w2,
    weights_ptr,
    plan_ptr,
    y_ptr,
    order_start,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    USE_TMA: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """y[pair] = weight · w2[expert] h[row]."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_n: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    num_m = tl.load(plan_ptr)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        i_m, i_n = _tile_of(tile, num_m, num_n, GROUP)
        expert = tl.load(plan_ptr + 4 + 4 * i_m).to(tl.int64)
        first = tl.load(plan_ptr + 5 + 4 * i_m)
        end = tl.load(plan_ptr + 6 + 4 * i_m)
        # fmt: off
        if TAIL_M > 0 and end - first > BLOCK_M:
            _down_tile(h_ptr, w2, weights_ptr, plan_ptr, y_ptr, order_start, expert, first, end,
                       i_n, HIDDEN, WIDTH, BLOCK_M, TAIL_M, BLOCK_N, BLOCK_K, SWAP, USE_TMA)
        else:
            _down_tile(h_ptr, w2, weights_ptr, plan_ptr, y_ptr, order_start, expert, first, end,
                       i_n, HIDDEN, WIDTH, BLOCK_M, 0, BLOCK_N, BLOCK_K, SWAP, USE_TMA)
        # fmt: on

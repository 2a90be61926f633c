"""The two grouped products and the sum over a token's experts.

Every program walks over (tile of rows, tile of columns) of the plan that `align_kernel` wrote.
With SWAP the weights are the left operand of the tensor cores and the rows the right one: 64 or
more rows of weights meet as few as 16 tokens. With DIRECT there is one token: pair a is tile a.
A tile of at most TAIL_M rows, an expert's last, takes a product of that size.
"""

import triton
import triton.language as tl


@triton.jit
def _tile_of(tile, num_m, num_n: tl.constexpr, GROUP: tl.constexpr):
    """(tile of rows, tile of columns): GROUP neighbouring tiles of rows share columns in L2."""
    per_group = GROUP * num_n
    first = tile // per_group * GROUP
    size = tl.minimum(num_m - first, GROUP)
    return first + tile % per_group % size, tile % per_group // size


@triton.jit
def _rows_of(ids_ptr, plan_ptr, tile, DIRECT: tl.constexpr):
    """(expert, first sorted row, first row behind) of a tile."""
    if DIRECT:
        expert = tl.load(ids_ptr + tile)
        first = tile
        end = tl.where(expert < 0, tile, tile + 1)
        expert = tl.maximum(expert, 0)
    else:
        expert = tl.load(plan_ptr + 4 + 4 * tile)
        first = tl.load(plan_ptr + 5 + 4 * tile)
        end = tl.load(plan_ptr + 6 + 4 * tile)
    return expert.to(tl.int64), first, end


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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    DIRECT: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    EVEN_K: tl.constexpr = HIDDEN % BLOCK_K == 0
    o_k = tl.arange(0, BLOCK_K)
    # [BLOCK_M]
    o_m = first + tl.arange(0, BLOCK_M)
    m_m = o_m < end
    if DIRECT:
        b_token = tl.zeros([BLOCK_M], tl.int64)
    else:
        b_pair = tl.load(plan_ptr + order_start + o_m, mask=m_m, other=0)
        b_token = (b_pair // TOPK).to(tl.int64)
    p_x = x_ptr + b_token[:, None] * HIDDEN + o_k[None, :]
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
    last_k = tl.where(end > first, HIDDEN, 0) if DIRECT else HIDDEN
    for i_k in range(0, last_k, BLOCK_K):
        m_k = i_k + o_k[None, :] < HIDDEN
        m_x = m_m[:, None] if EVEN_K else m_m[:, None] & m_k
        b_x = tl.load(p_x + i_k, mask=m_x, other=0.0)
        b_w1 = _weights_at(w13, p_w, row, i_k, m_k, USE_TMA, EVEN_K)
        b_gate = _product(b_x, b_w1, b_gate, SWAP)
        p_w3 = p_w if USE_TMA else p_w + WIDTH * HIDDEN
        b_w3 = _weights_at(w13, p_w3, row + WIDTH, i_k, m_k, USE_TMA, EVEN_K)
        b_up = _product(b_x, b_w3, b_up, SWAP)
    b_gate = tl.minimum(b_gate, limit)
    b_up = tl.minimum(tl.maximum(b_up, -limit), limit)
    b_h = b_gate * tl.sigmoid(alpha * b_gate) * (b_up + beta)
    if SWAP:
        p_h = h_ptr + o_m.to(tl.int64)[None, :] * WIDTH + o_n[:, None]
        m_h = m_m[None, :] & (o_n < WIDTH)[:, None]
    else:
        p_h = h_ptr + o_m.to(tl.int64)[:, None] * WIDTH + o_n[None, :]
        m_h = m_m[:, None] & (o_n < WIDTH)[None, :]
    tl.store(p_h, b_h.to(h_ptr.dtype.element_ty), mask=m_h)


@triton.jit(do_not_specialize=["order_start", "max_tiles"])
def gate_up_kernel(
    x_ptr,
    w13,
    ids_ptr,
    plan_ptr,
    h_ptr,
    order_start,
    max_tiles,
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
    DIRECT: tl.constexpr,
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """h[row] = swiglu_oai(w13[expert] x[token]): BLOCK_N gates and their ups a tile."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_n: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    num_m = max_tiles if DIRECT else tl.load(plan_ptr)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        i_m, i_n = _tile_of(tile, num_m, num_n, GROUP)
        expert, first, end = _rows_of(ids_ptr, plan_ptr, i_m, DIRECT)
        # fmt: off
        if TAIL_M == BLOCK_M:  # noqa: SIM114 - known when compiling, unlike the next
            _gate_up_tile(x_ptr, w13, plan_ptr, h_ptr, order_start, expert, first, end, i_n,
                          alpha, limit, beta, HIDDEN, WIDTH, TOPK, BLOCK_M, BLOCK_N, BLOCK_K,
                          SWAP, DIRECT, USE_TMA)
        elif end - first > TAIL_M:
            _gate_up_tile(x_ptr, w13, plan_ptr, h_ptr, order_start, expert, first, end, i_n,
                          alpha, limit, beta, HIDDEN, WIDTH, TOPK, BLOCK_M, BLOCK_N, BLOCK_K,
                          SWAP, DIRECT, USE_TMA)
        else:
            _gate_up_tile(x_ptr, w13, plan_ptr, h_ptr, order_start, expert, first, end, i_n,
                          alpha, limit, beta, HIDDEN, WIDTH, TOPK, TAIL_M, BLOCK_N, BLOCK_K,
                          SWAP, DIRECT, USE_TMA)
        # fmt: on


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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    DIRECT: tl.constexpr,
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
    last_k = tl.where(end > first, WIDTH, 0) if DIRECT else WIDTH
    for i_k in range(0, last_k, BLOCK_K):
        m_k = i_k + o_k[None, :] < WIDTH
        m_h = m_m[:, None] if EVEN_K else m_m[:, None] & m_k
        b_h = tl.load(p_h + i_k, mask=m_h, other=0.0)
        b_w = _weights_at(w2, p_w, row, i_k, m_k, USE_TMA, EVEN_K)
        b_y = _product(b_h, b_w, b_y, SWAP)
    b_pair = o_m if DIRECT else tl.load(plan_ptr + order_start + o_m, mask=m_m, other=0)
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
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=["order_start", "max_tiles"])
def down_kernel(
    h_ptr,
    w2,
    ids_ptr,
    weights_ptr,
    plan_ptr,
    y_ptr,
    order_start,
    max_tiles,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    DIRECT: tl.constexpr,
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """y[pair] = weight · w2[expert] h[row]."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_n: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    num_m = max_tiles if DIRECT else tl.load(plan_ptr)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        i_m, i_n = _tile_of(tile, num_m, num_n, GROUP)
        expert, first, end = _rows_of(ids_ptr, plan_ptr, i_m, DIRECT)
        # fmt: off
        if TAIL_M == BLOCK_M:  # noqa: SIM114 - known when compiling, unlike the next
            _down_tile(h_ptr, w2, weights_ptr, plan_ptr, y_ptr, order_start, expert, first, end,
                       i_n, HIDDEN, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, DIRECT, USE_TMA)
        elif end - first > TAIL_M:
            _down_tile(h_ptr, w2, weights_ptr, plan_ptr, y_ptr, order_start, expert, first, end,
                       i_n, HIDDEN, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, DIRECT, USE_TMA)
        else:
            _down_tile(h_ptr, w2, weights_ptr, plan_ptr, y_ptr, order_start, expert, first, end,
                       i_n, HIDDEN, WIDTH, TAIL_M, BLOCK_N, BLOCK_K, SWAP, DIRECT, USE_TMA)
        # fmt: on


@triton.jit
def combine_kernel(
    y_ptr,
    ids_ptr,
    add_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_ADD: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """out[token] = Σ y of its pairs, in ascending expert id, + add."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_t = tl.program_id(0).to(tl.int64)
    # [BLOCK_C]
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < HIDDEN
    # [BLOCK_A]
    o_a = tl.arange(0, BLOCK_A)
    b_ids = tl.load(ids_ptr + i_t * TOPK + o_a, mask=o_a < TOPK, other=-1)
    m_less = b_ids[None, :] < b_ids[:, None]
    m_same = (b_ids[None, :] == b_ids[:, None]) & (o_a[None, :] < o_a[:, None])
    m_before = (m_less | m_same) & (b_ids >= 0)[None, :]
    b_rank = tl.where(b_ids < 0, BLOCK_A, tl.sum(m_before.to(tl.int32), 1))
    num_valid = tl.sum((b_ids >= 0).to(tl.int32), 0)
    b_out = tl.zeros([BLOCK_C], tl.float32)
    for i in tl.static_range(TOPK):
        a = tl.sum(tl.where(b_rank == i, o_a, 0), 0)
        p_y = y_ptr + (i_t * TOPK + a) * HIDDEN + o_c
        m_y = o_c < tl.where(num_valid > i, HIDDEN, 0)
        b_out += tl.load(p_y, mask=m_y, other=0.0).to(tl.float32)
    if HAS_ADD:
        b_out += tl.load(add_ptr + i_t * HIDDEN + o_c, mask=m_c, other=0.0).to(tl.float32)
    tl.store(out_ptr + i_t * HIDDEN + o_c, b_out.to(out_ptr.dtype.element_ty), mask=m_c)

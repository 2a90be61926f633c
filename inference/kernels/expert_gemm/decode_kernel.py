"""The two grouped products for a handful of tokens, without a plan and with the shared expert.

Every program finds the tiles of experts in the ids itself: pair `t * A + a` is token t's a-th
expert, a pair that is the 0th, BLOCK_M-th.. of its expert begins a tile, and the rows of h and y
are pairs. The shared expert is the tile before all others; its rows follow those of the pairs.

64 rows of weights are the left operand of the tensor cores, the tokens the right one.

Programmatic dependent launch: weights are fetched into L2 before the wait for the kernel in front.
The second product also reads the ids there: the first lets it start only after its own wait, so
the kernel that wrote them has ended.
"""

import triton
import triton.language as tl

from inference.kernels.swiglu_oai.kernel import clamped


@triton.jit
def _tiles_of(ids_ptr, num_pairs, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, how many pairs of it come before, tile that begins here or -1, how many tiles)."""
    STEP: tl.constexpr = min(BLOCK_P, 32)
    # [BLOCK_P]
    o_p = tl.arange(0, BLOCK_P)
    b_ids = tl.load(ids_ptr + o_p, mask=o_p < num_pairs, other=-1, cache_modifier=".cg")
    b_place = tl.zeros([BLOCK_P], tl.int32)
    for first in tl.static_range(0, BLOCK_P, STEP):
        # [STEP]
        o_j = first + tl.arange(0, STEP)
        b_j = tl.load(ids_ptr + o_j, mask=o_j < num_pairs, other=-1, cache_modifier=".cg")
        m_before = (b_j[None, :] == b_ids[:, None]) & (o_j[None, :] < o_p[:, None])
        b_place += tl.sum(m_before.to(tl.int32), 1)
    b_begins = ((b_ids >= 0) & (b_place % BLOCK_M == 0)).to(tl.int32)
    b_tile = tl.where(b_begins > 0, tl.cumsum(b_begins, 0) - 1, -1)
    return b_ids, b_place, b_tile, tl.sum(b_begins, 0)


@triton.jit
def _pairs_of(b_ids, b_place, b_tile, tile, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, [BLOCK_M] pairs of a tile, -1 behind the last)."""
    o_p = tl.arange(0, BLOCK_P)
    code = tl.sum(tl.where(b_tile == tile, b_ids * 65536 + b_place, 0), 0)
    expert = code // 65536
    b_row = tl.where(b_ids == expert, b_place - code % 65536, -1)
    # [BLOCK_M, BLOCK_P]
    m_own = b_row[None, :] == tl.arange(0, BLOCK_M)[:, None]
    return expert.to(tl.int64), tl.sum(tl.where(m_own, o_p[None, :] + 1, 0), 1) - 1


@triton.jit
def _prefetch(p_row, PIECES: tl.constexpr, PREFETCH: tl.constexpr):
    """PREFETCH elements of rows into L2, a piece of a row a thread: [threads] row pointers."""
    o_lane = tl.arange(0, p_row.shape[0])
    p_piece = p_row + (o_lane % PIECES) * (PREFETCH // PIECES)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,n",
        [p_piece.to(tl.int64), PREFETCH // PIECES * 2],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _rows_product(
    p_w,
    p_x,
    m_m,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_R, BLOCK_M] of rows of weights at `p_w` and tokens at `p_x`."""
    o_k = tl.arange(0, BLOCK_K)
    p_w = p_w[:, None] + o_k[None, :]
    p_x = p_x[:, None] + o_k[None, :]
    b_acc = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
    for k in range(0, SIZE, BLOCK_K):
        if SIZE % BLOCK_K == 0:
            b_w = tl.load(p_w + k)
            b_x = tl.load(p_x + k, mask=m_m[:, None], other=0.0)
        else:
            m_k = o_k[None, :] < SIZE - k
            b_w = tl.load(p_w + k, mask=m_k, other=0.0)
            b_x = tl.load(p_x + k, mask=m_m[:, None] & m_k, other=0.0)
        b_acc = tl.dot(b_w, b_x.T, b_acc, input_precision="ieee")
    return b_acc


@triton.jit(do_not_specialize=["num_tokens"])
def decode_gate_up_kernel(
    x_ptr,
    w13_ptr,
    shared_ptr,
    ids_ptr,
    h_ptr,
    num_tokens,
    alpha,
    limit,
    beta,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOPK: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    NUM_THREADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """h[pair] = swiglu_oai(w13[expert] x[token]); gates and their ups are alternate rows."""
    NUM_N: tl.constexpr = (2 * WIDTH + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    if USE_PDL:
        if HAS_SHARED and PREFETCH > 0:
            # Programs beyond the first NUM_N fetch what follows in the same rows.
            PIECES: tl.constexpr = NUM_THREADS // BLOCK_R
            place = pid % NUM_N * BLOCK_R + tl.arange(0, NUM_THREADS) // PIECES
            place = tl.minimum(place, 2 * WIDTH - 1)
            row = (place // 2 + place % 2 * WIDTH).to(tl.int64)
            column = pid // NUM_N % (HIDDEN // PREFETCH) * PREFETCH
            _prefetch(shared_ptr + row * HIDDEN + column, PIECES, PREFETCH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_pairs = num_tokens * TOPK
    b_ids, b_place, b_tile, num_tiles = _tiles_of(ids_ptr, num_pairs, BLOCK_P, BLOCK_M)
    o_m = tl.arange(0, BLOCK_M)
    for tile in range(pid, (num_tiles + HAS_SHARED) * NUM_N, tl.num_programs(0)):
        i_m = tile // NUM_N - HAS_SHARED
        # [BLOCK_M]
        expert, b_pair = _pairs_of(b_ids, b_place, b_tile, i_m, BLOCK_P, BLOCK_M)
        p_w = w13_ptr + expert * (2 * WIDTH * HIDDEN)
        if HAS_SHARED and i_m < 0:
            p_w = shared_ptr
            b_pair = tl.where(o_m < num_tokens, num_pairs + o_m, -1)
        b_token = tl.where(b_pair < num_pairs, b_pair // TOPK, b_pair - num_pairs)
        p_x = x_ptr + b_token.to(tl.int64) * HIDDEN
        # [BLOCK_R]
        o_place = tile % NUM_N * BLOCK_R + tl.arange(0, BLOCK_R)
        o_row = tl.minimum(o_place // 2, WIDTH - 1) + o_place % 2 * WIDTH
        b_acc = _rows_product(
            p_w + o_row.to(tl.int64) * HIDDEN, p_x, b_pair >= 0, HIDDEN, BLOCK_R, BLOCK_M, BLOCK_K
        )
        # [BLOCK_R / 2, BLOCK_M]
        b_acc = b_acc.reshape(BLOCK_R // 2, 2, BLOCK_M).permute(0, 2, 1)
        b_gate, b_up = tl.split(b_acc)
        b_gate, b_up = clamped(b_gate, b_up, limit)
        b_h = b_gate * tl.sigmoid(alpha * b_gate) * (b_up + beta)
        o_n = tile % NUM_N * (BLOCK_R // 2) + tl.arange(0, BLOCK_R // 2)
        p_h = h_ptr + b_pair.to(tl.int64)[None, :] * WIDTH + o_n[:, None]
        m_h = (b_pair >= 0)[None, :] & (o_n < WIDTH)[:, None]
        tl.store(p_h, b_h.to(h_ptr.dtype.element_ty), mask=m_h)


@triton.jit(do_not_specialize=["num_tokens"])
def decode_down_kernel(
    h_ptr,
    w2_ptr,
    shared_ptr,
    ids_ptr,
    weights_ptr,
    y_ptr,
    num_tokens,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOPK: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    NUM_THREADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """y[pair] = weight · w2[expert] h[pair]; the shared expert counts 1."""
    NUM_N: tl.constexpr = (HIDDEN + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_pairs = num_tokens * TOPK
    b_ids, b_place, b_tile, num_tiles = _tiles_of(ids_ptr, num_pairs, BLOCK_P, BLOCK_M)
    num_tiles += HAS_SHARED
    if USE_PDL:
        if PREFETCH > 0 and pid < num_tiles * NUM_N:
            PIECES: tl.constexpr = NUM_THREADS // BLOCK_R
            i_m = pid // NUM_N - HAS_SHARED
            expert, _ = _pairs_of(b_ids, b_place, b_tile, i_m, BLOCK_P, BLOCK_M)
            p_w = w2_ptr + expert * (HIDDEN * WIDTH)
            if HAS_SHARED and i_m < 0:
                p_w = shared_ptr
            row = pid % NUM_N * BLOCK_R + tl.arange(0, NUM_THREADS) // PIECES
            row = tl.minimum(row, HIDDEN - 1).to(tl.int64)
            _prefetch(p_w + row * WIDTH, PIECES, PREFETCH)
        tl.extra.cuda.gdc_wait()
    o_m = tl.arange(0, BLOCK_M)
    for tile in range(pid, num_tiles * NUM_N, tl.num_programs(0)):
        i_m = tile // NUM_N - HAS_SHARED
        # [BLOCK_M]
        expert, b_pair = _pairs_of(b_ids, b_place, b_tile, i_m, BLOCK_P, BLOCK_M)
        p_w = w2_ptr + expert * (HIDDEN * WIDTH)
        if HAS_SHARED and i_m < 0:
            p_w = shared_ptr
            b_pair = tl.where(o_m < num_tokens, num_pairs + o_m, -1)
        p_h = h_ptr + b_pair.to(tl.int64) * WIDTH
        m_m = b_pair >= 0
        # [BLOCK_R]
        o_n = tile % NUM_N * BLOCK_R + tl.arange(0, BLOCK_R)
        o_row = tl.minimum(o_n, HIDDEN - 1).to(tl.int64)
        b_y = _rows_product(p_w + o_row * WIDTH, p_h, m_m, WIDTH, BLOCK_R, BLOCK_M, BLOCK_K)
        m_weight = m_m & (b_pair < num_pairs)
        b_y *= tl.load(weights_ptr + b_pair, mask=m_weight, other=1.0)[None, :]
        p_y = y_ptr + b_pair.to(tl.int64)[None, :] * HIDDEN + o_n[:, None]
        tl.store(p_y, b_y, mask=m_m[None, :] & (o_n < HIDDEN)[:, None])


@triton.jit(do_not_specialize=["place_start"])
def combine_kernel(
    y_ptr,
    ids_ptr,
    plan_ptr,
    weights_ptr,
    add_ptr,
    out_ptr,
    place_start,
    HIDDEN: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_ADD: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """out[token] = Σ y of its pairs, in ascending expert id, + add.

    With a plan rows of y are in its order, and not yet times their weights. Ids, places and weights
    are read before the wait, as `decode_down_kernel` does.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i_t = tl.program_id(0).to(tl.int64)
    # [BLOCK_C]
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < HIDDEN
    # [BLOCK_A]
    o_a = tl.arange(0, BLOCK_A)
    p_ids = ids_ptr + i_t * TOPK + o_a
    b_ids = tl.load(p_ids, mask=o_a < TOPK, other=-1, cache_modifier=".cg")
    m_less = b_ids[None, :] < b_ids[:, None]
    m_same = (b_ids[None, :] == b_ids[:, None]) & (o_a[None, :] < o_a[:, None])
    m_before = (m_less | m_same) & (b_ids >= 0)[None, :]
    b_rank = tl.where(b_ids < 0, BLOCK_A, tl.sum(m_before.to(tl.int32), 1))
    num_valid = tl.sum((b_ids >= 0).to(tl.int32), 0)
    # The row of each rank; ranks from num_valid on have none.
    m_rank = b_rank[None, :] == o_a[:, None]
    if plan_ptr is None:
        b_row = tl.sum(tl.where(m_rank, o_a[None, :], 0), 1) + i_t * TOPK
    else:
        o_pair = i_t * TOPK + o_a
        p_place = plan_ptr + place_start + o_pair
        b_place = tl.load(p_place, mask=o_a < TOPK, other=0, cache_modifier=".cg")
        b_row = tl.sum(tl.where(m_rank, b_place[None, :], 0), 1).to(tl.int64)
        b_weight = tl.load(weights_ptr + o_pair, mask=o_a < TOPK, other=0.0, cache_modifier=".cg")
        b_weight = tl.sum(tl.where(m_rank, b_weight[None, :], 0.0), 1)
    # [BLOCK_A, BLOCK_C]
    p_y = y_ptr + b_row[:, None] * HIDDEN + o_c[None, :]
    m_y = (o_a < num_valid)[:, None] & m_c[None, :]
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    b_y = tl.load(p_y, mask=m_y, other=0.0)
    if plan_ptr is not None:
        b_y *= b_weight[:, None]
    b_out = tl.sum(b_y, 0)
    if HAS_ADD:
        b_out += tl.load(add_ptr + i_t * HIDDEN + o_c, mask=m_c, other=0.0).to(tl.float32)
    tl.store(out_ptr + i_t * HIDDEN + o_c, b_out.to(out_ptr.dtype.element_ty), mask=m_c)

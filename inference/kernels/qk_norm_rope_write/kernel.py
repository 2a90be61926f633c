"""Everything between the fused projection and attention, in one launch.

A program takes one token: some of its query heads, or all heads of the other kinds (k, v, index q
and index k). A head is cut into the two halves that turn and pieces of their width for the rest:
partners meet in one thread's registers, and all pieces lie alike over the threads.
"""

# ruff: noqa: RUF005 - Triton knows no starred tuples

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.hardware import USE_PDL
from inference.kernels.paging import LayerPages, PagedBatch
from inference.kernels.qk_norm_rope_write.reference import QKNorms

HEADS = 16
"""Query heads of a program."""
MANY_TOKENS = 256


@triton.jit
def _cast(b_x, dtype: tl.constexpr):
    if dtype.is_fp8():
        # NaN stays NaN: it must reach the logits, where it is noticed.
        nan: tl.constexpr = tl.PropagateNan.ALL
        b_x = tl.maximum(b_x.to(tl.float32), -448.0, propagate_nan=nan)
        b_x = tl.minimum(b_x, 448.0, propagate_nan=nan)
    return b_x.to(dtype)


@triton.jit
def _load(p_head, offsets, ends, dim, m_row):
    """The pieces of heads of `dim` elements, 0 where none is; `p_head` is [R, 1] or scalar."""
    pieces = ()
    for i in tl.static_range(len(offsets)):
        mask = m_row & (offsets[i] < ends[i]) & (offsets[i] < dim)
        pieces = pieces + (tl.load(p_head + offsets[i], mask=mask, other=0.0),)
    return pieces


@triton.jit
def _store(p_head, pieces, offsets, ends, dim, m_row):
    dtype: tl.constexpr = p_head.dtype.element_ty
    for i in tl.static_range(len(pieces)):
        mask = m_row & (offsets[i] < ends[i]) & (offsets[i] < dim)
        tl.store(p_head + offsets[i], _cast(pieces[i], dtype), mask=mask)


@triton.jit
def _add(pieces, others):
    """Pieces of rows of two kinds; each is 0 in the other's rows."""
    sums = ()
    for i in tl.static_range(len(pieces)):
        sums = sums + (pieces[i] + others[i],)
    return sums


@triton.jit
def _load_turn(p_cos, o_i, HALF: tl.constexpr):
    """(cosines, sines) of one token."""
    b_cos = tl.load(p_cos + o_i, mask=o_i < HALF, other=1.0)
    return b_cos, tl.load(p_cos + HALF + o_i, mask=o_i < HALF, other=0.0)


@triton.jit
def _norm_rope(pieces, gains, turn, dim, eps, dtype: tl.constexpr):
    """The pieces normed and turned, in `dtype`."""
    b_square = pieces[0].to(tl.float32) * pieces[0].to(tl.float32)
    for i in tl.static_range(1, len(pieces)):
        b_square += pieces[i].to(tl.float32) * pieces[i].to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_square, 1)[:, None] / dim + eps)
    normed = ()
    for i in tl.static_range(len(pieces)):
        b_gain = 1.0 + gains[i].to(tl.float32)
        normed = normed + (pieces[i].to(tl.float32) * b_rstd * b_gain,)
    b_x, b_y = normed[0], normed[1]
    turned = ((b_x * turn[0] - b_y * turn[1]).to(dtype), (b_y * turn[0] + b_x * turn[1]).to(dtype))
    for i in tl.static_range(2, len(pieces)):
        turned = turned + (normed[i].to(dtype),)
    return turned


@triton.jit
def _qk_norm_rope_write_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    iq_weight_ptr,
    ik_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_out_ptr,
    iq_out_ptr,
    k_pages_ptr,
    v_pages_ptr,
    index_pages_ptr,
    stride_qkv,
    stride_k_page,
    stride_v_page,
    stride_index_page,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    INDEX_D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """A program per token and block: HEADS query heads, or (the last block) all of OTHERS heads."""
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    MOST: tl.constexpr = D if D > INDEX_D else INDEX_D
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    i_block = tl.program_id(0) % (Q_BLOCKS + 1)
    i_t = (tl.program_id(0) // (Q_BLOCKS + 1)).to(tl.int64)
    position = tl.load(positions_ptr + i_t)
    p_cos = cos_sin_ptr + position * (2 * HALF)
    p_x = qkv_ptr + i_t * stride_qkv
    # [1, BLOCK]
    o_i = tl.arange(0, BLOCK)[None, :]
    offsets, ends = (o_i, HALF + o_i), (HALF, 2 * HALF)
    for first in tl.static_range(2 * HALF, MOST, BLOCK):
        offsets, ends = offsets + (first + o_i,), ends + (MOST,)
    if i_block < Q_BLOCKS:
        # [HEADS, 1]
        o_h = i_block * HEADS + tl.arange(0, HEADS)[:, None]
        m_h = o_h < H
        q_gains = _load(q_weight_ptr, offsets, ends, D, o_i < BLOCK)
        if EARLY:
            q_turn = _load_turn(p_cos, o_i, HALF)
        if USE_PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        q_pieces = _load(p_x + o_h * D, offsets, ends, D, m_h)
        if not EARLY:
            q_turn = _load_turn(p_cos, o_i, HALF)
        q_pieces = _norm_rope(q_pieces, q_gains, q_turn, D, eps, dtype)
        _store(q_out_ptr + (i_t * H + o_h) * D, q_pieces, offsets, ends, D, m_h)
    else:
        # [OTHERS, 1]: K keys, K values, then K index queries and an index key.
        o_r = tl.arange(0, OTHERS)[:, None]
        m_k, m_v = o_r < K, (o_r >= K) & (o_r < 2 * K)
        slot = tl.load(slots_ptr + i_t)
        gains = _load(k_weight_ptr, offsets, ends, D, m_k)
        column, dim = (H + o_r) * D, tl.full([OTHERS, 1], D, tl.int32)
        if INDEX_D > 0:
            m_iq, m_ik = (o_r >= 2 * K) & (o_r < 3 * K), o_r == 3 * K
            dim = tl.where(m_k | m_v, D, INDEX_D)
            column = tl.where(m_k | m_v, column, (H + 2 * K) * D + (o_r - 2 * K) * INDEX_D)
            gains = _add(gains, _load(iq_weight_ptr, offsets, ends, INDEX_D, m_iq))
            gains = _add(gains, _load(ik_weight_ptr, offsets, ends, INDEX_D, m_ik))
        if EARLY:
            turn = _load_turn(p_cos, o_i, HALF)
        if USE_PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        m_r = o_r < (3 * K + 1 if INDEX_D > 0 else 2 * K)
        raw = _load(p_x + column, offsets, ends, dim, m_r)
        if not EARLY:
            turn = _load_turn(p_cos, o_i, HALF)
        pieces = _norm_rope(raw, gains, turn, dim, eps, dtype)
        if INDEX_D > 0:
            p_iq = iq_out_ptr + (i_t * K + o_r - 2 * K) * INDEX_D
            _store(p_iq, pieces, offsets, ends, INDEX_D, m_iq)
        if slot >= 0:
            page, place = slot // PAGE, slot % PAGE
            p_k = k_pages_ptr + page * stride_k_page + (o_r * PAGE + place) * D
            _store(p_k, pieces, offsets, ends, D, m_k)
            p_v = v_pages_ptr + page * stride_v_page + ((o_r - K) * PAGE + place) * D
            _store(p_v, raw, offsets, ends, D, m_v)
            if INDEX_D > 0:
                p_ik = index_pages_ptr + page * stride_index_page + place * INDEX_D + 0 * o_r
                _store(p_ik, pieces, offsets, ends, INDEX_D, m_ik)


def qk_norm_rope_write(
    qkv_TX: Tensor,
    norms: QKNorms,
    cos_sin_SX: Tensor,
    batch: PagedBatch,
    pages: LayerPages,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    num_tokens = qkv_TX.shape[0]
    index_dim = 0 if norms.index_q is None else norms.index_q.shape[0]
    options = {"dtype": qkv_TX.dtype, "device": qkv_TX.device}
    q_THD = torch.empty((num_tokens, num_heads, head_dim), **options)
    index_q_TKD = None
    if index_dim:
        index_q_TKD = torch.empty((num_tokens, num_kv_heads, index_dim), **options)
    if not num_tokens:
        return q_THD, index_q_TKD
    for name, tensor in _named(pages):
        if not tensor[0].is_contiguous():
            raise ValueError(f"qk_norm_rope_write: a page of {name} is not contiguous")
    if qkv_TX.stride(1) != 1 or not cos_sin_SX.is_contiguous():
        raise ValueError("qk_norm_rope_write: columns of qkv_TX and cos_sin_SX must be dense")
    heads = min(HEADS, triton.next_power_of_2(num_heads))
    num_others = 2 * num_kv_heads + (num_kv_heads + 1 if index_dim else 0)
    half = cos_sin_SX.shape[1] // 2
    is_many = num_tokens > MANY_TOKENS
    _qk_norm_rope_write_kernel[(num_tokens * (triton.cdiv(num_heads, heads) + 1),)](
        qkv_TX,
        norms.q,
        norms.k,
        norms.index_q,
        norms.index_k,
        cos_sin_SX,
        batch.positions_T,
        batch.slots_T,
        q_THD,
        index_q_TKD,
        pages.k_pages,
        pages.v_pages,
        pages.index_pages,
        qkv_TX.stride(0),
        pages.k_pages.stride(0),
        pages.v_pages.stride(0),
        0 if pages.index_pages is None else pages.index_pages.stride(0),
        eps,
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        INDEX_D=index_dim,
        HALF=half,
        PAGE=batch.page_size,
        HEADS=heads,
        OTHERS=triton.next_power_of_2(num_others),
        BLOCK=triton.next_power_of_2(max(half, 1)),
        # Few tokens wait for the projection; many come without one to wait for, and what they
        # read most of should be under way first.
        EARLY=not is_many,
        USE_PDL=USE_PDL,
        num_warps=2 if is_many else 4,
        launch_pdl=USE_PDL,
    )
    return q_THD, index_q_TKD


def _named(pages: LayerPages) -> list[tuple[str, Tensor]]:
    named = [("k_pages", pages.k_pages), ("v_pages", pages.v_pages)]
    return named if pages.index_pages is None else [*named, ("index_pages", pages.index_pages)]

"""Everything between the fused projection and attention, in one launch.

A program takes some heads of one kind (q, k, v, index q, index k) of some tokens; a head is cut
into the two rotated halves and the rest, so that partners meet in one thread's registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.paging import LayerPages, PagedBatch
from inference.kernels.qk_norm_rope_write.reference import QKNorms

USE_PDL = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
"""Programmatic dependent launch: positions and gains are loaded while the projection still runs."""


@triton.jit
def _cast(b_x, dtype: tl.constexpr):
    if dtype.is_fp8():
        b_x = tl.minimum(tl.maximum(b_x.to(tl.float32), -448.0), 448.0)
    return b_x.to(dtype)


@triton.jit
def _store(p_row, parts, offsets, masks):
    """Write the parts of a head of each row; `p_row` is [R, 1]."""
    dtype: tl.constexpr = p_row.dtype.element_ty
    for i in tl.static_range(len(parts)):
        tl.store(p_row + offsets[i], _cast(parts[i], dtype), mask=masks[i])


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
    num_tokens,
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
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid (tokens / TOKENS, head blocks); R = TOKENS * HEADS rows, heads running fastest."""
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = (K + HEADS - 1) // HEADS
    i_block = tl.program_id(1)
    # Which kind of head this program has, where its columns start, its gain.
    i_head, num_heads, column, dim = i_block * HEADS, H, 0, D
    weight_ptr = q_weight_ptr
    kind = 0
    if i_block >= Q_BLOCKS:
        kind = 1 + (i_block - Q_BLOCKS) // K_BLOCKS
        i_head = (i_block - Q_BLOCKS) % K_BLOCKS * HEADS
        num_heads = K
        column = (H + (kind - 1) * K) * D
        weight_ptr = k_weight_ptr
    if INDEX_D > 0:
        if kind >= 3:
            dim = INDEX_D
            column = (H + 2 * K) * D
            weight_ptr = iq_weight_ptr
        if kind == 4:
            column = (H + 2 * K) * D + K * INDEX_D
            num_heads = 1
            weight_ptr = ik_weight_ptr
    # [R]
    o_r = tl.arange(0, TOKENS * HEADS)
    o_t = tl.program_id(0) * TOKENS + o_r // HEADS
    o_h = i_head + o_r % HEADS
    m_r = (o_t < num_tokens) & (o_h < num_heads)
    o_t = o_t.to(tl.int64)
    b_position = tl.load(positions_ptr + o_t, mask=m_r, other=0)
    b_slot = tl.load(slots_ptr + o_t, mask=m_r, other=-1)
    # [1, BLOCK_HALF], [1, BLOCK_REST]
    o_first = tl.arange(0, BLOCK_HALF)[None, :]
    o_rest = tl.arange(0, BLOCK_REST)[None, :]
    # [R, BLOCK_HALF], [R, BLOCK_REST]
    m_first = m_r[:, None] & (o_first < HALF)
    m_rest = m_r[:, None] & (o_rest < dim - 2 * HALF)
    m_gain = o_first < HALF
    b_gain_first = tl.load(weight_ptr + o_first, mask=m_gain, other=0.0)
    b_gain_second = tl.load(weight_ptr + HALF + o_first, mask=m_gain, other=0.0)
    m_gain_rest = o_rest < dim - 2 * HALF
    b_gain_rest = tl.load(weight_ptr + 2 * HALF + o_rest, mask=m_gain_rest, other=0.0)
    p_cos = cos_sin_ptr + b_position[:, None] * (2 * HALF) + o_first
    b_cos = tl.load(p_cos, mask=m_first, other=1.0)
    b_sin = tl.load(p_cos + HALF, mask=m_first, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    p_x = qkv_ptr + (o_t * stride_qkv + column + o_h * dim)[:, None]
    b_first = tl.load(p_x + o_first, mask=m_first, other=0.0)
    b_second = tl.load(p_x + HALF + o_first, mask=m_first, other=0.0)
    b_rest = tl.load(p_x + 2 * HALF + o_rest, mask=m_rest, other=0.0)

    b_write = b_slot >= 0
    b_slot = tl.maximum(b_slot, 0)
    b_page, b_place = b_slot // PAGE, b_slot % PAGE
    offsets = (o_first, o_first + HALF, o_rest + 2 * HALF)
    masks = (m_first, m_first, m_rest)
    m_write_first, m_write_rest = m_first & b_write[:, None], m_rest & b_write[:, None]
    write_masks = (m_write_first, m_write_first, m_write_rest)
    if kind == 2:
        p_v = v_pages_ptr + (b_page * stride_v_page + (o_h * PAGE + b_place) * D)[:, None]
        _store(p_v, (b_first, b_second, b_rest), offsets, write_masks)
    else:
        dtype: tl.constexpr = qkv_ptr.dtype.element_ty
        b_x, b_y = b_first.to(tl.float32), b_second.to(tl.float32)
        b_z = b_rest.to(tl.float32)
        b_square = tl.sum(b_x * b_x + b_y * b_y, 1) + tl.sum(b_z * b_z, 1)
        b_rstd = tl.rsqrt(b_square / dim + eps)[:, None]
        b_x = b_x * b_rstd * (1.0 + b_gain_first.to(tl.float32))
        b_y = b_y * b_rstd * (1.0 + b_gain_second.to(tl.float32))
        b_z = b_z * b_rstd * (1.0 + b_gain_rest.to(tl.float32))
        b_turned_x = (b_x * b_cos - b_y * b_sin).to(dtype)
        b_turned_y = (b_y * b_cos + b_x * b_sin).to(dtype)
        parts = (b_turned_x, b_turned_y, b_z.to(dtype))
        if kind == 0:
            p_q = q_out_ptr + ((o_t * H + o_h) * D)[:, None]
            _store(p_q, parts, offsets, masks)
        elif kind == 1:
            p_k = k_pages_ptr + (b_page * stride_k_page + (o_h * PAGE + b_place) * D)[:, None]
            _store(p_k, parts, offsets, write_masks)
        elif INDEX_D > 0:
            if kind == 3:
                p_iq = iq_out_ptr + ((o_t * K + o_h) * INDEX_D)[:, None]
                _store(p_iq, parts, offsets, masks)
            else:
                p_ik = index_pages_ptr + (b_page * stride_index_page + b_place * INDEX_D)[:, None]
                _store(p_ik, parts, offsets, write_masks)


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
    *,
    tokens: int | None = None,
    heads: int | None = None,
    num_warps: int | None = None,
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
    heads = heads or min(16, triton.next_power_of_2(num_heads))
    tokens = tokens or (1 if num_tokens <= 256 else 4)
    num_warps = num_warps or (4 if tokens == 1 else 8)
    half = cos_sin_SX.shape[1] // 2
    rest = max(head_dim, index_dim) - 2 * half
    num_blocks = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    if index_dim:
        num_blocks += triton.cdiv(num_kv_heads, heads) + 1
    _qk_norm_rope_write_kernel[(triton.cdiv(num_tokens, tokens), num_blocks)](
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
        num_tokens,
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
        TOKENS=tokens,
        HEADS=heads,
        BLOCK_HALF=triton.next_power_of_2(max(half, 1)),
        BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
        USE_PDL=USE_PDL,
        num_warps=num_warps,
        launch_pdl=USE_PDL,
    )
    return q_THD, index_q_TKD


def _named(pages: LayerPages) -> list[tuple[str, Tensor]]:
    named = [("k_pages", pages.k_pages), ("v_pages", pages.v_pages)]
    return named if pages.index_pages is None else [*named, ("index_pages", pages.index_pages)]

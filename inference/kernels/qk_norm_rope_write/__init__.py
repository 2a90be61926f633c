"""Norm and rotate queries and keys, and write keys, values and index keys into their pages."""

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel
from inference.kernels.paging import LayerPages, PagedBatch
from inference.kernels.qk_norm_rope_write import reference
from inference.kernels.qk_norm_rope_write.reference import QKNorms

__all__ = ["QKNorms", "qk_norm_rope_write"]

OP = "qk_norm_rope_write"


def qk_norm_rope_write(
    qkv_TX: Tensor,
    norms: QKNorms,
    cos_sin_SX: Tensor,
    batch: PagedBatch,
    pages: LayerPages,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Split the fused projection, norm and rotate q, k, index_q and index_k, write the keys.

    Each norm is Gemma RMSNorm over the head dim; RoPE then turns the first `rotary_dim` dims in
    pairs (i, i + rotary_dim / 2) by the token's own position. V is copied untouched. FP32 inside,
    one rounding at the end. `pages` is written in place; tokens with slot -1 write nothing.

    Args:
        qkv_TX: [T, X], columns [q | k | v | index_q | index_k], the last two on an MSA layer only.
        norms: `index_q` and `index_k` on an MSA layer, None otherwise.
        cos_sin_SX: [max positions, rotary_dim] FP32: cosines of the rotary_dim / 2 angles, then
            their sines.

    Returns:
        (q_THD, index_q_TKD), in the dtype of `qkv_TX`; index_q_TKD is None on a full-attention
        layer.
    """
    on_gpu = use_kernel(OP, qkv_TX, *norms, cos_sin_SX, pages.k_pages, batch.positions_T)
    num_tokens = batch.positions_T.shape[0]
    is_sparse = [t is not None for t in (norms.index_q, norms.index_k, pages.index_pages)]
    if any(is_sparse) and not all(is_sparse):
        raise ValueError(
            f"{OP}: index_q norm, index_k norm and index pages must be given together, "
            f"have {is_sparse}"
        )
    index_dim = 0 if norms.index_q is None else norms.index_q.shape[0]
    width = (num_heads + 2 * num_kv_heads) * head_dim + (num_kv_heads + 1) * index_dim
    expect_shape(OP, "qkv_TX", qkv_TX, (num_tokens, width))
    expect_shape(OP, "slots_T", batch.slots_T, (num_tokens,))
    expect_dtype(OP, "cos_sin_SX", cos_sin_SX, torch.float32)
    rotary_dim = cos_sin_SX.shape[-1]
    if rotary_dim % 2 or rotary_dim > min(head_dim, index_dim or head_dim):
        raise ValueError(
            f"{OP}: rotary_dim={rotary_dim} must be even and at most the head dims "
            f"({head_dim}, index {index_dim})"
        )
    page_shape = (pages.k_pages.shape[0], num_kv_heads, batch.page_size, head_dim)
    expect_shape(OP, "k_pages", pages.k_pages, page_shape)
    expect_shape(OP, "v_pages", pages.v_pages, page_shape)
    if pages.index_pages is not None:
        index_shape = (page_shape[0], batch.page_size, index_dim)
        expect_shape(OP, "index_pages", pages.index_pages, index_shape)
    if on_gpu:
        from inference.kernels.qk_norm_rope_write import kernel

        return kernel.qk_norm_rope_write(
            qkv_TX, norms, cos_sin_SX, batch, pages, num_heads, num_kv_heads, head_dim, eps
        )
    return reference.qk_norm_rope_write(
        qkv_TX, norms, cos_sin_SX, batch, pages, num_heads, num_kv_heads, head_dim, eps
    )

"""What happens between the fused projection and attention, FP32 through with one rounding."""

from typing import NamedTuple

import torch
from torch import Tensor

from inference.kernels.paging import LayerPages, PagedBatch
from inference.kernels.rms_norm.reference import normalise


class QKNorms(NamedTuple):
    """Gains of the norms over the head dim, each shared by all heads of its kind."""

    q: Tensor
    """[D]"""
    k: Tensor
    """[D]"""
    index_q: Tensor | None = None
    """[index head dim]; None on a full-attention layer."""
    index_k: Tensor | None = None
    """[index head dim]; None on a full-attention layer."""


def norm_rope(x_THD: Tensor, weight_D: Tensor, cos_sin_TX: Tensor, eps: float) -> Tensor:
    """Norm over D, then rotate pairs (i, i + X/2) of the first X dims; the others pass."""
    half = cos_sin_TX.shape[-1] // 2
    head_dim = x_THD.shape[-1]
    cos, sin = cos_sin_TX[:, None, :].split(half, -1)
    y_THD = normalise(x_THD, weight_D, eps)
    first, second, rest = y_THD.split([half, half, head_dim - 2 * half], -1)
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return torch.cat(rotated, -1).to(x_THD.dtype)


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """As a page keeps them: FP8 has no infinity, so what is too large becomes the largest."""
    if dtype == torch.float8_e4m3fn:
        most = torch.finfo(dtype).max
        values = values.float().clamp(-most, most)
    return values.to(dtype)


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
    cos_sin_TX = cos_sin_SX[batch.positions_T]
    kv_width = num_kv_heads * head_dim
    q_TX, k_TX, v_TX, index_TX = qkv_TX.tensor_split(
        (
            num_heads * head_dim,
            num_heads * head_dim + kv_width,
            num_heads * head_dim + 2 * kv_width,
        ),
        dim=-1,
    )
    q_THD = norm_rope(q_TX.unflatten(-1, (num_heads, head_dim)), norms.q, cos_sin_TX, eps)
    k_TKD = norm_rope(k_TX.unflatten(-1, (num_kv_heads, head_dim)), norms.k, cos_sin_TX, eps)
    v_TKD = v_TX.unflatten(-1, (num_kv_heads, head_dim))

    is_real_T = batch.slots_T >= 0
    slots = batch.slots_T[is_real_T]
    page, offset = slots // batch.page_size, slots % batch.page_size
    pages.k_pages[page, :, offset] = stored(k_TKD[is_real_T], pages.k_pages.dtype)
    pages.v_pages[page, :, offset] = stored(v_TKD[is_real_T], pages.v_pages.dtype)
    if norms.index_q is None or norms.index_k is None or pages.index_pages is None:
        return q_THD, None

    # One index query head per KV head, then the single index key head.
    index_THD = index_TX.unflatten(-1, (num_kv_heads + 1, norms.index_q.shape[0]))
    index_q_TKD = norm_rope(index_THD[:, :-1], norms.index_q, cos_sin_TX, eps)
    index_k_T1D = norm_rope(index_THD[:, -1:], norms.index_k, cos_sin_TX, eps)
    index_k_TD = index_k_T1D[is_real_T, 0]
    pages.index_pages[page, offset] = stored(index_k_TD, pages.index_pages.dtype)
    return q_THD, index_q_TKD

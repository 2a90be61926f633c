"""Sparse attention of packed samples by the kernels of the runtime's prefill chunks."""

import torch
from torch import Tensor

from inference.kernels.msa_attention.prefill_kernel import msa_attention_prefill
from inference.kernels.packing import Packing, to_pages
from inference.kernels.paging import LayerPages


def msa_varlen_forward(
    q_QHD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    blocks_QKB: Tensor,
    packing: Packing,
    *,
    scale: float,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """(out [Q, H, D] of the queries' dtype, log-sum-exps [Q, H] FP32).

    A log-sum-exp is the natural logarithm of the sum of the exponentials of the scaled logits; -inf
    where nothing is visible.
    """
    num_queries, num_heads, head_dim = q_QHD.shape
    if q_QHD.stride()[1:] != (head_dim, 1):
        q_QHD = q_QHD.contiguous()
    k_pages, v_pages = (to_pages(x, packing, block_size) for x in (k_TKD, v_TKD))
    out_QHD = torch.empty(
        (num_queries, num_heads, head_dim), dtype=q_QHD.dtype, device=q_QHD.device
    )
    lse_QH = torch.empty((num_queries, num_heads), dtype=torch.float32, device=q_QHD.device)
    msa_attention_prefill(
        q_QHD,
        LayerPages(k_pages, v_pages, None),
        blocks_QKB,
        packing.pages(block_size).batch,
        scale,
        out_QHD,
        lse_TH=lse_QH,
    )
    return out_QHD, lse_QH

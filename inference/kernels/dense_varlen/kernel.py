"""Causal attention of packed samples by the FlashAttention in torch, gradients included."""

import torch
from torch import Tensor

from inference.kernels.packing import Packing


def dense_varlen(
    q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, packing: Packing, scale: float
) -> Tensor:
    seen = packing.seen
    # The last key belongs to the last query, also where a sample has more keys than queries.
    out_QHD, *_ = torch.ops.aten._flash_attention_forward(
        q_QHD,
        k_TKD[seen.keys],
        v_TKD[seen.keys],
        seen.query_start_R1,
        seen.key_start_R1,
        max(seen.query_lens),
        max(seen.key_lens),
        0.0,
        True,
        False,
        scale=scale,
    )
    return out_QHD

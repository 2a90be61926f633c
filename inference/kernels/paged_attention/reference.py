"""Causal GQA over everything the request has written."""

import torch
from torch import Tensor

from inference.kernels.paged_queries import masked_softmax, query_tiles
from inference.kernels.paging import LayerPages, PagedBatch


def paged_attention(q_THD: Tensor, pages: LayerPages, batch: PagedBatch, scale: float) -> Tensor:
    num_kv_heads = pages.k_pages.shape[1]
    group_size = q_THD.shape[1] // num_kv_heads
    out_THD = torch.zeros_like(q_THD)
    for tile in query_tiles(batch):
        k_RKSD = tile.gather(pages.k_pages).transpose(1, 2).flatten(2, 3).float()
        v_RKSD = tile.gather(pages.v_pages).transpose(1, 2).flatten(2, 3).float()
        # A weight of zero does not silence a NaN in V.
        v_RKSD = torch.where(tile.is_written_RS[:, None, :, None], v_RKSD, 0.0)
        q_RQKGD = q_THD[tile.tokens_RQ].unflatten(2, (num_kv_heads, group_size)).float()
        q_RKXD = q_RQKGD.permute(0, 2, 1, 3, 4).flatten(2, 3)  # X runs over (query, query head)
        logits_RKQGS = (q_RKXD @ k_RKSD.mT).unflatten(2, (-1, group_size)) * scale
        probs_RKQGS = masked_softmax(logits_RKQGS, tile.is_visible_RQS[:, None, :, None])
        out_RKQGD = (probs_RKQGS.flatten(2, 3) @ v_RKSD).unflatten(2, (-1, group_size))
        out_THD[tile.tokens_RQ] = out_RKQGD.transpose(1, 2).flatten(2, 3).to(q_THD.dtype)
    return out_THD

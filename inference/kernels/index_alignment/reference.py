"""The divergence in plain torch: the chosen keys of some queries at a time, side by side.

Suffixes: as in `packing`, and `X` queries of a chunk · `G` query heads of a KV head · `S` keys of a
block.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from inference.kernels.packing import Packing

CHUNK_BYTES = 64 << 20
"""Keys of a chunk, of one branch."""


def index_alignment(
    index_q_QKD: Tensor,
    index_k_TD: Tensor,
    q_QHD: Tensor,
    k_TKD: Tensor,
    blocks_QKB: Tensor,
    packing: Packing,
    scale: float,
    index_scale: float,
    block_size: int,
    level: str,
) -> Tensor:
    is_low = index_q_QKD.dtype.itemsize < 4
    index_q_QKD, index_k_TD, q_QHD, k_TKD = (
        x.float() if is_low else x for x in (index_q_QKD, index_k_TD, q_QHD, k_TKD)
    )

    def of_chunk(index_k_TD: Tensor, own: slice) -> Tensor:
        token_XKBS, is_visible_XKBS = _chosen(blocks_QKB[own], packing, own, block_size)
        with torch.no_grad():
            target_XKBS = _attention(q_QHD[own], k_TKD, token_XKBS, is_visible_XKBS, scale)
        index_k_XKBSD = _rows(index_k_TD, token_XKBS)
        logit_XKBS = torch.einsum("xkd,xkbsd->xkbs", index_q_QKD[own], index_k_XKBSD)
        logit_XKBS = (logit_XKBS * index_scale).masked_fill(~is_visible_XKBS, -torch.inf)
        if level == "block":
            return _kl(target_XKBS.sum(-1), logit_XKBS.max(-1).values)
        return _kl(target_XKBS.flatten(2), logit_XKBS.flatten(2))

    num_keys = blocks_QKB[0].numel() * block_size
    chunk = max(1, CHUNK_BYTES // (num_keys * k_TKD.shape[-1] * k_TKD.element_size()))
    parts = []
    for first in range(0, packing.num_queries, chunk):
        own = slice(first, first + chunk)
        parts.append(checkpoint(of_chunk, index_k_TD, own, use_reentrant=False))
    return torch.cat(parts)


def _chosen(
    blocks_XKB: Tensor, packing: Packing, own: slice, block_size: int
) -> tuple[Tensor, Tensor]:
    """(packed token, whether the query sees it) of every key in the chosen blocks."""
    queries = slice(packing.first, packing.first + packing.num_queries)
    position_X111 = packing.positions_T[queries][own][:, None, None, None]
    token_X111 = torch.arange(packing.num_tokens, device=blocks_XKB.device)[queries][own]
    token_X111 = token_X111[:, None, None, None]
    place_S = torch.arange(block_size, device=blocks_XKB.device)
    place_XKBS = blocks_XKB[..., None].long() * block_size + place_S
    is_visible_XKBS = (place_XKBS >= 0) & (place_XKBS <= position_X111)
    return torch.where(
        is_visible_XKBS, token_X111 - position_X111 + place_XKBS, token_X111
    ), is_visible_XKBS


def _attention(
    q_XHD: Tensor, k_TKD: Tensor, token_XKBS: Tensor, is_visible_XKBS: Tensor, scale: float
) -> Tensor:
    """[X, K, B, S]: mean weight of each key over the query heads of the KV head."""
    num_kv_heads = k_TKD.shape[1]
    head_K11 = torch.arange(num_kv_heads, device=k_TKD.device)[:, None, None]
    k_XKBSD = _rows(k_TKD.flatten(0, 1), token_XKBS * num_kv_heads + head_K11)
    q_XKGD = q_XHD.unflatten(1, (num_kv_heads, -1))
    logit_XKGBS = torch.einsum("xkgd,xkbsd->xkgbs", q_XKGD, k_XKBSD) * scale
    logit_XKGBS = logit_XKGBS.masked_fill(~is_visible_XKBS[:, :, None], -torch.inf)
    weight_XKGN = logit_XKGBS.flatten(3).softmax(-1).nan_to_num(0.0)  # a query may see nothing
    return weight_XKGN.mean(2).unflatten(-1, token_XKBS.shape[2:])


def _rows(x_TD: Tensor, index: Tensor) -> Tensor:
    """`x_TD[index]`, whose gradient `index_select` adds much faster."""
    return x_TD.index_select(0, index.flatten()).unflatten(0, index.shape)


def _kl(target_XKN: Tensor, logit_XKN: Tensor) -> Tensor:
    """[X, K]: what lies at -inf counts nowhere."""
    is_visible_XKN = logit_XKN > -torch.inf
    sees_XK1 = is_visible_XKN.any(-1, keepdim=True)
    log_p_XKN = torch.where(sees_XK1, logit_XKN, 0.0).log_softmax(-1)
    log_p_XKN = torch.where(is_visible_XKN, log_p_XKN, 0.0)
    return (torch.special.xlogy(target_XKN, target_XKN) - target_XKN * log_p_XKN).sum(-1)

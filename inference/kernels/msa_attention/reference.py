"""Attention over the chosen blocks: gather them per token and KV head, softmax, done."""

import torch
from torch import Tensor

from inference.kernels.paged_queries import masked_softmax, require_pages
from inference.kernels.paging import LayerPages, PagedBatch

# Most elements of the gathered keys of one tile of tokens: 64 MiB in FP32.
MAX_TILE_ELEMENTS = 1 << 24


def msa_attention(
    q_THD: Tensor, pages: LayerPages, blocks_TKB: Tensor, batch: PagedBatch, scale: float
) -> Tensor:
    num_tokens = q_THD.shape[0]
    page_ids_TKB = _physical_pages(blocks_TKB, batch)
    elements_per_token = (
        blocks_TKB[0].numel() * batch.page_size * q_THD.shape[-1] if num_tokens else 1
    )
    tile = max(1, MAX_TILE_ELEMENTS // elements_per_token)
    out_THD = torch.zeros_like(q_THD)
    for first in range(0, num_tokens, tile):
        tokens = slice(first, first + tile)
        out_THD[tokens] = _attend(
            q_THD[tokens],
            pages,
            page_ids_TKB[tokens],
            _visible_keys(blocks_TKB[tokens], batch.positions_T[tokens], batch.page_size),
            scale,
        )
    return out_THD


def _attend(
    q_THD: Tensor, pages: LayerPages, page_ids_TKB: Tensor, is_visible_TKS: Tensor, scale: float
) -> Tensor:
    num_kv_heads = pages.k_pages.shape[1]
    head_K1 = torch.arange(num_kv_heads, device=q_THD.device)[:, None]
    k_TKSD = pages.k_pages[page_ids_TKB, head_K1].flatten(2, 3).float()
    v_TKSD = pages.v_pages[page_ids_TKB, head_K1].flatten(2, 3).float()
    # A weight of zero does not silence a NaN in V.
    v_TKSD = torch.where(is_visible_TKS[..., None], v_TKSD, 0.0)
    q_TKGD = q_THD.unflatten(1, (num_kv_heads, -1)).float()
    logits_TKGS = (q_TKGD @ k_TKSD.mT) * scale
    probs_TKGS = masked_softmax(logits_TKGS, is_visible_TKS[:, :, None])
    return (probs_TKGS @ v_TKSD).flatten(1, 2).to(q_THD.dtype)


def _visible_keys(blocks_TKB: Tensor, positions_T: Tensor, page_size: int) -> Tensor:
    """[T, K, B * page_size] bool: the key lies in a chosen block and not in the future."""
    offset_P = torch.arange(page_size, device=blocks_TKB.device)
    key_TKBP = blocks_TKB.long()[..., None] * page_size + offset_P
    is_past_TKBP = key_TKBP <= positions_T[:, None, None, None]
    return (is_past_TKBP & (blocks_TKB >= 0)[..., None]).flatten(2)


def _physical_pages(blocks_TKB: Tensor, batch: PagedBatch) -> Tensor:
    """[T, K, B] int64 pages of the chosen blocks; page 0, never looked at, for id -1."""
    token_T = torch.arange(blocks_TKB.shape[0], device=blocks_TKB.device)
    request_T = torch.searchsorted(batch.query_start_R1[1:].long(), token_T, right=True)
    is_chosen_TKB = blocks_TKB >= 0
    # Tokens beyond the last request are padding: they have chosen nothing.
    pages_RN = torch.nn.functional.pad(batch.page_table_RN, (0, 1, 0, 1), value=-1)
    page_ids_TKB = pages_RN[request_T[:, None, None], blocks_TKB.long()].long()
    require_pages(page_ids_TKB, is_chosen_TKB)
    return page_ids_TKB.clamp(min=0)

"""MSA's choice of key blocks (arXiv:2606.13392), with every tie decided."""

import torch
from torch import Tensor

from inference.kernels.paged_queries import query_tiles
from inference.kernels.paging import PagedBatch


def index_select(
    index_q_TKD: Tensor, index_pages: Tensor, batch: PagedBatch, topk_blocks: int, local_blocks: int
) -> Tensor:
    num_tokens, num_heads, _ = index_q_TKD.shape
    blocks_TKB = torch.full(
        (num_tokens, num_heads, topk_blocks), -1, dtype=torch.int32, device=index_q_TKD.device
    )
    for tile in query_tiles(batch):
        keys_RSD = tile.gather(index_pages).flatten(1, 2).float()
        q_RQKD = index_q_TKD[tile.tokens_RQ].float()
        scores_RQKS = (q_RQKD.flatten(1, 2) @ keys_RSD.mT).unflatten(1, (-1, num_heads))
        scores_RQKS = torch.where(tile.is_visible_RQS[:, :, None], scores_RQKS, -torch.inf)
        scores_RQKN = scores_RQKS.unflatten(-1, (-1, batch.page_size)).amax(-1)
        num_blocks_RQ1 = -(-tile.num_keys_RQ[:, :, None] // batch.page_size)
        blocks_TKB[tile.tokens_RQ] = choose_blocks(
            scores_RQKN, num_blocks_RQ1, topk_blocks, local_blocks
        )
    return blocks_TKB


def choose_blocks(
    scores_XN: Tensor, num_blocks_X: Tensor, topk_blocks: int, local_blocks: int
) -> Tensor:
    """{last `local_blocks` visible} and the best others by (score descending, id ascending).

    Args:
        scores_XN: [..., N] block scores.
        num_blocks_X: [...] visible blocks of each row; later ones are never chosen.

    Returns:
        [..., topk_blocks] int32 ids, ascending, then -1.
    """
    num_columns = scores_XN.shape[-1]
    id_N = torch.arange(num_columns, device=scores_XN.device)
    num_blocks_X1 = num_blocks_X[..., None]
    # A NaN score ranks last, and no score ranks above the local blocks.
    finite_max = torch.finfo(scores_XN.dtype).max
    scores_XN = scores_XN.nan_to_num(nan=-torch.inf, posinf=finite_max, neginf=-torch.inf)
    scores_XN = torch.where(id_N >= num_blocks_X1 - local_blocks, torch.inf, scores_XN)
    scores_XN = torch.where(id_N < num_blocks_X1, scores_XN, -torch.inf)
    # Invisible ids are the highest, so the stable sort leaves them behind all visible ones.
    best_XB = scores_XN.sort(dim=-1, descending=True, stable=True).indices[..., :topk_blocks]
    best_XB = torch.where(best_XB < num_blocks_X1, best_XB, num_columns).sort(dim=-1).values
    best_XB = torch.where(best_XB < num_columns, best_XB, -1).int()
    return torch.nn.functional.pad(best_XB, (0, topk_blocks - best_XB.shape[-1]), value=-1)

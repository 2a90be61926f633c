"""Block choice of packed samples by the kernels of the runtime's prefill chunks."""

import torch
from torch import Tensor

from inference.kernels.index_select.prefill_kernel import index_select_prefill
from inference.kernels.packing import Packing, to_pages


def index_select_varlen(
    index_q_QKD: Tensor,
    index_k_TD: Tensor,
    packing: Packing,
    block_size: int,
    topk_blocks: int,
    local_blocks: int,
) -> Tensor:
    index_pages = to_pages(index_k_TD[:, None], packing, block_size)[:, 0]
    num_queries, num_heads, _ = index_q_QKD.shape
    blocks_QKB = torch.empty(
        (num_queries, num_heads, topk_blocks), dtype=torch.int32, device=index_q_QKD.device
    )
    batch = packing.pages(block_size).batch
    index_select_prefill(
        index_q_QKD.contiguous(), index_pages, batch, blocks_QKB, topk_blocks, local_blocks
    )
    return blocks_QKB

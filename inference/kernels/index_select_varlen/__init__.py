"""The MSA indexer over packed samples: which key blocks each query may read."""

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel
from inference.kernels.index_select_varlen import reference
from inference.kernels.packing import Packing

OP = "index_select_varlen"


@torch.no_grad()
def index_select_varlen(
    index_q_QKD: Tensor,
    index_k_TD: Tensor,
    packing: Packing,
    *,
    block_size: int,
    topk_blocks: int,
    local_blocks: int,
) -> Tensor:
    """Choose {local} and the best others by (score descending, id ascending), per KV head.

    The rule of `index_select`: a block's score is the largest unscaled FP32 query-key product among
    its visible keys, the newest `local_blocks` visible blocks always win. Ids count from the first
    token of the query's own sample. No gradient.

    Args:
        index_q_QKD: [Q, K, index head dim], one index head per KV head.
        index_k_TD: [T, index head dim], the keys of all packed tokens; the queries' dtype.
        topk_blocks: any number on the CPU, 1 to 16 on CUDA.

    Returns:
        [Q, K, topk_blocks] int32: ids ascending, then -1.
    """
    on_cuda = use_kernel(OP, index_q_QKD, index_k_TD, packing.positions_T)
    _, num_heads, index_dim = index_q_QKD.shape
    expect_shape(OP, "index_q_QKD", index_q_QKD, (packing.num_queries, num_heads, index_dim))
    expect_shape(OP, "index_k_TD", index_k_TD, (packing.num_tokens, index_dim))
    expect_dtype(OP, "index_k_TD", index_k_TD, index_q_QKD.dtype)
    if topk_blocks < 1 or not 0 <= local_blocks <= topk_blocks:
        raise ValueError(
            f"{OP}: local_blocks={local_blocks} must lie between 0 and topk_blocks={topk_blocks}"
        )
    args = (index_q_QKD, index_k_TD, packing, block_size, topk_blocks, local_blocks)
    if on_cuda:
        from inference.kernels.index_select_varlen import kernel

        return kernel.index_select_varlen(*args)
    return reference.index_select_varlen(*args)

"""The MSA indexer: which key blocks each query token may read."""

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel
from inference.kernels.index_select import reference
from inference.kernels.paging import PagedBatch

OP = "index_select"


def index_select(
    index_q_TKD: Tensor,
    index_pages: Tensor,
    batch: PagedBatch,
    *,
    topk_blocks: int,
    local_blocks: int,
) -> Tensor:
    """Choose {local} and the best others by (score descending, id ascending), per KV head.

    A block's score is the largest unscaled FP32 query-key product among its visible keys. The
    newest `local_blocks` visible blocks always win and count among the `topk_blocks`. A block is a
    page (`page_size == index_block_size`); ids are logical, counted from the request's first token.

    Args:
        index_q_TKD: [T, K, index head dim], one index head per KV head.
        index_pages: [num_pages, page_size, index head dim], one key head; the queries' dtype or
            FP8 e4m3. Unwritten places may hold anything.
        batch: on CUDA its decodes need a `plan`, and a missing page is not noticed.
        topk_blocks: any number on the CPU, 1 to 16 on CUDA.

    Returns:
        [T, K, topk_blocks] int32: ids ascending, then -1; padding rows are all -1.
    """
    on_cuda = use_kernel(OP, index_q_TKD, index_pages, batch.positions_T)
    num_tokens, num_heads, index_dim = index_q_TKD.shape
    expect_shape(OP, "index_q_TKD", index_q_TKD, (batch.positions_T.shape[0], num_heads, index_dim))
    page_shape = (index_pages.shape[0], batch.page_size, index_dim)
    expect_shape(OP, "index_pages", index_pages, page_shape)
    if not 0 <= local_blocks <= topk_blocks or topk_blocks < 1:
        raise ValueError(
            f"{OP}: local_blocks={local_blocks} must lie between 0 and topk_blocks={topk_blocks}"
        )
    if not on_cuda:
        return reference.index_select(index_q_TKD, index_pages, batch, topk_blocks, local_blocks)
    expect_dtype(OP, "index_pages", index_pages, index_q_TKD.dtype, torch.float8_e4m3fn)
    blocks_TKB = index_pages.new_empty((num_tokens, num_heads, topk_blocks), dtype=torch.int32)
    args = (index_q_TKD.contiguous(), index_pages, batch, blocks_TKB, topk_blocks, local_blocks)
    if batch.num_decodes:
        from inference.kernels.index_select.decode_kernel import index_select_decode

        index_select_decode(*args)
    if num_tokens > batch.num_decode_tokens:
        from inference.kernels.index_select.prefill_kernel import index_select_prefill

        index_select_prefill(*args)
    return blocks_TKB

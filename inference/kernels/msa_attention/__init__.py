"""Block-sparse GQA: each KV head's query heads read the blocks chosen for that head."""

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel
from inference.kernels.msa_attention import reference
from inference.kernels.paging import LayerPages, PagedBatch

OP = "msa_attention"


def msa_attention(
    q_THD: Tensor, pages: LayerPages, blocks_TKB: Tensor, batch: PagedBatch, *, scale: float
) -> Tensor:
    """Softmax attention over the keys of the chosen blocks that are not in the query's future.

    Query head h reads KV head `h // (H / K)`. FP32 inside, one cast to the dtype of `q_THD`.

    Args:
        q_THD: [T, H, D].
        blocks_TKB: [T, K, B] int32 logical block ids without repetition, -1 for none
            (from `index_select`, or replayed).
        scale: factor on the query-key products.

    Returns:
        [T, H, D]; zeros where no block is chosen.

    Raises:
        ValueError: a block id has no page in the page table (on the CPU; on CUDA such a block is
            left out, for looking would stop the GPU).
    """
    is_kernel = use_kernel(OP, q_THD, pages.k_pages, blocks_TKB, batch.positions_T)
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = pages.k_pages.shape[1]
    expect_shape(OP, "q_THD", q_THD, (batch.positions_T.shape[0], num_heads, head_dim))
    expect_shape(OP, "blocks_TKB", blocks_TKB, (num_tokens, num_kv_heads, blocks_TKB.shape[-1]))
    expect_dtype(OP, "blocks_TKB", blocks_TKB, torch.int32)
    page_shape = (pages.k_pages.shape[0], num_kv_heads, batch.page_size, head_dim)
    expect_shape(OP, "k_pages", pages.k_pages, page_shape)
    expect_shape(OP, "v_pages", pages.v_pages, page_shape)
    if num_heads % num_kv_heads:
        raise ValueError(f"{OP}: {num_heads} query heads do not share {num_kv_heads} KV heads")
    if is_kernel:
        return _run_kernels(q_THD, pages, blocks_TKB, batch, scale)
    return reference.msa_attention(q_THD, pages, blocks_TKB, batch, scale)


def _run_kernels(
    q_THD: Tensor, pages: LayerPages, blocks_TKB: Tensor, batch: PagedBatch, scale: float
) -> Tensor:
    """Decodes and prefill chunks have kernels of their own."""
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if batch.num_decode_tokens:
        from inference.kernels.msa_attention.decode_kernel import msa_attention_decode

        msa_attention_decode(q_THD, pages, blocks_TKB, batch, scale, out_THD)
    if batch.num_decode_tokens < q_THD.shape[0]:
        from inference.kernels.msa_attention.prefill_kernel import msa_attention_prefill

        msa_attention_prefill(q_THD, pages, blocks_TKB, batch, scale, out_THD)
    return out_THD

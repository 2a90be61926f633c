"""Dense causal GQA over paged keys and values: the layers without an indexer."""

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_shape, use_kernel
from inference.kernels.paged_attention import reference
from inference.kernels.paging import LayerPages, PagedBatch

OP = "paged_attention"


def paged_attention(q_THD: Tensor, pages: LayerPages, batch: PagedBatch, *, scale: float) -> Tensor:
    """Softmax attention of each token over its request's keys up to its own position.

    Query head h reads KV head `h // (H / K)`. FP32 inside, one cast to the dtype of `q_THD`.

    Args:
        q_THD: [T, H, D].
        scale: factor on the query-key products.

    Returns:
        [T, H, D]; zeros for padding rows.

    Raises:
        ValueError: a key counted by `seq_len_R` has no page (on the CPU; on CUDA looking would stop
            the GPU), or there are decodes on CUDA and `batch.plan` is None.
    """
    is_kernel = use_kernel(OP, q_THD, pages.k_pages, batch.positions_T)
    _, num_heads, head_dim = q_THD.shape
    num_pages, num_kv_heads = pages.k_pages.shape[:2]
    expect_shape(OP, "q_THD", q_THD, (batch.positions_T.shape[0], num_heads, head_dim))
    page_shape = (num_pages, num_kv_heads, batch.page_size, head_dim)
    expect_shape(OP, "k_pages", pages.k_pages, page_shape)
    expect_shape(OP, "v_pages", pages.v_pages, page_shape)
    if num_heads % num_kv_heads:
        raise ValueError(f"{OP}: {num_heads} query heads do not share {num_kv_heads} KV heads")
    if is_kernel:
        return _run_kernels(q_THD, pages, batch, scale)
    return reference.paged_attention(q_THD, pages, batch, scale)


def _run_kernels(q_THD: Tensor, pages: LayerPages, batch: PagedBatch, scale: float) -> Tensor:
    """Decodes and prefill chunks have kernels of their own."""
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if batch.num_decode_tokens:
        from inference.kernels.paged_attention.decode_kernel import paged_attention_decode

        paged_attention_decode(q_THD, pages, batch, scale, out_THD)
    if batch.num_decode_tokens < q_THD.shape[0]:
        from inference.kernels.paged_attention.prefill_kernel import paged_attention_prefill

        paged_attention_prefill(q_THD, pages, batch, scale, out_THD)
    return out_THD

"""Dense causal GQA over paged keys and values: the layers without an indexer."""

from torch import Tensor

from inference.kernels.dispatch import expect_shape, require_reference
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
        ValueError: a key counted by `seq_len_R` has no page.
    """
    require_reference(OP, q_THD, pages.k_pages, batch.positions_T)
    _, num_heads, head_dim = q_THD.shape
    num_pages, num_kv_heads = pages.k_pages.shape[:2]
    expect_shape(OP, "q_THD", q_THD, (batch.positions_T.shape[0], num_heads, head_dim))
    page_shape = (num_pages, num_kv_heads, batch.page_size, head_dim)
    expect_shape(OP, "k_pages", pages.k_pages, page_shape)
    expect_shape(OP, "v_pages", pages.v_pages, page_shape)
    if num_heads % num_kv_heads:
        raise ValueError(f"{OP}: {num_heads} query heads do not share {num_kv_heads} KV heads")
    return reference.paged_attention(q_THD, pages, batch, scale)

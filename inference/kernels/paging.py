"""How kernels see a batch of requests over paged memory.

A page holds `page_size` tokens; a slot is `page * page_size + offset`. With
`page_size == index_block_size` logical block b of a request is page `page_table[r, b]`.

Suffixes: `T` tokens packed over requests · `R` requests · `N` logical pages of a request ·
`H` query heads · `K` KV heads · `D` head dim · `C` hidden · `E` experts · `A` experts per token ·
`V` vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class PagedBatch:
    """The tokens of one engine step and where their keys live.

    Requests with one query token (decodes) come first, then prefill chunks. Rows of `page_table`
    are padded with -1.
    """

    positions_T: Tensor
    """[T] int64: position of each token in its own request."""
    slots_T: Tensor
    """[T] int64: slot that receives the token's key and value; -1 writes nothing (padding)."""
    query_start_R1: Tensor
    """[R + 1] int32: tokens of request r are `query_start_R1[r]` to `query_start_R1[r + 1]`."""
    seq_len_R: Tensor
    """[R] int32: keys of request r once this step's tokens are written (0 for a padding row)."""
    page_table_RN: Tensor
    """[R, N] int32: physical page of each logical page, -1 where the request has none."""
    page_size: int
    num_decodes: int
    """How many leading requests have exactly one query token."""
    max_query_len: int
    max_seq_len: int


@dataclass(slots=True)
class LayerPages:
    """Paged memory of one layer. Unwritten places may hold anything, NaN included."""

    k_pages: Tensor
    """[num_pages, K, page_size, D]"""
    v_pages: Tensor
    """[num_pages, K, page_size, D]"""
    index_pages: Tensor | None
    """[num_pages, page_size, index_head_dim]; None on a full-attention layer."""

"""How kernels see a batch of requests over paged memory.

A page holds `page_size` tokens; a slot is `page * page_size + offset`. With
`page_size == index_block_size` logical block b of a request is page `page_table[r, b]`.

Suffixes: `T` tokens packed over requests · `R` requests · `N` logical pages of a request ·
`H` query heads · `K` KV heads · `D` head dim · `C` hidden · `E` experts · `A` experts per token ·
`V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from inference.kernels.decode_plan import DecodePlan


@dataclass(slots=True)
class PagedBatch:
    """The tokens of one engine step and where their keys live.

    Decodes come first: `num_decodes` requests with `decode_query_len` query tokens each (1; up to 8
    when drafts are verified). Prefill chunks of any length follow. Rows of `page_table` are padded
    with -1.

    On CUDA all of it is complete before the first kernel of the step: kernels read it while the
    ones in front of them still run. In a step of decodes alone they read so, too, the pages before
    that of a request's first query token, shared pages among them: those are of earlier steps.
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
    """How many leading requests are decodes."""
    max_query_len: int
    max_seq_len: int
    decode_query_len: int = 1
    """Query tokens of each decode."""
    plan: DecodePlan | None = None
    """How the decodes' pages are spread over the programs of a kernel; every CUDA kernel that
    reads all pages of a decode needs it."""
    query_len_host_R: np.ndarray | None = None
    """[R] query tokens of each request, on the host; prefill kernels lay out their tiles by it."""
    seq_len_host_R: np.ndarray | None = None
    """[R] `seq_len_R` on the host."""

    @property
    def num_decode_tokens(self) -> int:
        """Leading tokens that belong to decodes."""
        return self.num_decodes * self.decode_query_len

    def host_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """(query tokens, keys) of each request on the host; read from the device if not given."""
        if self.query_len_host_R is None or self.seq_len_host_R is None:
            starts = self.query_start_R1.cpu().numpy()
            self.query_len_host_R = np.diff(starts)
            self.seq_len_host_R = self.seq_len_R.cpu().numpy()
        return self.query_len_host_R, self.seq_len_host_R


@dataclass(slots=True)
class LayerPages:
    """Paged memory of one layer. Unwritten places may hold anything, NaN included.

    Pages have the model's dtype or are `float8_e4m3fn`, unscaled: what is written is clamped to
    ±448 and rounded, what is read is exact.
    """

    k_pages: Tensor
    """[num_pages, K, page_size, D]"""
    v_pages: Tensor
    """[num_pages, K, page_size, D]"""
    index_pages: Tensor | None
    """[num_pages, page_size, index_head_dim]; None on a full-attention layer."""

"""Samples of a training batch one after the other in one row, without padding between them.

A token sees only keys of its own sample, up to itself; key blocks are counted from the sample's
own first token. Kernels made for paged memory read a packed row through pages that `to_pages`
fills: every sample begins a page of its own, a page is a key block, pages are in order.

Suffixes: `T` packed tokens · `Q` packed tokens that are queries · `B` samples · `P` pages ·
`R` samples with a query (requests of a `PagedBatch`) · `N` pages of a sample · `K` KV heads ·
`D` head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from inference.kernels.dispatch import expect_shape, send, use_kernel
from inference.kernels.paging import PagedBatch


@dataclass(frozen=True, slots=True)
class Seen:
    """Samples that have a query, and how many of their keys the queries see."""

    first_sample: int
    first_key: int
    """First token of the first of them: their keys lie side by side from here."""
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    """Keys up to the last query; only the last sample can have more."""

    query_start_R1: Tensor
    """[R + 1] int32 on the device: queries of sample r lie from place r to place r + 1."""
    key_start_R1: Tensor
    """[R + 1] int32 on the device: so their keys, counted from `first_key`."""

    @property
    def keys(self) -> slice:
        """The packed tokens that are keys of these samples."""
        return slice(self.first_key, self.first_key + sum(self.key_lens))


@dataclass(frozen=True, slots=True)
class Pages:
    """How the packed row lies in pages of one size."""

    tokens_P2: Tensor
    """[P, 2] int32: first packed token of each page, and how many tokens it holds."""
    batch: PagedBatch
    """The queries as prefill chunks of their samples. Its `slots_T` say that nothing is written."""

    @property
    def num_pages(self) -> int:
        return self.tokens_P2.shape[0]


@dataclass(frozen=True, eq=False)
class Packing:
    """Where each sample of a packed row lies, and which of its tokens are queries.

    All tokens have keys; queries are a range of them (all, unless the row's queries are split over
    ranks that each hold all keys).
    """

    starts_B1: Tensor
    """[B + 1] int32: sample b has the tokens `starts_B1[b]` to `starts_B1[b + 1]`."""
    positions_T: Tensor
    """[T] int64: place of each token in its own sample."""
    lengths: tuple[int, ...]
    """Tokens of each sample."""
    first: int
    """The first token that is a query."""
    num_queries: int
    _pages: dict[int, Pages] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str,
        first: int = 0,
        num_queries: int | None = None,
    ) -> Packing:
        """Samples of these lengths; queries are all tokens from `first` on, or `num_queries`.

        Raises:
            ValueError: no sample, an empty one, or queries that are not tokens.
        """
        lengths = tuple(int(length) for length in lengths)
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths={lengths}: a packed row has samples of at least one token")
        num_tokens = sum(lengths)
        num_queries = num_tokens - first if num_queries is None else num_queries
        if first < 0 or num_queries < 1 or first + num_queries > num_tokens:
            raise ValueError(
                f"queries [{first}, {first + num_queries}) are not a range of {num_tokens} tokens"
            )
        starts_B1 = starts_of(lengths)
        positions_T = np.arange(num_tokens) - np.repeat(starts_B1[:-1], lengths)
        device = torch.device(device)
        return cls(
            starts_B1=send(starts_B1.astype(np.int32), device),
            positions_T=send(positions_T, device),
            lengths=lengths,
            first=first,
            num_queries=num_queries,
        )

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def seen(self) -> Seen:
        """What the queries see; made once."""
        starts_B1, last = starts_of(self.lengths), self.first + self.num_queries
        first_B, last_B = starts_B1[:-1].clip(self.first), starts_B1[1:].clip(max=last)
        (has_query,) = np.nonzero(last_B > first_B)
        query_lens = (last_B - first_B)[has_query].tolist()
        key_lens = (last_B - starts_B1[:-1])[has_query].tolist()
        return Seen(
            first_sample=int(has_query[0]),
            first_key=int(starts_B1[has_query[0]]),
            query_lens=tuple(query_lens),
            key_lens=tuple(key_lens),
            query_start_R1=self._send(starts_of(query_lens)),
            key_start_R1=self._send(starts_of(key_lens)),
        )

    def _send(self, array: np.ndarray) -> Tensor:
        return send(array.astype(np.int32), self.positions_T.device)

    def pages(self, page_size: int) -> Pages:
        """The row in pages of `page_size` tokens; made once."""
        if page_size not in self._pages:
            self._pages[page_size] = _lay_pages(self, page_size)
        return self._pages[page_size]


def to_pages(x_TKD: Tensor, packing: Packing, page_size: int) -> Tensor:
    """[P, K, page_size, D]: the packed rows in pages; zeros where a page holds no token.

    Args:
        x_TKD: [T, K, D], the heads of a token side by side.
    """
    _, num_kv_heads, head_dim = x_TKD.shape
    expect_shape("to_pages", "x_TKD", x_TKD, (packing.num_tokens, num_kv_heads, head_dim))
    pages = packing.pages(page_size)
    shape = (pages.num_pages, num_kv_heads, page_size, head_dim)
    if use_kernel("to_pages", x_TKD, pages.tokens_P2):
        from inference.kernels.packing_kernel import copy_to_pages

        out_PKSD = torch.empty(shape, dtype=x_TKD.dtype, device=x_TKD.device)
        copy_to_pages(x_TKD, pages.tokens_P2, out_PKSD)
        return out_PKSD
    page_T, offset_T = _places(packing, page_size)
    out_PKSD = torch.zeros(shape, dtype=x_TKD.dtype, device=x_TKD.device)
    out_PKSD[page_T, :, offset_T] = x_TKD
    return out_PKSD


def from_pages(
    pages_PKSD: Tensor, packing: Packing, page_size: int, dtype: torch.dtype | None = None
) -> Tensor:
    """[T, K, D]: what `to_pages` has spread, packed again; in `dtype`, by default the pages'."""
    pages = packing.pages(page_size)
    _, num_kv_heads, _, head_dim = pages_PKSD.shape
    shape = (pages.num_pages, num_kv_heads, page_size, head_dim)
    expect_shape("from_pages", "pages_PKSD", pages_PKSD, shape)
    dtype = pages_PKSD.dtype if dtype is None else dtype
    if use_kernel("from_pages", pages_PKSD, pages.tokens_P2):
        from inference.kernels.packing_kernel import copy_from_pages

        out_TKD = torch.empty(
            (packing.num_tokens, num_kv_heads, head_dim), dtype=dtype, device=pages_PKSD.device
        )
        copy_from_pages(pages_PKSD, pages.tokens_P2, out_TKD)
        return out_TKD
    page_T, offset_T = _places(packing, page_size)
    return pages_PKSD[page_T, :, offset_T].to(dtype)


def starts_of(lengths: Sequence[int]) -> np.ndarray:
    """[B + 1] int64: where each of neighbouring runs begins, and where the last ends."""
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))])


def _places(packing: Packing, page_size: int) -> tuple[Tensor, Tensor]:
    """(page, offset in it) of each packed token, both [T] int64."""
    starts_B1 = starts_of([-(-length // page_size) for length in packing.lengths])
    first_page_T = np.repeat(starts_B1[:-1], packing.lengths)
    page_T = torch.from_numpy(first_page_T).to(packing.positions_T.device)
    return page_T + packing.positions_T // page_size, packing.positions_T % page_size


def _lay_pages(packing: Packing, page_size: int) -> Pages:
    lengths_B = np.array(packing.lengths, dtype=np.int64)
    pages_B = -(-lengths_B // page_size)
    first_page_B = np.cumsum(pages_B) - pages_B
    place_P = np.arange(pages_B.sum()) - np.repeat(first_page_B, pages_B)
    first_P = np.repeat(starts_of(packing.lengths)[:-1], pages_B) + place_P * page_size
    count_P = np.minimum(np.repeat(lengths_B, pages_B) - place_P * page_size, page_size)
    tokens_P2 = np.stack([first_P, count_P], 1)

    seen = packing.seen
    query_len_R, seq_len_R = np.array(seen.query_lens), np.array(seen.key_lens)
    pages_R1 = -(-seq_len_R // page_size)[:, None]
    column_N = np.arange(pages_R1.max())
    first_page_R = first_page_B[seen.first_sample :][: len(seq_len_R)]
    table_RN = np.where(column_N < pages_R1, first_page_R[:, None] + column_N, -1)
    queries = slice(packing.first, packing.first + packing.num_queries)
    batch = PagedBatch(
        positions_T=packing.positions_T[queries],
        slots_T=packing.positions_T.new_full((packing.num_queries,), -1),
        query_start_R1=seen.query_start_R1,
        seq_len_R=packing._send(seq_len_R),
        page_table_RN=packing._send(table_RN),
        page_size=page_size,
        num_decodes=0,
        max_query_len=max(seen.query_lens),
        max_seq_len=max(seen.key_lens),
        query_len_host_R=query_len_R,
        seq_len_host_R=seq_len_R,
    )
    return Pages(tokens_P2=packing._send(tokens_P2), batch=batch)

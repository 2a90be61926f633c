"""Copies between a packed row of tokens and pages in which every sample begins a page."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Elements that a program moves, about."""


def copy_to_pages(x_TKD: Tensor, tokens_P2: Tensor, out_PKSD: Tensor) -> None:
    """Fill all of `out_PKSD`, contiguous; zeros where a page holds no token."""
    _launch(x_TKD, tokens_P2, out_PKSD, to_pages=True)


def copy_from_pages(pages_PKSD: Tensor, tokens_P2: Tensor, out_TKD: Tensor) -> None:
    _launch(out_TKD, tokens_P2, pages_PKSD, to_pages=False)


def _launch(x_TKD: Tensor, tokens_P2: Tensor, pages_PKSD: Tensor, *, to_pages: bool) -> None:
    num_pages, num_kv_heads, page_size, head_dim = pages_PKSD.shape
    if x_TKD.stride(2) != 1 or not pages_PKSD.is_contiguous():
        raise ValueError("packing: places of a head must be contiguous, and so must the pages")
    padded_dim = triton.next_power_of_2(head_dim)
    rows = min(triton.next_power_of_2(page_size), max(1, BLOCK // padded_dim))
    _copy_kernel[(num_pages, num_kv_heads, triton.cdiv(page_size, rows))](
        x_TKD,
        pages_PKSD,
        tokens_P2,
        x_TKD.stride(0),
        x_TKD.stride(1),
        K=num_kv_heads,
        S=page_size,
        D=head_dim,
        ROWS=rows,
        D_PAD=padded_dim,
        TO_PAGES=to_pages,
        num_warps=4,
    )


@triton.jit
def _copy_kernel(
    x_ptr,
    pages_ptr,
    tokens_ptr,
    stride_t,
    stride_k,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    D_PAD: tl.constexpr,
    TO_PAGES: tl.constexpr,
):
    """ROWS places of one page and KV head."""
    i_page, i_k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_token = tl.load(tokens_ptr + i_page * 2).to(tl.int64)
    num_tokens = tl.load(tokens_ptr + i_page * 2 + 1)
    # [ROWS, D]
    o_s, o_d = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, D_PAD)
    m_d = (o_d < D)[None, :]
    p_x = x_ptr + (first_token + o_s)[:, None] * stride_t + i_k.to(tl.int64) * stride_k
    p_x += o_d[None, :]
    m_x = (o_s < num_tokens)[:, None] & m_d
    p_page = pages_ptr + ((i_page * K + i_k) * S + o_s)[:, None] * D + o_d[None, :]
    if TO_PAGES:
        b_x = tl.load(p_x, mask=m_x, other=0.0)
        tl.store(p_page, b_x, mask=(o_s < S)[:, None] & m_d)
    else:
        b_x = tl.load(p_page, mask=m_x, other=0.0)
        tl.store(p_x, b_x.to(x_ptr.dtype.element_ty), mask=m_x)
